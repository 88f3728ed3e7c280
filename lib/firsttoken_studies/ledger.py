"""The ledger with its answers: what a notebook, a run and the command line say of the claims."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import isclose
from pathlib import Path
from typing import Any

from firsttoken.study import paths
from firsttoken.study.errors import ClaimsError, FirstTokenError
from firsttoken.study.files import write_text
from firsttoken.study.machine import machine_slug
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.storage import storing
from firsttoken.study.summary import Entry, Summary
from firsttoken_studies.invariants import broken
from firsttoken_studies.record import code, history, pages, show
from firsttoken_studies.record.claims import Claim, claim_files, is_number, load_claims
from firsttoken_studies.record.claims_table import OwnRun, run_end, table_for
from firsttoken_studies.record.record_log import (
    RETIRED,
    ClaimRecord,
    Log,
    LogLine,
    answer_of,
    faults,
    forms,
    read_log,
    run_line,
    write_log,
)
from firsttoken_studies.record.results import (
    CHANGED,
    Result,
    all_results,
    known_machine,
    load_result,
    result_files,
    result_path,
    write_result,
)
from firsttoken_studies.record.verdicts import (
    RECORDED_UNDER,
    Judgement,
    Verdict,
    effect,
    judge,
    judge_all,
    judge_record,
    unjudgeable,
)
from firsttoken_studies.registry import EXPERIMENTS
from firsttoken_studies.sarathi import leaderboard

TABLES: pages.Tables = {leaderboard.EXPERIMENT: leaderboard.record_table}


def claims() -> list[Claim]:
    """The claims of the ledger. Raises ClaimsError."""
    return load_claims(paths.STUDIES, EXPERIMENTS)


def recorded() -> list[Result]:
    """The results that verdicts of the record stand on: those that were withdrawn stay, and answer nothing.

    Raises FirstTokenError as ``results.all_results`` and ``record_log.read_log``.
    """
    withdrawn = log().withdrawn()
    return [result for result in all_results(RECORDED_UNDER) if (result.place, result.started) not in withdrawn]


def log() -> Log:
    """The log of all that was ever recorded. Raises FirstTokenError as ``record_log.read_log``."""
    return read_log()


def machine() -> str:
    """The machine whose record is committed; this one before there is any."""
    return pages.recorded_machine() or machine_slug()


def verdicts(*ids: str) -> None:
    """Print what the record says of each claim named, in a line.

    Raises ClaimsError for a claim that does not exist.
    """
    standing_claims, results, noted = _standing(_state())
    chosen = [_named(name, standing_claims) for name in ids]
    for judged in judge_record(chosen, results, machine(), noted):
        ground = ", simulated" if judged.claim.stands_on == "simulated" else ""
        measured_text = f"; here {judged.measured}{ground}" if judged.measured else ""
        print(f"{judged.says}: {judged.claim.says}{measured_text} ({judged.claim.id})")


def beside(now: Result, recorded: Result | None) -> None:
    """Print, for above a figure, where this run and the record come from, whether they ran the same code, and on which
    claims they disagree.

    They disagree on a claim where its verdict differs, or where the intervals of the deciding measure lie apart. A run
    under changed settings is held against the reader's unchanged one, too, where there is one.
    """
    print(f"your run: {show.where(now)}")
    if recorded is None or (recorded.path, recorded.started) == (now.path, now.started):
        print("recorded: " + ("this run is the record" if recorded else "nothing yet"))
        return
    print(f"recorded: {show.where(recorded)}{_other_code(now, recorded)}")
    lines = list(_disagreements(now, recorded, "the record"))
    if now.profile.endswith(CHANGED):
        before = load_result(now.experiment, now.profile.removesuffix(CHANGED))
        lines += _disagreements(now, before, "your unchanged run") if before else ()
    for line in lines or ["where both judge a claim of this experiment, they agree"]:
        print(line)


def _other_code(now: Result, recorded: Result) -> str:
    """Say that the record was made by other code than runs here, and how much of it differs; return "" where that is
    not so, or cannot be known for want of git's history."""
    module = EXPERIMENTS[now.experiment].module
    if recorded.code == code.digest(module):
        return ""
    other, function_count = code.changed(module, recorded.git_revision), len(code.functions(module))
    if other is None:
        return "\nthe record was made by other code" if recorded.code.startswith(f"{code.FORM}-") else ""
    revision = f"\nthe record was made by revision {recorded.git_revision[:9]}"
    since = f"since then {other} of the {function_count} functions that this experiment imports were changed or renamed"
    return f"{revision}; {since}" if other else ""


