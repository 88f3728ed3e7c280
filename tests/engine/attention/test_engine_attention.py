"""One paged step against the plain forward pass: the same logits, keys and values, and nothing written elsewhere.

Measured with tiny random models, logits up to 8: 1e-5 at most in fp32, held to 1e-4; in bf16 the paged step is as far
from fp32 as the plain forward pass is.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.engine.accelerator import fuse
from firsttoken.engine.attention import VarlenAttend
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.sdpa_attention import PaddedAttend
from firsttoken.study.errors import ModelError
from firsttoken_cpu.native_attend import NativeAttend

TOLERANCE = 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen2", "lora", "gemma3"])
def test_logits_of_ragged_steps_are_the_plain_ones(bench, kind: str, request: pytest.FixtureRequest) -> None:
    """Whole prompts, partial ones with something cached, and decodes, in any order beside each other."""
    model = request.getfixturevalue(kind).model
    worst = 0.0

    @settings(settings.get_profile("live"), max_examples=20)
    @given(seed=st.integers(0, 2**32), block_tokens=st.integers(1, 16))
    def check(seed: int, block_tokens: int) -> None:
        nonlocal worst
        one = bench(model, block_tokens=block_tokens, seed=seed)
        open_ = [one.request(one.rng.choice((1, 2, one.rng.randint(1, 40)))) for _ in range(one.rng.randint(1, 6))]
        for _ in range(4):
            got, wanted = one.execute(one.some(open_))
            worst = max(worst, one.apart(got, wanted))
        one.close()

    check()
    assert 0 < worst < TOLERANCE


def test_gemma_3_hangs_on_its_windows_and_on_both_rotary_bases(bench, gemma3, monkeypatch) -> None:
    """The control of what is held to 1e-4: without one of them the logits are others."""
    one = bench(gemma3.model)
    assert one.executor._attend is PaddedAttend
    assert one.ragged_steps() < TOLERANCE
    one.close()
    with monkeypatch.context() as patch:
        patch.setattr(PaddedAttend, "_windowed", lambda self, mask, positions, window: mask)
        one = bench(gemma3.model)
        assert one.ragged_steps() > 100 * TOLERANCE
        one.close()
    one = bench(gemma3.model)
    through = one.executor.version.decoder._decoder.layers[0]
    through.kinds = ["sliding_attention"] * 4
    assert one.ragged_steps() > 100 * TOLERANCE


def test_gemma_3_with_packed_layers_says_the_same(bench, gemma3) -> None:
    """No kernel fuses its layers; their products are packed where they can be."""
    one = bench(fuse(copy.deepcopy(gemma3.model)))
    one.plain = gemma3.model
    assert one.ragged_steps() < TOLERANCE


@pytest.mark.parametrize("attend", [NativeAttend, VarlenAttend])
def test_an_attention_without_windows_refuses_gemma_3(gemma3, attend) -> None:
    with pytest.raises(ModelError, match=rf"^{attend.__name__} has no windows, which gemma3_text needs; leave it out$"):
        LiveExecutor(gemma3.model, 10, attend=attend)
    assert gemma3.model.config._attn_implementation == "sdpa"


def test_gemma_3_that_sees_what_comes_later_is_refused(gemma3) -> None:
    other = copy.deepcopy(gemma3.model)
    other.config.use_bidirectional_attention = True
    with pytest.raises(ModelError, match="gemma3_text has layers of sliding_attention; the engine runs full_attention"):
        LiveExecutor(other, 10)


def test_keys_and_values_lie_where_the_pool_says(bench, qwen2) -> None:
    """[blocks, layers, 2, block_tokens, kv_heads, head_dim], as the swap paths read it; nothing else is touched."""
    one = bench(qwen2.model)
    before = one.executor.pool.rows.normal_().clone()
    request, other = one.request(14), one.request(5)
    one.execute([(request, 9), (other, 5)])
    one.execute([(request, 5)])
    with torch.inference_mode():
        cache = one.plain(torch.tensor([request.tokens]), use_cache=True).past_key_values
    pool = one.executor.pool.rows
    for layer in range(2):
        for side, plain in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            kept = pool[request.blocks, layer, side].flatten(0, 1)[:14]  # [tokens, kv_heads, head_dim]
            torch.testing.assert_close(kept, plain[0].transpose(0, 1), atol=TOLERANCE, rtol=0)
    untouched = [block for block in range(len(pool)) if block not in request.blocks + other.blocks]
    assert torch.equal(pool[untouched], before[untouched])
    assert torch.equal(pool[request.blocks[-1], :, :, 2:], before[request.blocks[-1], :, :, 2:])


def test_bf16_is_as_near_to_fp32_as_plain_bf16(bench, llama) -> None:
    half = copy.deepcopy(llama.model).to(torch.bfloat16)
    one, exact = bench(half), copy.deepcopy(llama.model)
    paged, alone = one.far_from(exact)
    assert one.executor.pool.rows.dtype == torch.bfloat16
    assert paged < 1.3 * alone


def of_torch_2_11(q, k, v, ends, seen, longest, most, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """``varlen_attn`` with the oldest signature that pyproject.toml admits, spelt out: requests end to end, as
    many heads of keys as of queries, the last query of each request sees all of its keys."""
    assert q.shape[1] == k.shape[1]
    return of_torch_2_13(q, k, v, ends, seen, longest, most, scale=scale, window_size=window_size)


def of_torch_2_13(
    q, k, v, ends, seen, longest, most, *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False
) -> torch.Tensor:
    """``varlen_attn`` that takes fewer heads of keys where it is told so."""
    assert window_size == (-1, 0) and enable_gqa == (q.shape[1] != k.shape[1])
    assert (longest, most) == (int(ends.diff().max()), int(seen.diff().max())) and ends.dtype == torch.int32
    parts = []
    for i in range(len(ends) - 1):
        queries, keys, values = q[ends[i] : ends[i + 1]], k[seen[i] : seen[i + 1]], v[seen[i] : seen[i + 1]]
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(group, 1)) * scale
        late = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(keys) - len(queries))
        shares = scores.masked_fill(~late, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", shares, values.repeat_interleave(group, 1)))
    return torch.cat(parts)


@pytest.mark.parametrize("by_definition", [of_torch_2_11, of_torch_2_13])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_variable_length_call_is_told_the_same(bench, monkeypatch, kind: str, by_definition, request) -> None:
    """Its kernel is CUDA's; here its definition runs on what it is given, with either signature."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_definition)
    one = bench(request.getfixturevalue(kind).model, block_tokens=5)
    one.executor._attend = VarlenAttend
    assert one.ragged_steps() < TOLERANCE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_too(bench, llama, dtype: torch.dtype) -> None:
    model = copy.deepcopy(llama.model).to("cuda", dtype)
    one = bench(model)
    one.plain = llama.model
    assert (one.executor._attend is VarlenAttend) == (dtype != torch.float32)
    assert one.ragged_steps() < {torch.float32: 1e-3, torch.float16: 0.3, torch.bfloat16: 1.5}[dtype]
