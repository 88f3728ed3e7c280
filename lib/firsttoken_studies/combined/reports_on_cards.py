"""What CPS, DroidSpeak and PETALS state for GPUs, on GPUs that are not here: by operators that were measured there.

Sarathi-Serve has a study of its own (``sarathi/card_capacity.py``, ``sarathi/paper_cards.py``). What ProgressiveServe
gains is a share of the bytes, which no GPU changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from firsttoken.assets.dense_shape import SHAPES, DenseShape
from firsttoken.cps.costs.copies import CopyCosts
from firsttoken.cps.costs.crossing import crossing
from firsttoken.engine.costs.operator_costs import OperatorCosts
from firsttoken.engine.costs.operator_tables import OperatorTables, tables_from
from firsttoken.engine.costs.published import decomposed
from firsttoken.engine.kv import KVShape
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.summary import Summary
from firsttoken_studies.cps.recovery_latency import LONG, PCIE_4_X16
from firsttoken_studies.petals.chain_costs import (
    BLOOM_BLOCKS,
    BLOOM_HIDDEN,
    NETWORKS,
    PUBLISHED_SERVERS,
    published_compute_s,
    swarm_s,
)

QWEN = "qwen2.5-0.5b"
MODELS = SHAPES | {QWEN: DenseShape(24, 896, 4864, 14, 2, 64, 151936)}  # CPS ran it (Table 1); its own config.json
EACH_BLOCK, ONE_COPY = "per_block", "coalesced"
COMPUTING, LOADING = "computing", "loading"
GROUP = 11 / 32  # of the layers that DroidSpeak computes again in its example
_NUMBER_BYTES = 2


@dataclass(frozen=True)
class OnCardsConfig:
    """CPS: ``lengths`` at which a swap and a recomputation of each of ``models`` are reckoned on each of ``cards``, one
    GPU of it. DroidSpeak: ``prompts`` of ``reused`` ("MODEL GPUS CARD") over ``links`` in Gbit/s. PETALS: a block of
    BLOOM on each of ``block_cards``, at ``context`` tokens."""

    cards: tuple[str, ...]
    models: tuple[str, ...]
    lengths: tuple[int, ...]
    reused: tuple[str, ...]
    prompts: tuple[int, ...]
    links: tuple[float, ...]
    block_cards: tuple[str, ...]
    context: int

    def __post_init__(self) -> None:
        if min(*self.lengths, *self.prompts, self.context) < 1 or min(self.links) <= 0:
            raise ProfileError("on_cards: lengths, prompts and context must be at least 1, links above 0")
        if odd := next((one for one in self.models if one not in MODELS), ""):
            raise ProfileError(f"on_cards: no shape is called {odd!r}; known: {', '.join(MODELS)}")


def reports_on_cards(profile: Profile) -> Outcome:
    """Rows {report, card, model, ...} with times in seconds; a pair of model and card that no table covers is a row
    with the reason under ``not_covered``."""
    config = profile.section("on_cards", OnCardsConfig)
    rows = [row for card in config.cards for model in config.models for row in recoveries(card, model, config.lengths)]
    for text in config.reused:
        rows += prefills(text, config.prompts, config.links)
    for card in config.block_cards:
        rows += chains(card, config.context)
    return Outcome(rows, provenance={"kind": "simulated on measured operators", "costs": tables_from()})


def recoveries(card: str, model: str, lengths: tuple[int, ...]) -> Rows:
    """Rows of CPS: the swap out and back of a request of each length, with vLLM 0.2.4's copies and with one copy each
    way, and the prefill that computes its cache again."""
    where = {"report": "CPS", "card": card, "model": model}
    shape = MODELS[model]
    try:
        costs = OperatorCosts.of(OperatorTables.read(card), shape)
    except ProfileError as error:
        return [where | {"not_covered": str(error)}]
    kv = KVShape(shape.layers, shape.kv_heads, shape.head_dim, torch.float16)
    copy_s = decomposed(LONG, PCIE_4_X16).out_us_per_copy / 1e6
    rows: Rows = []
    for way in (EACH_BLOCK, ONE_COPY):
        swaps = CopyCosts(costs, kv, copy_s, costs.swap_bytes_s, coalesced=way == ONE_COPY)
        for tokens in lengths:
            swap_s = swaps.swap_out_s(tokens) + swaps.swap_in_s(tokens)
            rows.append(
                where | {"way": way, "tokens": tokens, "swap_s": swap_s, "recompute_s": _prefill_s(costs, tokens)}
            )
    return rows


def prefills(text: str, prompts: tuple[int, ...], links: tuple[float, ...]) -> Rows:
    """Rows of DroidSpeak: a prompt's own prefill, that of a group of 11 of 32 layers, and what comes over the link
    meanwhile: the other layers' keys and values, and the hidden states that enter the group (E-cache).

    The first token comes when the slower of both is over, as in a pipeline without gaps. Raises ProfileError for what
    no table covers.
    """
    try:
        model, gpus, card = text.split()
        shape, count = MODELS[model], int(gpus)
    except (ValueError, KeyError):
        raise ProfileError(f"on_cards: {text!r} is no set-up; write MODEL GPUS CARD") from None
    costs = OperatorCosts.of(OperatorTables.read(card), shape, count)
    rows: Rows = []
    for tokens in prompts:
        own_s, head_s = _prefill_s(costs, tokens), float(costs.heads[1])
        group_s = GROUP * (own_s - head_s) + head_s
        sent = (1 - GROUP) * shape.kv_bytes() * tokens + _NUMBER_BYTES * shape.hidden * tokens
        for link in links:
            loading_s = 8 * sent / (link * 1e9)
            row = {"report": "DroidSpeak", "card": card, "model": model, "gpus": count, "tokens": tokens, "link": link}
            rows.append(row | {"own_s": own_s, "group_s": group_s, "loading_s": loading_s})
    return rows


def chains(card: str, context: int) -> Rows:
    """Rows of PETALS: a token through all blocks of BLOOM-176B in 16 bits, on three servers, by network; and the time
    that the paper's own servers took for it."""
    computing_s = BLOOM_BLOCKS * block_s(OperatorTables.read(card), context)
    where = {"report": "PETALS", "card": card, "model": "bloom-176b", "computing_s": computing_s}
    return [
        where
        | {
            "network": name,
            "step_s": swarm_s(computing_s, PUBLISHED_SERVERS, BLOOM_HIDDEN, network),
            "published_computing_s": published_compute_s(),
        }
        for name, network in NETWORKS.items()
    ]