def _disagreements(now: Result, other: Result, whose: str) -> Iterable[str]:
    for claim in _standing(_state())[0].values():
        if claim.experiment != now.experiment:
            continue
        if claim.profiles and other.profile in RECORDED_UNDER and other.profile not in claim.profiles:
            continue  # that record answers another claim: of another model, or other questions
        own_judgement, theirs = judge(claim, now), judge(claim, other)
        if Verdict.NOT_RUN not in (own_judgement.verdict, theirs.verdict) and _differ(
            own_judgement, theirs, now, other
        ):
            measured = f"your run {own_judgement.measured}, {whose} {theirs.measured}"
            yield f"OTHERWISE than {whose}: {claim.says}; {measured} ({claim.id})"


def _differ(own_judgement: Judgement, theirs: Judgement, now: Result, other: Result) -> bool:
    """Return whether two results disagree on a claim: in the verdict, or by intervals that lie apart. Where one of them
    has too few observations for a verdict, only an effect in the other direction counts."""
    claim = own_judgement.claim
    if own_judgement.verdict.judged and theirs.verdict.judged and own_judgement.verdict != theirs.verdict:
        return True
    entries = [result.summary.of(claim.measure, **claim.places[0]) for result in (now, other)]
    if claim.kind == "ordering" or not all(is_number(entry["value"]) for entry in entries):
        return False
    if not (own_judgement.verdict.judged and theirs.verdict.judged):
        return claim.no_effect is not None and len({effect(claim, entry)[1] > 0 for entry in entries}) == 2
    bounds = [(entry.get("low", entry["value"]), entry.get("high", entry["value"])) for entry in entries]
    return bounds[0][0] > bounds[1][1] or bounds[0][1] < bounds[1][0]


def table(slug: str | None = None, profile: str | None = None, statements: Sequence[Claim] | None = None) -> str:
    """The table of the claims that are ``statements`` (all without) on the machine ``slug``; without one, the record
    beside what this machine measured, under ``profile`` where one is named. Raises FirstTokenError for a machine
    without results."""
    results, statements = all_results(), claims() if statements is None else statements
    if slug:
        return table_for(statements, results, known_machine(slug, results), log=log())
    return table_for(statements, recorded(), machine(), _own(results, profile), log())


def judged(slug: str | None = None, report: str = "", verdict: str = "") -> list[Judgement]:
    """Return the record's verdicts on the claims of ``report`` that are ``verdict`` (its words joined by "-"), as on
    the machine ``slug``. Raises ClaimsError for a report or verdict that there is not, and as ``table`` does."""
    results, statements = all_results() if slug else recorded(), claims()
    reports = {claim.report.casefold(): claim.report for claim in statements}
    verdicts = {kind.replace(" ", "-"): kind for kind in map(str, Verdict)}
    if report and report.casefold() not in reports:
        raise ClaimsError(f"no report {report!r}; {unknown(report, reports.values())}")
    if verdict and verdict not in verdicts:
        raise ClaimsError(f"no verdict {verdict!r}; {unknown(verdict, verdicts)}")
    judgements = judge_record(statements, results, known_machine(slug, results) if slug else machine(), log())
    return [
        judgement
        for judgement in judgements
        if report.casefold() in ("", judgement.claim.report.casefold())
        and verdicts.get(verdict) in (None, judgement.verdict)
    ]


