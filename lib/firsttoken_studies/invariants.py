"""What the rows of a result obey whatever was measured: phases add up, bytes come no faster than their link, a time is
no shorter than its parts. A row that was edited by hand breaks one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from firsttoken_studies.record.results import Result

Row = dict[str, Any]
Rule = Callable[[Row], str]  # what is wrong with a row, "" if nothing or if the rule is not about it

SLACK_S = 1e-4  # by which a sum of times may be off: each is rounded
LINK_SLACK = 0.15  # by which a link may be faster than its setting: 0.11 is the most that was recorded at 1 Gbit/s
SHAPED_TO = 1.0  # Gbit/s; a kernel's bucket that was set to 4 let the recorded loads pass in 0.68 to 0.9 of their time
_LINKS = {"two_links": 2, "four_links": 4}


def broken(result: Result) -> list[str]:
    """The first row that breaks each rule of the experiment, in words."""
    return [fault for rule in RULES.get(result.experiment, ()) if (fault := next(_faults(rule, result.rows), ""))]


def _faults(rule: Rule, rows: list[Row]) -> Iterator[str]:
    for number, row in enumerate(rows):
        if fault := rule(row):
            yield f"row {number}: {fault}"


def adds_up(whole_name: str, *parts: str) -> Rule:
    """A rule: the column ``whole_name`` is the sum of ``parts``, in rows that have them all."""

    def rule(row: Row) -> str:
        if any(row.get(name) is None for name in (whole_name, *parts)):
            return ""
        total = sum(row[name] for name in parts)
        return (
            ""
            if abs(row[whole_name] - total) <= SLACK_S * len(parts)
            else f"{whole_name} is {row[whole_name]}, its parts {total}"
        )

    return rule


def no_shorter(total: str, part: str) -> Rule:
    """A rule: the time ``total`` holds the time ``part``."""

    def rule(row: Row) -> str:
        if row.get(total) is None or row.get(part) is None or row[total] >= row[part] - SLACK_S:
            return ""
        return f"{total} is {row[total]}, less than its part {part}, {row[part]}"

    return rule


def of(column: str, value: str, rule: Rule) -> Rule:
    """The ``rule`` for rows whose ``column`` is ``value``."""
    return lambda row: rule(row) if row.get(column) == value else ""


def kept_to_the_link(bytes_column: str, seconds_column: str) -> Rule:
    """A rule: bytes over links of up to ``SHAPED_TO`` each take at least their time at that rate."""

    def rule(row: Row) -> str:
        rate, count, took = row.get("gbit_per_s"), row.get(bytes_column), row.get(seconds_column)
        if not rate or rate > SHAPED_TO or count is None or took is None:
            return ""
        least = count * 8 / (rate * 1e9 * _LINKS.get(row.get("variant", ""), 1))
        return "" if took >= least * (1 - LINK_SLACK) else f"{count} bytes in {took} s are faster than {rate} Gbit/s"

    return rule


def ordered(*columns: str) -> Rule:
    """A rule: the columns do not fall from one to the next."""

    def rule(row: Row) -> str:
        values = [row[name] for name in columns if row.get(name) is not None]
        return "" if values == sorted(values) else f"{', '.join(columns)} are {values}, which falls"

    return rule


def between(column: str, low: float, high: float) -> Rule:
    """A rule: the column lies between ``low`` and ``high``."""

    def rule(row: Row) -> str:
        value = row.get(column)
        return "" if value is None or low <= value <= high else f"{column} is {value}, not within {low} and {high}"

    return rule


_START = (
    adds_up("ttft_process_s", "ttft_request_s", "phase_imports_s", "phase_interpreter_s"),
    kept_to_the_link("bytes", "load_s"),
    kept_to_the_link("bytes", "loaded_s"),
    no_shorter("ttft_process_s", "ttft_request_s"),
)
_POLICIES = (ordered("mean_tpot_ms", "p99_tpot_ms"), ordered("swapped", "preemptions"))
_SCORES = (between("em", 0, 1), ordered("em", "f1"), between("f1", 0, 1), between("choice_correct", 0, 1))
RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("cold_start", "cold_start_shapes", "precision_start", "borrowed_start", "parallel_start"), _START),
    **dict.fromkeys(("crosspoint_live", "crosspoint_replayed"), _POLICIES),
    **dict.fromkeys(("stage_quality", "healing_controls", "precision_frontier"), _SCORES),
    "deferral_sweep": (*_START, *_SCORES),
    "serving_capacity": (ordered("tbt_p99_s", "tbt_max_s"),),
    "live_peer": tuple(ordered(f"{name}_p50_s", f"{name}_p99_s") for name in ("gap", "itl", "latency", "ttft")),
    # of many copies; a GPU may copy a request at once in less time than it takes to gather its blocks
    "recovery_latency": (of("path", "per_block", no_shorter("out_ms", "prep_ms")),),
    "swarm_survival": (ordered("faults_in_it", "generation"),),
    "pipelined_loading": (no_shorter("ttft_s", "start_s"), kept_to_the_link("bytes", "transfer_s")),
    "layer_distance": (ordered("low", "distance", "high"), between("distance", 0, 1)),
    "eight_bits": (ordered("outliers", "values"), ordered("bytes8", "bytes16"), between("agree", 0, 1)),
    "reuse_throughput": (ordered("alone_ttft_ms", "alone_e2e_ms"), ordered("ttft_mean_ms", "e2e_mean_ms")),
    "one_engine": (no_shorter("beside_s", "tbt_s"),),
    "throughput": (between("same_tokens", 0, 1),),
}
