"""The verdicts once more, from the raw files, by the rules as data/CLAIMS.md states them.

Nothing here is of the ledger's code: it was written from the sentences of that page.

``python tests/support/independent_scoreboard.py`` prints the scoreboard; ``tests/study/test_scoreboard.py`` holds the
ledger and README.md to it, and shows that a fault of each kind is seen.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
COLUMNS = ("reproduced", "trend only", "not reproduced", "machine-dependent")
CONTRADICTED, TOO_FEW, NOT_RUN = "sources contradict themselves", "n too small to judge", "not run here"
ELSEWHERE, POST_HOC, UNVERIFIABLE = "counted elsewhere", "post hoc", "unverifiable"
LARGEST_FIRST = ("paper", "full", "gpu", "tasks")


@dataclass
class Files:
    """The raw files of a repository: claims, results and lines of the log, as they stand in them."""

    claims: list[dict]
    results: list[dict]
    lines: list[dict]
    machine: str
    runs: list[dict] = field(init=False)

    def __post_init__(self) -> None:
        self.runs = [line for line in self.lines if line["kind"] == "run"]
        withdrawn = {(name_of(line), line["started"]) for line in self.lines if line["kind"] == "removal"}
        self.results = [
            result
            for result in self.results
            if ((result["experiment"], result["profile"], result["machine"]["slug"]), result["started"])
            not in withdrawn
        ]


def read(root: Path = ROOT) -> Files:
    """The files of the repository in ``root``; its page names the machine of the record."""
    claims = []
    for path in sorted(root.glob("lib/firsttoken_studies/nb*/claims.yaml")):
        claims += yaml.safe_load(path.read_text(encoding="utf-8"))
    files = [path for kind in LARGEST_FIRST for path in sorted(root.glob(f"data/results/*/{kind}/*"))]
    results = [json.loads((gzip.open if path.suffix == ".gz" else open)(path, "rb").read()) for path in files]
    lines = [json.loads(line) for line in (root / "data/record.jsonl").read_text(encoding="utf-8").splitlines()]
    page = (root / "data/CLAIMS.md").read_text(encoding="utf-8")
    return Files(claims, results, lines, re.search(r"^Recorded: `([^`]+)`", page, re.MULTILINE).group(1))


def name_of(line: dict) -> tuple[str, str, str]:
    """Experiment, profile and machine of a line."""
    return line["experiment"], line["profile"], line["machine"]


def rules(claim: dict, entries: list[dict]) -> str:
    """The verdict on a claim from the entries at its places, whatever else is known of it."""
    if claim.get("nature", "measured") == "measured" and any(entry.get("n", 5) < 5 for entry in entries):
        return TOO_FEW
    if claim["kind"] == "exact":
        measured, value = entries[0]["value"], claim["value"]
        if isinstance(value, bool | str) or isinstance(measured, bool | str):
            return COLUMNS[0] if type(value) is type(measured) and value == measured else COLUMNS[2]
        return COLUMNS[0] if abs(measured - value) <= claim.get("tolerance", 0) + 1e-9 else COLUMNS[2]
    if claim["kind"] == "ordering":
        pairs = list(pairwise(entries))
        if any(after["value"] <= before["value"] for before, after in pairs):
            return COLUMNS[2]
        apart = all(ends(after)[0] > ends(before)[1] for before, after in pairs)
        larger = [max(abs(before["value"]), abs(after["value"])) for before, after in pairs]
        tenth = all(b["value"] - a["value"] >= 0.1 * most for (a, b), most in zip(pairs, larger, strict=True))
        return COLUMNS[0] if apart and tenth else COLUMNS[1]
    return _of_a_size(claim, entries[0])


def _of_a_size(claim: dict, entry: dict) -> str:
    value, zero, (low, high) = claim["value"], claim.get("no_effect"), ends(entry)
    trend = False
    if zero is not None:
        effect = value - zero
        shares = sorted(((low - zero) / effect, (high - zero) / effect))
        trend = shares[0] > 0 and 0.5 <= (entry["value"] - zero) / effect <= 2
        if claim.get("unit", "").startswith("%") and zero == 0 and 0 < value < 100:
            trend = trend and 0.5 <= (100 - entry["value"]) / (100 - value) <= 2
    if claim["kind"] == "ratio":
        off = min(0.25, claim["tolerance"]) + 1e-9
        inside = shares[0] > 0 and shares[0] >= 1 - off and shares[1] <= 1 + off
        return COLUMNS[0] if inside else COLUMNS[1] if trend else COLUMNS[2]
    keep = [end >= value if claim["op"] == ">=" else end <= value for end in (low, high)]
    return COLUMNS[0] if all(keep) else COLUMNS[1] if any(keep) or trend else COLUMNS[2]


def ends(entry: dict) -> tuple[float, float]:
    """The ends of an interval; a number without one stands for both."""
    return entry.get("low", entry["value"]), entry.get("high", entry["value"])


def verdict(claim: dict, entries: list[dict]) -> str:
    """The verdict of one machine on a claim."""
    if claim.get("counts_as"):
        return ELSEWHERE
    said = rules(claim, entries)
    return CONTRADICTED if said == COLUMNS[2] and claim.get("erratum") else said


def ground(claim: dict) -> str:
    """What a claim's number stands on."""
    return claim.get("ground", "live") if claim.get("nature", "measured") == "measured" else "arithmetic"