def _own(results: Iterable[Result], profile: str | None) -> OwnRun:
    machine = machine_slug()
    own_results = (result for result in results if result.slug == machine and not result.profile.endswith(CHANGED))
    return OwnRun(
        machine,
        profile or "any profile",
        tuple(own_result for own_result in own_results if profile in (None, own_result.profile)),
    )


def end_of_run(profile: str, notebooks: Collection[str]) -> list[str]:
    """Return what a run of ``notebooks`` (numbers) under ``profile`` ends with: by report what this machine's results
    say of their claims, where they contradict the record or the reports most, and the page with all claims, which is
    written here.

    Raises FirstTokenError as ``table``.
    """
    page = paths.EXECUTED / profile / "claims.md"
    with storing(page.parent):
        write_text(page, table(profile=profile) + "\n")
    statements = [claim for claim in claims() if claim.notebook in notebooks]
    own_results = _own(all_results((profile,)), profile)
    lines = (
        run_end(statements, recorded(), machine(), own_results, log())
        if statements
        else ["No claim hangs on what was run."]
    )
    return [*lines, "", f"all claims: {page}"]


def update_pages(slug: str | None = None) -> None:
    """Write README.md, the pages of data and what notebooks say from the record of ``slug``.

    Raises ClaimsError where the pages would lose verdicts that they show, and ClaimsError and FirstTokenError as
    ``pages.update``.
    """
    results, shown = recorded(), machine()
    new = known_machine(slug, results) if slug else shown
    changed = {
        slug: sum(j.verdict != Verdict.NOT_RUN for j in judge_all(claims(), results, slug)) for slug in (shown, new)
    }
    if changed[new] < changed[shown]:
        raise ClaimsError(
            f"{new} has {changed[new]} verdicts, the pages show {changed[shown]} of {shown}; measure the rest"
        )
    pages.update(claims(), results, new, TABLES, log())


def outdated_pages(slug: str | None = None) -> Iterable[str]:
    """The names of the pages that do not show the record. Raises as ``update_pages``."""
    return [page.name for page in pages.outdated(claims(), recorded(), slug or machine(), TABLES, log())]


def record_faults() -> list[str]:
    """Return the faults of the record: in results, log, claims, the rules of rows, and where it is here the history.

    Raises ClaimsError and FirstTokenError for files that cannot be read.
    """
    noted, results, statements = log(), recorded(), claims()
    messages = faults(noted, results, statements, all_results(RECORDED_UNDER)) + unjudgeable(statements, results)
    for result in results:
        messages += [f"{result.experiment} on {result.slug}: {fault}" for fault in broken(result)]
    return messages + (history.faults(noted, statements) if history.is_here() else [])


def note_run(result: Result, because: str = "") -> None:
    """Add the line of a run for the record to the log. Raises as ``log`` does, ClaimsError and StorageError."""
    statements = [claim for claim in claims() if claim.experiment == result.experiment]
    may = [claim for claim in statements if not claim.profiles or result.profile in claim.profiles]
    noted = log()
    again = (result.experiment, result.profile, result.slug) in noted.standing
    reason = because or (f"recorded again, at revision {result.git_revision[:9]}" if again else "")
    write_log(noted.followed_by([run_line(result, _answers(may, result), noted, reason)]))


def _answers(statements: Iterable[Claim], result: Result) -> dict[str, ClaimRecord]:
    answers = {claim.id: answer_of(claim, result, str(judge(claim, result).verdict)) for claim in statements}
    return {name: answer for name, answer in answers.items() if answer}


