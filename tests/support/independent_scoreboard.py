"""The scoreboard of README.md once more, from the raw files, with nothing of the ledger's own code.

``python tests/support/independent_scoreboard.py`` prints it; ``tests/study/test_scoreboard.py`` holds the README to it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
SAID = ("reproduced", "trend only", "not reproduced", "machine-dependent")


def verdict(claim: dict, entries: list[dict]) -> str:
    """The verdict on a claim from the entries at its places."""
    sizes = [entry["n"] for entry in entries if "n" in entry]
    if claim.get("nature", "measured") == "measured" and sizes and min(sizes) < 5:
        return "too few"
    entry, value, zero = entries[0], claim.get("value"), claim.get("no_effect")
    low, high = entry.get("low", entry["value"]), entry.get("high", entry["value"])
    if claim["kind"] == "exact":
        if isinstance(value, bool | str) or isinstance(entry["value"], bool | str):
            return SAID[0] if type(value) is type(entry["value"]) and value == entry["value"] else SAID[2]
        return SAID[0] if abs(entry["value"] - value) <= claim.get("tolerance", 0) + 1e-9 else SAID[2]
    if claim["kind"] == "ordering":
        pairs = list(pairwise(entries))
        if any(a["value"] >= b["value"] for a, b in pairs):
            return SAID[2]
        apart = all(a.get("high", a["value"]) < b.get("low", b["value"]) for a, b in pairs)
        tenth = all(b["value"] - a["value"] >= 0.1 * max(abs(a["value"]), abs(b["value"])) for a, b in pairs)
        return SAID[0] if apart and tenth else SAID[1]
    shares = sorted((end - zero) / (value - zero) for end in (low, high)) if zero is not None else (0, 0)
    share = (entry["value"] - zero) / (value - zero) if zero is not None else 0
    near = shares[0] > 0 and 0.5 <= share <= 2
    if str(claim.get("unit", "")).startswith("%") and zero == 0 and 0 < value < 100:
        near = near and 0.5 <= (100 - entry["value"]) / (100 - value) <= 2
    if claim["kind"] == "ratio":
        tolerance = min(claim["tolerance"], 0.25) + 1e-9
        inside = shares[0] > 0 and 1 - tolerance <= shares[0] and shares[1] <= 1 + tolerance
        return SAID[0] if inside else SAID[1] if near else SAID[2]
    keeps = [(end - value) * (1 if claim["op"] == ">=" else -1) >= 0 for end in (low, high)]
    return SAID[0] if all(keeps) else SAID[1] if any(keeps) or near else SAID[2]


def by_machine(claim: dict, results: list[dict], lines: list[dict]) -> dict[str, str]:
    """What each machine without a GPU said of a claim last, a machine whose result is gone by its line; the machines
    with a GPU where no other said anything."""
    return on_machines(claim, results, lines, gpu=False) or on_machines(claim, results, lines, gpu=True)


def on_machines(claim: dict, results: list[dict], lines: list[dict], gpu: bool) -> dict[str, str]:
    places = claim.get("where", {})
    places = places if isinstance(places, list) else [places]
    said, may = {}, claim.get("profiles") or ["full", "gpu", "paper"]
    for result in results:
        if result["experiment"] != claim["experiment"] or result["profile"] not in may:
            continue
        if bool(result["machine"]["gpu"]) != gpu:
            continue
        found = [[e for e in result["summary"] if (e["measure"], e["where"]) == (claim["measure"], p)] for p in places]
        if all(found):
            said[result["machine"]["slug"]] = verdict(claim, [entries[0] for entries in found])
    faulty = {one.get("replaces") or f"{one['started']} {one['rows']}" for one in lines if one.get("faulty")}
    gone = {}
    for line in (line for line in lines if line["kind"] == "run"):
        answer = line.get("claims", {}).get(claim["id"])
        counts = answer and answer["fixed"] != "other" and f"{line['started']} {line['rows']}" not in faulty
        if counts and line["machine"] not in said and not gpu and not line.get("gpu"):
            gone[line["machine"]] = verdict(claim, answer["entries"])
    return said | gone


def scoreboard() -> dict[str, dict[str, str]]:
    """By report and by what a value stands on: reproduced / trend only / not reproduced / machine-dependent."""
    folders = sorted(ROOT.glob("lib/firsttoken_studies/nb*/claims.yaml"))
    claims = [claim for path in folders for claim in yaml.safe_load(path.read_text(encoding="utf-8"))]
    files = [path for kind in ("full", "gpu", "paper") for path in sorted(ROOT.glob(f"data/results/*/{kind}/*"))]
    results = [json.loads((gzip.open if path.suffix == ".gz" else open)(path, "rb").read()) for path in files]
    lines = [json.loads(line) for line in (ROOT / "data/record.jsonl").read_text(encoding="utf-8").splitlines()]
    page = (ROOT / "data/CLAIMS.md").read_text(encoding="utf-8")
    machine = re.search(r"^Recorded: `([^`]+)`", page, re.MULTILINE).group(1)
    cells: dict[str, dict[str, Counter]] = {}
    for claim in claims:
        if claim.get("whose", "report") != "report":
            continue
        said = by_machine(claim, results, lines)
        judged = {slug: one for slug, one in said.items() if one in SAID}
        first = said.get(machine) or next(iter(said.values()), "not run")
        total = SAID[3] if len(set(judged.values())) > 1 else first
        measured = claim.get("nature", "measured") == "measured"
        ground = claim.get("ground", "live") if measured else "arithmetic"
        for report in (claim["report"], "*all*"):
            cells.setdefault(report, {}).setdefault(ground, Counter())[total] += 1
    return {
        report: {ground: " / ".join(str(count[one]) for one in SAID) for ground, count in of.items()}
        for report, of in cells.items()
    }


if __name__ == "__main__":
    for name, row in scoreboard().items():
        print(name, row)
