"""The ledger and the README's scoreboard, held to a script that shares no code with them and sees planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partialmethod
from typing import Any

import pytest
from entries import entry
from independent_scoreboard import CONTRADICTED, Files, faults, judged, read, scoreboard
from independent_scoreboard import ROOT as REPOSITORY

from firsttoken_studies import ledger
from firsttoken_studies.record import claims_table, verdicts
from firsttoken_studies.record.claims import Claim
from firsttoken_studies.record.record_log import ClaimRecord, Log, LogLine, forms, rows_digest, run_line
from firsttoken_studies.record.results import Result, pick
from firsttoken_studies.record.verdicts import Verdict

GROUNDS = ("live", "simulated", "arithmetic")
HEADS = ("report", *GROUNDS, CONTRADICTED, "not judged")


def differences(files: Files, record: tuple[list[Claim], list[Result], str, Log], page: str = "") -> list[str]:
    """What the script says otherwise than the ledger, and than the scoreboard in ``page`` (written without)."""
    claims, results, machine, log = record
    theirs = {j.claim.id: (str(j.verdict), j.standing) for j in verdicts.judge_record(claims, results, machine, log)}
    ours = judged(files)
    messages = [f"{name}: {ours[name]}, the ledger {theirs[name]}" for name in ours if ours[name] != theirs[name]]
    if len(faults(files)) != len(unjudgeable := verdicts.unjudgeable(claims, results)):
        messages.append(f"{faults(files)}, the ledger {unjudgeable}")
    table = (page or claims_table.counts(claims, results, machine, log)).split("| report |", 1)[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    shown = {row[0]: {head: cell for head, cell in zip(HEADS, row, strict=True) if cell} for row in rows}
    expected = {report: {"report": report} | cells for report, cells in scoreboard(files).items()}
    return messages + [
        f"{report}: {expected[report]}, the page {shown[report]}"
        for report in expected
        if expected[report] != shown[report]
    ]


def test_the_ledger_and_the_readme_say_what_an_independent_script_does() -> None:
    record = ledger.claims(), ledger.recorded(), ledger.machine(), ledger.log()
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert differences(read(), record, page) == []
    assert faults(read()) == []
    spoilt = page.replace(" / ", " / 1", 1 + page[: page.index("| report |")].count(" / "))
    assert differences(read(), record, spoilt) != []


@pytest.fixture
def record(claim, make_result) -> tuple[list[Claim], list[Result], str, Log]:
    """A small record with each of the cases that a verdict can go wrong by."""
    gain = {"kind": "ratio", "value": 2.0, "tolerance": 0.25, "no_effect": 1.0, "nature": "measured"}
    claims = {
        name: claim(id=name, measure=name, experiment="machine", **changes)
        for name, changes in {
            "profile": {"profiles": ("paper",)},
            "standing": {"profiles": ("full",)},
            "again": {},
            "card": gain,
            "card-first": {},
            "bare": gain,
            "sum": {"ground": "simulated"},
            "rows": {"nature": "arithmetic"},
            "look": {"ground": "simulated", "first_look": True},
            "share": gain | {"value": 2.5, "tolerance": 0.25},
            "twice": gain | {"value": 2.6, "tolerance": 0.25},
            "pointer": {"counts_as": "share"},
            "erratum": {"erratum": "I20"},
            "few": {},
        }.items()
    }
    log = Log()

    def run(result: Result, fixed: str = "before", removed: bool = False, without: tuple[str, ...] = ()) -> Result:
        nonlocal log
        given = {e["measure"]: {"value": e["value"]} for e in result.summary}
        answers = {
            name: ClaimRecord((given[name],), *forms(claims[name]), fixed) for name in given if name not in without
        }
        lines = [run_line(result, answers, log, "again")]
        if removed:
            place = {"experiment": result.experiment, "profile": result.profile, "machine": result.slug}
            lines.append(
                LogLine("removal", **place, started=result.started, rows=rows_digest(result.rows), reason="moved")
            )
        log = log.followed_by(lines)
        return replace(result, entries={name: claims[name].digest for name in answers})

    def made(profile: str, slug: str, day: int, values: dict[str, Any], gpu: str | None = None) -> Result:
        summary = [
            entry(name, **value if isinstance(value, dict) else {"value": value}) for name, value in values.items()
        ]
        machine, started = {"slug": slug, "gpu": gpu}, f"2026-01-{day:02}T00:00:00+00:00"
        return make_result(profile=profile, machine=machine, started=started, summary=summary, rows=[{"day": day}])

    first = made("full", "here", 1, {"profile": 25, "again": 1, "sum": 25, "rows": 25})
    run(first, "after", removed=True, without=("rows",))
    run(made("full", "there", 2, {"standing": 25}), "after", removed=True)
    run(made("paper", "there", 2, {"again": 1}), removed=True)
    run(made("paper", "there", 3, {"look": 25}), removed=True)
    estimates = {"share": {"value": 2.41, "low": 2.3, "high": 2.5, "n": 9}, "bare": {"value": 2.04, "n": 6}}
    estimates |= {"twice": {"value": 2.41, "low": 2.35, "high": 2.5, "n": 9}, "few": {"value": 25, "n": 4}}
    values = {"card-first": 25, "sum": 25, "rows": 25, "pointer": 25, "erratum": 1}
    on_cpu = {"card": {"value": 2.1, "low": 2.0, "high": 2.2, "n": 9}}
    here = made("full", "here", 4, values | estimates | on_cpu)
    here = run(replace(here, rows=[{"day": 1}]))
    on_card = {"card": {"value": 9.0, "low": 8.5, "high": 9.5, "n": 5}, "card-first": 25}
    card = run(made("gpu", "card", 5, on_card, "A Card"), "after")
    return list(claims.values()), [here, card], "here", log


def files_of(record: tuple[list[Claim], list[Result], str, Log]) -> Files:
    """The record as its files would be."""
    claims, results, machine, log = record
    plain = json.loads(json.dumps([[asdict(claim) for claim in claims], [asdict(result) for result in results]]))
    return Files(*plain, [json.loads(line.text) for line in log.lines], machine)


EXPECTED = {
    "profile": ("not run here", ""),
    "standing": ("reproduced", "post hoc"),
    "again": ("not run here", ""),
    "card": ("machine-dependent", "post hoc"),
    "card-first": ("reproduced", "post hoc"),
    "bare": ("reproduced", ""),
    "sum": ("reproduced", "post hoc"),
    "rows": ("reproduced", "post hoc"),
    "look": ("reproduced", "post hoc"),
    "share": ("reproduced", ""),
    "twice": ("reproduced", ""),
    "pointer": ("counted elsewhere", ""),
    "erratum": (CONTRADICTED, ""),
    "few": ("n too small to judge", ""),
}


def test_the_small_record_is_judged_by_the_rules(record) -> None:
    assert judged(files_of(record)) == EXPECTED
    assert differences(files_of(record), record) == []
    assert sorted(fault.split()[0] for fault in faults(files_of(record))) == ["bare", "one"]


_WITHDRAWN, _ENTRIES, _UNJUDGEABLE, _COUNT = (
    Log.withdrawn_answer,
    verdicts.judge_entries,
    verdicts.unjudgeable,
    claims_table._count,
)


def _any_line(log: Log, claim: Claim, machine: str, *, allowed: bool) -> ClaimRecord | None:
    """The wrong rule: any line of the machine answers, of a profile that the claim allows or of another."""
    answers = [
        answer
        for line, answer in log.answers(claim)
        if line.machine == machine and allowed == (not claim.profiles or line.profile in claim.profiles)
    ]
    return _WITHDRAWN(log, claim, machine) or next(iter(answers), None)


def _without(name: str) -> Callable[..., Any]:
    return lambda claim, entries: _ENTRIES(replace(claim, **{name: ""}), entries)


def _silent(word: str) -> Callable[..., list[str]]:
    return lambda *record: [message for message in _UNJUDGEABLE(*record) if word not in message]


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a profile that the claim does not allow": (Log, "withdrawn_answer", partialmethod(_any_line, allowed=False)),
    "a line that was recorded again": (Log, "withdrawn_answer", partialmethod(_any_line, allowed=True)),
    "a withdrawn run that is forgotten": (Log, "withdrawn_answer", lambda *_: None),
    "a standing that is lost": (verdicts, "_standing", lambda *_: ("", False)),
    "a GPU that is not heard": (
        verdicts,
        "pick",
        lambda results, *of: pick([r for r in results if not r.machine["gpu"]], *of),
    ),
    "a GPU that stands behind": (verdicts, "_of_a_gpu", lambda _: False),
    "a sum that is fixed once it is done again": (verdicts, "_foreseen", lambda *_: False),
    "a sum that was seen first": (Claim, "first_look", property(lambda _: False)),
    "an estimate without an interval": (verdicts, "unjudgeable", _silent("interval")),
    "a number that answers twice": (verdicts, "unjudgeable", _silent("one number")),
    "a pointer that counts": (verdicts, "judge_entries", _without("counts_as")),
    "a contradiction that reads not reproduced": (verdicts, "judge_entries", _without("erratum")),
    "a contradiction in no column": (
        claims_table,
        "_count",
        lambda judged, kind, *ground: 0 if kind == Verdict.CONTRADICTED else _COUNT(judged, kind, *ground),
    ),
    "too few observations": (verdicts, "FEWEST", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(record, monkeypatch, fault: str) -> None:
    owner, name, wrong = FAULTS[fault]
    files = files_of(record)
    monkeypatch.setattr(owner, name, wrong)
    assert differences(files, record) != []
