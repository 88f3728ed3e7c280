"""README.md, data/CLAIMS.md and what notebooks say of recorded runs, written from templates: every number of a result
in them is put there by the program.

A template says ``{{ value("cold_start", "ttft_x", 2, variant="progressive", than="whole_streamed", link="1gbit") }}``
for a value as text, its place by keywords, ``{{ interval(...) }}`` for one with its interval, ``{{ raw(...) }}`` for
the value to reckon with, ``{{ count(...) }}`` for how many observations it has, ``{{ said("progressive.ttft") }}`` for
the report's own number of a claim, ``{{ compared(raw(...), raw(...), "sooner", "later") }}`` for the word that two
numbers give, ``{{ counts }}``, ``{{ goals }}``, ``{{ scoreboard }}``, ``{{ systems }}`` and
``{{ index }}`` for tables, ``{{ table("serving_capacity") }}`` for the table that the system of an experiment makes of
its result, and ``{{ mechanisms }}`` for the digests of the notebooks' cells.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from firsttoken.study import paths
from firsttoken.study.errors import ClaimsError, FirstTokenError
from firsttoken.study.files import write_text
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.summary import Entry, Scalar
from firsttoken_studies.record import cell_mechanism
from firsttoken_studies.record.claims import Claim
from firsttoken_studies.record.claims_table import counts, goals, page_table, scoreboard
from firsttoken_studies.record.notebooks import notebook_paths, read_notebook
from firsttoken_studies.record.record_log import EMPTY, Log
from firsttoken_studies.record.report_index import index_tables, load_index
from firsttoken_studies.record.results import Result, known_machine, recorded_result
from firsttoken_studies.record.verdicts import compared, show

# The markdown cells of a notebook that state results: written from a template, as the pages are.
#
# A template, ``page.md`` in the notebook's folder, has a part for each such cell, headed by ``<!-- cell: ID -->``. All
# other cells are edited in the notebook.

REPORTS = ("ProgressiveServe", "CPS", "DroidSpeak", "Sarathi-Serve", "PETALS")  # what is of several comes behind them

_HEAD = re.compile(r"^<!-- cell: (\S+) -->\n", re.MULTILINE)


def templates() -> dict[Path, Path]:
    """Return each notebook that has a template, with it. Raises NotebookError for a template without a notebook."""
    by_number = {template.parent.name[2:4]: template for template in sorted(paths.STUDIES.glob("nb*/page.md"))}
    return dict(zip(notebook_paths(by_number), by_number.values(), strict=True)) if by_number else {}


def parts(text: str) -> dict[str, str]:
    """The markdown of each cell that ``text``, a template or what it gives, has a part for, by the cell's id."""
    before, *rest = _HEAD.split(text)
    if before.strip():
        raise ClaimsError(f"text before the first `<!-- cell: ID -->`: {before.strip()[:40]!r}")
    return {cell: part.strip() for cell, part in zip(rest[::2], rest[1::2], strict=True)}


def filled(notebook: Path, text: str) -> str:
    """The file ``notebook`` with the cells of ``text`` in place of its own.

    Raises ClaimsError for a cell that it does not have as markdown, and NotebookError for a file that cannot be read.
    """
    content = read_notebook(notebook)
    cells = {cell["id"]: cell for cell in content["cells"] if cell["cell_type"] == "markdown"}
    for name, markdown in parts(text).items():
        if name not in cells:
            raise ClaimsError(f"{notebook.name} has no markdown cell {name!r}; there are: {', '.join(cells)}")
        cells[name]["source"] = markdown.splitlines(keepends=True)
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


Tables = Mapping[str, Callable[[Result], str]]  # by experiment: systems make them, and the record knows no system
NO_TABLES: Tables = MappingProxyType({})

_CAPTION = re.compile(r"^Recorded: `([^`]+)`", re.MULTILINE)


def pages() -> dict[Path, Path]:
    """Each page with its template. Raises NotebookError for a template without a notebook."""
    readme = {paths.ROOT / "README.md": paths.TEMPLATES / "README.md"}
    data_pages = (paths.CLAIMS_PAGE, paths.CAPACITY_PAGE, paths.INDEX_PAGE, paths.DATA / "VICTIMS.md", paths.MECHANISMS)
    data = {page: paths.TEMPLATES / page.name for page in data_pages}
    return readme | data | templates()


def recorded_machine() -> str | None:
    """The machine whose results the pages show, so that any other can write them too; None before they are written."""
    page = paths.CLAIMS_PAGE
    match = _CAPTION.search(page.read_text(encoding="utf-8")) if page.exists() else None
    return match.group(1) if match else None


