"""Writes ``data/record.jsonl`` anew from git's history: a line for each result that was ever committed.

For whoever keeps the record: the log was begun after runs had been replaced and removed, and this is how their lines
came into it. ``--removed REASONS.yaml`` names why, by "experiment machine started".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from firsttoken.study import history, paths
from firsttoken.study.canonical_json import expanded
from firsttoken.study.claims import Claim
from firsttoken.study.code import git
from firsttoken.study.record import all_results
from firsttoken.study.record_log import ClaimRecord, Log, LogLine, answer_of, forms, rows_digest, write_log
from firsttoken.study.verdicts import judge_entries
from firsttoken_studies import ledger

SAME_MACHINE = {"amd-epyc-2c": "amd-epyc-avx512bf16-2c"}  # the name that it had at first


def main() -> None:
    """Read the history, and write the log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reasons", type=Path, help="YAML: by 'experiment machine started' a reason, and whether faulty")
    reasons = yaml.safe_load(parser.parse_args().reasons.read_text(encoding="utf-8"))
    now = {(result.started, rows_digest(result.rows)): result for result in all_results(ledger.FOR_THE_RECORD)}
    claims = {claim.id: claim for claim in ledger.claims()}
    log = Log()
    for content, asked, commit in sorted(_runs(), key=lambda run: run[0]["started"]):
        rows = rows_digest(content["rows"])
        result = now.get((content["started"], rows))
        found = _now(result, claims) if result else _then(content, asked, claims)
        log = log.followed_by([_line(content, found, log, f"recorded again by commit {_named(commit)}")])
    standing, present = log.standing, {(one.experiment, one.profile, one.slug) for one in now.values()}
    for place, line in standing.items():
        if place not in present:
            told = reasons[" ".join((line.experiment, line.machine, line.started))]
            why = {"reason": told["reason"], "faulty": told.get("faulty", False)}
            gone = {"claims": {}, "revision": "", "replaces": "", "code": "", "duration_s": 0.0}
            log = log.followed_by([replace(line, kind="removal", **gone, **why)])
    write_log(log)
    print(f"{len(log.lines)} lines in {paths.RECORD_LOG}")


def _named(commit: str) -> str:
    """A commit as a reader finds it: its first digits and its subject."""
    return git("show", "-s", "--format=%h (%s)", "--abbrev=9", commit).decode().strip()


def _runs() -> list[tuple[dict[str, Any], Mapping[str, Any], str]]:
    """Each run, as its last commit has it, with the claims of that commit, and the commit that brought it."""
    found = {}
    for commit, path, rows in history.committed_runs():
        content = expanded(json.loads(history.file_at(commit, path)))
        machine = SAME_MACHINE.get(content["machine"]["slug"], content["machine"]["slug"])
        content["machine"]["slug"] = machine
        key = content["experiment"], machine, content["started"], rows
        found[key] = content, history.claims_at(commit), found[key][2] if key in found else commit
    return list(found.values())


def _now(result: Any, claims: Mapping[str, Claim]) -> dict[str, ClaimRecord]:
    """What a result that the record still holds says of each claim."""
    found = {}
    for claim in claims.values():
        answer = answer_of(claim, result, "") if claim.experiment == result.experiment else None
        if answer and not (claim.profiles and result.profile not in claim.profiles):
            found[claim.id] = _judged(claim, answer.entries, result.git_revision)
    return found


def _then(content: Mapping[str, Any], asked: Mapping[str, Any], claims: Mapping[str, Claim]) -> dict[str, ClaimRecord]:
    """What a result that is gone said of each claim that there is still, read as the claims of its commit named it."""
    found, summary = {}, content["summary"]
    for name, claim in claims.items():
        then = asked.get(name)
        if then is None or then["experiment"] != content["experiment"]:
            continue
        if isinstance(summary, dict):
            measures = then["measure"] if isinstance(then["measure"], list) else [then["measure"]]
            entries = [summary.get(measure) for measure in measures]
        else:
            where = then.get("where", {})
            places = where if isinstance(where, list) else [where]
            entries = [_entry(summary, then["measure"], place) for place in places]
        if all(entries):
            kept = ({k: v for k, v in entry.items() if k not in ("measure", "where")} for entry in entries)
            found[name] = _judged(claim, tuple(kept), content["git_revision"])
    return found


def _entry(summary: list[dict[str, Any]], measure: str, where: Mapping[str, Any]) -> dict[str, Any] | None:
    return next((entry for entry in summary if (entry["measure"], entry["where"]) == (measure, where)), None)


def _judged(claim: Claim, entries: tuple[dict[str, Any], ...], revision: str) -> ClaimRecord:
    fixed, reworded = history.stats(claim, revision)
    verdict = str(judge_entries(claim, entries)[0]) if fixed != "other" else ""
    return ClaimRecord(entries, *forms(claim), fixed, reworded, verdict)


def _line(content: Mapping[str, Any], found: Mapping[str, ClaimRecord], log: Log, again: str) -> LogLine:
    place = content["experiment"], content["profile"], content["machine"]["slug"]
    before = log.standing.get(place)
    return LogLine(
        kind="run",
        experiment=place[0],
        profile=place[1],
        machine=place[2],
        gpu=bool(content["machine"]["gpu"]),
        started=content["started"],
        duration_s=float(content["duration_s"]),
        revision=content["git_revision"],
        rows=rows_digest(content["rows"]),
        replaces=before.run if before else "",
        code=content.get("code", ""),
        claims=dict(found),
        reason=again if before else "",
    )


if __name__ == "__main__":
    main()
