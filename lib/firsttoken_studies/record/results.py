"""One experiment, one JSON file: ``data/results/<machine>/<profile>/<experiment>.json``, a large one with ``.gz``.

A file holds the raw rows as well as the summary, so that a figure or an interval can be made again without the
machine that measured it; the digest of every claim that it answers, as the ledger had it when the run began; and a
sha256 of all that, so that what was edited by hand is refused.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from firsttoken.study import paths
from firsttoken.study.canonical_json import plain_number, sha256_of
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.files import replacing
from firsttoken.study.machine import machine_slug
from firsttoken.study.parsing.json_text import parse_json, read_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, read_gzip, shown
from firsttoken.study.parsing.schema import at_least, parse_as, unknown
from firsttoken.study.storage import storing
from firsttoken.study.summary import Entry, Rows, Scalar, Summary, misplaced
from firsttoken_studies.record.code import git

if TYPE_CHECKING:
    import pandas

SCHEMA = 3
# of several results that answer, the larger sample counts
PREFERENCE = ("paper", "full", "gpu", "tasks", "review", "quick")
PACKED = ".json.gz"
_LARGE_BYTES = 256 * 1024  # of a result as text, above which it is packed: to a quarter to an eighth
CHANGED = "-changed"  # behind the name of a profile of which a reader changed settings in a notebook

_MEASURES = ("lib", "env", "data/adapters")  # what a result hangs on

Table = Iterator[dict[str, Any]]  # the lines of a table as a notebook shows it, by heading


def rows_where(rows: Rows, **values: Any) -> Rows:
    """Return those of ``rows`` that have all of ``values`` in the columns of these names, in their order."""
    return [row for row in rows if values.items() <= row.items()]


def distinct(rows: Rows, column: str, **values: Any) -> list[Any]:
    """The values that :func:`rows_where` have in ``column``, each once, in the order in which they first appear."""
    return list(dict.fromkeys(row[column] for row in rows_where(rows, **values)))


def frame_of(rows: Rows, **values: Any) -> pandas.DataFrame:
    """Return the table of :func:`rows_where`. Its columns are those of these rows, so that whole numbers stay whole:
    pandas would make them floats where another kind of row lacks them."""
    import pandas

    return pandas.DataFrame(rows_where(rows, **values))


@dataclass(frozen=True)
class Outcome:
    """The rows that an experiment returns, with their circumstances.

    ``rows`` are tidy raw observations with units in the column names, and hold all that the summary is made of.
    ``floors`` maps a name to {value, unit, why}; ``provenance`` says what the weights and the data were.
    """

    rows: Rows
    floors: dict[str, dict[str, Any]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


def _named(machine: dict[str, Any]) -> str:
    slug, gpu = machine.get("slug"), machine.get("gpu", 0)
    named = isinstance(slug, str) and slug and (gpu is None or isinstance(gpu, str))
    return "" if named else "does not say on which machine it was measured (slug, gpu)"


def _measured(entry: Entry) -> str:
    """Return the fault of ``entry``, "" for none: it needs a measure and its place, a value, and both ends of an
    interval or none."""
    if not isinstance(entry.get("measure"), str) or not isinstance(entry.get("where"), dict):
        return "expected a measure, and where it holds"
    bounds = [entry[name] for name in ("low", "high") if name in entry]
    if "value" not in entry or len(bounds) == 1 or not all(type(end) in (int, float) for end in bounds):
        return "expected a value, and low and high as numbers or not at all"
    return "" if type(entry["value"]) in (int, float, bool, str) else "expected a number, yes or no, or text as value"


@dataclass(frozen=True)
class Result:
    """An outcome with the circumstances under which it was measured."""

    experiment: str
    profile: str
    parameters: dict[str, Any]
    machine: Annotated[dict[str, Any], _named]
    provenance: dict[str, Any]
    git_revision: str  # of the code; ends in "-dirty" when it differed from that commit
    seeds: list[int]
    started: str  # ISO 8601, UTC
    duration_s: Annotated[float, at_least(0)]  # with what was kept of interrupted runs
    entries: dict[str, str]  # id of a claim -> its digest (``claims.digests``) when the run began
    rows: Rows
    floors: dict[str, dict[str, Any]]
    summary: Annotated[list[Annotated[Entry, _measured]], misplaced]
    code: str = ""  # digest of the functions that the experiment imports (``code.digest``); older results have none
    with_mechanism: ClassVar[Result | None] = (
        None  # the same with the reader's mechanism, where it is another; not kept
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", Summary(self.summary))

    def frame(self, **values: Any) -> pandas.DataFrame:
        """The rows that have ``values`` as a table, one observation a row."""
        return frame_of(self.rows, **values)

    @property
    def slug(self) -> str:
        return self.machine["slug"]

    @property
    def place(self) -> tuple[str, str, str]:
        """Experiment, profile and machine, as a line of the log has them (``record_log.LogLine.place``)."""
        return self.experiment, self.profile, self.slug

    @property
    def path(self) -> Path:
        """The path at which this result is kept."""
        return result_path(self.experiment, self.profile, self.slug)


def result_path(experiment: str, profile: str, slug: str) -> Path:
    """The file of an experiment under a profile on the machine named ``slug``, packed if it is large."""
    plain = paths.RESULTS / slug / profile / f"{experiment}.json"
    packed = plain.with_suffix(PACKED)
    return packed if packed.exists() else plain


def write_result(result: Result) -> Path:
    """Write ``result`` to its place, atomically and with sorted keys.

    Raises FirstTokenError for a value that is nan or infinite, or that JSON cannot hold, and StorageError.
    """
    content = {"schema": SCHEMA} | dataclasses.asdict(result)
    for field_path in _not_finite(content):
        raise FirstTokenError(f"result {result.experiment}: {field_path} is not finite; leave the key out instead")
    try:
        text = _dump(content | {"sha256": sha256_of(content)})
    except TypeError as error:
        raise FirstTokenError(f"result {result.experiment}: {error}") from error
    written = text.encode()
    large = len(written) > _LARGE_BYTES
    path = result.path.parent / (result.experiment + (PACKED if large else ".json"))
    with storing(path.parent), replacing(path) as temporary:
        temporary.write_bytes(gzip.compress(written, mtime=0) if large else written)
        if result.path != path:
            result.path.unlink(missing_ok=True)
    return path


def read_result(path: Path) -> Result:
    """Read one result.

    Raises FirstTokenError for an unreadable file, another schema, a missing or unknown key, and for content that is not
    what the program wrote.
    """
    with errors_as(f"result {path}", FirstTokenError, "measure it again"):
        path = Path(path)
        content = parse_json(read_gzip(path)) if path.suffix == ".gz" else read_json(path)
        content = expanded(content) if isinstance(content, dict) else content
        schema = content.pop("schema", None) if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise ParseError(f"schema {shown(schema)}, this version reads {SCHEMA}")
        if content.pop("sha256", None) != sha256_of({"schema": schema} | content):
            raise ParseError("does not fit its own sha256, so it was edited")
        return parse_as(Result, content)


def all_results(profiles: Iterable[str] = ("*",)) -> list[Result]:
    """Every recorded result of ``profiles`` (all), ordered by path.

    Raises FirstTokenError as ``read_result`` does, for a result in the folder of another machine or profile, and for
    one that has not its experiment's name, as of two for one machine one has.
    """
    results = []
    for path in result_files(profiles):
        results.append(result := read_result(path))
        if result.experiment != path.name.split(".")[0]:
            raise FirstTokenError(
                f"result {path}: it is of {result.experiment}, of which a machine and profile have one result, "
                "in a file of that name; remove one"
            )
        if (result.slug, result.profile) != (path.parent.parent.name, path.parent.name):
            raise FirstTokenError(
                f"result {path}: it was measured on {result.slug} under profile {result.profile}, which is another "
                "folder; move it there"
            )
    return results


def result_files(profiles: Iterable[str] = ("*",)) -> list[Path]:
    """The files of the results of ``profiles`` (all), ordered by path within a profile."""
    return [path for profile in profiles for path in _files(f"*/{profile}/*")]


def known_machine(slug: str, results: Iterable[Result]) -> str:
    """``slug``, if there are results of such a machine or it is this one. Raises FirstTokenError otherwise."""
    slugs = {machine_slug(), *(result.slug for result in results)}
    if slug not in slugs:
        raise FirstTokenError(f"no results of a machine {slug!r}; {unknown(slug, slugs)}")
    return slug


def load_result(experiment: str, profile: str | None = None, machine: str | None = None) -> Result | None:
    """The recorded result of ``experiment`` that ``pick`` prefers, or None."""
    results = (read_result(path) for path in _files(f"*/*/{experiment}"))
    return pick(results, experiment, [profile] if profile else (), machine)


def _files(pattern: str) -> list[Path]:
    """The results that came with the code and this reader's own, which replace those of the same place."""
    newest = {
        path.relative_to(folder).with_name(path.name.removesuffix(".gz")): path
        for folder in (paths.RECORDED, paths.RESULTS)
        for ending in (".json", PACKED)
        for path in folder.glob(pattern + ending)
    }
    return [newest[key] for key in sorted(newest)]


