"""Many cold starts, simulated: what the link carries, and that every request is answered."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from firsttoken.engine.costs.fitted import FittedCosts
from firsttoken.engine.engine import Engine
from firsttoken.engine.workload_items import Item
from firsttoken.progressiveserve.stages import STAGES
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb63_many_cold_starts import figures, replicas
from firsttoken_studies.nb63_many_cold_starts import study as experiment
from firsttoken_studies.nb63_many_cold_starts.replicas import (
    FAIR,
    FIRST_STAGES,
    IN_TURN,
    Bounds,
    Loads,
    System,
    serve,
    shared_link,
    stages_at,
)
from firsttoken_studies.nb63_many_cold_starts.study import ARMS, STAGED, WARM, WHOLE, ManyStartsConfig
from firsttoken_studies.record.results import Result

SIZES = (8e6, 1e6, 1e6)
BOUNDS = Bounds(open_requests=3, token_budget=64, moves=False)


def _costs(share: float) -> FittedCosts:
    return FittedCosts(0.01 * share, 1e-4 * share, 0.0, 1e-3 * share, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


TOY = System((8_000_000, 1_000_000, 1_000_000), 10_000_000, {1: _costs(0.8), 2: _costs(0.9), 3: _costs(1.0)}, 256)


@pytest.fixture
def config() -> ManyStartsConfig:
    return load_profile("quick").section("many_starts", ManyStartsConfig)


@pytest.mark.parametrize("order", [FAIR, FIRST_STAGES, IN_TURN])
@pytest.mark.parametrize("seed", range(20))
def test_the_link_carries_every_byte_once_and_never_more_than_its_rate(order: str, seed: int) -> None:
    draw = random.Random(seed)
    starts = [draw.choice([0.0, draw.uniform(0, 20)]) for _ in range(draw.randint(1, 12))]
    sizes = [draw.randint(1, 10**7) for _ in range(draw.randint(1, 3))]
    rate, most = 1e6, draw.uniform(1e5, 2e6)
    loads = shared_link(starts, sizes, rate, most, order)
    assert loads.bytes_by(math.inf) == pytest.approx([size * len(starts) for size in sizes], rel=1e-6, abs=len(starts))
    assert all(sum(rates) <= rate * (1 + 1e-9) for _, _, rates in loads.flows)
    assert all(begin < end or not sum(rates) for begin, end, rates in loads.flows)
    for begin, times in zip(starts, loads.ready_s, strict=True):
        assert times == sorted(times) and len(times) == len(sizes)
        assert times[-1] - begin >= sum(sizes) / min(rate, most) * (1 - 1e-6) - 1e-4  # as if alone
    if order == FAIR and most >= rate:  # an idle link is the only time that is lost
        assert max(map(max, loads.ready_s)) <= max(starts) + len(starts) * sum(sizes) / rate + 1e-3


def test_a_fair_link_is_shared_alike_and_a_turn_is_alone() -> None:
    fair = shared_link([0.0] * 4, SIZES, 1e6, 1e6)
    assert fair.ready_s == [pytest.approx([32, 36, 40])] * 4
    turns = shared_link([0.0] * 4, SIZES, 1e6, 1e6, IN_TURN)
    assert [times[0] for times in turns.ready_s] == pytest.approx([8, 16, 24, 32])
    assert max(times[-1] for times in turns.ready_s) == pytest.approx(40)
    capped = shared_link([0.0, 0.0], SIZES, 1e6, 1e5)
    assert capped.ready_s[0] == pytest.approx([80, 90, 100])
    late = shared_link([0.0, 7.0], SIZES, 1e6, 1e6, FIRST_STAGES)  # from 8.0 on two first stages, then none waits
    assert late.ready_s[1][0] < shared_link([0.0, 7.0], SIZES, 1e6, 1e6).ready_s[1][0]


def _drawn(seed: int, count: int = 30) -> list[Item]:
    draw = random.Random(seed)
    moments = sorted(draw.uniform(0, 60) for _ in range(count))
    return [Item(at, draw.randint(1, 90), draw.randint(1, 40)) for at in moments]


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("order", [FAIR, IN_TURN])
@pytest.mark.parametrize("seed", range(5))
def test_no_request_is_lost_and_none_begins_before_its_replica(moves: bool, order: str, seed: int) -> None:
    items = _drawn(seed)
    loads = shared_link([0.0, 3.0, 5.0], SIZES, 1e6, 1e6, order)
    found = serve(TOY, stages_at(loads), items, BOUNDS._replace(moves=moves))
    assert sorted(request.arrival_s for request in found.requests) == [item.arrival_s for item in items]
    assert [len(request.times_s) for request in found.requests] == [item.output_tokens for item in items]
    first_s = min(times[0] for times in loads.ready_s)
    for request in found.requests:
        assert request.times_s == sorted(request.times_s) and request.times_s[0] > max(first_s, request.arrival_s)
    assert found.said.total() == sum(item.output_tokens for item in items)
    assert set(found.said) <= set(STAGES)


def test_steps_that_are_taken_at_once_are_those_one_by_one(monkeypatch) -> None:
    loads = shared_link([0.0, 3.0], SIZES, 1e6, 1e6)
    quick = serve(TOY, stages_at(loads), _drawn(7), BOUNDS)
    monkeypatch.setattr(replicas, "fast_forward", lambda engine, until_s: False)
    slow = serve(TOY, stages_at(loads), _drawn(7), BOUNDS)
    assert quick.said == slow.said
    for one, two in zip(quick.requests, slow.requests, strict=True):
        assert one.times_s == pytest.approx(two.times_s, abs=1e-9)


def test_a_replica_never_has_more_requests_than_it_may(monkeypatch) -> None:
    most, right = [], Engine.submit

    def submit(self, *given, **options):
        request = right(self, *given, **options)
        most.append(self.open_requests)
        return request

    monkeypatch.setattr(Engine, "submit", submit)
    serve(TOY, [[(5.0, 3)], [(6.0, 3)]], [Item(0.0, 4, 4)] * 20, BOUNDS)
    assert max(most) == BOUNDS.open_requests and len(most) == 20


def test_requests_that_move_are_computed_again_and_pay_for_it() -> None:
    item, ready = [Item(0.0, 60, 120)], [[(0.0, 1), (0.5, 3)]]
    stay, move = (serve(TOY, ready, item, BOUNDS._replace(moves=moves)) for moves in (False, True))
    assert stay.said == {1: 120}
    assert set(move.said) == {1, 3} and move.said.total() == 120
    alone = serve(TOY, [[(0.0, 1)]], item, BOUNDS)
    assert stay.requests[0].times_s == pytest.approx(alone.requests[0].times_s)
    gaps = [b - a for a, b in zip(move.requests[0].times_s, move.requests[0].times_s[1:], strict=False)]
    assert max(gaps) > 1.5 * sorted(gaps)[len(gaps) // 2]


def test_bytes_that_are_lost_on_the_way_are_seen() -> None:
    """A negative control: what the properties above look at does change when the link is wrong."""
    loads = shared_link([0.0] * 3, SIZES, 1e6, 1e6)
    wrong = Loads(loads.ready_s, [(begin, end, [2 * rate for rate in rates]) for begin, end, rates in loads.flows])
    assert wrong.bytes_by(math.inf) != pytest.approx([size * 3 for size in SIZES], rel=1e-3)
    assert any(sum(rates) > 1e6 * 1.01 for _, _, rates in wrong.flows)


def test_an_arm_pays_from_start_to_the_last_token(config: ManyStartsConfig) -> None:
    config = dataclasses.replace(config, gbit_per_s=(8e-3, 1.0), most_gbit_per_s=(8e-3, 1.0), open_requests=3)
    items = [Item(0.1 * number, 20, 30) for number in range(6)]
    rows = {arm: experiment.burst(TOY, arm, [0.0, 1.0], items, config) for arm in ARMS}
    for arm, row in rows.items():
        begun = 0.0 if arm == WARM else 1.0
        assert row["paid_s"] == pytest.approx(2 * row["over_s"] - begun)
        assert row["served"] == 6 and row["tokens"] == 180
        assert all(first <= over for first, over in zip(row["bytes_first"], row["bytes_over"], strict=True))
        assert sum(row["bytes_over"]) <= sum(row["bytes_all"]) + 10
    assert rows[WARM]["ttft_p95_s"] < 1 < rows[STAGED]["ttft_p95_s"] < rows[WHOLE]["ttft_p95_s"]
    assert rows[WHOLE]["pruned_pct"] == rows[WARM]["pruned_pct"] == 0 < rows[STAGED]["pruned_pct"]
    assert rows["whole, in turn"]["first_s"] < rows[WHOLE]["first_s"]


def _row(arm: str, paid_s: float, seed: int) -> dict:
    row = {
        "what": "burst",
        "model": "smollm2-135m",
        "replicas": 2,
        "seed": seed,
        "arm": arm,
        "served": 10,
        "tokens": 50,
    }
    row |= {"ttft_p50_s": paid_s / 4, "ttft_p95_s": paid_s / 2, "ttft_p99_s": paid_s / 2, "first_s": 1.0}
    row |= {"over_s": paid_s / 2, "whole_s": 9.0, "pruned_pct": 0.0, "paid_s": paid_s}
    came = [] if arm == WARM else [1e9]
    return row | {"bytes_first": came, "bytes_over": came, "bytes_all": came}


ROWS = [_row(arm, paid_s, seed) for arm, paid_s in ((WHOLE, 100.0), (STAGED, 80.0), (WARM, 20.0)) for seed in range(5)]
ROWS.append({"what": "live", "case": "whole", "moment": experiment.FIRST, "live_s": 2.0, "simulated_s": 1.9})
ASKED = {"systems": ["smollm2-135m"], "arms": [WHOLE, STAGED, WARM], "replicas": [2], "gbit_per_s": [1.0]}
ASKED = {"many_starts": ASKED | {"usd_per_hour": [3.6], "gaps_s": [30.0, 60.0], "keep_alive_s": [0.0, 60.0]}}


def test_the_summary_says_where_a_pool_and_a_cold_start_cost_the_same() -> None:
    summary = experiment.starts_summary(ROWS, ASKED)
    where = {"model": "smollm2-135m", "replicas": 2}
    assert summary.value("ttft_p95_below_pct", **where, variant=STAGED, than=WHOLE) == pytest.approx(20)
    assert summary.value("crossing_s", **where, variant=STAGED, than=WARM) == pytest.approx(30)
    assert summary.value("usd", **where, variant=STAGED) == pytest.approx(80 / 3600 * 3.6 * 100)
    cold, kept = (summary.value("usd", **where, variant=STAGED, case=experiment.pool(30, kept)) for kept in (0, 60))
    assert cold == pytest.approx(8)
    met = 1 - math.exp(-2)
    assert kept == pytest.approx((met * 20 + (1 - met) * 80 + 2 * 30 * met) / 10)
    assert summary.value("off_pct", source="simulated", than="live", across="worst") == pytest.approx(5)


def test_figures_and_tables_are_made_of_a_result_alone() -> None:
    summary = experiment.starts_summary(ROWS, ASKED)
    result = Result("many_starts", "full", ASKED, {"slug": "x"}, {}, "", [0], "2026", 0.0, {}, ROWS, {}, summary)
    assert len(figures.waits(None, result).axes) == 1
    assert len(figures.money(None, result).axes) == 1
    assert [row["arm"] for row in figures.arm_rows(result, "smollm2-135m", 2)] == [WHOLE, STAGED, WARM]
    assert len(list(figures.crossing_rows(result))) == len(figures.error_rows(result)) == 1


def test_without_the_recorded_costs_one_line_says_so(monkeypatch) -> None:
    monkeypatch.setattr(experiment, "load_result", lambda *given, **options: None)
    with pytest.raises(ProfileError, match="no recorded cold_start of amd-epyc-avx512bf16-2c is here"):
        experiment.here()
