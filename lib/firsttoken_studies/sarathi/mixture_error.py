"""Mixtures of experts by measured operators, against servers on the same cards: runs of vLLM from the same wheel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from firsttoken.assets.dense_shape import MIXTURES
from firsttoken.assets.lock import asset_path
from firsttoken.engine.costs.mixture_costs import mixture_costs
from firsttoken.engine.costs.operator_tables import OperatorTables, tables_from
from firsttoken.engine.costs.tables import number, rows
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.summary import Summary
from firsttoken_studies.sarathi.operator_error import RUNS, OperatorErrorConfig, ServerRun, operator_summary, served

_CARDS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200-sxm"}
_MODELS = {"Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b", "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5"}
_TEXTS = ("backend", "mode", "system", "model_path", "gemm_quant_mode")
_FIELDS = ("isl", "osl", "batch_size", "tp_size", "moe_tp_size", "moe_ep_size")
_TIMES = ("silicon_ttft_ms", "silicon_tpot_ms")


@dataclass(frozen=True)
class MixtureErrorConfig:
    """Every ``every``-th published run, ``rounds`` requests for each client and vLLM's default ``token_budget``.

    ``routing`` says how unevenly tokens choose experts, by the tables' name for it.
    """

    every: int
    rounds: int
    token_budget: int
    routing: str

    def __post_init__(self) -> None:
        if min(self.every, self.rounds, self.token_budget) < 1:
            raise ProfileError("mixture_error: every, rounds and token_budget must be at least 1")


@dataclass(frozen=True)
class MixtureRun:
    """A run whose experts are each split over ``split`` GPUs and spread over ``spread``."""

    server: ServerRun
    split: int
    spread: int


def mixture_runs() -> list[MixtureRun]:
    """The runs of mixtures in 8 bits under vLLM, prefill and decode in one engine, whose tables are pinned.

    Left out are those that compute attention for several batches apart, whose GPUs exchange tokens and no sums. Raises
    AssetError for a table that is not fetched, CorpusError for one that cannot be read.
    """
    path = asset_path(RUNS)
    found = []
    for line, row in rows(path, (*_TEXTS, *_FIELDS, *_TIMES)):
        card, model = _CARDS.get(row["system"]), _MODELS.get(row["model_path"])
        if (row["backend"], row["mode"], row["gemm_quant_mode"]) != ("vllm", "agg", "fp8") or not card or not model:
            continue
        isl, osl, clients, gpus, split, spread = (int(number(path, line, row, name, least=1)) for name in _FIELDS)
        if split * spread == gpus:
            times = (number(path, line, row, name) for name in _TIMES)
            server = ServerRun(card, model, "fp8_block", gpus, isl, osl, clients, *times)
            found.append(MixtureRun(server, split, spread))
    return found


def mixture_error(profile: Profile) -> Outcome:
    """Rows {card, model, gpus, split, spread, prompt_tokens, output_tokens, clients, source, ttft_ms, tpot_ms,
    latency_ms}, those of "vllm" and "simulated" in turns; for a run that no table covers, none, and its reason
    is counted in the provenance."""
    config = profile.section("mixture_error", MixtureErrorConfig)
    found: Rows = []
    left_out: dict[str, int] = {}
    for run in tqdm(mixture_runs()[:: config.every], desc="mixture_error", disable=None):
        server = run.server
        try:
            costs = mixture_costs(
                OperatorTables.read(server.card), MIXTURES[server.model], run.split, run.spread, routing=config.routing
            )
        except ProfileError as error:
            left_out[str(error)] = left_out.get(str(error), 0) + 1
            continue
        settings = OperatorErrorConfig(1, config.rounds, config.token_budget)
        requests = served(server, costs, costs.blocks, settings, profile.seed)
        ours = [
            float(np.mean([1e3 * (getattr(one, name) or 0.0) for one in requests])) for name in ("ttft_s", "tpot_s")
        ]
        where = {
            "card": server.card,
            "model": server.model,
            "gpus": server.gpus,
            "split": run.split,
            "spread": run.spread,
            "prompt_tokens": server.prompt_tokens,
            "output_tokens": server.output_tokens,
            "clients": server.clients,
        }
        for source, (ttft, tpot) in (("vllm", (server.ttft_ms, server.tpot_ms)), ("simulated", ours)):
            latency = ttft + tpot * (server.output_tokens - 1)
            times = {"ttft_ms": round(ttft, 3), "tpot_ms": round(tpot, 3), "latency_ms": round(latency, 3)}
            found.append(where | {"source": source} | times)
    told = "; ".join(f"{times} runs: {reason}" for reason, times in left_out.items())
    provenance = {"kind": "simulated on measured operators", "costs": tables_from(), "left_out": told}
    return Outcome(found, provenance=provenance)


def mixture_summary(found: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The error of each metric in %, as it is summarised for dense models."""
    return operator_summary(found, parameters)
