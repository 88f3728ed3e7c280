"""Whether published operator times hold on a card of that kind that is at hand: products, attention, whole prefills.

The published ones are those of :mod:`firsttoken.simulation.costs.operator_tables`, by which GPUs are simulated that are
not here. Here the same sizes are computed by torch, each product with several copies of its weights in turn, so that
they come from the card's memory and not from its cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from firsttoken.assets.dense_shape import dense_shape
from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT as MODEL_CONTEXT
from firsttoken.assets.needs import ModelFacts, Need, check
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import CONTEXT, PRODUCTS, OperatorTables, tables_from
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken.study.timing import timed
from firsttoken_studies.nb46_on_the_stated_gpus.operator_error import add_errors
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, distinct, frame_of
from firsttoken_studies.record.show import interval

OPERATORS, GPU_HERE = "measured operators", "this GPU"
PRODUCT, DRAWN, ATTENTION, PREFILL = "products of the model", "products drawn from the table", "attention", "prefill"
_LARGEST = 1 << 30  # numbers in a factor or the product
_TURNS = 32  # products in one graph at most
_CACHES = 3  # the weights in turn are so many times the size of the card's cache
_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)


@dataclass(frozen=True)
class OperatorsHereConfig:
    """The operators of ``model`` (a random shape) on ``card``, which must be the one that is here.

    Its products are computed for batches of each of ``rows`` tokens, its attention and its whole prefill for prompts of
    each of ``prompts``, and beside them ``drawn`` products of the published table; each ``repeats`` times.
    """

    card: str
    model: str
    rows: tuple[int, ...]
    prompts: tuple[int, ...]
    drawn: int
    repeats: int

    def __post_init__(self) -> None:
        if min(*self.rows, *self.prompts, self.drawn, self.repeats) < 1:
            raise ProfileError("operators_here: rows, prompts, drawn and repeats must be at least 1")

    def needs(self) -> list[Need]:
        """Require a model whose context holds the longest prompt."""
        return [Need("operators_here.prompts", max(self.prompts), MODEL_CONTEXT)]


def operators_here(profile: Profile) -> Outcome:
    """Rows {what, published_us, here_us} and, by what they are, m, n and k, or tokens; ``here_us`` is the median.

    Raises ProfileError where the GPU is another than the configuration's card.
    """
    config, device = profile.section("operators_here", OperatorsHereConfig), profile.torch_device()
    spec = f"random:{config.model}"
    check(config.needs(), ModelFacts(spec))
    _check_card(config.card, device)
    model = load_model(spec, dtype=profile.torch_dtype(), device=device, with_tokenizer=False).model
    tables, shape, draw = OperatorTables.read(config.card), dense_shape(config.model), random.Random(profile.seed)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    sizes = [(width, shape.hidden), (shape.hidden, shape.heads * shape.head_dim), (2 * shape.mlp, shape.hidden)]
    sizes += [(shape.hidden, shape.mlp), (shape.vocabulary, shape.hidden)]
    products = [(PRODUCT, m, n, k, _published_s(tables, m, n, k)) for n, k in sizes for m in config.rows]
    products += [(DRAWN, *point) for point in _drawn(tables, config.drawn, draw)]
    rows: Rows = []
    with torch.inference_mode():
        for operation, m, n, k, published_s in track(products, desc="products"):
            seconds = _product_s(m, n, k, profile.torch_dtype(), device, config.repeats)
            rows.append({"what": operation, "m": m, "n": n, "k": k} | _both(published_s, seconds))
        heads = shape.heads, shape.kv_heads, shape.head_dim
        lengths, published = tables.attention(CONTEXT, *heads, "bfloat16")[1]
        for tokens in config.prompts:
            kernel, seconds = _attention_s(tokens, heads, profile.torch_dtype(), device, config.repeats)
            pairs = _both(float(np.interp(tokens, lengths, published)), seconds)
            rows.append({"what": ATTENTION, "tokens": tokens, "kernel": kernel} | pairs)
        costs = OperatorCosts.of(tables, shape)
        for tokens in config.prompts:
            ids = torch.randint(model.config.vocab_size, (1, tokens), device=device)
            run = _prefill_of(model, ids)
            seconds = median(timed(run, repeats=config.repeats, warmup=2, device=device))
            rows.append({"what": PREFILL, "tokens": tokens} | _both(costs.step_s([(0, tokens)], []), seconds))
    return Outcome(rows, provenance={"kind": "random", "source": spec, "costs": f"{config.card} of {tables_from()}"})


def _prefill_of(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    return lambda: model(ids, use_cache=True, logits_to_keep=1)


def _both(published_s: float, here_s: float) -> dict[str, float]:
    return {"published_us": round(1e6 * published_s, 3), "here_us": round(1e6 * here_s, 3)}


def _check_card(card: str, device: torch.device) -> None:
    """Raises ProfileError where ``device`` is a GPU of another name than ``card``; a CPU only tries the code."""
    if device.type != "cuda":
        return
    name = torch.cuda.get_device_name(device)
    wanted = card.removesuffix("-sxm").replace("-", " ")
    if wanted not in name.lower():
        raise ProfileError(f"operators_here.card: {card} is not the GPU here, which is {name!r}; name its own card")


def _published_s(tables: OperatorTables, m: int, n: int, k: int) -> float:
    (sizes, seconds), _ = tables.product("bfloat16", n, k)
    return float(np.exp(np.interp(np.log(m), np.log(sizes), np.log(seconds))))


def _drawn(tables: OperatorTables, count: int, draw: random.Random) -> Iterator[tuple[int, int, int, float]]:
    """(m, n, k, seconds) of ``count`` products of the table, none twice, that a card's memory holds."""
    table = tables.tables[PRODUCTS]
    fits = np.flatnonzero(
        (table["gemm_dtype"] == "bfloat16")
        & (table["n"] * table["k"] <= _LARGEST)
        & (table["m"] * np.maximum(table["n"], table["k"]) <= _LARGEST)
    )
    for row in sorted(draw.sample(fits.tolist(), min(count, len(fits)))):
        m, n, k = (int(table[name][row]) for name in ("m", "n", "k"))
        yield m, n, k, float(table["latency"][row])


