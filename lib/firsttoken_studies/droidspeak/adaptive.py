"""A group chosen for the link at run time, live against every fixed one (DroidSpeak leaves it to future work, 6)."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from firsttoken.droidspeak.choose import Choice, Conditions, GroupCosts, LinkEstimate, Scored, choose_group
from firsttoken.droidspeak.pipeline.schedule import Schedule
from firsttoken.droidspeak.prefill import Group
from firsttoken.link.shaped import LinkConfig
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.droidspeak.profiling import BOUND, setting_profile
from firsttoken_studies.droidspeak.setting import Setting
from firsttoken_studies.droidspeak.wire import LoadingConfig, WiredPair


def adaptive_group(profile: Profile) -> Outcome:
    """One row a link, group and round: TTFT of every fixed group within the loss bound, and of the one that is chosen.

    The choice knows the costs, measured once before, and what it has seen of the link: its first belief is a wrong one
    (1 Gbit/s), and the first request over each link corrects it and is not counted.
    """
    config = profile.section("loading", LoadingConfig)
    setting = Setting(profile, config.needs())
    receiver, sender, profiled = setting_profile(setting, setting.runs[0])
    within = sorted((g for g in profiled if g.relative_loss <= BOUND), key=lambda g: (len(g.group), g.relative_loss))
    best_by_size = {len(g.group): g for g in reversed(within)}
    candidates = [Scored(g.group, g.relative_loss) for _, g in sorted(best_by_size.items())]
    depth = receiver.model.config.num_hidden_layers
    partial = [c for c in candidates if len(c.group) < depth]
    count = config.rivals if partial else 0
    rivals = [partial[round(i * (len(partial) - 1) / max(1, count - 1))] for i in range(count)]
    rivals = list(dict.fromkeys([*rivals, Scored(Group(0, depth), 0.0)]))
    rng, rows = random.Random(profile.seed), []
    with tempfile.TemporaryDirectory(prefix="firsttoken-") as folder:
        wire = WiredPair(sender, receiver, config.tokens, [c.group for c in candidates], Path(folder))
        costs = measured_costs(wire, next(c.group for c in candidates if len(c.group)))
        for rate in tqdm(config.gbit_per_s, desc="choices", unit="link", disable=None):
            estimate, link = LinkEstimate(1e9 / 8), LinkConfig(rate)
            for step in range(-1, config.rounds):
                choice = _chosen(candidates, costs, config.tokens, estimate)
                groups = [(rival.group, "fixed") for rival in rivals] if step >= 0 else []
                for group, how in rng.sample([*groups, (choice.group, "chosen")], len(groups) + 1):
                    whole = len(group) == depth
                    marks = wire.ask(group, link, Schedule.RECOMPUTE if whole else Schedule.PIPELINED).marks
                    if how == "chosen" and marks.last_byte_s:
                        estimate.observe(marks.bytes_moved, marks.last_byte_s)
                    if step >= 0:
                        rows.append(
                            {"gbit_per_s": rate, "how": how, "lo": group.lo, "hi": group.hi, "layers": len(group)}
                            | {"round": step, "tokens": config.tokens, "ttft_s": round(marks.first_token_s, 6)}
                            | {"expected_s": round(costs.ttft_s(group, _now(config.tokens, estimate)), 6)}
                        )
    return Outcome(rows, provenance={"models": setting.models.provenance, "costs": vars(costs)})


def measured_costs(wire: WiredPair, group: Group) -> GroupCosts:
    """What one recomputed layer and the pass behind the prefix take, from three unshaped requests; medians."""
    layer, behind = [], []
    for step in range(4):
        marks = wire.ask(group, LinkConfig(), Schedule.SEND_REUSED).marks
        if step:
            layer.append((marks.recompute_end_s - marks.recompute_start_s) / len(group))
            behind.append(marks.first_token_s - marks.recompute_end_s)
    depth = wire.model.config.num_hidden_layers
    return GroupCosts(depth, sorted(layer)[1], 0.0, sorted(behind)[1], wire.kv_token_bytes, wire.edge_token_bytes)


def adaptive_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By link: the chosen group, and its median TTFT over that of the best fixed one."""
    summary, over = Summary(), {"variant": "chosen", "than": "best fixed"}
    for rate in sorted({row["gbit_per_s"] for row in rows}):
        times: dict[tuple[str, int, int], list[float]] = {}
        for row in rows:
            if row["gbit_per_s"] == rate:
                key = ("chosen", 0, 0) if row["how"] == "chosen" else ("fixed", row["lo"], row["hi"])
                times.setdefault(key, []).append(row["ttft_s"])
        medians = {key: bootstrap(values, "median").estimate for key, values in times.items()}
        best = min(value for key, value in medians.items() if key[0] == "fixed")
        of = [value / best for value in times["chosen", 0, 0]]
        summary.add("ttft_x", bootstrap(of, "median").summary("x of the best fixed"), **over, gbit_per_s=rate)
    summary.add("ttft_x", max(summary, key=lambda entry: entry["value"]), **over, across="worst")
    return summary


def _chosen(candidates: Sequence[Scored], costs: GroupCosts, tokens: int, estimate: LinkEstimate) -> Choice:
    return choose_group(candidates, costs, _now(tokens, estimate), BOUND)


def _now(tokens: int, estimate: LinkEstimate) -> Conditions:
    return Conditions(tokens, estimate.bytes_per_s)