def render(
    template: Path,
    claims: Sequence[Claim],
    results: Sequence[Result],
    machine: str,
    tables: Tables = NO_TABLES,
    log: Log = EMPTY,
) -> str:
    """Return the page that ``template`` makes of the results of ``machine``, or of another machine or one profile where
    the template names an experiment as "NAME on MACHINE" or "NAME of PROFILE".

    Raises ClaimsError for a result or a measure that a template names and nobody recorded, and for what is no template,
    and FirstTokenError for a machine without results.
    """
    import jinja2

    known_machine(machine, results)
    called = f"{template.parent.name}/{template.name}"

    def recorded(experiment: str) -> Result:
        experiment, _, named = experiment.partition(" on ")
        name, _, profile = experiment.partition(" of ")
        try:
            return recorded_result(results, name, known_machine(named, results) if named else machine, profile)
        except FirstTokenError as error:
            raise ClaimsError(f"{called}: {error}") from error

    def entry(experiment: str, measure: str, /, **labels: Scalar) -> Entry:
        result = recorded(experiment)
        try:
            return result.summary.of(measure, **labels)
        except FirstTokenError as error:
            raise ClaimsError(f"{called}: {experiment}: {error}") from error

    def raw(experiment: str, measure: str, /, **labels: Scalar) -> Any:
        return entry(experiment, measure, **labels)["value"]

    def count(experiment: str, measure: str, /, **labels: Scalar) -> int:
        return entry(experiment, measure, **labels)["n"]

    def said(claim: str) -> str:
        values = [statement.value for statement in claims if statement.id == claim and statement.value is not None]
        if not values:
            raise ClaimsError(f"{called}: no claim {claim!r} with a value in the ledger")
        return show(values[0])

    def machine_of(experiment: str) -> str:
        return recorded(experiment).slug

    def table(experiment: str) -> str:
        if experiment not in tables:
            raise ClaimsError(f"{called}: {experiment!r} has no table; {unknown(experiment, tables)}")
        return tables[experiment](recorded(experiment))

    def value(experiment: str, measure: str, digits: int | None = None, scale: float = 1, /, **labels: Scalar) -> str:
        measured = raw(experiment, measure, **labels)
        return show(measured) if digits is None else f"{scale * measured:.{digits}f}"

    def interval(experiment: str, measure: str, digits: int | None = None, /, **labels: Scalar) -> str:
        measured = entry(experiment, measure, **labels)
        bounds = [
            show(measured[name]) if digits is None else f"{measured[name]:.{digits}f}" for name in ("low", "high")
        ]
        called = "range " if measured.get("range") else ""
        return f"{value(experiment, measure, digits, **labels)} {called}[{', '.join(bounds)}]"

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    names = sorted({claim.report: None for claim in claims}, key=lambda name: (*REPORTS, name).index(name))
    reports = {name: [claim for claim in claims if claim.report == name] for name in names}
    try:
        return environment.from_string(template.read_text(encoding="utf-8")).render(
            value=value,
            interval=interval,
            raw=raw,
            count=count,
            said=said,
            compared=compared,
            table=table,
            where=machine_of,
            machine=machine,
            counts=counts(claims, results, machine, log),
            goals=goals(claims, results, machine, log),
            scoreboard=scoreboard(claims, results, machine, log),
            index=index_tables(load_index(paths.INDEX)),
            mechanisms=cell_mechanism.published(),
            systems={name: page_table(report_claims, results, machine, log) for name, report_claims in reports.items()},
        )
    except (jinja2.TemplateError, OSError) as error:
        raise ClaimsError(f"{template}: {error}") from error


def _written(page: Path, template: Path, *content: Any) -> str:
    text = render(template, *content)
    return filled(page, text) if page.suffix == ".ipynb" else text


def outdated(
    claims: Sequence[Claim], results: Sequence[Result], machine: str, tables: Tables = NO_TABLES, log: Log = EMPTY
) -> list[Path]:
    """The pages that are not what their templates give. Raises as ``render`` does."""
    return [
        page
        for page, template in pages().items()
        if not page.exists()
        or page.read_text(encoding="utf-8") != _written(page, template, claims, results, machine, tables, log)
    ]


def update(
    claims: Sequence[Claim], results: Sequence[Result], machine: str, tables: Tables = NO_TABLES, log: Log = EMPTY
) -> None:
    """Write all pages, or none where one cannot be made. Raises as ``render`` does."""
    made = {page: _written(page, template, claims, results, machine, tables, log) for page, template in pages().items()}
    for page, text in made.items():
        write_text(page, text)
