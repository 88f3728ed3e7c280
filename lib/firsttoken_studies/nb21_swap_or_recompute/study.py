"""Swap or recompute, by length, block size and swap path (CPS Table 2 and Figure 1), beside plain copies."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.cps.crossing import Crossing, crossing, crossing_interval
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.engine.swap import PATHS, make_path
from firsttoken.engine.swap.block_copier import CopyJob, SwapPath, start
from firsttoken.engine.swap.host_pool import HostPool
from firsttoken.engine.swap.per_block import Cut, PerBlock
from firsttoken.engine.trace import Trace
from firsttoken.simulation.costs.published import PAPER_SHAPE, TABLE_2, decomposed
from firsttoken.study.errors import ProfileError, RequestError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import Interval, ratio_of_medians
from firsttoken.study.summary import Summary
from firsttoken.study.timing import torch_threads
from firsttoken_studies.record.results import Outcome, Rows, frame_of

if TYPE_CHECKING:
    import pandas


def swap_rows(path: SwapPath, tokens: Sequence[int], repeats: int, seed: int) -> Rows:
    """Rows {path, block_tokens, tokens, repeat, out_ms, prep_ms, in_ms, copies, bytes}, one for each swap out and in.

    The blocks of each length are drawn from the whole pool by ``seed``, so they lie in no order; all of its blocks must
    be free. Each length is swapped once before it counts. ``prep_ms`` is that of both ways, so that the three times add
    up to the swap latency (CPS, Table 2); ``copies`` and ``bytes`` are those of one way.

    Raises RequestError when a length does not fit the pool or the host pool.
    """
    shape, rng, rows = path.pool.shape, random.Random(seed), []
    for count in tokens:
        blocks = _draw(rng, path, count)
        span = path.host_pool.allocate(len(blocks))
        if span is None:
            raise RequestError(
                f"swap: {count} tokens need {len(blocks)} host blocks; {path.host_pool.largest} are free"
            )
        try:
            for repeat in range(-1, repeats):
                host_span = path.out(blocks, span)
                back = path.into(span, blocks).wait()
                if repeat < 0:
                    continue
                times = {
                    "out_ms": host_span.copy_s * 1e3,
                    "prep_ms": (host_span.prep_s + back.prep_s) * 1e3,
                    "in_ms": back.copy_s * 1e3,
                }
                case = {"path": path.name, "block_tokens": shape.block_tokens, "tokens": count, "repeat": repeat}
                rows.append(case | times | {"copies": back.copies, "bytes": back.bytes})
        finally:
            path.host_pool.release(span)
    return rows


def memcpy_rows(shape: KVShape, tokens: Sequence[int], repeats: int, device: torch.device | str) -> Rows:
    """Rows {tokens, repeat, direction, ms, bytes} of one contiguous copy of as many bytes: what a swap can reach.

    ``direction`` is "out" (to the host: pinned with CUDA) or "in". On a CPU both are ``copy_`` between two tensors, by
    one thread, as the swap paths have it: with two threads and two busy cores each copy waited 8 to 16 ms for the
    second one. What all threads reach is the machine's ceiling (``study.roofline``).
    """
    device = torch.device(device)
    host_pool = HostPool(shape, max(map(shape.blocks, tokens), default=1), pinned=device.type == "cuda")
    host = host_pool.all_rows
    device_buffer = torch.zeros_like(host, device=device)
    rows = []
    with torch_threads(1):
        for count, repeat in product(tokens, range(-1, repeats)):
            blocks = shape.blocks(count)
            for direction, target, source in (("out", host, device_buffer), ("in", device_buffer, host)):
                seconds = _copy_s(target[:blocks], source[:blocks])
                if repeat >= 0:
                    case = {"tokens": count, "repeat": repeat, "direction": direction}
                    rows.append(case | {"ms": seconds * 1e3, "bytes": blocks * shape.block_bytes})
    return rows


def _draw(rng: random.Random, path: SwapPath, tokens: int) -> list[int]:
    """Draw as many blocks of the pool as ``tokens`` tokens need."""
    needed = path.pool.shape.blocks(tokens)
    if not 0 < needed <= path.pool.blocks:
        raise RequestError(f"swap: {tokens} tokens need {needed} blocks; the pool has {path.pool.blocks}")
    return rng.sample(range(path.pool.blocks), needed)


def _copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of one copy, timed as those of a swap path."""
    device = source.device if source.is_cuda else target.device
    job = CopyJob(lambda: target.copy_(source, non_blocking=True), copies=1, bytes=target.nbytes)
    return start(job, device).wait().copy_s


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
        """Require a context that holds the longest request, preempted one token before its end, and the longest swept
        one."""
        return [
            Need("recovery.tokens", max(self.tokens) + 2, CONTEXT),
            Need("recovery.sweep_tokens", self.sweep_tokens, CONTEXT),
        ]


