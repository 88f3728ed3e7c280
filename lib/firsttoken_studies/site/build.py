"""``firsttoken site``: all pages of the site into one folder, with relative links and without a network."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from firsttoken.study import paths
from firsttoken.study.claims_table import told
from firsttoken.study.errors import AssetError, CorpusError, StorageError
from firsttoken.study.files import write_text
from firsttoken.study.notebooks import notebook_paths
from firsttoken.study.record import recorded_entries
from firsttoken.study.report_index import load_index
from firsttoken.study.storage import storing
from firsttoken.study.verdicts import judge_record
from firsttoken_studies import ledger
from firsttoken_studies.site import recorded_runs, scheduler_page, tricks_page
from firsttoken_studies.site.notebook_page import NotebookPage, body, described, thumbnail, with_links
from firsttoken_studies.site.scheduler_scene import COLUMNS
from firsttoken_studies.tricks import IDEAS

PAGES = Path(__file__).parent / "pages"
GROUPS = {  # in the order in which they are best read
    "Basics": ("01", "00"),
    "Sarathi-Serve: prompts in chunks, so that nobody waits": ("02", "40", "41", "46", "43", "44"),
    "CPS: a lost cache is copied back or computed again": ("03", "21", "22", "24", "23"),
    "ProgressiveServe: an answer before the last layer is loaded": ("04", "11", "12", "13", "14", "15", "16", "17"),
    "DroidSpeak: the cache of another model": ("05", "30", "31", "32", "33", "34", "35", "36", "62"),
    "PETALS: layers on other machines": ("06", "50", "51", "52", "53", "54"),
    "Together": ("56", "60", "61", "63", "47", "48"),
    "Can the engine and the simulator be trusted?": ("20", "42", "45"),
    "All claims": ("90",),
}
_FROM = {
    "CLAIMS.md": "claims.html",
    "INDEX.md": "reports.html",
    "CAPACITY.md": "capacity.html",
    "README.md": "index.html",
}


def build(folder: Path) -> int:
    """Write the site into ``folder``; the bytes of all its files.

    Raises StorageError where the folder holds something else than a site, and what reading the notebooks raises.
    """
    mark = folder / "site.css"
    if folder.is_dir() and any(folder.iterdir()) and not mark.exists():
        raise StorageError(f"{folder} holds other files than a site; name an empty folder, or one that is not there")
    with storing(folder):
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        for name in ("site.css", "claims.js", "tricks.js", "scheduler.js"):
            shutil.copyfile(PAGES / name, folder / name)
        _write(folder)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _write(folder: Path) -> None:
    notebooks, recorded = [described(path) for path in notebook_paths()], ledger.recorded()
    links = {page.path.name: page.name for page in notebooks} | _FROM
    lacking = _scheduler(folder, notebooks)
    for page in tqdm(notebooks, desc="site", disable=None):
        content = {"title": f"{page.number} · {page.title}", "body": with_links(body(page.path), links)}
        _page(folder / page.name, "notebook.html.j2", content, notebooks)
    pictures = {page.number: _copied(thumbnail(page.path, paths.FIGURES), folder) for page in notebooks}
    hero = _copied(paths.FIGURES / "90-findings.png", folder)
    content = {"title": "firsttoken", "groups": GROUPS, "pictures": pictures, "hero": hero, "lacking": lacking}
    _page(folder / "index.html", "index.html.j2", content, notebooks)
    capacity = with_links(_html(paths.CAPACITY_PAGE.read_text(encoding="utf-8")), links)
    _page(folder / "capacity.html", "notebook.html.j2", {"title": "Serving capacity", "body": capacity}, notebooks)
    entries = load_index(paths.INDEX)
    named = sorted({name for entry in entries for name in entry.figures})
    drawn = {name for name in named if _copied(paths.FIGURES / f"{name}.png", folder)}
    content = {"title": "Where each figure, table and algorithm of the reports is", "entries": entries, "drawn": drawn}
    _page(folder / "reports.html", "reports.html.j2", content, notebooks)
    write_text(folder / "formulas.js", tricks_page.formulas())
    runs = recorded_runs.recorded_runs(recorded, ledger.machine())
    write_text(folder / "runs.js", recorded_runs.script(runs))
    ideas = {report: says for report, (_, says) in IDEAS.items()}
    content = {"title": "Which idea pays where", "sliders": tricks_page.SLIDERS, "ideas": ideas}
    content["recorded"] = tricks_page.recorded(recorded_entries(recorded, ledger.machine()))
    content["ranges"] = tricks_page.told_ranges(runs)
    content["pages"] = {page.number: page.name for page in notebooks}
    content["close"] = {"factor": recorded_runs.CLOSE, "share": recorded_runs.CLOSE_SHARE}
    _page(folder / "tricks.html", "tricks.html.j2", content, notebooks)
    judged = judge_record(ledger.claims(), recorded, ledger.machine(), ledger.log())
    rows = [{"judged": one, "told": told(one.claim), "ground": one.claim.stands_on} for one in judged]
    _page(folder / "claims.html", "claims.html.j2", {"title": "Claims", "rows": rows}, notebooks)


def _scheduler(folder: Path, notebooks: list[NotebookPage]) -> str:
    """Write the page on which a scheduler is written, or return what is missing for it."""
    page, data = folder / "scheduler.html", folder / "scheduler-data.js"
    for path in (page, data):
        path.unlink(missing_ok=True)  # of an earlier site
    try:
        python = scheduler_page.pyodide()
        scene, setting = scheduler_page.scene()
    except (AssetError, CorpusError) as error:
        return str(error)
    write_text(data, scheduler_page.script(scene, python))
    content = {"title": "Write a scheduler", "setting": setting, "policy": scheduler_page.POLICY}
    content |= {"siblings": scheduler_page.SIBLINGS, "headings": COLUMNS, "version": python.version}
    _page(page, "scheduler.html.j2", content, notebooks)
    return ""


def _copied(figure: Path | None, folder: Path) -> str:
    """Copy the figure into the site; returns where it is there, "" for none."""
    if figure is None or not figure.exists():
        return ""
    shutil.copyfile(figure, folder / "figures" / figure.name)
    return f"figures/{figure.name}"


def _page(path: Path, template: str, content: Mapping[str, Any], notebooks: list[NotebookPage]) -> None:
    import jinja2

    loader = jinja2.FileSystemLoader(PAGES)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=True)
    shared = {"notebooks": notebooks, "by_number": {page.number: page for page in notebooks}}
    shared["schedulers"] = (path.parent / "scheduler-data.js").exists()
    write_text(path, environment.get_template(template).render(**shared, **content))


def _html(markdown: str) -> str:
    import mistune

    return str(mistune.create_markdown(plugins=["table"])(markdown))
