"""The cache on its way over a shaped link: the four ways of Figures 13 and 20."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from firsttoken.droidspeak.pipeline.schedule import Schedule, simulate
from firsttoken.droidspeak.profile.pareto import smallest_within
from firsttoken.link.shaped import LinkConfig
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.droidspeak.profiling import BOUND, setting_profile
from firsttoken_studies.droidspeak.published import FIGURE_13, PUBLISHED_UNITS, SHAPES, edge_over_kv, kv_bytes
from firsttoken_studies.droidspeak.setting import Setting
from firsttoken_studies.droidspeak.wire import LoadingConfig, WiredPair


def pipelined_loading(profile: Profile) -> Outcome:
    """One row a link, schedule and round, with the floor of its request: the longer of transfer and computation.

    The computation is that of the same round's unpipelined request after its last byte; the transfer is the bytes over
    the link's own rate.
    """
    config = profile.section("loading", LoadingConfig)
    setting = Setting(profile, config.needs())
    receiver, sender, profiled = setting_profile(setting, setting.runs[0])
    group = smallest_within(profiled, BOUND).group
    rng, rows = random.Random(profile.seed), []
    with tempfile.TemporaryDirectory(prefix="firsttoken-") as folder:
        wire = WiredPair(sender, receiver, config.tokens, [group], Path(folder))
        schedules = [Schedule.RECOMPUTE, Schedule.SEND_ALL, Schedule.SEND_REUSED, Schedule.PIPELINED]
        for schedule in schedules:
            wire.ask(group, LinkConfig(), schedule)  # warms up, and touches the buffers
        cells = [(rate, step) for step in range(config.rounds) for rate in config.gbit_per_s]
        for rate, step in tqdm(cells, desc="links", unit="link", disable=None):
            for schedule in rng.sample(schedules, len(schedules)):
                marks = wire.ask(group, LinkConfig(rate), schedule).marks
                rows.append(
                    {"gbit_per_s": rate, "schedule": str(schedule), "round": step, "group": str(group)}
                    | {"tokens": config.tokens, "ttft_s": round(marks.first_token_s, 6), "bytes": marks.bytes_moved}
                    | {"kv_token_bytes": wire.kv_token_bytes, "edge_token_bytes": wire.edge_token_bytes}
                    | _rounded(edge_s=marks.edge_s, last_byte_s=marks.last_byte_s, start_s=marks.recompute_start_s)
                )
    _add_floors(rows)
    return Outcome(rows, provenance={"models": setting.models.provenance})


def _add_arithmetic(summary: Summary) -> None:
    """What the paper's formulas and its Figure 13 give, exactly."""
    for name in ("Llama-3-8B", "Llama-3.1-70B", "Llama-2-7B"):
        entry = {"value": edge_over_kv(*SHAPES[name][:3]), "unit": "x of one layer's KV"}
        summary.add("edge_bytes_x", entry, model=name.lower(), than="kv of a layer")
    for schedule in PUBLISHED_UNITS:
        entry = {"value": simulate(FIGURE_13, schedule).total, "unit": "units, two requests"}
        summary.add("ttft_units", entry, method=schedule, case="figure 13")
    for layers in (6, 4):  # the report's toy, and the one that its number fits (errata I36)
        entry = {"value": kv_bytes(layers, 1, 2, 4), "unit": "bytes"}
        summary.add("kv_bytes", entry, model="toy", layers=layers)


def _add_floors(rows: Rows) -> None:
    """To each row of a request that computes on what was sent: ``floor_s``."""
    for row in rows:
        same = (r for r in rows if (r["gbit_per_s"], r["round"]) == (row["gbit_per_s"], row["round"]))
        plain = next(r for r in same if r["schedule"] == Schedule.SEND_REUSED)
        last_byte_s = plain.get("last_byte_s", 0.0)  # nothing is sent where the group is all layers
        compute = plain["ttft_s"] - last_byte_s
        if row["schedule"] == Schedule.RECOMPUTE:
            continue
        transfer = row["bytes"] / (row["gbit_per_s"] * 1e9 / 8) if row["gbit_per_s"] else last_byte_s
        row |= {"compute_s": round(compute, 6), "transfer_s": round(transfer, 6)}
        row["floor_s"] = round(max(compute, transfer), 6)


def loading_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By link: pipelined over its floor, and its gain over the other ways; the group, sizes, and the arithmetic.

    The size of this model's E-cache is left out where the rows do not have it.
    """
    summary, pipelined = Summary(), Schedule.PIPELINED
    for rate in sorted({row["gbit_per_s"] for row in rows}):
        of = {
            schedule: sorted(
                (r for r in rows if r["gbit_per_s"] == rate and r["schedule"] == schedule), key=lambda r: r["round"]
            )
            for schedule in Schedule
        }
        over = [row["ttft_s"] / row["floor_s"] for row in of[pipelined]]
        entry = bootstrap(over, "median").summary("x of max(transfer, compute)")
        summary.add("ttft_x", entry, method=pipelined, than="floor", gbit_per_s=rate)
        for other in (Schedule.RECOMPUTE, Schedule.SEND_ALL, Schedule.SEND_REUSED):
            gains = [a["ttft_s"] / b["ttft_s"] for a, b in zip(of[other], of[pipelined], strict=True)]
            entry = bootstrap(gains, "median").summary("x")
            summary.add("ttft_x", entry, method=other, than=pipelined, gbit_per_s=rate)
    reused = {"method": Schedule.SEND_REUSED, "than": pipelined}
    summary.add("ttft_x", max(summary.all("ttft_x", **reused), key=lambda e: e["value"]), **reused, across="most")
    if fastest := max(row["gbit_per_s"] for row in rows):  # at 0 a link is not shaped
        full, floor = {"method": Schedule.RECOMPUTE, "than": pipelined}, {"method": pipelined, "than": "floor"}
        shaped = [entry for entry in summary.all("ttft_x", **floor) if entry["where"]["gbit_per_s"]]
        summary.add("ttft_x", summary.of("ttft_x", **full, gbit_per_s=fastest), **full, link="fastest")
        summary.add("ttft_x", max(shaped, key=lambda entry: entry["value"]), **floor, across="worst")
    one = rows[0]  # the group and what a token weighs are the same in all
    if "edge_token_bytes" in one:
        ratio = one["edge_token_bytes"] / one["kv_token_bytes"]
        summary.add("edge_bytes_x", {"value": ratio, "unit": "x of one layer's KV"}, than="kv of a layer")
    summary.add("group", {"value": one["group"], "unit": "layers"})
    _add_arithmetic(summary)
    return summary


def _rounded(**seconds: float | None) -> dict[str, float]:
    """Those that are there, to microseconds."""
    return {name: round(value, 6) for name, value in seconds.items() if value is not None}