def pick(
    results: Iterable[Result], experiment: str, profiles: Iterable[str] = (), machine: str | None = None
) -> Result | None:
    """The preferred result of ``experiment``, or None.

    ``machine`` is a slug, None for this machine, "any" for all. ``profiles`` limits which profiles may answer; a
    changed one does only where it is named. A larger profile goes before a smaller one (``PREFERENCE``), then the
    latest.
    """
    slug, allowed = machine or machine_slug(), set(profiles)
    candidates = [
        result
        for result in results
        if result.experiment == experiment
        and (result.profile in allowed if allowed else not result.profile.endswith(CHANGED))
        and slug in ("any", result.slug)
    ]
    return max(candidates, key=lambda result: (-_rank(result.profile), result.started), default=None)


def recorded_result(results: Iterable[Result], experiment: str, machine: str, profile: str = "") -> Result:
    """The preferred result of ``experiment``, or that of ``profile``, on ``machine``, or on any other that has one.

    Raises FirstTokenError where nobody recorded it.
    """
    results, profiles = list(results), [profile] if profile else []
    result = pick(results, experiment, profiles, machine) or pick(results, experiment, profiles, "any")
    if result is None:
        raise FirstTokenError(f"no result of {experiment!r}; run `firsttoken measure {experiment}`")
    return result


