"""Swap or recompute, by length, block size and swap path (CPS Table 2 and Figure 1)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from tqdm import tqdm

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.cps.costs.crossing import Crossing, crossing, crossing_interval
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.costs.published import PAPER_SHAPE, TABLE_2, decomposed
from firsttoken.engine.engine import Engine
from firsttoken.engine.fused import fuse
from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.engine.swap import PATHS, make_path
from firsttoken.engine.swap.arena import HostArena
from firsttoken.engine.trace import Trace
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import Interval, bootstrap, ratio_of_medians
from firsttoken_studies.cps.swap_measure import memcpy_rows, swap_rows

PCIE_4_X16 = 25e9  # bytes/s that a PCIe 4.0 x16 link moves in practice, of 31.5e9 by its clock
LONG = 1024  # tokens from which the target for coalesced copies holds


@dataclass(frozen=True)
class RecoveryConfig:
    """``tokens`` are the lengths, each measured ``repeats`` times swapped and ``recomputes`` times recomputed.

    ``model`` overrides the profile's ("" keeps it). ``block_sizes`` are swept at ``sweep_tokens``; the other
    measurements have blocks of ``block_tokens``.
    """

    model: str
    tokens: tuple[int, ...]
    repeats: int
    recomputes: int
    block_tokens: int
    block_sizes: tuple[int, ...]
    sweep_tokens: int

    def __post_init__(self) -> None:
        for name in ("repeats", "recomputes", "block_tokens", "sweep_tokens"):
            if getattr(self, name) < 1:
                raise ProfileError(f"recovery.{name} must be at least 1, not {getattr(self, name)}")
        if len(self.tokens) < 2 or min(self.tokens) < 2:
            raise ProfileError("recovery.tokens needs two or more lengths of at least 2 tokens")

    def needs(self) -> list[Need]:
        """The context holds the longest request, preempted one token before its end, and the longest swept one."""
        return [
            Need("recovery.tokens", max(self.tokens) + 2, CONTEXT),
            Need("recovery.sweep_tokens", self.sweep_tokens, CONTEXT),
        ]


def recovery_latency(profile: Profile) -> Outcome:
    """Both ways back for a request of each length, timed as the paper times them, beside a plain copy of the bytes."""
    config = profile.section("recovery", RecoveryConfig)
    check(config.needs(), ModelFacts(config.model or profile.model))
    loaded = load_model(config.model or profile.model, dtype=profile.torch_dtype(), device=profile.torch_device())
    model = fuse(loaded.model)
    rows = recompute_rows(model, config.tokens, config.recomputes, config.block_tokens, profile.seed)
    shape = KVShape.of(model.config, profile.torch_dtype(), config.block_tokens)
    plain = memcpy_rows(shape, config.tokens, config.repeats, profile.torch_device())
    rows += [{"what": "memcpy"} | row for row in plain]
    rows += [{"what": "swap"} | row for row in _swaps(shape, config.tokens, config.repeats, profile)]
    for block_tokens in config.block_sizes:
        swept = KVShape.of(model.config, profile.torch_dtype(), block_tokens)
        rows += [{"what": "swept"} | row for row in _swaps(swept, [config.sweep_tokens], config.repeats, profile)]
    return Outcome(rows, _floors(rows), provenance=loaded.provenance.as_dict())


def recompute_rows(
    model: nn.Module, tokens: Sequence[int], repeats: int, block_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Rows {what: "recompute", tokens, repeat, ms}: a request that holds ``tokens`` is preempted in the middle of its
    answer and prefilled again; the marker that it carries tells this prefill from others (CPS 3.2.2)."""
    rng = random.Random(seed)
    executor = LiveExecutor(model, -(-(max(tokens) + 2) // block_tokens), block_tokens=block_tokens)
    cases = [(count, repeat) for repeat in range(-1, repeats) for count in rng.sample(list(tokens), len(tokens))]
    rows = []
    try:
        for count, repeat in tqdm(cases, desc="recompute", disable=None):
            trace = Trace()
            engine = Engine(executor, EngineConfig(watermark=0.0), trace=trace)
            prompt = [rng.randrange(executor.limits.vocabulary) for _ in range(count - 1)]
            request = engine.submit(prompt, Sampling(3))
            engine.step()
            engine.step()  # the first decode: now `count` tokens are cached
            engine.scheduler.preempt(request)
            engine.run()
            if repeat >= 0:
                (recovery,) = trace.recoveries
                rows.append({"what": "recompute", "tokens": count, "repeat": repeat, "ms": recovery.recompute_s * 1e3})
    finally:
        executor.close()
    return rows


def _swaps(shape: KVShape, tokens: Sequence[int], repeats: int, profile: Profile) -> Rows:
    """Rows of every path, in random order, for a pool twice as large as the longest request."""
    device, blocks, rows = profile.torch_device(), shape.blocks(max(tokens)), []
    for name in random.Random(profile.seed).sample(sorted(PATHS), len(PATHS)):
        path = make_path(name, KVPool(shape, 2 * blocks, device), HostArena(shape, blocks, device.type == "cuda"))
        rows += swap_rows(path, tokens, repeats, profile.seed)
        path.close()
    return rows


def swap_ms(row: dict[str, Any]) -> float:
    """The paper's swap latency: out, prep and in."""
    return row["out_ms"] + row["prep_ms"] + row["in_ms"]


def recovery_latency_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """What Table 2 says about itself, and here: by swap path where it crosses recompute, what it costs beside recompute
    and beside a plain copy; what a copy of the paper's size costs, and how large it is."""
    recompute = [(row["tokens"], row["ms"] / 1e3) for row in rows if row["what"] == "recompute"]
    longest = max(tokens for tokens, _ in recompute)
    summary = _published()
    for name in PATHS:
        mine = [row for row in rows if row["what"] == "swap" and row["path"] == name]
        found = crossing_interval([(row["tokens"], swap_ms(row) / 1e3) for row in mine], recompute)
        summary.add("crossing", {"value": found.crossing.verdict, "n": found.n}, variant=name)
        summary.add("cheaper_way", {"value": _cheaper_at_end(found.crossing)}, variant=name, case="longest")
        at_end = [swap_ms(row) for row in mine if row["tokens"] == longest]
        again = [seconds * 1e3 for tokens, seconds in recompute if tokens == longest]
        over = ratio_of_medians(at_end, again).summary("x")
        summary.add("recovery_x", over, policy="swap", than="recompute", variant=name, case="longest")
        if least := _of_memcpy(mine, [row for row in rows if row["what"] == "memcpy"]):
            summary.add("rate_x", least.summary("x"), variant=name, than="memcpy", across="least")
    copied = [row for row in rows if row["what"] == "swap" and row["path"] == "per_block"]
    if long := [row for row in copied if row["tokens"] >= LONG]:
        each = [1e3 * (row["out_ms"] + row["in_ms"]) / (2 * row["copies"]) for row in long]
        summary.add("us_per_copy", bootstrap(each, "median").summary("us"), variant="per_block")
    copy_bytes = copied[0]["bytes"] // copied[0]["copies"]
    summary.add("copy_bytes", {"value": copy_bytes, "unit": "bytes"}, variant="per_block")
    return summary


def _of_memcpy(swaps: Rows, plain: Rows) -> Interval | None:
    """The rate of a path as a share of one plain copy's, the lower of both ways and of all long lengths, if any are."""
    found = []
    for tokens in sorted({row["tokens"] for row in swaps if row["tokens"] >= LONG}):
        for way in ("out", "in"):
            took = [row[f"{way}_ms"] for row in swaps if row["tokens"] == tokens]
            least = [row["ms"] for row in plain if row["tokens"] == tokens and row["direction"] == way]
            found.append(ratio_of_medians(least, took))
    return min(found, key=lambda interval: interval.estimate, default=None)


def _published() -> Summary:
    """What Table 2 says about itself; exact arithmetic, no measurement."""
    swap, again = [row.swap_ms for row in TABLE_2], [row.recompute_ms for row in TABLE_2]
    lengths = [row.tokens for row in TABLE_2]
    parts = decomposed(LONG, PCIE_4_X16)
    rate = PAPER_SHAPE.copies(8192) * PAPER_SHAPE.copy_bytes / (TABLE_2[-1].out_ms / 1e3)
    straight, log2 = (crossing(lengths, swap, again, log2=log2).tokens for log2 in (False, True))
    bytes_share = parts.wire_s / (TABLE_2[1].out_ms / 1e3)
    summary = Summary()
    summary.add("crossing_tokens", {"value": straight, "unit": "tokens"}, source="published")
    summary.add("crossing_tokens", {"value": log2, "unit": "tokens"}, source="published", variant="log2")
    summary.add("us_per_copy", {"value": parts.out_us_per_copy, "unit": "us"}, source="published")
    summary.add("bytes_share_pct", {"value": 100 * bytes_share, "unit": "%"}, source="published")
    summary.add("link_share_pct", {"value": 100 * rate / PCIE_4_X16, "unit": "%"}, source="published")
    return summary


def _cheaper_at_end(found: Crossing) -> str:
    """Which way is cheaper at the longest length."""
    other = {"swap": "recompute", "recompute": "swap"}[found.below]
    return other if found.changes % 2 else found.below


def _floors(rows: Rows) -> dict[str, dict[str, Any]]:
    """One plain copy each way of the bytes of each length, in ms."""
    plain = [row for row in rows if row["what"] == "memcpy"]
    why = "one contiguous copy out and one in, of as many bytes (medians)"
    return {
        f"swap_{tokens}_tokens": {"value": _two_ways(plain, tokens), "unit": "ms", "why": why}
        for tokens in sorted({row["tokens"] for row in plain})
    }


def _two_ways(plain: Iterable[dict[str, Any]], tokens: int) -> float:
    chosen = [row for row in plain if row["tokens"] == tokens]
    return sum(float(np.median([row["ms"] for row in chosen if row["direction"] == way])) for way in ("out", "in"))
