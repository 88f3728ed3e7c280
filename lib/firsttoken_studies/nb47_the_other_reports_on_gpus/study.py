"""What four of the reports state for GPUs, on GPUs that are not here: by operators that were measured there.

Sarathi-Serve has a study of its own (``sarathi/card_capacity.py``, ``sarathi/paper_cards.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from firsttoken.assets.dense_shape import SHAPES, DenseShape
from firsttoken.cps.crossing import crossing
from firsttoken.engine.kv import KVShape
from firsttoken.progressiveserve.stages import REPORT_PLAN
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import CONTEXT, OperatorTables, power_between, tables_from
from firsttoken.simulation.costs.published import decomposed
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.summary import Summary
from firsttoken_studies.cps.assumed_costs import CopyCosts
from firsttoken_studies.nb21_swap_or_recompute.study import LONG, PCIE_4_X16
from firsttoken_studies.petals.chain_costs import (
    BLOOM_BLOCKS,
    BLOOM_HIDDEN,
    NETWORKS,
    PUBLISHED_SERVERS,
    published_compute_s,
    swarm_s,
)
from firsttoken_studies.record.results import Outcome, Rows, rows_where

QWEN = "qwen2.5-0.5b"
LLAMA_2 = "llama-2-7b"
MODELS = SHAPES | {  # as their own config.json says: CPS ran the first (Table 1), ProgressiveServe the second
    QWEN: DenseShape(24, 896, 4864, 14, 2, 64, 151936),
    LLAMA_2: DenseShape(32, 4096, 11008, 32, 32, 128, 32000),
}
WHOLE, FIRST_STAGE = "whole", "progressive"
EACH_BLOCK, ONE_COPY = "per_block", "coalesced"
GROUP = 11 / 32  # of the layers that DroidSpeak computes again in its example
_NUMBER_BYTES = 2


@dataclass(frozen=True)
class OnCardsConfig:
    """CPS: ``lengths`` at which a swap and a recomputation of each of ``models`` are reckoned on each of ``cards``, one
    GPU of it. DroidSpeak: ``prompts`` of ``reused`` ("MODEL GPUS CARD") over ``links`` in Gbit/s. PETALS: a block of
    BLOOM on each of ``block_cards``, at ``context`` tokens. ProgressiveServe: a cold start of Llama-2-7B on each of
    ``cold_cards`` over each of ``cold_links`` in Gbit/s, up to the first token behind ``cold_prompt`` tokens."""

    cards: tuple[str, ...]
    models: tuple[str, ...]
    lengths: tuple[int, ...]
    reused: tuple[str, ...]
    prompts: tuple[int, ...]
    links: tuple[float, ...]
    block_cards: tuple[str, ...]
    context: int
    cold_cards: tuple[str, ...]
    cold_links: tuple[float, ...]
    cold_prompt: int

    def __post_init__(self) -> None:
        if min(*self.lengths, *self.prompts, self.context, self.cold_prompt) < 1:
            raise ProfileError("on_cards: lengths, prompts, context and cold_prompt must be at least 1")
        if min(*self.links, *self.cold_links) <= 0:
            raise ProfileError("on_cards: links and cold_links must be above 0")
        if unknown := next((model for model in self.models if model not in MODELS), ""):
            raise ProfileError(f"on_cards: no shape is called {unknown!r}; known: {', '.join(MODELS)}")


BothWays: TypeAlias = Callable[[OperatorCosts, KVShape, float, int, int], tuple[float, float]]
FirstToken: TypeAlias = Callable[[float, float, float, float, float, float], float]


def both_ways_s(costs: OperatorCosts, kv: KVShape, copy_s: float, tokens: int, copies: int) -> tuple[float, float]:
    """Return the seconds to compute the cache of a request again, and to copy it out and back: with ``copies`` each
    way, which are one or those of vLLM 0.2.4, of ``copy_s`` each."""
    swaps = CopyCosts(costs, kv, copy_s, costs.swap_bytes_s, coalesced=copies == 1)
    return _prefill_s(costs, tokens), swaps.swap_out_s(tokens) + swaps.swap_in_s(tokens)


def first_token_s(
    own_s: float, head_s: float, share: float, cache_bytes: float, entry_bytes: float, bytes_s: float
) -> float:
    """Return the seconds until a ``share`` of the layers is computed again and the cache of the others is there, as in
    a pipeline without gaps.

    A prefill of all layers takes ``own_s``, of which the head ``head_s``. All layers have ``cache_bytes`` of keys and
    values; the hidden states that enter the group (E-cache) have ``entry_bytes``.
    """
    loading_s = ((1 - share) * cache_bytes + entry_bytes) / bytes_s
    return max(share * (own_s - head_s) + head_s, loading_s)


def reports_on_cards(
    profile: Profile, *, ways: BothWays = both_ways_s, first_token: FirstToken = first_token_s
) -> Outcome:
    """Rows {report, card, model, ...} with times in seconds; a pair of model and card that no table covers is a row
    with the reason under ``not_covered``. A reader's ``ways`` and ``first_token`` stand in for the library's."""
    config = profile.section("on_cards", OnCardsConfig)
    pairs = [(card, model) for card in config.cards for model in config.models]
    rows = [row for card, model in pairs for row in recoveries(card, model, config.lengths, ways)]
    for text in config.reused:
        rows += prefills(text, config.prompts, config.links, first_token)
    for card in config.block_cards:
        rows += chains(card, config.context)
    for card in config.cold_cards:
        rows += cold_starts(card, config.cold_links, config.cold_prompt)
    return Outcome(rows, provenance={"kind": "simulated on measured operators", "costs": tables_from()})


def recoveries(card: str, model: str, lengths: tuple[int, ...], ways: BothWays) -> Rows:
    """Rows of CPS: the swap out and back of a request of each length, with vLLM 0.2.4's copies and with one copy each
    way, and the prefill that computes its cache again."""
    labels = {"report": "CPS", "card": card, "model": model}
    shape = MODELS[model]
    try:
        costs = OperatorCosts.of(OperatorTables.read(card), shape)
    except ProfileError as error:
        return [labels | {"not_covered": str(error)}]
    kv = KVShape(shape.layers, shape.kv_heads, shape.head_dim, torch.float16)
    copy_s = decomposed(LONG, PCIE_4_X16).out_us_per_copy / 1e6
    rows: Rows = []
    for way in (EACH_BLOCK, ONE_COPY):
        for tokens in lengths:
            recompute_s, swap_s = ways(costs, kv, copy_s, tokens, kv.copies(tokens) if way == EACH_BLOCK else 1)
            rows.append(labels | {"way": way, "tokens": tokens, "swap_s": swap_s, "recompute_s": recompute_s})
    return rows


def prefills(text: str, prompts: tuple[int, ...], links: tuple[float, ...], first_token: FirstToken) -> Rows:
    """Rows of DroidSpeak: a prompt's own prefill, and the first token of a group of 11 of 32 layers that is computed
    again while the others' keys and values come over the link. Raises ProfileError for what no table covers."""
    try:
        model, gpus, card = text.split()
        shape, count = MODELS[model], int(gpus)
    except (ValueError, KeyError):
        raise ProfileError(f"on_cards: {text!r} is no set-up; write MODEL GPUS CARD") from None
    costs = OperatorCosts.of(OperatorTables.read(card), shape, count)
    rows: Rows = []
    for tokens in prompts:
        own_s, head_s = _prefill_s(costs, tokens), float(costs.heads[1])
        sent = shape.kv_bytes() * tokens, _NUMBER_BYTES * shape.hidden * tokens
        for link in links:
            first_s = first_token(own_s, head_s, GROUP, *sent, link * 1e9 / 8)
            row = {"report": "DroidSpeak", "card": card, "model": model, "gpus": count, "tokens": tokens, "link": link}
            rows.append(row | {"own_s": own_s, "first_s": first_s})
    return rows


