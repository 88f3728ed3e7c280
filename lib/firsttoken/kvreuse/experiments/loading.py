"""The cache on its way over a shaped link: the four ways of Figures 13 and 20, and a choice that knows the link."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from firsttoken.kvreuse.choose import Choice, Conditions, GroupCosts, LinkEstimate, Scored, choose_group
from firsttoken.kvreuse.experiments.profiling import BOUND, profiled_groups, run_profile
from firsttoken.kvreuse.experiments.setting import Setting
from firsttoken.kvreuse.pairs import Variant
from firsttoken.kvreuse.pipeline.live import FirstToken, first_token, pieces_of, sent_pieces
from firsttoken.kvreuse.pipeline.schedule import Job, Schedule, simulate
from firsttoken.kvreuse.pipeline.transfer import Buffers, Piece
from firsttoken.kvreuse.prefill import Group, full_prefill
from firsttoken.kvreuse.prefix import Prefix
from firsttoken.kvreuse.profile.pareto import smallest_within
from firsttoken.kvreuse.store import KVStore
from firsttoken.link import Link, LinkConfig
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome
from firsttoken.study.stats import bootstrap

SUFFIX = 4  # tokens behind the prefix, as "\nAnswer:" has


@dataclass(frozen=True)
class LoadingConfig:
    """Links of ``gbit_per_s`` (0: as fast as the file comes), a prefix of ``tokens`` tokens, ``rounds`` of all of it.

    The group that is timed and its rivals come from the profile of the first run. ``rivals`` is how many other groups
    within the loss bound the choice is held against.
    """

    gbit_per_s: tuple[float, ...]
    tokens: int
    rounds: int
    rivals: int


class Wire:
    """A sender's cache of one prefix, stored on disk, and a receiver that fetches it over links."""

    def __init__(self, sender: Variant, receiver: Variant, tokens: int, groups: Sequence[Group], folder: Path) -> None:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(receiver.model.config.vocab_size, (1, tokens + SUFFIX), generator=draw)
        ids = ids.to(receiver.model.device)
        self.model, self.prefix, self.suffix = receiver.model, Prefix(ids[:, :tokens]), ids[:, tokens:]
        sent = full_prefill(sender.model, self.prefix, {group.lo for group in groups if group.needs_edge})
        room = 2 * sum(kv.nbytes for kv in sent.kv) + 2 * sum(edge.nbytes for edge in sent.edges.values())
        store, context = KVStore(folder, memory_bytes=0, disk_bytes=room), ids[0, :tokens].tolist()
        store.store(context, sender.identity, sent)
        self.pieces: dict[str, Piece] = pieces_of(store.locate(context, sender.identity))
        self._buffers: dict[tuple[Group, Schedule], Buffers] = {}

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return self.pieces["layer.0"].nbytes // self.prefix.tokens

    @property
    def edge_token_bytes(self) -> int:
        """Bytes of one token's hidden state; a group that starts at layer 0 needs none, so none may be stored."""
        return self.model.config.hidden_size * self.model.dtype.itemsize

    def ask(self, group: Group, link: LinkConfig, schedule: Schedule = Schedule.PIPELINED) -> FirstToken:
        """One request over a fresh link; buffers are kept from request to request, as a server would."""
        key = (group, schedule)
        if key not in self._buffers:
            depth = self.model.config.num_hidden_layers
            self._buffers[key] = Buffers(sent_pieces(self.pieces, group, depth, schedule), self.prefix.ids.device)
        wire, buffers = Link(link), self._buffers[key]
        return first_token(self.model, self.prefix, self.pieces, group, wire, self.suffix, schedule, buffers=buffers)


def pipelined_loading(profile: Profile) -> Outcome:
    """One row a link, schedule and round, with the floor of its request: the longer of transfer and computation.

    The computation is that of the same round's unpipelined request after its last byte; the transfer is the bytes over
    the link's own rate.
    """
    setting, config = Setting(profile), profile.section("loading", LoadingConfig)
    run = setting.runs[0]
    receiver, sender = setting.pair(run)
    to_choose, _ = setting.items(run, receiver.tokenizer)
    group = smallest_within(profiled_groups(run_profile(setting, run, receiver, sender, to_choose)), BOUND).group
    rng, rows = random.Random(profile.seed), []
    with tempfile.TemporaryDirectory(prefix="firsttoken-") as folder:
        wire = Wire(sender, receiver, config.tokens, [group], Path(folder))
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
                    | _rounded(edge_s=marks.edge_s, last_byte_s=marks.last_byte_s, start_s=marks.recompute_start_s)
                )
    _add_floors(rows)
    summary = loading_summary(rows) | {
        "edge_over_kv": {"value": wire.edge_token_bytes / wire.kv_token_bytes, "unit": "x of one layer's KV"},
        "group": {"value": str(group), "unit": "layers"},
    }
    summary |= arithmetic()
    return Outcome(rows, {}, summary, {"models": setting.models.provenance})


