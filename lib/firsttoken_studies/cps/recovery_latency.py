"""Swap or recompute, by length, block size and swap path (CPS Table 2 and Figure 1)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.assets.shapes import shape_config
from firsttoken.cps.costs.arithmetic import LinkModel
from firsttoken.cps.costs.copies import CopyCosts
from firsttoken.cps.costs.crossing import Crossing, crossing, crossing_interval
from firsttoken.engine.costs.published import PAPER_SHAPE, TABLE_2, PublishedCosts, decomposed
from firsttoken.engine.engine import Engine
from firsttoken.engine.engine_config import EngineConfig
from firsttoken.engine.fused import fuse
from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.engine.swap import PATHS, make_path
from firsttoken.engine.swap.block_copier import CopyJob, SwapPath, start
from firsttoken.engine.swap.host_pool import HostArena
from firsttoken.engine.trace import Trace
from firsttoken.study.errors import ProfileError, RequestError
from firsttoken.study.overlay import Drawn, name_results, over
from firsttoken.study.plot import COLOURS
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Result, Rows
from firsttoken.study.stats import Interval, bootstrap, ratio_of_medians
from firsttoken.study.summary import Summary
from firsttoken_studies.cps.styles import LINES, PATH_LOOKS, POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Timing swaps of requests of given lengths, and the plain copies that they are held against.

Row = dict[str, Any]


def swap_rows(path: SwapPath, tokens: Sequence[int], repeats: int, seed: int) -> list[Row]:
    """Rows {path, block_tokens, tokens, repeat, out_ms, prep_ms, in_ms, copies, bytes}, one for each swap out and in.

    The blocks of each length are drawn from the whole pool by ``seed``, so they lie in no order; all of its blocks must
    be free. Each length is swapped once before it counts. ``prep_ms`` is that of both ways, so that the three times add
    up to the swap latency (CPS, Table 2); ``copies`` and ``bytes`` are those of one way.

    Raises RequestError when a length does not fit the pool or the host pool.
    """
    shape, rng, rows = path.pool.shape, random.Random(seed), []
    for count in tokens:
        blocks = _draw(rng, path, count)
        span = path.arena.take(len(blocks))
        if span is None:
            raise RequestError(f"swap: {count} tokens need {len(blocks)} host blocks; {path.arena.largest} are free")
        try:
            for repeat in range(-1, repeats):
                there = path.out(blocks, span)
                back = path.into(span, blocks).wait()
                if repeat < 0:
                    continue
                times = {
                    "out_ms": there.copy_s * 1e3,
                    "prep_ms": (there.prep_s + back.prep_s) * 1e3,
                    "in_ms": back.copy_s * 1e3,
                }
                case = {"path": path.name, "block_tokens": shape.block_tokens, "tokens": count, "repeat": repeat}
                rows.append(case | times | {"copies": back.copies, "bytes": back.bytes})
        finally:
            path.arena.give(span)
    return rows


def memcpy_rows(shape: KVShape, tokens: Sequence[int], repeats: int, device: torch.device | str) -> list[Row]:
    """Rows {tokens, repeat, direction, ms, bytes} of one contiguous copy of as many bytes: what a swap can reach.

    ``direction`` is "out" (to the host: pinned with CUDA) or "in". On a CPU both are ``copy_`` between two tensors, by
    one thread, as the swap paths have it: with two threads and two busy cores each copy waited 8 to 16 ms for the
    second one. What all threads reach is the machine's ceiling (``study.roofline``).
    """
    device = torch.device(device)
    arena = HostArena(shape, max(map(shape.blocks, tokens), default=1), pinned=device.type == "cuda")
    host = arena.all_rows
    there = torch.zeros_like(host, device=device)
    rows = []
    with _one_thread():
        for count, repeat in product(tokens, range(-1, repeats)):
            blocks = shape.blocks(count)
            for direction, target, source in (("out", host, there), ("in", there, host)):
                seconds = _copy_s(target[:blocks], source[:blocks])
                if repeat >= 0:
                    case = {"tokens": count, "repeat": repeat, "direction": direction}
                    rows.append(case | {"ms": seconds * 1e3, "bytes": blocks * shape.block_bytes})
    return rows


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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


# The figures of notebook 21: the published table, and the reader's run over the record.


def latency_by_length(recorded: Result | None, now: Result) -> Figure:
    """Figure 1 of the paper beside this machine's: milliseconds to recover a request of so many tokens."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    fig, (paper, here) = plt.subplots(1, 2, figsize=(9, 4.9))
    lengths = [row.tokens for row in TABLE_2]
    swap, again = [row.swap_ms for row in TABLE_2], [row.recompute_ms for row in TABLE_2]
    _, colour, marker = POLICIES["recompute"]
    paper.plot(
        lengths, swap, PATH_LOOKS["per_block"][2] + "-", color=PATH_LOOKS["per_block"][1], label="swap, as published"
    )
    paper.plot(lengths, again, marker + "-", color=colour, label="recompute, as published")
    shape, parts = PAPER_SHAPE, decomposed(LONG, PCIE_4_X16)
    whole = _swap_ms(lengths, CopyCosts(PublishedCosts(0.0), shape, parts.out_us_per_copy / 1e6, PCIE_4_X16, True))
    label, light, _ = PATH_LOOKS["coalesced"]
    paper.plot(lengths, whole, "--", color=light, label=f"swap, {label} at 25 GB/s (computed)")
    at = crossing(lengths, swap, again).tokens
    paper.axvline(at, color=COLOURS["paper"], linestyle=":", label=f"its own data cross at {at:.0f} tokens")
    paper.set_title("CPS Table 2: RTX A6000, Qwen2.5-0.5B")
    for drawn in results:
        for name, (label, *_) in PATH_LOOKS.items():
            _line(here, drawn, "swap", f"swap, {label}", LINES[name], path=name)
        _line(here, drawn, "recompute", "recompute", "recompute")
        floors = sorted((int(name.split("_")[1]), floor["value"]) for name, floor in drawn.result.floors.items())
        plain = "floor: plain copies out and in" if drawn.own else None
        here.plot(*zip(*floors, strict=True), ":", color=COLOURS["floor"], label=plain, **drawn.style)
    here.set_title(f"this machine: {now.parameters['recovery']['model'] or now.parameters['model']}")
    for ax in (paper, here):
        ax.set(xscale="log", yscale="log", xlabel="tokens of the preempted request", ylabel="recovery, ms")
        ax.xaxis.set_minor_formatter("")
        ax.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    paper.set_xticks(lengths, [f"{length:,}" for length in lengths])
    there = sorted({row["tokens"] for drawn in results for row in drawn.result.rows if row["what"] == "recompute"})
    here.set_xticks(there, [f"{length:,}" for length in there], fontsize=9)
    fig.suptitle("Swap loses its lead by 3,072 copies for 1,024 tokens; in one copy it wins at every length")
    name_results(fig, results)
    return fig