def chains(card: str, context: int) -> Rows:
    """Rows of PETALS: a token through all blocks of BLOOM-176B in 16 bits, on three servers, by network; and the time
    that the paper's own servers took for it."""
    computing_s = BLOOM_BLOCKS * block_s(OperatorTables.read(card), context)
    labels = {"report": "PETALS", "card": card, "model": "bloom-176b", "computing_s": computing_s}
    return [
        labels
        | {
            "network": name,
            "step_s": swarm_s(computing_s, PUBLISHED_SERVERS, BLOOM_HIDDEN, network),
            "published_computing_s": published_compute_s(),
        }
        for name, network in NETWORKS.items()
    ]


def cold_starts(card: str, links: tuple[float, ...], tokens: int) -> Rows:
    """Rows of ProgressiveServe: Llama-2-7B's bytes in 16 bits over each of ``links``, then the prefill of ``tokens``.

    Each is there for the whole model, and for the first stage, which lacks 8 of 32 layers.
    The adapter of the stage is 0.2 % of the bytes and left out. Nothing is computed while bytes come, as in the report.
    """
    tables, shape = OperatorTables.read(card), MODELS[LLAMA_2]
    first = replace(shape, layers=shape.layers - len(REPORT_PLAN.block))
    labels = {"report": "ProgressiveServe", "card": card, "model": LLAMA_2, "tokens": tokens}
    return [
        labels
        | {
            "link": link,
            "stage": stage,
            "loading_s": 8 * _NUMBER_BYTES * loaded.weights / (link * 1e9),
            "prefill_s": equal_heads_prefill_s(tables, loaded, tokens),
        }
        for link in links
        for stage, loaded in ((WHOLE, shape), (FIRST_STAGE, first))
    ]