def standing(claim: dict, answer: dict, files: Files) -> str:
    """Whether a claim was fixed before the run that gave ``answer``, by the lines of the log: "" for yes."""

    def of(line_answer: dict) -> str:
        if line_answer.get("fixed", "before") == "unknown":
            return UNVERIFIABLE
        fixed = line_answer.get("fixed", "before") == "before" and line_answer["asked"] == files_form(claim, files)
        return "" if fixed else POST_HOC

    if ground(claim) != "live":
        if claim.get("first_look"):
            return POST_HOC
        values = [entry["value"] for entry in answer["entries"]]
        equal = [
            line
            for line in files.runs
            if (other := counting(claim, line, files)) and [entry["value"] for entry in other["entries"]] == values
        ]
        rows = {line["rows"] for line in equal}
        if any(of(line["claims"][claim["id"]]) == POST_HOC for line in equal):
            return POST_HOC
        if any(line["rows"] in rows and claim["id"] not in line.get("claims", {}) for line in files.runs):
            return POST_HOC
    return of(answer)


def counting(claim: dict, line: dict, files: Files) -> dict | None:
    """The answer of a run's line to a claim; None for a faulty run and for another measure under the same name."""
    answer = line.get("claims", {}).get(claim["id"])
    if not answer or answer.get("fixed") == "other":
        return None
    faulty = {
        other.get("replaces") or f"{other['started']} {other['rows']}" for other in files.lines if other.get("faulty")
    }
    if f"{line['started']} {line['rows']}" in faulty:
        return None
    again = [
        other["claims"][claim["id"]]
        for other in files.lines
        if other["kind"] == "summary" and (other["started"], other["rows"]) == (line["started"], line["rows"])
        if claim["id"] in other.get("claims", {})
    ]
    return (again or [answer])[-1]


def files_form(claim: dict, files: Files) -> str:
    """The digest of what decides a claim, as the last run or edit that noted the claim has it."""
    lines = [line for line in files.lines if line["kind"] != "summary" and claim["id"] in line.get("claims", {})]
    return lines[-1]["claims"][claim["id"]]["asked"]