def summarise_again(because: str) -> list[str]:
    """Make the summary of every recorded result again from its rows, and note which entries are others.

    Return what changed, a line a result. Raises as ``note_run`` does.
    """
    messages, noted = list[str](), log()
    for result in recorded():
        made = EXPERIMENTS[result.experiment].summarise(result.rows, result.parameters)
        plain = Summary(json.loads(json.dumps(made, default=lambda number: number.item())))
        other = sum(not _same(entry, result.summary.get(entry["measure"], **entry["where"])) for entry in plain)
        if not other and len(plain) == len(result.summary):
            continue
        again = replace(result, summary=plain)
        write_result(again)
        line = noted.standing[result.experiment, result.profile, result.slug]
        answers = _answers((claim for claim in claims() if claim.id in line.claims), again)
        answers_kept = {name: replace(line.claims[name], **_measured(answer)) for name, answer in answers.items()}
        same = LogLine(
            "summary", *line.place, rows=line.rows, started=line.started, claims=answers_kept, reason=because
        )
        noted = noted.followed_by([same])
        messages.append(f"{result.experiment} on {result.slug}: {other} of {len(plain)} entries are others")
    write_log(noted)
    return messages


def _same(entry: Entry, before: Entry | None) -> bool:
    """Return whether two entries say the same: another processor adds up in another order."""
    if before is None or entry.keys() != before.keys():
        return False
    return all(
        isclose(value, before[name], rel_tol=1e-9, abs_tol=1e-12) if type(value) is float else value == before[name]
        for name, value in entry.items()
    )


def _measured(answer: ClaimRecord) -> dict[str, Any]:
    return {"entries": answer.entries, "verdict": answer.verdict}


def take_out(experiment: str, slug: str, because: str, *, faulty: bool) -> Path:
    """Withdraw the result of ``experiment`` on the machine ``slug`` from the record, with a line that says why.

    Its file stays where it is, and answers no claim. ``faulty``: it measured something else than it said, so that it is
    no evidence; its file goes, as a run that is replaced does. Raises FirstTokenError where there
    is none, and as ``note_run`` does.
    """
    noted = log()
    key = next((key for key in noted.standing if key[0] == experiment and key[2] == slug), None)
    if key is None:
        machines = sorted(standing_key[2] for standing_key in noted.standing if standing_key[0] == experiment)
        raise FirstTokenError(f"no result of {experiment} on {slug} is recorded; {unknown(slug, machines)}")
    line = noted.standing[key]
    gone = LogLine("removal", *key, line.gpu, line.started, rows=line.rows, reason=because, faulty=faulty)
    write_log(noted.followed_by([gone]))
    path = result_path(*key)
    if faulty:
        path.unlink(missing_ok=True)
    return path


def note_edits(because: str) -> list[str]:
    """Note the claims that are others than the log knows or are gone, and return their names. Raises as ``note_run``
    does."""
    noted, statements = log(), claims()
    edited = {claim.id: ClaimRecord((), *forms(claim)) for claim in statements if noted.noted(claim) != forms(claim)}
    edited |= dict.fromkeys(sorted(noted.claimed() - {claim.id for claim in statements}), RETIRED)
    if edited:
        write_log(noted.followed_by([LogLine("edit", claims=edited, reason=because)]))
    return list(edited)


def _state() -> tuple[tuple[Path, int, int], ...]:
    """Return the files from which ledger and record are read, each with time and size, which change when it does."""
    read = (*claim_files(paths.STUDIES), paths.RECORD_LOG, *result_files(RECORDED_UNDER))
    files = [(path, path.stat()) for path in read if path.exists()]
    return tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in files)


@lru_cache(maxsize=1)  # a notebook asks for verdicts several times, and reading takes longer than a second
def _standing(_: tuple[tuple[Path, int, int], ...]) -> tuple[dict[str, Claim], list[Result], Log]:
    return {claim.id: claim for claim in claims()}, recorded(), log()


def _named(name: str, by_id: dict[str, Claim]) -> Claim:
    if name not in by_id:
        raise ClaimsError(f"no claim {name!r}; {unknown(name, by_id)}")
    return by_id[name]