def equal_heads_prefill_s(tables: OperatorTables, shape: DenseShape, tokens: int) -> float:
    """Seconds of the prefill of ``tokens`` tokens on one GPU, of a shape with as many heads of keys as of queries.

    No table has decodes of 32 such heads, which ``OperatorCosts`` asks for as well; prompts of them were measured. The
    five small kernels of a layer are charged as there.
    """
    wide, width = shape.hidden, shape.heads * shape.head_dim
    layer = 0.0
    for n, k in ((3 * width, wide), (wide, width), (2 * shape.mlp, wide), (wide, shape.mlp)):
        layer += _product_s(tables, n, k, tokens)
    layer += float(
        np.interp(tokens, *tables.attention(CONTEXT, shape.heads, shape.heads, shape.head_dim, "bfloat16")[1])
    )
    moved = _NUMBER_BYTES * (2 * 4 * wide + 2 * 2 * width + 2 * 2 * width + 3 * shape.mlp)
    layer += moved * tokens / tables.memory_bytes_s + 5 * tables.kernel_s
    return shape.layers * layer + _product_s(tables, shape.vocabulary, wide, 1)


def _product_s(tables: OperatorTables, n: int, k: int, tokens: int) -> float:
    """Seconds of a product [tokens, k] x [k, n]: a power between two measured numbers of tokens."""
    curve, _ = tables.product("bfloat16", n, k)
    return float(power_between(np.array([float(tokens)]), curve)[0])


def block_s(tables: OperatorTables, context: int) -> float:
    """Seconds of one token through a block of BLOOM-176B: four products, the keys and values of ``context`` tokens as
    bytes (no table has 112 heads of them), and six small kernels."""
    wide = BLOOM_HIDDEN
    seconds = 0.0
    for n, k in ((3 * wide, wide), (wide, wide), (4 * wide, wide), (wide, 4 * wide)):
        (rows_at, seconds_found), _ = tables.product("bfloat16", n, k)
        seconds += float(np.interp(1.0, rows_at, seconds_found))
    return seconds + 2 * wide * _NUMBER_BYTES * context / tables.memory_bytes_s + 6 * tables.kernel_s


def _prefill_s(costs: OperatorCosts, tokens: int) -> float:
    return float(costs.step_s([(0, tokens)], []))


def on_cards_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize the crossings of swap and recompute by card, model and kind of copies; the prefill and its speed-up by
    link; steps a second by network, and the share that the operators leave unexplained; cold starts by link."""
    summary, cps = Summary(), [row for row in rows if "way" in row]
    for card, model, way in dict.fromkeys((row["card"], row["model"], row["way"]) for row in cps):
        of_way = rows_where(cps, card=card, model=model, way=way)
        crossing_point = crossing(*([row[key] for row in of_way] for key in ("tokens", "swap_s", "recompute_s")))
        labels = {"machine": card, "model": model, "variant": way}
        summary.add("cheaper_way", {"value": crossing_point.verdict}, **labels)
        if crossing_point.tokens is not None:
            summary.add("crossing_tokens", {"value": crossing_point.tokens, "unit": "tokens"}, **labels)
    for row in rows_where(rows, report="DroidSpeak"):
        labels = {"machine": row["card"], "model": row["model"], "context_tokens": row["tokens"]}
        if summary.get("prefill_s", **labels) is None:
            summary.add("prefill_s", {"value": row["own_s"], "unit": "s"}, **labels)
        first_s = row["first_s"] if "first_s" in row else max(row["group_s"], row["loading_s"])  # of an earlier run
        speedup = row["own_s"] / first_s
        summary.add("speedup_x", {"value": speedup, "unit": "x"}, **labels, gbit_per_s=row["link"])
    petals = rows_where(rows, report="PETALS")
    for row in petals:
        steps = {"value": 1 / row["step_s"], "unit": "steps/s"}
        summary.add("steps_per_s", steps, machine=row["card"], link=row["network"])
    for card, row in {row["card"]: row for row in petals}.items():
        share = {"value": 100 * row["computing_s"] / row["published_computing_s"], "unit": "%"}
        summary.add("computing_share_pct", share, machine=card, than="the paper's servers")
    _cold(summary, rows_where(rows, report="ProgressiveServe"))
    return summary


def _cold(summary: Summary, rows: Rows) -> None:
    """Add the first token of the whole model and of the first stage by card and link, how much earlier the latter
    comes, and the share of the whole model's that is not loading."""
    for complete, first in zip(rows[::2], rows[1::2], strict=True):
        labels = {"machine": complete["card"], "model": complete["model"], "gbit_per_s": complete["link"]}
        seconds = {row["stage"]: row["loading_s"] + row["prefill_s"] for row in (complete, first)}
        for stage, value in seconds.items():
            summary.add("ttft_s", {"value": value, "unit": "s"}, **labels, variant=stage)
        below = 100 * (1 - seconds[FIRST_STAGE] / seconds[WHOLE])
        summary.add("ttft_below_pct", {"value": below, "unit": "%"}, **labels, variant=FIRST_STAGE, than=WHOLE)
        share = 100 * complete["prefill_s"] / seconds[WHOLE]
        summary.add("prefill_share_pct", {"value": share, "unit": "%"}, **labels, variant=WHOLE)
