"""The KV cache in bytes and copies, held to what CPS says of its model; and the pool in memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from firsttoken.assets.shapes import shape_config
from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.study.errors import RequestError


def test_arithmetic_of_the_papers_model() -> None:
    """Qwen2.5-0.5B in half precision, blocks of 16: 12,288 bytes a token, 3,072 copies of 4 KiB for 1,024 tokens."""
    shape = KVShape.of(shape_config("qwen2.5-0.5b"), torch.float16)
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.block_tokens) == (24, 2, 64, 16)
    assert shape.bytes_per_token == 12_288
    assert shape.block_bytes == 16 * 12_288
    assert (shape.copies(1024), shape.copy_bytes) == (3072, 4096)
    assert shape.copies(1024) * shape.copy_bytes == 1024 * shape.bytes_per_token


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_started_block_is_a_whole_one(tokens: int, blocks: int) -> None:
    shape = KVShape(layers=3, kv_heads=1, head_dim=4, dtype=torch.float32)
    assert shape.blocks(tokens) == blocks
    assert shape.copies(tokens) == blocks * 6


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(num_hidden_layers=5, hidden_size=48, num_attention_heads=6, num_key_value_heads=3), (5, 3, 8)),
        (Qwen3Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=20), (2, 1, 20)),
        (GPT2Config(n_layer=3, n_embd=36, n_head=4), (3, 4, 9)),  # knows no groups: a KV head for each query head
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_shape_of_a_configuration(config, expected: tuple[int, int, int]) -> None:
    shape = KVShape.of(config, torch.bfloat16, 8)
    assert (shape.layers, shape.kv_heads, shape.head_dim) == expected
    assert (shape.dtype, shape.block_tokens) == (torch.bfloat16, 8)


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "block_tokens"])
def test_a_shape_without_content_is_refused(name: str) -> None:
    shape = KVShape(layers=3, kv_heads=2, head_dim=4, dtype=torch.float32)
    with pytest.raises(RequestError, match=f"KV cache: {name} must be at least 1, not 0"):
        dataclasses.replace(shape, **{name: 0})
    with pytest.raises(RequestError, match="at least 1 block, not 0"):
        KVPool(shape, 0)


@pytest.mark.parametrize("touched", [True, False])
def test_a_pool_that_no_memory_holds_is_refused(monkeypatch, touched: bool) -> None:
    """Before a byte of it is taken, as a system may promise more than it has."""
    shape = KVShape(layers=1, kv_heads=1, head_dim=1 << 12, dtype=torch.float32)
    monkeypatch.setattr("firsttoken.engine.kv.free_memory_bytes", lambda: 3 << 19)
    with pytest.raises(RequestError, match=r"4 blocks of 16 tokens need 0.0 GiB, and 0.0 GiB of memory are free; ask"):
        KVPool(shape, 4, touched=touched)
    assert KVPool(shape, 3, touched=touched).blocks == 3
    monkeypatch.undo()
    with pytest.raises(RequestError, match=r"need 32,768.0 GiB, and .* GiB of memory are free; ask for fewer"):
        KVPool(shape, 1 << 26, touched=touched)


def test_a_block_is_one_row_of_the_pool_and_the_views_share_its_memory() -> None:
    shape = KVShape(layers=3, kv_heads=2, head_dim=4, dtype=torch.bfloat16, block_tokens=5)
    pool = KVPool(shape, 7)
    assert pool.blocks == 7 and pool.rows.is_contiguous() and not pool.rows.any()
    assert pool.rows[0].nbytes == shape.block_bytes
    assert pool.block_rows[0].nbytes == shape.copy_bytes
    block, layer, offset = 4, 2, 3
    pool.rows[block, layer, 1, offset] = 9  # the value of one token
    assert pool.block_rows.shape == (7 * 3 * 2, 5 * 2 * 4)
    assert pool.token_rows.shape == (7 * 3 * 2 * 5, 2 * 4)
    assert pool.block_rows.any(1).nonzero().tolist() == [[(block * 3 + layer) * 2 + 1]]
    assert pool.token_rows.any(1).nonzero().tolist() == [[((block * 3 + layer) * 2 + 1) * 5 + offset]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pool_that_is_not_touched_is_the_same(dtype: torch.dtype) -> None:
    shape = KVShape(2, 3, 8, dtype, 4)
    lazy, usual = (KVPool(shape, 5, touched=touched) for touched in (False, True))
    assert torch.equal(lazy.rows, usual.rows) and lazy.rows.dtype == dtype and lazy.rows.shape == usual.rows.shape
    assert lazy.rows.data_ptr() % 64 == 0  # a row that crosses a line more takes longer to read
    lazy.token_rows[7] = 1.5
    assert float(lazy.rows.sum()) == 1.5 * 3 * 8
