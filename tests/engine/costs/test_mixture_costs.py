"""Mixtures of experts: the kernel that was measured stands where a dense model has its MLP, and what no table has is
refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from firsttoken.assets.dense_shape import MIXTURES, DenseShape, MixtureShape, dense_shape, model_shape
from firsttoken.simulation.costs import mixture_costs as mixtures
from firsttoken.simulation.costs.mixture_costs import experts_s, layout, mixture_costs
from firsttoken.simulation.costs.operator_tables import OperatorTables, power_between
from firsttoken.simulation.hardware import Hardware
from firsttoken.study.errors import ModelError, ProfileError

SHAPE = MixtureShape(DenseShape(3, 4096, 512, 32, 8, 128, 32000, stored="fp8"), experts=8, active=2)
CARD = "h200-sxm"


def expert_rows(scale: float = 1.0) -> list[dict[str, object]]:
    """Two kernels by tokens, of which one is faster for few and the other for many; two layouts, two routings."""
    return [
        {
            "moe_dtype": "fp8_block",
            "hidden_size": 4096,
            "inter_size": 512,
            "topk": 2,
            "num_experts": 8,
            "moe_tp_size": split,
            "moe_ep_size": spread,
            "num_tokens": tokens,
            "distribution": routing,
            "latency": scale * uneven * milliseconds / split / spread,
        }
        for split, spread in ((1, 1), (2, 1), (1, 2))
        for routing, uneven in (("balanced", 1.0), ("power_law_1.2", 1.5))
        for tokens in (1, 16, 256, 4096)
        for milliseconds in (0.1 + 0.001 * tokens, 0.3 + 0.0005 * tokens)
    ]


@pytest.fixture
def experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lay a table of experts into the cache's place."""
    path = tmp_path / "experts.parquet"
    monkeypatch.setattr(mixtures, "asset_path", lambda name: path)

    def lay(rows: list[dict[str, object]]) -> Path:
        mixtures._experts.cache_clear()
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path

    lay(expert_rows())
    yield lay
    mixtures._experts.cache_clear()


def costs(split: int = 1, spread: int = 1, **others):
    return mixture_costs(OperatorTables.read(CARD), SHAPE, split, spread, **others)


def test_the_fastest_kernel_is_taken(experts):
    at, seconds = experts_s(CARD, SHAPE, 1, 1, "balanced")
    assert at.tolist() == [1, 16, 256, 4096]
    assert seconds == pytest.approx([0.101e-3, 0.116e-3, 0.356e-3, 2.348e-3])


def test_twice_the_experts_time_adds_it_once_a_layer(experts):
    steps = (([], [500] * 16), ([(0, 256)], []), ([(512, 240)], [100] * 16))
    single = [costs().step_s(*step) for step in steps]
    experts(expert_rows(scale=2.0))
    tokens = np.array([16.0, 256.0, 256.0])
    added = SHAPE.dense.layers * power_between(tokens, experts_s(CARD, SHAPE, 1, 1, "power_law_1.2")) / 2
    assert [costs().step_s(*step) for step in steps] == pytest.approx(np.array(single) + added)


def test_uneven_routing_takes_longer(experts):
    assert costs(routing="balanced").step_s([], [9] * 64) < costs().step_s([], [9] * 64)


@pytest.mark.parametrize(("split", "spread"), [(2, 1), (1, 2)])
def test_two_gpus_exchange_twice_a_layer(experts, split, spread):
    tables = OperatorTables.read(CARD)
    both = costs(split, spread).step_s([], [9] * 64)
    exchanged = 2 * SHAPE.dense.layers * power_between(np.array([64.0 * 4096 * 2]), tables.all_reduce(2))[0]
    assert exchanged < both < costs().step_s([], [9] * 64) + exchanged


def test_all_experts_weigh_on_the_memory(experts):
    assert SHAPE.as_dense.weights - SHAPE.dense.weights == 3 * 3 * 4096 * 512 * 7
    assert costs(2).blocks > costs().blocks
    tables = replace(OperatorTables.read(CARD), memory_bytes=4.2e9)
    with pytest.raises(ProfileError, match=r"leave no room for keys and values; take more GPUs"):
        mixture_costs(tables, SHAPE, 1, 1)