def recorded_entries(results: Sequence[Result], machine: str) -> Callable[..., Entry]:
    """Return a function that gives the entry of a summary by experiment, measure and place, from ``recorded_result``.

    The function raises FirstTokenError as that does, and for a measure that the result lacks.
    """

    def of(experiment: str, measure: str, /, **labels: Scalar) -> Entry:
        return recorded_result(results, experiment, machine).summary.of(measure, **labels)

    return of


def git_revision() -> str:
    """The commit of the code, "-dirty" appended when what results hang on differs from it; "unknown" outside a git
    clone."""
    try:
        head = git("rev-parse", "HEAD").decode().strip()
        changed = git("status", "--porcelain", "--", *_MEASURES).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if changed else "")


def is_clean(revision: str) -> bool:
    """Return whether ``revision`` (of :func:`git_revision`) names the code that ran."""
    return len(revision) == 40 and set(revision) <= set("0123456789abcdef")


def _rank(profile: str) -> int:
    return PREFERENCE.index(profile) if profile in PREFERENCE else len(PREFERENCE)


# The text of a file: a line for each row, and numbers that are finite.

MANY = 500  # rows, whose names are written once


def _dump(content: Mapping[str, Any]) -> str:
    """JSON with a line per row and per entry of the summary, so that a changed observation is one changed line.

    Of many rows ``keys`` has the names, each set of them once, and a row is a list: which of ``keys`` it has, and its
    values in that order. :func:`expanded` gives the rows back.
    """
    if len(rows := content.get("rows") or ()) > MANY:
        content = dict(content) | _with_keys_apart(rows)

    def encode(value: Any, **layout: Any) -> str:
        return json.dumps(value, sort_keys=True, allow_nan=False, default=plain_number, ensure_ascii=False, **layout)

    parts = []
    for key, value in sorted(content.items()):
        if key in ("keys", "rows", "summary") and value:
            text = "[\n" + ",\n".join(encode(item, separators=(",", ":")) for item in value) + "\n ]"
        else:
            text = encode(value, indent=1).replace("\n", "\n ")
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _with_keys_apart(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    numbers: dict[tuple[str, ...], int] = {}
    lists = []
    for row in rows:
        keys = tuple(sorted(row))
        lists.append([numbers.setdefault(keys, len(numbers)), *(row[key] for key in keys)])
    return {"keys": [list(keys) for keys in numbers], "rows": lists}


def expanded(content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` of a file with each row by its keys, however they were written.

    Raises ValueError for rows that do not fit the keys."""
    if "keys" not in content:
        return dict(content)
    content = dict(content)
    keys, rows = content.pop("keys"), content.get("rows")
    if not (isinstance(keys, list) and isinstance(rows, list)):
        raise ValueError("its rows and their keys are no lists")
    try:
        content["rows"] = [dict(zip(keys[number], values, strict=True)) for number, *values in rows]
    except (TypeError, IndexError, ValueError) as error:
        raise ValueError("a row does not fit its keys") from error
    return content


def _not_finite(value: Any, path: str = "") -> Iterable[str]:
    """Places of the nan and infinite numbers in ``value``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _not_finite(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _not_finite(item, f"{path}[{index}]")
    elif getattr(value, "ndim", None) == 0:
        yield from _not_finite(value.item(), path)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path
