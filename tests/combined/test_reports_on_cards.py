"""A cold start on a card: bytes over a link and a prefill, of the whole model and of its first stage."""

from __future__ import annotations

import dataclasses

import pytest

from firsttoken.assets.dense_shape import SHAPES
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import OperatorTables
from firsttoken.study.errors import ProfileError
from firsttoken_studies.nb47_the_other_reports_on_gpus.study import (
    FIRST_STAGE,
    LLAMA_2,
    MODELS,
    WHOLE,
    cold_starts,
    equal_heads_prefill_s,
    on_cards_summary,
)

CARD = "h100-sxm"


@pytest.fixture(scope="module")
def summary():
    return on_cards_summary(cold_starts(CARD, (1, 16, 1e6), 512), {})


def test_the_whole_model_is_13_48_gb():
    assert 2 * MODELS[LLAMA_2].weights / 1e9 == pytest.approx(13.48, abs=0.01)


def test_over_a_slow_link_only_bytes_count(summary):
    where = {"machine": CARD, "model": LLAMA_2, "gbit_per_s": 1}
    whole, first = (summary.value("ttft_s", **where, variant=stage) for stage in (WHOLE, FIRST_STAGE))
    assert whole == pytest.approx(8 * 13.477, rel=1e-3)
    below = summary.value("ttft_below_pct", **where, variant=FIRST_STAGE, than=WHOLE)
    assert below == pytest.approx(100 * (1 - first / whole)) == pytest.approx(24.03, abs=0.02)
    assert summary.value("prefill_share_pct", **where, variant=WHOLE) < 0.1


def test_without_loading_the_layers_of_a_prefill_count(summary):
    where = {"machine": CARD, "model": LLAMA_2, "gbit_per_s": 1e6}
    assert summary.value("prefill_share_pct", **where, variant=WHOLE) > 90
    assert 23 < summary.value("ttft_below_pct", **where, variant=FIRST_STAGE, than=WHOLE) < 25


def test_a_prefill_of_equal_heads_lies_by_that_of_shared_ones():
    """The products of queries, keys and values are wider, and nothing else differs much."""
    tables, shared = OperatorTables.read(CARD), SHAPES["llama-3.1-8b"]
    equal = dataclasses.replace(shared, kv_heads=shared.heads)
    ratio = equal_heads_prefill_s(tables, equal, 2048) / OperatorCosts.of(tables, shared).step_s([(0, 2048)], [])
    assert 1.0 < ratio < 1.2


def test_a_card_that_is_not_there_is_refused():
    with pytest.raises(ProfileError, match="no operators of 'rtx-5090' are pinned; known: a100-sxm"):
        cold_starts("rtx-5090", (1,), 512)