def answers(claim: dict, files: Files) -> dict[str, tuple[str, str]]:
    """What each machine says of a claim, and with which standing, the first machine first."""
    wanted = claim.get("where", {})
    wanted = wanted if isinstance(wanted, list) else [wanted]
    may = [profile for profile in LARGEST_FIRST if profile in (claim.get("profiles") or LARGEST_FIRST)]
    said, withdrawn = dict[str, tuple[str, str]](), set[str]()
    for profile in may:
        for result in files.results:
            slug = result["machine"]["slug"]
            if (result["experiment"], result["profile"]) != (claim["experiment"], profile) or slug in said:
                continue
            by_where = [
                [e for e in result["summary"] if e["measure"] == claim["measure"] and e["where"] == w] for w in wanted
            ]
            if all(by_where):
                name = (claim["experiment"], profile, slug)
                line = [line for line in files.runs if name_of(line) == name and line["started"] == result["started"]][
                    -1
                ]
                noted = counting(claim, line, files)
                entries = [entries[0] for entries in by_where]
                after = standing(claim, noted, files) if noted else POST_HOC
                said[slug] = verdict(claim, entries), after
    removed = {f"{line['started']} {line['rows']}" for line in files.lines if line["kind"] == "removal"}
    last = {name_of(line): line for line in files.runs}
    for name, line in last.items():
        answer = counting(claim, line, files)
        if line["machine"] in said or name[1] not in may or f"{line['started']} {line['rows']}" not in removed:
            continue
        if answer and answer["asked"] == files_form(claim, files):
            said[line["machine"]] = verdict(claim, answer["entries"]), standing(claim, answer, files)
            withdrawn.add(line["machine"])
    gpus = {line["machine"] for line in files.runs if line.get("gpu")}
    gpus |= {result["machine"]["slug"] for result in files.results if result["machine"]["gpu"]}
    on_gpu = claim.get("whose", "report") == "report" and claim.get("nature", "measured") == "measured"

    def order(slug: str) -> tuple:
        behind = said[slug][0] == TOO_FEW, slug in withdrawn
        return behind, slug not in gpus if on_gpu else slug != files.machine, slug != files.machine, slug in gpus, slug

    return {slug: said[slug] for slug in sorted(said, key=order)}


def judged(files: Files) -> dict[str, tuple[str, str]]:
    """By claim: the verdict of the record, and its standing."""
    verdicts = {}
    for claim in files.claims:
        by_machine = answers(claim, files)
        told = {said for said, _ in by_machine.values() if said in (*COLUMNS, CONTRADICTED)}
        first, after = next(iter(by_machine.values()), (NOT_RUN, ""))
        verdicts[claim["id"]] = (COLUMNS[3] if len(told) > 1 else first), after
    return verdicts


def scoreboard(files: Files) -> dict[str, dict[str, str]]:
    """By report and column of README.md: what a cell of it says."""
    verdicts, cells = judged(files), dict[str, dict[str, Counter]]()
    for claim in files.claims:
        if claim.get("whose", "report") != "report" or claim.get("counts_as"):
            continue
        said, _ = verdicts[claim["id"]]
        column = ground(claim) if said in COLUMNS else said if said == CONTRADICTED else "not judged"
        for report in (claim["report"], "*all*"):
            cells.setdefault(report, {}).setdefault(column, Counter())[said] += 1
    differ = any(count[COLUMNS[3]] for row in cells.values() for count in row.values())
    shown = COLUMNS if differ else COLUMNS[:3]

    def cell(column: str, count: Counter[str]) -> str:
        in_columns = column not in (CONTRADICTED, "not judged")
        return " / ".join(str(count[said]) for said in shown) if in_columns else str(count.total())

    return {report: {column: cell(column, count) for column, count in row.items()} for report, row in cells.items()}


def faults(files: Files) -> list[str]:
    """What the page says that no record may have: an estimate without an interval, a number that answers twice."""
    messages, numbers = [], set()
    for claim in files.claims:
        wanted = claim.get("where", {})
        wanted = wanted if isinstance(wanted, list) else [wanted]
        for result in files.results:
            if result["experiment"] != claim["experiment"] or result["profile"] not in (
                claim.get("profiles") or LARGEST_FIRST
            ):
                continue
            for entry in result["summary"]:
                if entry["measure"] != claim["measure"] or entry["where"] not in wanted:
                    continue
                estimate = ground(claim) == "live" and claim["kind"] != "exact" and not claim.get("invariant")
                if estimate and entry.get("n", 0) >= 5 and "low" not in entry:
                    messages.append(f"{claim['id']} has no interval")
                counts = claim.get("whose", "report") == "report" and not claim.get("counts_as")
                if counts and claim["kind"] != "ordering" and isinstance(entry["value"], float) and entry["value"] % 1:
                    numbers.add((claim["report"], entry["value"], claim["id"]))
    for (report, value, name), (other_report, other, other_name) in pairwise(sorted(numbers)):
        if report == other_report and name != other_name and abs(value - other) <= 1e-4 * abs(value):
            messages.append(f"one number answers {name} and {other_name}")
    return messages


if __name__ == "__main__":
    for report_name, row in scoreboard(read()).items():
        print(report_name, row)
