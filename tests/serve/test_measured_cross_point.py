"""The costs of this machine's own preemptions: what is measured, what is kept of it, and what is not believed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption.preemption_policy import Action, Observation
from firsttoken.engine.request import Sampling
from firsttoken.engine.request_limits import STALL_FREE
from firsttoken.study import paths
from firsttoken.study.errors import ModelError
from firsttoken_serve.measured_cross_point import MeasuredCrossPoint, RecoveryCosts, load_costs, measure, save_costs

OF = {"machine": "this one", "dtype": "float32"}
SEEN = tuple(
    Observation(way, tokens - (way is Action.RECOMPUTE), seconds, 0.0)
    for tokens, swapped, again in ((64, 0.02, 0.01), (256, 0.03, 0.04), (1024, 0.07, 0.2))
    for way, seconds in ((Action.SWAP, swapped), (Action.RECOMPUTE, again))
)
COSTS = RecoveryCosts(SEEN, "2026-11-27")


@pytest.fixture
def executor() -> Iterator[LiveExecutor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=100,
            max_position_embeddings=200,
            eos_token_id=None,
            bos_token_id=None,
        )
        model = AutoModelForCausalLM.from_config(config).eval()
    made = LiveExecutor(model, 32, host_blocks=32)
    yield made
    made.close()


@pytest.fixture
def folder(executor, tmp_path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the executor's model, and a cache that is empty."""
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    executor.model.config.architectures = ["LlamaForCausalLM"]
    executor.model.config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_both_ways_are_seen_at_each_length_that_has_room(executor) -> None:
    costs = measure(executor, STALL_FREE)
    by_way = {way: sorted({one.tokens for one in costs.observations if one.action is way}) for way in Action}
    assert by_way == {Action.SWAP: [64, 198], Action.RECOMPUTE: [63, 197]}, "a context of 200 ends the lengths"
    assert len(costs.observations) == 12 and all(0 < one.seconds < math.inf for one in costs.observations)
    assert "64 tokens" in str(costs) and "198 tokens" in str(costs) and "\n" not in str(costs)


def test_where_nothing_can_be_swapped_nothing_is_known(executor) -> None:
    bare = LiveExecutor.__new__(LiveExecutor)
    bare.__dict__ = executor.__dict__ | {"host_pool": None}
    assert measure(bare, STALL_FREE) is None
    tiny = LiveExecutor.__new__(LiveExecutor)
    tiny.__dict__ = executor.__dict__ | {"limits": type(executor.limits)(4, 100)}
    assert measure(tiny, STALL_FREE) is None


def test_the_line_says_the_rule(tmp_path) -> None:
    assert str(COSTS).startswith("recompute up to 160 tokens (swapped and recomputed, measured here on 2026-11-27: ")
    assert "1,024 tokens 70.0 and 200.0 ms" in str(COSTS)
    assert str(RecoveryCosts(SEEN[:2], "2026-11-27")).startswith("recompute always (")


def test_what_is_kept_is_read_again(tmp_path) -> None:
    file = tmp_path / "new" / "costs.json"
    assert load_costs(file, OF) is None
    save_costs(file, OF, COSTS)
    assert load_costs(file, OF) == COSTS
    assert load_costs(file, OF | {"dtype": "bfloat16"}) is None, "of another model"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda held: "{",
        lambda held: "[]",
        lambda held: json.dumps(held | {"seen": []}),
        lambda held: json.dumps(held | {"seen": held["seen"][:1]}),
        lambda held: json.dumps(held | {"seen": [["swap", 0, 1.0], *held["seen"]]}),
        lambda held: json.dumps(held | {"seen": [["swap", 64, -1.0], *held["seen"]]}),
        lambda held: json.dumps(held | {"seen": [["swap", 64, math.nan], *held["seen"]]}),
        lambda held: json.dumps(held | {"seen": [["swop", 64, 1.0], *held["seen"]]}),
        lambda held: json.dumps(held | {"seen": [["swap", 64], *held["seen"]]}),
        lambda held: json.dumps({"of": held["of"], "seen": held["seen"]}),
        lambda held: json.dumps(held)[:-20],
    ],
)
def test_what_is_spoilt_is_not_believed(tmp_path, spoil: Any) -> None:
    file = tmp_path / "costs.json"
    save_costs(file, OF, COSTS)
    file.write_text(spoil(json.loads(file.read_text())))
    assert load_costs(file, OF) is None