def _product_s(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Seconds of a product [m, k] x [k, n], the median over ``repeats``, each the mean of several weights in turn."""
    cached = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    turns = min(_TURNS, max(2, -(-_CACHES * cached // (2 * n * k))))
    rows = torch.randn(m, k, dtype=dtype, device=device)
    weights = [torch.randn(n, k, dtype=dtype, device=device) for _ in range(turns)]
    return _each_s([lambda weight=weight: F.linear(rows, weight) for weight in weights], device, repeats)


def _attention_s(
    tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, repeats: int
) -> tuple[str, float]:
    """The fastest of torch's kernels for the attention of a prompt of ``tokens``, and its seconds."""
    queries, kv_heads, head_dim = heads
    query = torch.randn(1, queries, tokens, head_dim, dtype=dtype, device=device)
    key, value = torch.randn(2, 1, kv_heads, tokens, head_dim, dtype=dtype, device=device)
    seconds = {}
    for kernel in _KERNELS[: None if device.type == "cpu" else -1]:
        with sdpa_kernel(kernel):
            run = lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)  # noqa: E731
            try:
                run()
            except RuntimeError:  # a kernel that this card or this processor has not
                continue
            seconds[kernel.name] = _each_s([run] * 4, device, repeats)
    name = min(seconds, key=seconds.__getitem__)
    return name, seconds[name]


def _each_s(runs: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> float:
    """Seconds of each of ``runs``, which follow each other: on a GPU in one graph, so that no launch counts."""
    if device.type != "cuda":
        return median(timed(lambda: [run() for run in runs], repeats=repeats)) / len(runs)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):  # what a first call sets up must not be in the graph
        for run in runs:
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(runs))
    return median(seconds)


def operators_here_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize the difference of the published times from those here, in %: the median of the absolute values, the
    90th percentile, the worst and the mean, by what was computed."""
    summary = Summary()
    for operation, timed_here in frame_of(rows).groupby("what", sort=False):
        off = 100 * (timed_here.published_us / timed_here.here_us - 1)
        labels = {"case": operation, "costs": OPERATORS, "than": GPU_HERE}
        add_errors(summary, "off_pct", off, "median", **labels)
        summary.add("off_pct", {"value": off.abs().max(), "n": len(off), "unit": "%"}, **labels, across="worst")
    return summary


def operators_rows(result: Result) -> Table:
    """A line for each kind of operator: how many were timed, and how far the published times are off."""
    for operation in distinct(result.rows, "what"):
        labels = {"case": operation, "costs": OPERATORS, "than": GPU_HERE}
        entries = {
            name: result.summary.of("off_pct", **labels, across=name) for name in ("median", "p90", "mean", "worst")
        }
        line = {"computed": operation, "n": entries["median"]["n"], "median, %": interval(entries["median"], 0)}
        line |= {"p90, %": f"{entries['p90']['value']:.0f}", "worst, %": f"{entries['worst']['value']:.0f}"}
        yield line | {"mean, %": f"{entries['mean']['value']:+.0f}"}
