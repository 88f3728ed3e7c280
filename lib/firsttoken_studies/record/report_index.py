"""Where each figure, table and algorithm of the reports is, from ``data/index.yaml``: a notebook, code, or why not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from firsttoken.study import paths
from firsttoken.study.errors import ClaimsError
from firsttoken_studies.record.claims import entries_by_id
from firsttoken_studies.record.markdown import table
from firsttoken_studies.record.notebooks import notebook_paths


@dataclass(frozen=True)
class IndexEntry:
    """One item of a report: ``what`` it is and its ``place`` there.

    ``notebooks`` show it, the main one first, ``figures`` draw it, and ``code`` does it, a path in the repository. For
    an item with none of these, ``not_here`` gives the reason; ``differs`` says in what the item here differs from the
    report's.
    """

    id: str
    report: str
    place: str
    what: str
    notebooks: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    code: str = ""
    not_here: str = ""
    differs: str = ""

    def __post_init__(self) -> None:
        if bool(self.notebooks or self.code) == bool(self.not_here):
            raise ClaimsError("give a notebook or code, or else say in not_here why there is none")


def load_index(path: Path) -> list[IndexEntry]:
    """The entries of the file. Raises ClaimsError with line and id for one that is wrong or there twice."""
    return [entry for _, entry in entries_by_id(path, IndexEntry, "entry")]


def index_tables(entries: Sequence[IndexEntry]) -> dict[str, str]:
    """A table of markdown for each report, whose links lead from the folder ``data``."""
    titles = {path.name[:2]: path.name for path in notebook_paths()}
    reports = dict.fromkeys(entry.report for entry in entries)
    return {report: _table([e for e in entries if e.report == report], titles) for report in reports}


def _table(entries: Sequence[IndexEntry], titles: dict[str, str]) -> str:
    return table(
        {
            "where in the report": [entry.place for entry in entries],
            "what": [entry.what for entry in entries],
            "here": [_here(entry, titles) for entry in entries],
            "how it differs, or why it is not here": [entry.not_here or entry.differs for entry in entries],
        }
    )


def opener_rows(report: str) -> list[dict[str, str]]:
    """For each item of a ``report`` its ``place`` there, ``what`` it is, and ``where`` it is here.

    ``where`` is of markdown: links that lead from the folder ``notebooks``, or why there is nothing to lead to. Raises
    ClaimsError for a report that the index does not have.
    """
    entries = load_index(paths.INDEX)
    of_report = [entry for entry in entries if entry.report == report]
    if not of_report:
        reports = ", ".join(dict.fromkeys(entry.report for entry in entries))
        raise ClaimsError(f"no report {report!r} in {paths.INDEX.name}; there are: {reports}")
    titles = {path.name[:2]: path.name for path in notebook_paths()}
    return [{"place": entry.place, "what": entry.what, "where": _where(entry, titles)} for entry in of_report]


def _where(entry: IndexEntry, titles: dict[str, str]) -> str:
    if entry.notebooks:
        return ", ".join(f"[{number}]({titles[number]})" for number in entry.notebooks)
    return f"[code](../{entry.code})" if entry.code else f"not here: {entry.not_here}"


def _here(entry: IndexEntry, titles: dict[str, str]) -> str:
    links = [f"[{number}](../{paths.NOTEBOOKS.name}/{titles[number]})" for number in entry.notebooks]
    links += [f"[figure](../{paths.FIGURES.name}/{name}.png)" for name in entry.figures]
    links += [f"[code](../{entry.code})"] if entry.code else []
    return ", ".join(links) or "not here"