def test_the_published_mixtures_have_their_weights():
    billions = {name: shape.as_dense.weights / 1e9 for name, shape in MIXTURES.items()}
    assert billions == {"qwen3-235b-a22b": pytest.approx(235, rel=0.01), "minimax-m2.5": pytest.approx(229, rel=0.01)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"split": 4},
            r"no fp8_block experts of 4096 x 512, 2 of 8, split 4 and spread 1 ways; measured for these: 1 x 1",
        ),
        ({"routing": "random"}, r"no experts under the routing 'random'; measured: balanced, power_law_1.2"),
    ],
)
def test_what_no_table_has_is_refused(experts, change, says):
    with pytest.raises(ProfileError, match=says):
        costs(**change)
    with pytest.raises(ProfileError, match=r"no fp8_block experts of 4096 x 512, 3 of 8, .*; measured for these: none"):
        layout(CARD, replace(SHAPE, active=3), 1)


def test_experts_lie_as_they_were_measured(experts):
    """Split over all GPUs where that was measured, else spread; what was not measured names what was."""
    assert layout(CARD, SHAPE, 1) == (1, 1)
    assert layout(CARD, SHAPE, 2) == (2, 1)
    experts([row for row in expert_rows() if row["moe_tp_size"] == 1])
    assert layout(CARD, SHAPE, 2) == (1, 2)
    with pytest.raises(ProfileError, match=r"2 of 8, on 3 GPUs; measured for these: 1 x 1, 1 x 2$"):
        layout(CARD, SHAPE, 3)
    with pytest.raises(ProfileError, match="no experts of 'l40s' are pinned"):
        layout("l40s", SHAPE, 1)


CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def written(folder: Path, **changed: object) -> str:
    (folder / "config.json").write_text(json.dumps(CONFIG | changed), encoding="utf-8")
    return str(folder)


def test_a_config_says_whether_its_model_is_a_mixture(tmp_path):
    assert model_shape("llama-3.1-8b") == dense_shape("llama-3.1-8b")
    assert model_shape("qwen3-235b-a22b") is MIXTURES["qwen3-235b-a22b"]
    assert model_shape(written(tmp_path)) == replace(SHAPE, dense=replace(SHAPE.dense, head_norms=True))
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_experts": None, "num_local_experts": 8}
    shape = model_shape(written(tmp_path, **mixtral, moe_intermediate_size=None))
    assert (shape.dense.mlp, shape.experts, shape.active) == (12288, 8, 2)
    dense = model_shape(written(tmp_path, num_experts=None, quantization_config=None))
    assert dense == replace(SHAPE.dense, mlp=12288, head_norms=True, stored="bfloat16")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"num_experts_per_tok": None},
            "does not say how many experts there are, how wide, and how many a token takes",
        ),
        ({"num_experts_per_tok": 9}, "does not say how many experts"),
        ({"num_experts": "eight"}, "does not say how many experts"),
        ({"n_shared_experts": 1}, "'n_shared_experts' is 1, and what that changes is not computed here"),
        ({"mlp_only_layers": [0]}, r"'mlp_only_layers' is \[0\], and what that changes is not computed"),
        ({"decoder_sparse_step": 2}, "'decoder_sparse_step' is 2, and what that changes is not computed"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "products of weights in 'fp8' are not counted; known: 16 bits",
        ),
    ],
)
def test_a_mixture_of_which_nothing_was_measured_is_refused(tmp_path, changed, message):
    with pytest.raises(ModelError, match=message):
        model_shape(written(tmp_path, **changed))


def test_a_mixture_runs_on_a_card(experts, tmp_path):
    hardware = Hardware(CARD, 32, 1024, model=written(tmp_path), gpus=2)
    assert hardware.layers == 3 and hardware.blocks > 0
    assert hardware.description.endswith("in 8 bits on 2 h200-sxm by measured operators")
    assert hardware.iteration_s(hardware.read()) > 0
    half = written(tmp_path, quantization_config=None)
    with pytest.raises(ProfileError, match="has no bfloat16 experts of 4096 x 512, 2 of 8, on 2 GPUs"):
        Hardware(CARD, 32, 1024, model=half, gpus=2)
    assert Hardware(CARD, 32, 1024, model=half, gpus=2, weights="fp8").blocks == hardware.blocks
    experts([row | {"moe_dtype": "bfloat16"} for row in expert_rows()])
    whole = Hardware(CARD, 32, 1024, model=half, gpus=2)
    assert whole.blocks < hardware.blocks and "8 bits" not in whole.description
    with pytest.raises(ModelError, match=r"no shape is called 'qwen9'.*llama-3.1-8b.*qwen3-235b-a22b"):
        Hardware(CARD, 32, 1024, model="qwen9")
