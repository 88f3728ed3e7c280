"""``firsttoken site``: all pages of the site into one folder, with relative links and without a network."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from firsttoken.study import paths
from firsttoken.study.errors import StorageError
from firsttoken.study.files import write_text
from firsttoken.study.progress import track
from firsttoken.study.storage import storing
from firsttoken_studies import ledger
from firsttoken_studies.nb48_measured_on_a_gpu.study import RECORDED_ON
from firsttoken_studies.record.claims_table import told
from firsttoken_studies.record.notebooks import notebook_paths, notebook_title, read_notebook
from firsttoken_studies.record.report_index import load_index
from firsttoken_studies.record.results import recorded_entries
from firsttoken_studies.record.verdicts import judge_record
from firsttoken_studies.site import recorded_runs, tricks_page
from firsttoken_studies.tricks import IDEAS

PAGES = Path(__file__).parent / "pages"
GROUPS = {  # in the order in which they are best read
    "Basics": ("01", "00"),
    "Sarathi-Serve: prompts in chunks, so that nobody waits": ("02", "40", "41", "46", "43"),
    "CPS: a lost cache is copied back or computed again": ("03", "21", "22", "24", "23"),
    "ProgressiveServe: an answer before the last layer is loaded": ("04", *map(str, range(11, 19))),
    "DroidSpeak: the cache of another model": ("05", "30", "31", "32", "33", "34", "35", "36", "62"),
    "PETALS: layers on other machines": ("06", "50", "51", "52", "53", "54"),
    "Together": ("56", "60", "61", "47", "48"),
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
        for name in ("site.css", "claims.js", "tricks.js"):
            shutil.copyfile(PAGES / name, folder / name)
        _write(folder)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _write(folder: Path) -> None:
    notebooks, recorded = [described(path) for path in notebook_paths()], ledger.recorded()
    links = {page.path.name: page.name for page in notebooks} | _FROM
    for page in track(notebooks, desc="site"):
        content = {"title": f"{page.number} · {page.title}", "body": with_links(body(page.path), links)}
        _page(folder / page.name, "notebook.html.j2", content, notebooks)
    pictures = {page.number: _copied(thumbnail(page.path, paths.FIGURES), folder) for page in notebooks}
    hero = _copied(paths.FIGURES / "90-findings.png", folder)
    content = {"title": "firsttoken", "groups": GROUPS, "pictures": pictures, "hero": hero}
    _page(folder / "index.html", "index.html.j2", content, notebooks)
    capacity = with_links(_html(paths.CAPACITY_PAGE.read_text(encoding="utf-8")), links)
    _page(folder / "capacity.html", "notebook.html.j2", {"title": "Serving capacity", "body": capacity}, notebooks)
    entries = load_index(paths.INDEX)
    named = sorted({name for entry in entries for name in entry.figures})
    copied = {name for name in named if _copied(paths.FIGURES / f"{name}.png", folder)}
    content = {"title": "Where each figure, table and algorithm of the reports is", "entries": entries, "drawn": copied}
    _page(folder / "reports.html", "reports.html.j2", content, notebooks)
    write_text(folder / "formulas.js", tricks_page.formulas())
    runs = recorded_runs.recorded_runs(recorded, ledger.machine())
    write_text(folder / "runs.js", recorded_runs.script(runs))
    entry_of, gpu_entry_of = (recorded_entries(recorded, slug) for slug in (ledger.machine(), RECORDED_ON))
    content = {"title": "Which idea pays where", "sliders": tricks_page.SLIDERS, "ideas": IDEAS}
    content["recorded"] = tricks_page.recorded(entry_of)
    content["prices"], content["priced_in"] = tricks_page.prices(entry_of, gpu_entry_of), tricks_page.PRICED_IN
    content["presets"], content["first"] = tricks_page.presets(runs), tricks_page.FIRST
    content["ranges"] = tricks_page.told_ranges(runs)
    content["pages"] = {page.number: page.name for page in notebooks}
    content["close"] = {"factor": recorded_runs.CLOSE, "share": recorded_runs.CLOSE_SHARE}
    _page(folder / "tricks.html", "tricks.html.j2", content, notebooks)
    judged = judge_record(ledger.claims(), recorded, ledger.machine(), ledger.log())
    rows = [
        {"judged": judgement, "told": told(judgement.claim), "ground": judgement.claim.stands_on}
        for judgement in judged
    ]
    _page(folder / "claims.html", "claims.html.j2", {"title": "Claims", "rows": rows}, notebooks)


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
    write_text(path, environment.get_template(template).render(**shared, **content))


def _html(markdown: str) -> str:
    import mistune

    return str(mistune.create_markdown(plugins=["table"])(markdown))


# An executed notebook as one page without a network: equations as MathML, links between pages, figures with words.

_DISPLAY, _INLINE = re.compile(r"\$\$(.+?)\$\$", re.DOTALL), re.compile(r"(?<![\\$\w])\$([^$\n]+?)\$(?![\w$])")
_HEADING = re.compile(r"<(h[1-6])>(.*?)</\1>", re.DOTALL)
_LINK = re.compile(r'<a href="([^"#:]+)(#[^"]*)?"[^>]*>(.*?)</a>', re.DOTALL)
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_TIME = re.compile(r"\*\*Time\.\*\* ([^.(\n]+(?:\.\d+[^.(\n]*)*)")
_MARKS = re.compile(r"[*_`>#]|\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class NotebookPage:
    """A notebook for the index: ``finding`` is its first sentence or two, ``minutes`` as it states them."""

    path: Path
    number: str
    title: str
    finding: str
    minutes: str

    @property
    def name(self) -> str:
        """Return the file name of the notebook's page."""
        return f"{self.path.stem}.html"


