"""``data/record.jsonl``: a line for every run that was recorded, and for whatever was done to the record since.

A line is never changed or taken away: it holds the sha256 of the line before it, so an edit breaks all that follow.
There are four kinds. A ``run`` says when and where an experiment ran, of which revision, the sha256 of its rows, and
for each claim that it answers what was measured and whether the claim stood as it does now before the run. A
``summary`` says that the rows of a run were summarised again, an ``edit`` that claims were changed or retired, and a
``removal`` that a result was withdrawn. The last three say why, and so does a run that takes the place of another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from firsttoken.study import paths
from firsttoken.study.canonical_json import sha256_of
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.files import write_text
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as
from firsttoken.study.parsing.schema import fits, parse_as
from firsttoken.study.storage import storing
from firsttoken_studies.record.claims import Claim
from firsttoken_studies.record.results import Result, Rows

FIRST = "0" * 64  # what the first line holds as the sha256 of the one before it
Fixed = Literal["before", "after", "other", "unknown"]


@dataclass(frozen=True)
class ClaimRecord:
    """The answer of a run to a claim: the entries of its summary, one a place of the claim.

    ``asked`` and ``worded`` are the digests of the claim (``forms``) when the line was written. ``fixed`` is the
    claim's state at the revision of the run: "before" as now; "after" otherwise, so that the claim is *post hoc*;
    "other" where the run answered another measure under the same name; "unknown" where the history has no such
    revision. ``reworded``: conditions, place or wording were changed after the run.
    """

    entries: tuple[dict[str, Any], ...]
    asked: str = ""
    worded: str = ""
    fixed: Fixed = "before"
    reworded: bool = False
    verdict: str = ""  # by the rules of the day on which the line was written


RETIRED = ClaimRecord((), verdict="retired")
"""What an edit says of a claim that is judged no longer."""


_reasoned = fits(lambda reason: reason == reason.strip(), "a reason neither begins nor ends with a space")


@dataclass(frozen=True)
class LogLine:
    """One line.

    ``rows`` is the sha256 of the run's rows, and ``replaces`` the :attr:`run` whose file this one took. ``faulty`` says
    that the run which was replaced or removed measured something else than it said, so that it is no evidence. ``code``
    is the digest of the functions that the experiment imported (``code.digest``), where it is known.
    """

    kind: Literal["run", "summary", "edit", "removal"]
    experiment: str = ""
    profile: str = ""
    machine: str = ""
    gpu: bool = False
    started: str = ""
    duration_s: float = 0.0
    revision: str = ""
    rows: str = ""
    replaces: str = ""
    code: str = ""
    claims: dict[str, ClaimRecord] = field(default_factory=dict)
    reason: Annotated[str, _reasoned] = ""
    faulty: bool = False
    previous: str = FIRST

    def __post_init__(self) -> None:
        if (self.kind != "run" or self.replaces) and not self.reason:
            raise FirstTokenError(f"a line of kind {self.kind} needs a reason")

    @property
    def text(self) -> str:
        """The line as it stands in the file: what is not said is left out."""
        fields = {name: value for name, value in asdict(self).items() if value or name == "previous"}
        return json.dumps(fields, sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    @property
    def run(self) -> str:
        """The name of the run that a line is about: its start and its rows, which two runs may have in common."""
        return f"{self.started} {self.rows}"

    @property
    def place(self) -> tuple[str, str, str]:
        """Experiment, profile and machine: of these the record holds one result at a time."""
        return self.experiment, self.profile, self.machine


def rows_digest(rows: Rows) -> str:
    """The sha256 of the rows of a result, whatever the order of their keys."""
    return sha256_of({"rows": rows})


class Log:
    """The lines of the file, oldest first, and what stands by them."""

    def __init__(self, lines: Iterable[LogLine] = ()) -> None:
        self.lines = tuple(lines)

    @property
    def head(self) -> str:
        """The sha256 of the last line."""
        return _sha256(self.lines[-1].text) if self.lines else FIRST

    def runs(self) -> list[LogLine]:
        """Return the lines of runs."""
        return [line for line in self.lines if line.kind == "run"]

    def gone(self) -> set[str]:
        """The runs that a later one replaced or that were removed."""
        replaced = {line.replaces for line in self.lines if line.replaces}
        return replaced | {line.run for line in self.lines if line.kind == "removal"}

    def withdrawn(self) -> set[tuple[tuple[str, str, str], str]]:
        """Place and start of the runs that were removed, whose files may stand in the record still."""
        return {(line.place, line.started) for line in self.lines if line.kind == "removal"}

    def faulty(self) -> set[str]:
        """The runs that are no evidence."""
        return {line.replaces or line.run for line in self.lines if line.faulty}

    @cached_property
    def standing(self) -> dict[tuple[str, str, str], LogLine]:
        """The run that each place of the record holds, with the answers of its last summary."""
        gone, lines = self.gone(), dict[tuple[str, str, str], LogLine]()
        for line in self.lines:
            if line.kind == "run" and line.run not in gone:
                lines[line.place] = line
            elif line.kind == "summary" and (run := lines.get(line.place)) and run.run == line.run:
                lines[line.place] = replace(run, claims=run.claims | line.claims)
        return lines

    def noted(self, claim: Claim) -> tuple[str, str] | None:
        """The form of a claim that a run or an edit noted last, as digests of what decides it and of its wording.

        A summary keeps the forms of its run.
        """
        lines = [line for line in self.lines if line.kind in ("run", "edit") and claim.id in line.claims]
        return (lines[-1].claims[claim.id].asked, lines[-1].claims[claim.id].worded) if lines else None

    def claimed(self) -> set[str]:
        """The names of all claims that a line holds, but for those that were retired since."""
        last = {name: answer for line in self.lines for name, answer in line.claims.items()}
        return {name for name, answer in last.items() if answer != RETIRED}

    def answers(self, claim: Claim) -> list[tuple[LogLine, ClaimRecord]]:
        """Return each run that answered the claim, with its answer as it was last summarised, faulty ones left out."""
        faulty, summaries = self.faulty(), dict[str, ClaimRecord]()
        for line in self.lines:
            if line.kind == "summary" and claim.id in line.claims:
                summaries[line.run] = line.claims[claim.id]
        return [
            (line, summaries.get(line.run, line.claims[claim.id]))
            for line in self.runs()
            if claim.id in line.claims and line.run not in faulty
        ]

    def withdrawn_answer(self, claim: Claim, machine: str) -> ClaimRecord | None:
        """Return what a machine answered whose result was withdrawn, under a profile that the claim allows.

        None where it was recorded there again, was faulty, or answered another question.
        """
        last = {line.place: line for line in self.runs()}
        removed = {line.run for line in self.lines if line.kind == "removal"}
        answers = [
            answer
            for line, answer in self.answers(claim)
            if line.machine == machine and last[line.place] is line and line.run in removed
            if not claim.profiles or line.profile in claim.profiles
            if answer.fixed != "other" and answer.asked == forms(claim)[0]
        ]
        return answers[-1] if answers else None

    def followed_by(self, lines: Iterable[LogLine]) -> Log:
        """The log with ``lines`` at its end, each holding the sha256 of the one before it."""
        longer = self
        for line in lines:
            longer = Log((*longer.lines, replace(line, previous=longer.head)))
        return longer


EMPTY = Log()


def read_log() -> Log:
    """Read the log; one that does not exist has no lines.

    Raises FirstTokenError for a line that cannot be read, and for one that does not follow from the line before it.
    """
    path = paths.RECORD_LOG
    return parse_log(path.read_text(encoding="utf-8"), path) if path.exists() else Log()


def parse_log(text: str, path: Path) -> Log:
    """The log that ``text`` holds; ``path`` is named in errors. Raises as ``read_log`` does."""
    lines, head = list[LogLine](), FIRST
    for number, text_line in enumerate(text.splitlines(), start=1):
        with errors_as(f"{path.name}:{number}", FirstTokenError, "restore the file from git"):
            line = parse_as(LogLine, parse_json(text_line))
            if line.previous != head:
                raise ParseError("does not follow from the line before it, so one of the two was edited")
            if line.text != text_line:
                raise ParseError("is not laid out as the program writes it")
        lines.append(line)
        head = _sha256(text_line)
    return Log(lines)


def write_log(log: Log) -> None:
    """Write the log whole. Raises StorageError."""
    with storing(paths.RECORD_LOG.parent):
        write_text(paths.RECORD_LOG, "".join(f"{line.text}\n" for line in log.lines))


def answer_of(claim: Claim, result: Result, verdict: str) -> ClaimRecord | None:
    """Return the answer of ``result`` to ``claim`` as it is now; None where its summary lacks a place of the claim."""
    entries = [result.summary.get(claim.measure, **labels) for labels in claim.places]
    if any(entry is None for entry in entries):
        return None
    numbers = [{k: v for k, v in entry.items() if k not in ("measure", "where")} for entry in entries if entry]
    return ClaimRecord(tuple(numbers), *forms(claim), verdict=verdict)


def forms(claim: Claim) -> tuple[str, str]:
    """The digests by which a line names what decides a claim, and its wording."""
    return claim.digest[:16], claim.wording[:16]


def run_line(result: Result, answers: Mapping[str, ClaimRecord], log: Log, reason: str = "") -> LogLine:
    """The line of a run, which replaces what the log has at its place."""
    before = log.standing.get((result.experiment, result.profile, result.slug))
    return LogLine(
        kind="run",
        experiment=result.experiment,
        profile=result.profile,
        machine=result.slug,
        gpu=bool(result.machine["gpu"]),
        started=result.started,
        duration_s=result.duration_s,
        revision=result.git_revision,
        rows=rows_digest(result.rows),
        replaces=before.run if before else "",
        code=result.code,
        claims=dict(answers),
        reason=reason,
    )


def faults(log: Log, results: Sequence[Result], claims: Sequence[Claim], every: Sequence[Result] = ()) -> list[str]:
    """Return what the record holds that the log does not know of: a result without a line or with other rows, a line
    whose result is gone, a number of a claim that is not the one of its line, a claim that was changed or retired
    without a line. Of ``every`` result, those that were withdrawn must have their rows still."""
    standing, messages = log.standing, list[str]()
    present = {result.place: result for result in results}
    gone, withdrawn = log.gone(), log.withdrawn()
    for result in every:
        run = f"{result.started} {rows_digest(result.rows)}" if (result.place, result.started) in withdrawn else ""
        if run and run not in gone:
            messages.append(f"the rows of {result.experiment} on {result.slug}, which was withdrawn, are not its own")
    for key, line in standing.items():
        if key not in present:
            messages.append(f"the result of {_said(line)} is gone, and no line of {paths.RECORD_LOG.name} says why")
    by_id = {claim.id: claim for claim in claims}
    for key, result in present.items():
        line = standing.get(key)
        if line is None:
            messages.append(f"the result of {key[0]} on {key[2]} has no line in {paths.RECORD_LOG.name}")
        elif line.rows != rows_digest(result.rows):
            messages.append(f"the rows of {key[0]} on {key[2]} are not those of its line: measure it again")
        elif (line.started, line.revision) != (result.started, result.git_revision):
            messages.append(f"{key[0]} on {key[2]} names another start or revision than its line")
        else:
            messages += _other_numbers(line, result, by_id)
    for claim in claims:
        if log.noted(claim) not in (None, forms(claim)):
            messages.append(f"claim {claim.id} was changed: say why, by `firsttoken record --claims --because TEXT`")
    for name in sorted(log.claimed() - by_id.keys()):
        messages.append(f"claim {name} is gone: say why, by `firsttoken record --claims --because TEXT`")
    return messages


def _other_numbers(line: LogLine, result: Result, claims: Mapping[str, Claim]) -> Iterable[str]:
    for name, recorded in line.claims.items():
        now = answer_of(claims[name], result, "") if name in claims else None
        if now and recorded.asked == now.asked and recorded.entries != now.entries:
            yield (
                f"claim {name}: the summary of {line.experiment} says {_values(now)}, its line {_values(recorded)}: "
                "summarise it again by `firsttoken record --summarise`, or restore the file from git"
            )


def _values(answer: ClaimRecord) -> str:
    return ", ".join(str(entry.get("value")) for entry in answer.entries)


def _said(line: LogLine) -> str:
    return f"{line.experiment} on {line.machine}, begun {line.started},"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
