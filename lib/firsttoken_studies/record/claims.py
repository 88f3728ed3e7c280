"""The ledger: what the papers say, in ``claims.yaml`` in each notebook's folder, fixed before anything is measured.

A claim names the experiment that answers it and, of its summary, the measure and where it holds (``summary.py``); the
verdict is computed (``verdicts.py``), never written down. A result keeps the digest of every claim that it answers as
it stood when the run began. Whoever changes afterwards what decides a verdict notes why (``firsttoken record --claims
--because TEXT``), and the verdict reads "post hoc" until the experiment is recorded again.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from firsttoken.study.errors import ClaimsError
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, shown
from firsttoken.study.parsing.schema import at_least, fits, parse_as, unknown
from firsttoken.study.parsing.yaml_text import read_entries
from firsttoken.study.summary import misnamed

Kind = TypeVar("Kind")
NATURES = ("measured", "arithmetic", "configuration")
GROUNDS = ("live", "simulated", "arithmetic")  # what a value stands on
DECIDES = (  # what a verdict hangs on: a change to any of it makes a result *post hoc*
    *("kind", "value", "unit", "op", "tolerance", "no_effect"),
    *("measure", "where", "experiment", "profiles", "whose", "nature"),
)
WORDING = ("place", "says", "conditions", "told")  # what a reader takes the verdict to mean
COUNTING = ("erratum", "counts_as", "first_look")  # how a verdict counts, in a claim's wording where one is set


_row_of_errata = fits(re.compile(r"([IN]\d+)?").fullmatch, "expected a row of errata.md, such as I20")


@dataclass(frozen=True)
class Claim:
    """One statement of a report, or a goal of this project (``whose`` is "report" or "project").

    ``kind`` is "exact" (|measured - value| <= tolerance, or equality of text), "ratio" (tolerance relative to the
    effect, which is the value's distance from ``no_effect``), "bound" (``op`` "<=" or ">=" the value) or "ordering"
    (``where`` lists places of the measure from the smallest value to the largest). ``no_effect`` is what would be
    measured if the idea did nothing; a bound that has no such value, such as a limit on a loss, leaves it out.
    ``nature`` is "measured", "arithmetic" (on published numbers) or "configuration" (chosen here as the report chose
    it). ``ground`` says what a measured value stands on: it was measured live, it was simulated or replayed on
    published or profiled times, or it was counted on a format. More of an ``effect`` is better where it is a gain, and
    worse where it is a cost; a finding is best as the report has it. An ``invariant`` is a goal of this project that
    its tests hold as well, such as equal tokens. ``notebook`` is its number; the minutes are a reader's and a
    computer's. ``profiles`` limits which profiles may answer, () for all. ``told`` is what a table shows as the
    report's, where that is not value and unit; a ``headline`` is in the README. ``erratum`` is the row of
    ``data/errata.md`` that shows that the sources contradict the claim. A claim ``counts_as`` another where one
    measurement answers both, or where the other is on the report's own card. ``first_look``: it was written in view of
    its number, which a sum gives again each time.
    """

    id: str
    report: str
    place: str
    says: str
    kind: Literal["exact", "ratio", "bound", "ordering"]
    measure: str
    experiment: str
    notebook: str
    human_min: Annotated[float, at_least(0)]
    compute_min: Annotated[float, at_least(0)]
    where: dict[str, Any] | tuple[dict[str, Any], ...] = field(default_factory=dict)
    conditions: str = ""
    value: float | bool | str | None = None
    unit: str = ""
    op: Literal["<=", ">="] | None = None
    tolerance: Annotated[float, at_least(0)] = 0.0
    no_effect: float | None = None
    profiles: tuple[Literal["quick", "review", "full", "gpu", "paper", "tasks"], ...] = ()
    whose: Literal["report", "project"] = "report"
    nature: Literal[NATURES] = "measured"
    ground: Literal[GROUNDS] = "live"
    effect: Literal["gain", "cost", "finding"] = "gain"
    invariant: bool = False
    told: str = ""
    headline: bool = False
    erratum: Annotated[str, _row_of_errata] = ""
    counts_as: str = ""
    first_look: bool = False

    def __post_init__(self) -> None:
        if not self.place.strip():
            raise ClaimsError("no source: place must say where the report has it, or that it is this project's goal")
        if isinstance(self.where, tuple) != (self.kind == "ordering"):
            raise ClaimsError("where must be a list of places for an ordering, and one place otherwise")
        for fault in filter(None, map(misnamed, self.places)):
            raise ClaimsError(f"where: {fault}")
        if self.kind == "ordering" and (len(self.places) < 2 or not self.told):
            raise ClaimsError("an ordering needs at least two places of its measure, and told: what the report has")
        if (self.value is None) != (self.kind == "ordering"):
            raise ClaimsError(f"value must be {'absent' if self.kind == 'ordering' else 'given'} for kind {self.kind}")
        if self.kind in ("ratio", "bound") and not is_number(self.value):
            raise ClaimsError(f"value must be a number for kind {self.kind}, not {self.value!r}")
        if bool(self.op) != (self.kind == "bound"):
            raise ClaimsError('op must be "<=" or ">=" for a bound, and absent otherwise')
        if self.kind == "ratio" and self.tolerance == 0:
            raise ClaimsError("tolerance must be positive for a ratio")
        if self.kind == "ratio" and self.no_effect is None:
            raise ClaimsError("no_effect must say what would be measured if there were no effect (1 for a factor)")
        if self.no_effect is not None and self.no_effect == self.value:
            raise ClaimsError(f"no_effect is the value itself, {self.value}; nothing could be told apart")
        if self.first_look and self.stands_on == "live":
            raise ClaimsError("first_look is of sums, which give the same number again; a live run measures anew")

    @property
    def stands_on(self) -> str:
        """Return one of ``GROUNDS``: a claim on published numbers or on a configuration is arithmetic."""
        return self.ground if self.nature == "measured" else "arithmetic"

    @property
    def places(self) -> tuple[dict[str, Any], ...]:
        """The places where the measure is read: one place, or several for an ordering."""
        return (self.where,) if isinstance(self.where, dict) else self.where

    @property
    def digest(self) -> str:
        """The sha256 of all that decides a verdict of the record; wording, notebook and minutes may change, and so may
        whether the profile "review" answers, of whose results the record holds none."""
        deciding = {name: getattr(self, name) for name in DECIDES}
        return digest(deciding | {"profiles": [name for name in self.profiles if name != "review"]})

    @property
    def wording(self) -> str:
        """The sha256 of the words that say what was asked. A change of them after the run leaves the verdict, and is
        told."""
        counting = {name: value for name in COUNTING if (value := getattr(self, name))}
        return digest({name: getattr(self, name) for name in WORDING} | counting)


def digest(deciding: dict[str, Any]) -> str:
    """The sha256 of what decides a verdict, whatever the order and layout of the file that it stands in."""
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def digests(claims: Iterable[Claim], experiment: str) -> dict[str, str]:
    """The digest of each of ``claims`` that ``experiment`` answers, by id: what a result keeps."""
    return {claim.id: claim.digest for claim in claims if claim.experiment == experiment}


def claim_files(studies: Path) -> list[Path]:
    """The files of claims below ``studies``, one in the folder ``nbNN_name`` of each notebook that has claims."""
    return sorted(studies.glob("nb[0-9][0-9]_*/claims.yaml"))


def load_claims(studies: Path, experiments: Iterable[str]) -> list[Claim]:
    """Read the claims below the folder ``studies``, in the order of their notebooks; each claim must name one of
    ``experiments``. The name of a claim's folder says the number of its notebook.

    Raises ClaimsError with file, line and id for an id that is there twice, an unknown experiment or kind, an unknown
    or missing key, a value of the wrong type, or keys that do not fit the kind.
    """
    experiment_names, claims = set(experiments), dict[str, Claim]()
    for path in claim_files(studies):
        for location, claim in entries_by_id(path, Claim, "claim", {"notebook": path.parent.name[2:4]}):
            if claim.experiment not in experiment_names:
                raise ClaimsError(
                    f"{location}: no experiment {claim.experiment!r}; {unknown(claim.experiment, experiment_names)}"
                )
            if claim.id in claims:
                raise ClaimsError(f"{location}: notebook {claims[claim.id].notebook} has a claim of this id as well")
            claims[claim.id] = claim
    return list(claims.values())


def entries_by_id(
    path: Path, kind: type[Kind], called: str, common: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Kind]]:
    """Yield each entry of a list in a file as ``kind``, which has an ``id``, and its place, as an error names it. The
    fields in ``common`` are those of all entries, which then must not have them.

    Raises ClaimsError with line and id for an entry that is wrong or there twice.
    """
    with errors_as(path, ClaimsError, "mend it, or restore it from git"):
        entries = read_entries(path)
    file_name = f"{path.parent.name}/{path.name}" if common else path.name
    ids = set[str]()
    for line, entry in entries:
        name = entry.get("id", "without an id") if isinstance(entry, dict) else "that is no mapping"
        location = f"{file_name}:{line}: {called} {shown(name).strip(chr(39))}"
        try:
            if common and isinstance(entry, dict):
                if clash := sorted(common.keys() & entry.keys()):
                    raise ParseError(f"{clash[0]}: left out here, as the folder says it")
                entry = entry | common
            made = parse_as(kind, entry)
        except (ParseError, ClaimsError) as error:
            raise ClaimsError(f"{location}: {error}") from error
        if made.id in ids:
            raise ClaimsError(f"{location}: this id is used twice")
        ids.add(made.id)
        yield location, made


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number; booleans are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