def described(path: Path) -> NotebookPage:
    """Return the notebook at ``path`` for the index; its finding is the box at its head, else the sentence in bold
    behind it."""
    cells = read_notebook(path)["cells"]
    texts = ["".join(cell["source"]) if cell["cell_type"] == "markdown" else "" for cell in cells]
    words = "\n".join(texts[:2])
    box = re.search(r"^> (?:\*\*[^*]+\*\* )?(.+)$", words, re.MULTILINE)
    claim = re.search(r"^\*\*[^*]+\*\* (.+)$", words, re.MULTILINE)
    match = box or claim
    minutes = _TIME.search("\n".join(texts))
    title = notebook_title(path).partition("·")[2].strip() or notebook_title(path)
    description = plain(match.group(1)) if match else ""
    return NotebookPage(path, path.name[:2], title, description, minutes.group(1).strip() if minutes else "")


def plain(markdown: str) -> str:
    """Text without the marks of markdown."""
    return " ".join(_MARKS.sub(lambda match: match.group(1) or "", markdown).split())


def body(path: Path) -> str:
    """The HTML of a notebook's cells, outputs included. Raises NotebookError for a file that cannot be read."""
    import nbformat
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    content = deepcopy(read_notebook(path))
    description = notebook_title(path)
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            description = plain(_DISPLAY.sub("", text))[:300].replace('"', "'") or description
            cell["source"] = _with_equations(text)
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                output.setdefault("metadata", {}).setdefault("image/png", {})["alt"] = description
    exporter = HTMLExporter(template_name="basic", config=Config({"HTMLExporter": {"sanitize_html": False}}))
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = exporter.exclude_anchor_links = True
    made, _ = exporter.from_notebook_node(nbformat.reads(json.dumps(content), as_version=4))
    return _HEADING.sub(_with_name, made)


def _with_name(heading: re.Match[str]) -> str:
    """A heading that links lead to by its words, as JupyterLab names it: "#One-control:-the-link"."""
    level, words = heading.groups()
    return f'<{level} id="{quote(unescape(re.sub("<[^>]*>", "", words)).replace(" ", "-"))}">{words}</{level}>'


def _with_equations(text: str) -> str:
    """Markdown whose equations are MathML, but for what looks like one in code."""
    parts = _CODE.split(text)
    for index in range(0, len(parts), 2):
        shown = _DISPLAY.sub(lambda match: _mathml(match.group(1), "block"), parts[index])
        parts[index] = _INLINE.sub(lambda match: _mathml(match.group(1), "inline"), shown)
    return "".join(parts)


def _mathml(latex: str, display: str) -> str:
    from latex2mathml.converter import convert

    return convert(" ".join(latex.split()), display=display)


def with_links(html: str, pages: dict[str, str]) -> str:
    """``html`` whose relative links lead to other ``pages`` (by the name of their source), or are words without one."""

    def led(match: re.Match[str]) -> str:
        target, fragment, words = match.groups()
        page = pages.get(Path(target).name)
        return f'<a href="{page}{fragment or ""}">{words}</a>' if page else words

    return _LINK.sub(led, html)


def thumbnail(path: Path, figures: Path) -> Path | None:
    """The first figure of a notebook, as its name has it; None where it draws none."""
    names: list[Any] = []
    for cell in read_notebook(path)["cells"]:
        names += re.findall(r'plot\.save\(\w+, "([\w-]+)"', "".join(cell["source"]))
    candidates = (figures / f"{name}.png" for name in names)
    return next((figure for figure in candidates if figure.exists()), None)