def recovery_latency(profile: Profile, *, cut: Cut | None = None) -> Outcome:
    """Both ways back for a request of each length, timed as the paper times them, beside a plain copy of the bytes.

    ``cut`` says what a copy moves where blocks are copied one by one: a reader's in place of the library's.
    """
    config = profile.section("recovery", RecoveryConfig)
    check(config.needs(), ModelFacts(config.model or profile.model))
    loaded = load_model(config.model or profile.model, dtype=profile.torch_dtype(), device=profile.torch_device())
    model = fuse(loaded.model)
    rows = recompute_rows(model, config.tokens, config.recomputes, config.block_tokens, profile.seed)
    shape = KVShape.of(model.config, profile.torch_dtype(), config.block_tokens)
    plain = memcpy_rows(shape, config.tokens, config.repeats, profile.torch_device())
    rows += [{"what": "memcpy"} | row for row in plain]
    rows += [{"what": "swap"} | row for row in _swaps(shape, config.tokens, config.repeats, profile, cut)]
    for block_tokens in config.block_sizes:
        swept = KVShape.of(model.config, profile.torch_dtype(), block_tokens)
        swaps = _swaps(swept, [config.sweep_tokens], config.repeats, profile, cut)
        rows += [{"what": "swept"} | row for row in swaps]
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
        for count, repeat in track(cases, desc="recompute"):
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


def _swaps(shape: KVShape, tokens: Sequence[int], repeats: int, profile: Profile, cut: Cut | None) -> Rows:
    """Rows of every path, in random order, for a pool twice as large as the longest request."""
    device, blocks, rows = profile.torch_device(), shape.blocks(max(tokens)), []
    for name in random.Random(profile.seed).sample(sorted(PATHS), len(PATHS)):
        pool, host_pool = KVPool(shape, 2 * blocks, device), HostPool(shape, blocks, device.type == "cuda")
        path = PerBlock(pool, host_pool, cut) if name == PerBlock.name else make_path(name, pool, host_pool)
        with torch_threads(1):  # as plain copies have it: a piece of many layers would wait for a second thread
            rows += swap_rows(path, tokens, repeats, profile.seed)
        path.close()
    return rows


def swap_ms(row: Any) -> Any:
    """The paper's swap latency of ``row``, or of each row of a frame: out, prep and in."""
    return row["out_ms"] + row["prep_ms"] + row["in_ms"]


def recovery_latency_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize Table 2's own consistency and this machine's, by swap path: where swap crosses recompute, its cost over
    that of recompute and of a plain copy; the time and size of a copy of the paper's size."""
    summary, recompute, swaps = _published(), frame_of(rows, what="recompute"), frame_of(rows, what="swap")
    swaps["ms"], longest = swap_ms(swaps), recompute.tokens.max()
    again = recompute[recompute.tokens == longest].ms
    points = list(zip(recompute.tokens, recompute.ms / 1e3, strict=True))
    for name in PATHS:
        of_path = swaps[swaps.path == name]
        interval = crossing_interval(list(zip(of_path.tokens, of_path.ms / 1e3, strict=True)), points)
        summary.add("crossing", {"value": interval.crossing.verdict, "n": interval.n}, variant=name)
        if interval.crossing.tokens is not None:
            entry = {"value": interval.crossing.tokens, "low": interval.low, "high": interval.high, "n": interval.n}
            summary.add("crossing_tokens", entry | {"unit": "tokens"}, source="live", variant=name)
        summary.add("cheaper_way", {"value": _cheaper_at_end(interval.crossing)}, variant=name, case="longest")
        ratio_entry = ratio_of_medians(of_path[of_path.tokens == longest].ms, again).summary("x")
        summary.add("recovery_x", ratio_entry, policy="swap", than="recompute", variant=name, case="longest")
        if least := _of_memcpy(of_path, frame_of(rows, what="memcpy")):
            summary.add("rate_x", least.summary("x"), variant=name, than="memcpy", across="least")
    copied = swaps[swaps.path == "per_block"]
    long = copied[copied.tokens >= LONG].assign(
        each=lambda frame: 1e3 * (frame.out_ms + frame.in_ms) / (2 * frame.copies)
    )
    summary.by(long, {}, {"us_per_copy": ("each", "median", "us")}, variant="per_block")
    copy_bytes = copied.bytes.iloc[0] // copied.copies.iloc[0]
    summary.add("copy_bytes", {"value": copy_bytes, "unit": "bytes"}, variant="per_block")
    return summary


def _of_memcpy(swaps: pandas.DataFrame, plain: pandas.DataFrame) -> Interval | None:
    """The rate of a path as a share of one plain copy's, the lower of both ways and of all long lengths, if any are."""
    shares = []
    for tokens, way in product(sorted(set(swaps.tokens[swaps.tokens >= LONG])), ("out", "in")):
        least = plain[(plain.tokens == tokens) & (plain.direction == way)].ms
        shares.append(ratio_of_medians(least, swaps[swaps.tokens == tokens][f"{way}_ms"]))
    return min(shares, key=lambda interval: interval.estimate, default=None)


def _published() -> Summary:
    """Summarize what Table 2 implies; exact arithmetic, no measurement."""
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


def _cheaper_at_end(crossing_point: Crossing) -> str:
    """Return the way that is cheaper at the longest length."""
    other = {"swap": "recompute", "recompute": "swap"}[crossing_point.below]
    return other if crossing_point.changes % 2 else crossing_point.below


def _floors(rows: Rows) -> dict[str, dict[str, Any]]:
    """One plain copy each way of the bytes of each length, in ms."""
    medians = frame_of(rows, what="memcpy").groupby(["tokens", "direction"]).ms.median()
    why = "one contiguous copy out and one in, of as many bytes (medians)"
    return {
        f"swap_{tokens}_tokens": {"value": float(both.sum()), "unit": "ms", "why": why}
        for tokens, both in medians.groupby("tokens")
    }
