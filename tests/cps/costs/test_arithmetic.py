from __future__ import annotations

import pytest

from firsttoken.assets.shapes import shape_config
from firsttoken.cps.costs.arithmetic import LinkModel
from firsttoken.simulation.costs.published import TABLE_2
from firsttoken_studies.cps.recovery_latency_figures import LINKS, SHAPES, map_of

PAPER = LinkModel(shape_config("qwen2.5-0.5b"), 25e9)


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: str(row.tokens))
def test_the_arithmetic_is_of_the_size_of_table_2(row) -> None:
    """Prices are those of one line, 1,024 tokens; the others dearer copies and cheaper products are the paper's own."""
    assert PAPER.swap_s(row.tokens) * 1e3 == pytest.approx(row.swap_ms, rel=0.35)
    assert PAPER.recompute_s(row.tokens) * 1e3 == pytest.approx(row.recompute_ms, rel=0.15)


def test_the_papers_own_cell_is_its_own_crossing() -> None:
    found = dict(zip(SHAPES, map_of(coalesced=False), strict=True))["qwen2.5-0.5b"][list(LINKS).index("4.0 x16")]
    assert found.below == "swap" and found.tokens == pytest.approx(927, rel=0.1)


@pytest.mark.parametrize("coalesced", [False, True])
def test_a_faster_link_never_makes_swap_worse(coalesced: bool) -> None:
    for line in map_of(coalesced):
        lengths = [float("inf") if each.tokens is None and each.below == "swap" else each.tokens or 0 for each in line]
        assert lengths == sorted(lengths)