def arithmetic() -> dict[str, dict[str, Any]]:
    """What the paper's formulas and its Figure 13 give, exactly."""
    shapes = {"llama_3_8b": (4096, 8, 128), "llama_3_70b": (8192, 8, 128), "llama_2_7b": (4096, 32, 128)}
    found = {
        f"edge_over_kv_{name}": {"value": hidden / (2 * kv_heads * head_dim), "unit": "x of one layer's KV"}
        for name, (hidden, kv_heads, head_dim) in shapes.items()
    }
    jobs = [Job("A", 0, 10, Group(3, 10)), Job("B", 2, 10, Group(0, 3))]
    for schedule in (Schedule.SEND_ALL, Schedule.SEND_REUSED, Schedule.PIPELINED):
        name = f"fig13_{str(schedule).replace(' ', '_')}"
        found[name] = {"value": simulate(jobs, schedule).total, "unit": "units, two requests"}
    toy_bytes = 2 * 6 * 1 * 2 * 4 * 1 * 2  # K and V, layers, heads, head_dim, tokens, batch, bytes
    return found | {"toy_kv_bytes": {"value": toy_bytes, "unit": "bytes"}}


def _add_floors(rows: list[dict[str, Any]]) -> None:
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


def loading_summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By link: TTFT of every schedule; pipelined over its floor, and its gain over the other ways."""
    found: dict[str, dict[str, Any]] = {}
    for rate in sorted({row["gbit_per_s"] for row in rows}):
        of = {
            schedule: sorted(
                (r for r in rows if r["gbit_per_s"] == rate and r["schedule"] == schedule), key=lambda r: r["round"]
            )
            for schedule in Schedule
        }
        piped, tag = of[Schedule.PIPELINED], f"{rate:g}".replace(".", "p")
        over = [row["ttft_s"] / row["floor_s"] for row in piped]
        found[f"pipelined_over_floor_{tag}"] = bootstrap(over, "median").summary("x of max(transfer, compute)")
        for other in (Schedule.RECOMPUTE, Schedule.SEND_ALL, Schedule.SEND_REUSED):
            gains = [a["ttft_s"] / b["ttft_s"] for a, b in zip(of[other], piped, strict=True)]
            name = f"{str(other).replace(' ', '_')}_over_pipelined_{tag}"
            found[name] = bootstrap(gains, "median").summary("x")
    shaped = [entry for name, entry in found.items() if name.startswith("pipelined_over_floor") and name[-2:] != "_0"]
    gains = [entry for name, entry in found.items() if name.startswith("send_reused_over_pipelined")]
    found["send_reused_over_pipelined_most"] = max(gains, key=lambda entry: entry["value"])
    if shaped:
        found["pipelined_over_floor_worst"] = max(shaped, key=lambda entry: entry["value"])
    return found


def adaptive_group(profile: Profile) -> Outcome:
    """One row a link, group and round: TTFT of every fixed group within the loss bound, and of the one that is chosen.

    The choice knows the costs, measured once before, and what it has seen of the link: its first belief is a wrong one
    (1 Gbit/s), and the first request over each link corrects it and is not counted.
    """
    setting, config = Setting(profile), profile.section("loading", LoadingConfig)
    run = setting.runs[0]
    receiver, sender = setting.pair(run)
    to_choose, _ = setting.items(run, receiver.tokenizer)
    profiled = profiled_groups(run_profile(setting, run, receiver, sender, to_choose))
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
        wire = Wire(sender, receiver, config.tokens, [c.group for c in candidates], Path(folder))
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
    return Outcome(rows, {}, adaptive_summary(rows), {"models": setting.models.provenance, "costs": vars(costs)})


def measured_costs(wire: Wire, group: Group) -> GroupCosts:
    """What one recomputed layer and the pass behind the prefix take, from three unshaped requests; medians."""
    layer, behind = [], []
    for step in range(4):
        marks = wire.ask(group, LinkConfig(), Schedule.SEND_REUSED).marks
        if step:
            layer.append((marks.recompute_end_s - marks.recompute_start_s) / len(group))
            behind.append(marks.first_token_s - marks.recompute_end_s)
    depth = wire.model.config.num_hidden_layers
    return GroupCosts(depth, sorted(layer)[1], 0.0, sorted(behind)[1], wire.kv_token_bytes, wire.edge_token_bytes)


def adaptive_summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By link: the chosen group, and its median TTFT over that of the best fixed one."""
    found: dict[str, dict[str, Any]] = {}
    for rate in sorted({row["gbit_per_s"] for row in rows}):
        times: dict[tuple[str, int, int], list[float]] = {}
        for row in rows:
            if row["gbit_per_s"] == rate:
                key = ("chosen", 0, 0) if row["how"] == "chosen" else ("fixed", row["lo"], row["hi"])
                times.setdefault(key, []).append(row["ttft_s"])
        medians = {key: bootstrap(values, "median").estimate for key, values in times.items()}
        best = min(value for key, value in medians.items() if key[0] == "fixed")
        of = [value / best for value in times["chosen", 0, 0]]
        found[f"chosen_over_best_{rate:g}".replace(".", "p")] = bootstrap(of, "median").summary("x of the best fixed")
    found["chosen_over_best_worst"] = max(found.values(), key=lambda entry: entry["value"])
    return found


def _chosen(candidates: Sequence[Scored], costs: GroupCosts, tokens: int, estimate: LinkEstimate) -> Choice:
    return choose_group(candidates, costs, _now(tokens, estimate), BOUND)


def _now(tokens: int, estimate: LinkEstimate) -> Conditions:
    return Conditions(tokens, estimate.bytes_per_s)


def _rounded(**seconds: float | None) -> dict[str, float]:
    """Those that are there, to microseconds."""
    return {name: round(value, 6) for name, value in seconds.items() if value is not None}
