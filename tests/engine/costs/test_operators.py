"""Operator tables and their sum: what is measured is met exactly, what lies between is between, and what is not covered
is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.assets.dense_shape import SHAPES, DenseShape, dense_shape, model_shape
from firsttoken.simulation.costs import operator_tables
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import (
    CONTEXT,
    GENERATION,
    PRODUCTS,
    OperatorTables,
    read_table,
    undisturbed,
)
from firsttoken.study.errors import AssetError, CorpusError, ModelError, ProfileError

SHAPE = DenseShape(layers=2, hidden=64, mlp=128, heads=4, kv_heads=2, head_dim=16, vocabulary=256)
SIZES = (16, 32, 64, 128, 256)


def product_ms(m: int, n: int, k: int) -> float:
    return 0.002 + 1e-6 * n * k / 64 + 1e-8 * m * n * k


def attention_ms(heads: int, batch: int, size: int) -> float:
    return 0.003 + 1e-6 * heads * batch * size


def written(folder: Path, name: str, rows: list[dict[str, object]]) -> Path:
    path = folder / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OperatorTables:
    """The tables of a card that nobody has, by formulas."""
    products = [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": product_ms(m, n, k)}
        for m in (1, 8, 64, 512)
        for n in SIZES
        for k in SIZES
    ]
    attention = {
        kind: [
            {
                "num_heads": heads,
                "num_key_value_heads": kv,
                "head_dim": 16,
                "kv_cache_dtype": "bfloat16",
                "batch_size": batch,
                size: at,
                "latency": attention_ms(heads, batch, at),
            }
            for heads in (1, 2, 4, 8)
            for kv in (1, 2)
            for batch in (1, 4, 16)
            for at in (1, 16, 256, 1024)
        ]
        for kind, size in ((CONTEXT, "isl"), (GENERATION, "step"))
    }
    own = [
        {"num_gpus": gpus, "backend": "vllm_graph", "message_size": size, "latency": 0.004 + size * 1e-6}
        for gpus in (2, 4)
        for size in (128, 4096, 1 << 20)
    ]
    nccl = [
        {"op_name": "all_reduce", "num_gpus": gpus, "nccl_dtype": "half", "message_size": size, "latency": 0.02}
        for gpus in (2, 4)
        for size in (128, 1 << 20)
    ]
    files = {PRODUCTS: products, **attention, "all-reduce": own, "nccl": nccl}
    for kind, rows in files.items():
        written(tmp_path, f"a100-sxm-{kind}", rows)
    (tmp_path / "a100-sxm.yaml").write_text(
        "gpu: {mem_bw: 1.0e+12, mem_bw_empirical_scaling_factor: 0.8, mem_empirical_constant_latency: 3.0e-6, "
        "mem_capacity: 8.0e+10}\nnode: {pcie_bw: 3.2e+10}\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(operator_tables, "asset_path", lambda name: tmp_path / name)
    operator_tables._read.cache_clear()
    operator_tables._products_of.cache_clear()
    yield OperatorTables.read("a100-sxm")
    operator_tables._read.cache_clear()
    operator_tables._products_of.cache_clear()


def test_a_measured_product_is_met_exactly(tables):
    (sizes, seconds), beyond = tables.product("bfloat16", 64, 128)
    assert sizes.tolist() == [1, 8, 64, 512] and not beyond
    assert seconds == pytest.approx([product_ms(m, 64, 128) / 1e3 for m in (1, 8, 64, 512)])


def test_between_two_measured_products_lies_one_between_them(tables):
    at = [tables.product("bfloat16", n, 64)[0][1] for n in (64, 96, 128)]
    assert (at[0] < at[1]).all() and (at[1] < at[2]).all()


@given(st.lists(st.one_of(st.floats(1e-6, 1.0), st.just(np.inf)), min_size=1, max_size=12))
def test_no_size_takes_a_quarter_longer_than_a_larger_one(seconds):
    found = undisturbed(np.array(seconds))
    for at, (before, after) in enumerate(zip(seconds, found, strict=True)):
        assert after <= before and np.isfinite(after) == np.isfinite(before)
        if np.isfinite(before):
            assert after <= 1.25 * min(found[at:]) and after in seconds[at:]
        if before <= 1.25 * min(seconds[at:]):
            assert after == before  # a point that was not disturbed stays as it was measured
    assert (undisturbed(found) == found).all()


def test_a_disturbed_product_takes_as_long_as_a_larger_one(tables, tmp_path):
    rows = pq.read_table(tmp_path / f"a100-sxm-{PRODUCTS}.parquet").to_pylist()
    for row in rows:
        row["latency"] *= 10 if (row["m"], row["n"], row["k"]) == (8, 64, 128) else 1
    written(tmp_path, f"a100-sxm-{PRODUCTS}", rows)
    operator_tables._read.cache_clear()
    operator_tables._products_of.cache_clear()
    (_, seconds), _ = OperatorTables.read("a100-sxm").product("bfloat16", 64, 128)
    assert seconds == pytest.approx([product_ms(m, 64, 128) / 1e3 for m in (1, 64, 64, 512)])


def test_beyond_the_table_a_product_grows_with_its_width_and_says_so(tables):
    (_, last), inside = tables.product("bfloat16", 256, 64)
    (_, twice), beyond = tables.product("bfloat16", 512, 64)
    assert twice == pytest.approx(2 * last) and beyond and not inside


def test_heads_between_two_measured_lie_on_the_line(tables):
    sizes, seconds = tables.attention(CONTEXT, 3, 2, 16, "bfloat16")[1]
    assert seconds == pytest.approx([attention_ms(3, 1, int(size)) / 1e3 for size in sizes])


def test_an_all_reduce_takes_the_faster_of_two_kernels(tables):
    sizes, seconds = tables.all_reduce(2)
    assert dict(zip(sizes.tolist(), seconds.tolist(), strict=True))[128.0] == pytest.approx(0.004128e-3)
    assert seconds[-1] == pytest.approx(0.02e-3)  # NCCL's, of 1 MiB


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda tables: OperatorTables.read("gtx-1080"), r"no operators of 'gtx-1080' are pinned; known: a100-sxm"),
        (lambda tables: tables.product("fp8", 64, 64), r"no products of fp8; measured: bfloat16"),
        (lambda tables: tables.attention(CONTEXT, 4, 8, 16, "bfloat16"), r"no context attention of 4 heads, 8 of keys"),
        (lambda tables: tables.attention(GENERATION, 16, 2, 16, "bfloat16"), r"with these it has 1, 2, 4, 8 heads"),
        (lambda tables: tables.attention(CONTEXT, 4, 2, 128, "bfloat16"), r"128 wide"),
        (lambda tables: tables.all_reduce(8), r"no all-reduce of 8 GPUs; measured: 2, 4"),
        (
            lambda tables: OperatorCosts.of(tables, SHAPE, 3),
            r"4 heads, 2 of keys and values, and an MLP of 128 cannot be",
        ),
        (
            lambda tables: OperatorCosts.of(tables, replace(SHAPE, heads=8, kv_heads=6), 4),
            r"8 heads, 6 of keys and values, and an MLP of 128 cannot be split over 4 GPUs",
        ),
        (lambda tables: OperatorCosts.of(tables, SHAPE, kv="int4"), r"no operators of bfloat16 weights over a int4"),
        (
            lambda tables: OperatorCosts.of(tables, replace(SHAPE, layers=10**6)),
            r"on each of 1 a100-sxm leave no room for keys and values",
        ),
    ],
)
def test_what_no_table_covers_is_refused_in_one_line(tables, ask, says):
    with pytest.raises(ProfileError, match=says) as raised:
        ask(tables)
    assert "\n" not in str(raised.value)


def test_a_step_is_the_sum_of_its_operators(tables):
    costs = OperatorCosts.of(tables, SHAPE)
    tokens, contexts = 7 + 4, [256] * 4
    curves = [tables.product("bfloat16", n, k)[0] for n, k in ((128, 64), (64, 64), (256, 64), (64, 128))]
    layer = sum(np.exp(np.interp(np.log(tokens), np.log(at), np.log(s))) for at, s in curves)
    layer += (attention_ms(4, 1, 7) + attention_ms(4, 4, 256)) / 1e3
    bytes_moved = tokens * (8 * 64 + 8 * 64 + 4 * (4 + 4) * 16 + 4 * 2 * 2 * 16 / 2 * 1 + 6 * 128)
    layer += bytes_moved / 0.8e12 + 5 * 3e-6
    head = np.exp(np.interp(np.log(5), *map(np.log, tables.product("bfloat16", 256, 64)[0])))
    assert costs.step_s([(0, 7)], contexts) == pytest.approx(2 * layer + head, rel=1e-3)


def test_chunks_of_a_prompt_cost_its_attention_once(tables):
    costs = OperatorCosts.of(tables, SHAPE)
    whole = costs._chunk_s(0, 1024)
    pieces = costs._chunk_s(0, 256) + costs._chunk_s(256, 768)
    assert pieces == pytest.approx(whole)
    assert costs._chunk_s(1000, 1) >= costs._chunk_s(0, 1)  # a kernel takes its least time


@pytest.mark.parametrize("context", [1, 200, 4096])
def test_more_decodes_never_cost_less(tables, context):
    costs = OperatorCosts.of(tables, SHAPE)
    seconds = [costs.step_s([], [context] * count) for count in (1, 3, 4, 9, 16, 40)]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert costs.step_s([], []) == 0


@pytest.mark.parametrize("contexts", [[1], [255, 1, 900], [300] * 5, [10] * 16, [900] * 40])
def test_steps_of_decodes_take_what_each_takes_to_the_bit(tables, contexts):
    costs = OperatorCosts.of(tables, SHAPE)
    alone = [costs.step_s([], [tokens + step for tokens in contexts]) for step in range(1100)]
    assert costs.decode_steps_s(contexts, 1100) == alone
    assert costs.decode_steps_s(contexts, 3) == alone[:3] and costs.decode_steps_s([], 20) == [0.0] * 20


def test_two_cards_halve_the_products_and_add_all_reduces(tables):
    one, two = (OperatorCosts.of(tables, SHAPE, gpus) for gpus in (1, 2))
    assert two.once[1] > one.once[1]  # a token: latencies and two all-reduces
    assert two.blocks > 2 * one.blocks
    assert two.swap_out_s(100) == pytest.approx(one.swap_out_s(100) / 2)


@pytest.mark.parametrize("size", [0, 100, 1000])
def test_a_table_that_is_cut_off_is_refused(tmp_path, size):
    path = written(tmp_path, "cut", [{"m": m, "latency": 1.0} for m in range(100)])
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorpusError, match=r"cut.parquet.*is no whole Parquet table.*run `firsttoken fetch`"):
        read_table(path, ("m",))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"m": 1, "latency": 0.0}], r"latency must be above 0"),
        ([{"m": 1, "latency": float("nan")}], r"latency must be above 0"),
        ([{"n": 1, "latency": 1.0}], r"has no column m"),
        ([{"m": 1}], r"has no column latency"),
    ],
)
def test_a_table_of_other_content_is_refused(tmp_path, rows, says):
    with pytest.raises(CorpusError, match=says):
        read_table(written(tmp_path, "odd", rows), ("m",))


def test_tables_that_are_not_fetched_say_how(tmp_path, monkeypatch):
    from firsttoken.study import paths

    monkeypatch.setattr(paths, "CACHE", tmp_path)
    operator_tables._read.cache_clear()
    with pytest.raises(AssetError, match=r"h100-sxm.yaml is not in the cache; run `firsttoken fetch`"):
        OperatorTables.read("h100-sxm")


def test_a_shape_is_that_of_its_config(tmp_path):
    config = (
        '{"architectures": ["MistralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, '
        '"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, '
        '"max_position_embeddings": 32768, "sliding_window": null%s}'
    )
    (tmp_path / "config.json").write_text(config % "", encoding="utf-8")
    assert dense_shape(str(tmp_path)) == dense_shape(str(tmp_path / "config.json")) == SHAPES["mistral-7b"]
    (tmp_path / "config.json").write_text(config % ', "num_local_experts": 8', encoding="utf-8")
    with pytest.raises(ModelError, match=r"config.json is of a mixture of experts; give a dense model"):
        dense_shape(str(tmp_path))
    with pytest.raises(ModelError, match=r"no shape is called 'gpt-9'.*known: mistral-7b"):
        dense_shape("gpt-9")


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096}
LLAMA |= {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}


def llama(folder: Path, **changed: object) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA | changed), encoding="utf-8")
    return str(folder)


def test_what_a_config_says_of_context_weights_and_head_is_counted(tmp_path):
    shape = model_shape(llama(tmp_path, max_position_embeddings=8192, tie_word_embeddings=True))
    assert (shape.context, shape.stored) == (8192, "bfloat16")
    assert model_shape(llama(tmp_path)).weights - shape.weights == 4096 * 128256
    assert model_shape(llama(tmp_path, quantization_config={"quant_method": "fp8"})).stored == "fp8"
    window = {"use_sliding_window": False, "sliding_window": 32768}
    assert model_shape(llama(tmp_path, architectures=["Qwen2ForCausalLM"], model_type="qwen2", **window)).layers == 32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512}, "the layers of 'DeepseekV2' are not known"),
        ({"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 128}, "the layers of 'Glm4Moe' are not known"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 64}, "the layers of 'Ernie4_5_Moe' are not"),
        ({"architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 3072}, "the layers of 'FalconH1' are not known"),
        ({"architectures": ["Starcoder2ForCausalLM"]}, "the layers of 'Starcoder2' are not known"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "the layers of 'Gemma2' are not known"),
        ({"architectures": ["OPTForCausalLM"], "intermediate_size": None, "ffn_dim": 20480}, "the layers of 'OPT'"),
        ({"architectures": ["Llama4ForConditionalGeneration"], "num_hidden_layers": None}, "the layers of 'Llama4For"),
        ({"architectures": ["MistralForCausalLM"]}, "'sliding_window 4096': attention to less than all tokens before"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, "'sliding_window 512': attention to less"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention': attention to less than all"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "products of weights in 'gptq' are not counted"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "products of weights in 'fp8' in blocks are not counted",
        ),
        ({"kv_lora_rank": 512}, "'kv_lora_rank' is 512, and what that changes is not computed here; use another model"),
    ],
)
def test_a_model_of_which_some_layer_is_not_counted_is_refused(tmp_path, changed, message):
    with pytest.raises(ModelError, match=message) as caught:
        model_shape(llama(tmp_path, **changed))
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)
    model = llama(tmp_path)
    (tmp_path / "hf_quant_config.json").touch()
    with pytest.raises(ModelError, match=r"hf_quant_config.json beside it says that its weights are quantised"):
        model_shape(model)


@pytest.mark.parametrize(("name", "billions"), [("mistral-7b", 7.2), ("yi-34b", 34.4), ("llama-3.1-70b", 70.6)])
def test_published_shapes_have_their_published_sizes(name, billions):
    assert SHAPES[name].weights / 1e9 == pytest.approx(billions, abs=0.05)