def block_s(tables: OperatorTables, context: int) -> float:
    """Seconds of one token through a block of BLOOM-176B: four products, the keys and values of ``context`` tokens as
    bytes (no table has 112 heads of them), and six small kernels."""
    wide = BLOOM_HIDDEN
    seconds = 0.0
    for n, k in ((3 * wide, wide), (wide, wide), (4 * wide, wide), (wide, 4 * wide)):
        (at, found), _ = tables.product("bfloat16", n, k)
        seconds += float(np.interp(1.0, at, found))
    return seconds + 2 * wide * _NUMBER_BYTES * context / tables.memory_bytes_s + 6 * tables.kernel_s


def _prefill_s(costs: OperatorCosts, tokens: int) -> float:
    return float(costs.step_s([(0, tokens)], []))


def on_cards_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Where swap and recompute cross by card, model and kind of copies; the prefill and its speed-up by link; steps a
    second by network, and what of a step the operators leave unexplained."""
    summary = Summary()
    crossings: dict[tuple[str, str, str], Rows] = {}
    for row in rows:
        if "way" in row:
            crossings.setdefault((row["card"], row["model"], row["way"]), []).append(row)
    for (card, model, way), mine in crossings.items():
        found = crossing(*([row[key] for row in mine] for key in ("tokens", "swap_s", "recompute_s")))
        where = {"machine": card, "model": model, "variant": way}
        summary.add("cheaper_way", {"value": found.verdict}, **where)
        if found.tokens is not None:
            summary.add("crossing_tokens", {"value": found.tokens, "unit": "tokens"}, **where)
    told = set[tuple[str, str, int]]()
    for row in rows:
        if row["report"] == "DroidSpeak":
            where = {"machine": row["card"], "model": row["model"], "context_tokens": row["tokens"]}
            if (place := (row["card"], row["model"], row["tokens"])) not in told:
                told.add(place)
                summary.add("prefill_s", {"value": row["own_s"], "unit": "s"}, **where)
            speedup = row["own_s"] / max(row["group_s"], row["loading_s"])
            summary.add("speedup_x", {"value": speedup, "unit": "x"}, **where, gbit_per_s=row["link"])
        if row["report"] == "PETALS":
            where = {"machine": row["card"], "link": row["network"]}
            summary.add("steps_per_s", {"value": 1 / row["step_s"], "unit": "steps/s"}, **where)
    for card, seconds, theirs in dict.fromkeys(
        (row["card"], row["computing_s"], row["published_computing_s"]) for row in rows if row["report"] == "PETALS"
    ):
        share = {"value": 100 * seconds / theirs, "unit": "%"}
        summary.add("computing_share_pct", share, machine=card, than="the paper's servers")
    return summary
