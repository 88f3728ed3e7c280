"""The simulator against a model that is split: vLLM with Qwen3-32B on two RTX PRO 6000, by five sources of costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firsttoken.assets.dense_shape import SHAPES
from firsttoken.assets.manual_downloads import downloaded
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.costs.operator_costs import OperatorCosts
from firsttoken.engine.costs.operator_tables import OperatorTables, tables_from
from firsttoken.engine.costs.profiled import ProfiledCosts
from firsttoken.engine.costs.tensor_parallel import ExchangingCosts, ScaledProfile
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Result, Rows, Table
from firsttoken.study.summary import Summary
from firsttoken_studies.sarathi.operator_error import rounded
from firsttoken_studies.sarathi.second_card import OPERATORS, off_rows, off_summary
from firsttoken_studies.sarathi.simulator_error import as_vllm, beside_vllm

SHARE = "the share's profile"
EXCHANGED = "the share's profile and all-reduces"
SCALED = "one GPU's profile, scaled"
LINKED = "the share's profile and its authors' link"
SOURCES = (EXCHANGED, SHARE, LINKED, SCALED, OPERATORS)


@dataclass(frozen=True)
class TwoCardsConfig:
    """A run of vLLM with ``model`` on ``gpus`` of ``card``, at most ``batch`` requests and
    ``token_budget`` tokens a step.

    Its timestamps are ``requests`` in the folder ``share``, which holds the profile of one GPU's share; ``whole`` is
    the profile of the whole model on one GPU. ``link_gbyte_s`` and ``link_latency_us`` are of the link between the two
    GPUs as the profile's authors state it (bench/examples/RTXPRO6000/Qwen3-32B/config.json), which was looked up when
    the all-reduces of the tables proved too fast for this run.
    """

    share: str
    whole: str
    requests: str
    model: str
    card: str
    gpus: int
    link_gbyte_s: float
    link_latency_us: float
    token_budget: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.token_budget, self.batch) < 1:
            raise ProfileError("two_cards: token_budget and batch must be at least 1")
        if self.model not in SHAPES:
            raise ProfileError(f"two_cards: no shape is called {self.model!r}; known: {', '.join(SHAPES)}")


def two_cards(profile: Profile) -> Outcome:
    """Rows {request, run, ttft_s, tpot_s, latency_s}; ``run`` is "vllm" or one of ``SOURCES``.

    Every simulation has the KV blocks that fit beside the weights, by the operators' tables.
    """
    config = profile.section("two_cards", TwoCardsConfig)
    costs, blocks = sources(config)
    engines = {run: as_vllm(of, blocks, config.batch, config.token_budget) for run, of in costs.items()}
    rows = rounded(beside_vllm(downloaded(config.share) / config.requests, engines), 5)
    provenance = {"kind": "simulated on profiled costs", "costs": config.share, "operators": tables_from()}
    return Outcome(rows, provenance=provenance)


def sources(config: TwoCardsConfig) -> tuple[dict[str, Costs], int]:
    """The costs by source, and the number of KV blocks."""
    shape, tables = SHAPES[config.model], OperatorTables.read(config.card)
    operators = OperatorCosts.of(tables, shape, config.gpus)
    share = ProfiledCosts.read(downloaded(config.share), shape.layers)
    whole = ProfiledCosts.read(downloaded(config.whole), shape.layers)
    costs: dict[str, Costs] = {
        EXCHANGED: ExchangingCosts.of(share, tables, shape, config.gpus),
        SHARE: share,
        LINKED: ExchangingCosts.over_link(
            share, shape, config.gpus, 1e9 * config.link_gbyte_s, 1e-6 * config.link_latency_us
        ),
        SCALED: ScaledProfile(whole, OperatorCosts.of(tables, shape), operators),
        OPERATORS: operators,
    }
    return costs, operators.blocks


def two_cards_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """How far each of ``SOURCES`` is off, in % of vLLM's: mean, median and P99 of each time, and the worst."""
    return off_summary(rows, SOURCES)


def two_cards_rows(result: Result) -> Table:
    """A line a time: vLLM's on the two cards, and how far each source of costs is off."""
    return off_rows(result, SOURCES)