def test_a_cache_that_cannot_be_written_costs_a_measurement(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    save_costs(tmp_path / "file" / "costs.json", OF, COSTS)


def test_the_policy_measures_once_and_begins_with_what_it_knows(executor, folder) -> None:
    first = MeasuredCrossPoint(folder, STALL_FREE)
    assert first.measures("float32")
    told = first.prepare(executor, "float32")
    assert told.startswith("cross_point: ") and first.prepare(executor, "float32") == told
    assert first._curves[Action.SWAP].seen == len(first._costs.observations) / 2, "what is told twice is learnt once"
    (file,) = (paths.CACHE / "recovery-costs").iterdir()
    written = file.read_bytes()
    second = MeasuredCrossPoint(folder, STALL_FREE)
    assert not second.measures("float32")
    assert second.prepare(executor, "float32") == told
    assert file.read_bytes() == written
    for way in Action:
        assert first.predict(way, 100) == second.predict(way, 100) > 0
    cheaper = min(Action, key=lambda way: second.predict(way, 100))
    assert second.choose(100, 0.0) is cheaper
    for other in (
        MeasuredCrossPoint(folder, STALL_FREE, remeasure=True).measures("float32"),
        MeasuredCrossPoint(folder, STALL_FREE, device="cuda").measures("float32"),
        MeasuredCrossPoint(folder, STALL_FREE).measures("bfloat16"),
    ):
        assert other


@pytest.mark.parametrize("seen", [SEEN, SEEN[::-1]], ids=["in order", "the other way round"])
def test_the_threshold_is_where_the_measured_costs_cross(executor, folder, seen) -> None:
    policy = MeasuredCrossPoint(folder, STALL_FREE)
    save_costs(*policy._cache_entry("float32"), RecoveryCosts(seen * 3, "2026-11-27"))
    policy.prepare(executor, "float32")
    assert policy.choose(64, 0.0) is Action.RECOMPUTE
    assert policy.choose(1000, 1.0) is Action.SWAP
    for number in range(12):  # the link is 20 times slower from now on
        policy.observe(Observation(Action.SWAP, 900, 1.3, 2.0 + number))
    assert policy.choose(1000, 20.0) is Action.RECOMPUTE


def test_no_other_threshold_stands_in_for_a_model_in_stages(executor, folder) -> None:
    policy = MeasuredCrossPoint(folder, STALL_FREE, plain_folder=False)
    assert not policy.measures("float32")
    assert "learnt while serving" in policy.prepare(executor, "float32") and not paths.CACHE.exists()
    policy.observe(Observation(Action.RECOMPUTE, 100, 0.1, 0.0))
    assert [policy.choose(100, float(now)) for now in range(3)] == [Action.SWAP, Action.RECOMPUTE, Action.RECOMPUTE]


def test_a_folder_without_a_model_is_told(executor, folder) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        MeasuredCrossPoint(folder, STALL_FREE).prepare(executor, "float32")


def test_who_is_preempted_after_measuring_says_the_same(executor, folder) -> None:
    """What measuring left in the pool is nobody's."""
    alone = Engine(executor, STALL_FREE)
    expected = alone.submit([1, 2, 3], Sampling(20))
    alone.run()
    policy = MeasuredCrossPoint(folder, STALL_FREE)
    policy.prepare(executor, "float32")
    engine = Engine(executor, STALL_FREE, policy=policy)
    request = engine.submit([1, 2, 3], Sampling(20))
    for _ in range(5):
        engine.step()
    engine.scheduler.preempt(request)
    engine.run()
    assert request.output == expected.output and engine.pool.free == engine.pool.count