def block_sizes(recorded: Result | None, now: Result) -> Figure:
    """What larger blocks do: to the paper's cross-point (computed from its data), and to a swap on this machine."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    fig, (paper, here) = plt.subplots(1, 2, figsize=(9, 4.2))
    sizes = (8, 16, 32, 64, 128)
    lengths = [row.tokens for row in TABLE_2]
    again = [row.recompute_ms for row in TABLE_2]
    paper.axhline(1.0, color=POLICIES["recompute"][1])
    paper.text(lengths[-1], 1.03, "recompute", color=POLICIES["recompute"][1], ha="right", va="bottom")
    for size in sizes:
        shape = replace(PAPER_SHAPE, block_tokens=size)
        ratio = [_scaled_swap_ms(row, shape) / once for row, once in zip(TABLE_2, again, strict=True)]
        paper.plot(lengths, ratio, marker="o", color=PATH_LOOKS["per_block"][1], alpha=1 if size == 16 else 0.5)
        paper.annotate(f"{size}", (lengths[-1], ratio[-1]), (7, -3), textcoords="offset points", fontsize=9)
    paper.set(xscale="log", yscale="log", xlabel="tokens of the preempted request", ylabel="swap / recompute")
    paper.set_xticks(lengths, [f"{length:,}" for length in lengths])
    paper.xaxis.set_minor_formatter("")
    paper.set_yticks([0.2, 0.5, 1, 2], ["0.2", "0.5", "1", "2"])
    paper.yaxis.set_minor_formatter("")
    paper.set_title("Table 2 with blocks of 8 to 128 tokens (computed)", fontsize=11)
    for drawn in results:
        swept = [row for row in drawn.result.rows if row["what"] == "swept"]
        there = sorted({row["block_tokens"] for row in swept})
        for name, (label, *_) in PATH_LOOKS.items():
            least = _median_of(swept, name, max(there))
            times = [{"value": _median_of(swept, name, size) / least} for size in there]
            drawn.line(here, there, times, LINES[name], label=label if drawn.own else None)
    here.set(xscale="log", xlabel="tokens in a block", ylabel="time of a swap / that with the largest blocks")
    here.set_ylim(0, None)
    here.set_xticks(there, [str(size) for size in there])
    here.xaxis.set_minor_formatter("")
    here.set_title("this machine, measured", fontsize=11)
    here.legend(fontsize=9)
    fig.suptitle("Larger blocks mean fewer copies: from 32 tokens a block, swap wins at every length")
    name_results(fig, results)
    return fig


def _line(ax: Axes, drawn: Drawn, what: str, label: str, look: str, path: str | None = None) -> None:
    rows = [row for row in drawn.result.rows if row["what"] == what and row.get("path") == path]
    tokens = sorted({row["tokens"] for row in rows})
    times = [[row["ms"] if what == "recompute" else swap_ms(row) for row in rows if row["tokens"] == t] for t in tokens]
    ends = [dict(zip(("low", "value", "high"), np.percentile(group, [2.5, 50, 97.5]), strict=True)) for group in times]
    drawn.line(ax, tokens, ends, look, label=label if drawn.own else None)


def _swap_ms(lengths: list[int], costs: CopyCosts) -> list[float]:
    return [costs.swap_s(tokens) * 1e3 for tokens in lengths]


def _scaled_swap_ms(row: object, shape: KVShape) -> float:
    """A published swap with the copies of another block size: the bytes stay, each copy keeps its own price."""
    parts = decomposed(row.tokens, PCIE_4_X16)
    per_copy_ms = (parts.out_us_per_copy + parts.in_us_per_copy) / 1e3
    return shape.copies(row.tokens) * per_copy_ms + 2 * parts.wire_s * 1e3 + row.prep_ms


def _median_of(rows: list, path: str, size: int) -> float:
    return float(np.median([swap_ms(row) for row in rows if row["path"] == path and row["block_tokens"] == size]))


# Where the cross-point would lie with other links and models; no measurement, the arithmetic of ``LinkModel``.

LINKS = {"3.0 x4": 3e9, "3.0 x16": 12.5e9, "4.0 x16": 25e9, "5.0 x16": 50e9, "6.0 x16": 100e9}  # bytes/s in practice
SHAPES = {
    "smollm2-135m": "SmolLM2 135M",
    "qwen2.5-0.5b": "Qwen2.5 0.5B (the paper)",
    "tinyllama-1.1b": "TinyLlama 1.1B",
    "llama-3.1-8b": "Llama 3.1 8B",
    "llama-2-7b": "Llama 2 7B (no GQA)",
}
LENGTHS = tuple(round(128 * 2 ** (step / 8)) for step in range(49))  # tokens, 128 to 8,192


def map_of(coalesced: bool) -> list[list[Crossing]]:
    """[shapes, links]: where the cheaper way changes over ``LENGTHS``."""
    found = []
    for name in SHAPES:
        models = [LinkModel(shape_config(name), rate, coalesced) for rate in LINKS.values()]
        found.append(
            [crossing(LENGTHS, [m.swap_s(n) for n in LENGTHS], [m.recompute_s(n) for n in LENGTHS]) for m in models]
        )
    return found


def link_map() -> Figure:
    """Up to which length to swap, by link and model: a copy per block, layer, K and V, and one copy."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("ways", [POLICIES["recompute"][1], "white", POLICIES["swap"][1]])
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True)
    for ax, (coalesced, path) in zip(axes, ((False, "per_block"), (True, "coalesced")), strict=True):
        found = map_of(coalesced)
        shares = np.array([[_swapped(each) for each in line] for line in found])
        ax.imshow(shares, cmap=colours, vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            dark = abs(share - 0.5) > 0.3
            ax.text(
                column,
                row,
                _told(found[row][column]),
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark else "black",
            )
        ax.set_title(PATH_LOOKS[path][0])
        ax.set_xticks(range(len(LINKS)), [f"{name}\n{rate / 1e9:g}" for name, rate in LINKS.items()])
        ax.set_xlabel("PCIe, and its GB/s in practice")
        ax.grid(visible=False)
    axes[0].set_yticks(range(len(SHAPES)), list(SHAPES.values()))
    fig.suptitle("Which length to swap up to depends on the model more than on the link (computed)")
    return fig


def _swapped(found: Crossing) -> float:
    """The share of the lengths, on a log scale, for which swap is cheaper."""
    low, high = np.log([LENGTHS[0], LENGTHS[-1]])
    below = 1.0 if found.tokens is None else (np.log(found.tokens) - low) / (high - low)
    return float(below if found.below == "swap" else 1 - below)


def _told(found: Crossing) -> str:
    if found.tokens is None:
        return found.below
    return f"swap\n{'to' if found.below == 'swap' else 'from'} {found.tokens:,.0f}"
