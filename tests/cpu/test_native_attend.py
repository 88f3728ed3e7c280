"""The engine with the compiled kernels: the plain model's logits and tokens, and those of the reference.

Measured with tiny random models in fp32: 1e-5 at most, held to 1e-4.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from firsttoken.engine import decoder
from firsttoken.engine.attention import Attend
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.sdpa_attention import PaddedAttend
from firsttoken_cpu import fused, native_attend
from firsttoken_cpu.fused import fuse_layer
from firsttoken_cpu.native.library import kernels
from firsttoken_cpu.native_attend import NativeAttend, TiledAttend

TOLERANCE = 1e-4
KINDS = {"llama": LlamaConfig, "qwen2": Qwen2Config}


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    if kernels() is None:
        pytest.skip("no C++ compiler builds the kernels here")


def config(kind: str, head_dim: int, group: int, depth: int = 2) -> PretrainedConfig:
    return KINDS[kind](
        num_hidden_layers=depth,
        hidden_size=42,  # transformers wants a multiple of the heads
        intermediate_size=64,
        vocab_size=256,
        max_position_embeddings=512,
        pad_token_id=0,
        num_attention_heads=2 * group,
        num_key_value_heads=2,
        head_dim=head_dim,
    )


class BothWays(NativeAttend):
    """Works of up to 8 tokens by the kernels, longer ones as the reference does it; notes how much of each."""

    together = 8
    seen: list[tuple[int, int]]

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.seen.append((self.shared, len(self.prefills)))


def steps(bench, model, attend: type[Attend], seed: int) -> tuple[torch.Tensor, float]:
    """Logits of some ragged steps, and how far they are from the plain ones at most."""
    one = bench(model, block_tokens=1 + 5 * seed, seed=seed, attend=attend)
    open_ = [one.request(one.rng.choice((1, 2, one.rng.randint(1, 40)))) for _ in range(4)]
    said, worst = [], 0.0
    for _ in range(5):
        got, wanted = one.execute(one.some(open_))
        worst = max(worst, one.apart(got, wanted))
        said.append(got)
    one.close()
    return torch.cat(said), worst


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_ragged_steps(bench, make_model, monkeypatch, kind: str, head_dim: int, group: int) -> None:
    """Whole prompts, parts of one with something cached, and decodes: the plain logits, and PaddedAttend's."""
    monkeypatch.setattr(BothWays, "seen", [], raising=False)
    model = make_model(config(kind, head_dim, group))
    for seed in range(3):
        native, far = steps(bench, model, NativeAttend, seed)
        assert 0 < far < TOLERANCE
        both, far = steps(bench, model, BothWays, seed)
        assert 0 < far < TOLERANCE
        padded, _ = steps(bench, model, PaddedAttend, seed)
        torch.testing.assert_close(native, padded, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(both, padded, atol=TOLERANCE, rtol=0)
    assert any(shared and prefills for shared, prefills in BothWays.seen)


def test_a_decode_beside_short_and_long_prefills(bench, make_model, monkeypatch) -> None:
    """Both branches in one step, with something cached and without."""
    monkeypatch.setattr(BothWays, "seen", [], raising=False)
    one = bench(make_model(config("llama", 16, 3)), attend=BothWays)
    decoding, short, halfway, whole = (one.request(length) for length in (13, 20, 40, 9))
    one.execute([(halfway, 11), (decoding, 13), (short, 12)])
    one.grow(decoding)
    got, wanted = one.execute([(whole, 9), (short, 8), (halfway, 17), (decoding, 1)])
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    assert BothWays.seen == [(0, 3), (9, 2)]


def test_steps_of_tiles(bench, make_model) -> None:
    """Few tokens by the kernels, a block of them as the reference does it: the plain logits."""
    assert steps(bench, make_model(config("llama", 64, 3)), TiledAttend, 1)[1] < TOLERANCE


def test_what_lies_in_the_pool_does_not_show(bench, make_model) -> None:
    """Not even NaN, which no mask would hide."""
    one = bench(make_model(config("qwen2", 16, 3)), attend=NativeAttend)
    one.executor.pool.rows.fill_(torch.nan)
    assert one.ragged_steps() < TOLERANCE


def test_logits_in_bf16_are_as_near_to_fp32_as_plain_ones(bench, make_model) -> None:
    exact = make_model(config("llama", 64, 3))
    one = bench(copy.deepcopy(exact).to(torch.bfloat16))
    assert issubclass(one.executor._attend, NativeAttend)
    paged, alone = one.far_from(exact)
    assert paged < 1.3 * alone


def chosen(model: torch.nn.Module) -> type[Attend]:
    executor = LiveExecutor(model, 4)
    executor.close()
    return executor._attend


def test_the_executor_takes_the_kernels_where_it_can(make_model, llama, monkeypatch, accelerated) -> None:
    accelerated("kernels")
    model = make_model(config("llama", 16, 1))
    assert chosen(model) is NativeAttend
    for tiles in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        assert chosen(copy.deepcopy(model).to(torch.bfloat16)) is (TiledAttend if tiles else NativeAttend)
        assert chosen(model) is NativeAttend, "float32 has no tiles"
    assert chosen(copy.deepcopy(model).to(torch.float64)) is PaddedAttend
    assert chosen(copy.deepcopy(model).to(torch.float16)) is PaddedAttend
    assert llama.model.config.head_dim == 8 and chosen(llama.model) is PaddedAttend
    monkeypatch.setattr(native_attend, "kernels", lambda: None)
    assert chosen(model) is PaddedAttend


def logits_of(executor: LiveExecutor, chunks: list[ScheduledChunk]) -> torch.Tensor:
    with torch.inference_mode():
        return executor.version.decoder.logits(executor.plan(executor.version, chunks))


@pytest.mark.parametrize("kept", [(), (2,), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_one_call_are_the_layers_one_by_one(
    make_model, monkeypatch, kind: str, dtype: torch.dtype, kept: tuple[int, ...]
) -> None:
    """To the bit, in logits, pool and kept hidden states: the same kernels in the same order, also where one layer
    between them is not fused, and where what enters a layer is kept."""
    model = make_model(config(kind, 16, 3, depth=5)).to(dtype)
    calls: list[int] = []

    right = fused.KernelLayers.run

    def counted(joined, *others):
        calls.append(joined.count)
        return right(joined, *others)

    got = []
    for together in (True, False):
        own = copy.deepcopy(model)
        layers = [layer if i == 3 else fuse_layer(layer) for i, layer in enumerate(own.model.layers)]
        monkeypatch.setattr(fused.KernelLayers, "run", counted)
        if not together:
            monkeypatch.setattr(fused, "join", lambda _: (0, None))
        cache = HiddenStateCache(kept)
        executor = LiveExecutor(own, 12, segments=[decoder.LocalSegment(layers)], hidden_cache=cache)
        requests = [Request(i, range(i + 1, i + length + 1), Sampling(4), 0.0) for i, length in enumerate((33, 5, 1))]
        for number, request in enumerate(requests):
            request.blocks = list(range(4 * number, 4 * number + 4))
        logits = logits_of(executor, [ScheduledChunk(one, 0, len(one.tokens), 0) for one in requests])
        for request in requests:
            request.tokens.append(7)
        ends = [len(request.tokens) for request in requests]
        decodes = [ScheduledChunk(one, end - 1, end, end - 1) for one, end in zip(requests, ends, strict=True)]
        later = logits_of(executor, decodes)
        states = [cache.of(request.number, layer) for request in requests for layer in kept]
        got.append([logits, later, executor.pool.rows.clone(), *states])
        executor.close()
    parts = {(): [3, 1], (2,): [2, 1, 1], (0, 3): [3, 1]}[kept]
    # layers of bfloat16 are fused where torch multiplies it, which a process held to AVX2 does not
    multiplied = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert calls == (parts * 2 if dtype in kernels().multiplied and multiplied else [])
    for mine, other in zip(*got, strict=True):
        assert torch.equal(mine, other) and mine.isfinite().all()


def test_layers_whose_step_is_too_long_for_the_kernels_run_one_by_one(bench, make_model, monkeypatch) -> None:
    model = make_model(config("llama", 64, 3))
    layers = [fuse_layer(layer) for layer in copy.deepcopy(model.model.layers)]
    tried = "a prefill of more tokens than `together`"
    monkeypatch.setattr(fused.KernelLayers, "run", lambda *_: pytest.fail(tried))
    executor = LiveExecutor(model, 4, segments=[decoder.LocalSegment(layers)], attend=TiledAttend)
    request = Request(0, list(range(30)), Sampling(4), 0.0)
    request.blocks = [0, 1]
    assert logits_of(executor, [ScheduledChunk(request, 0, 30, 0)]).isfinite().all()
    executor.close()


def test_the_number_of_threads_does_not_show(make_model) -> None:
    """To the bit, also with more threads than cores, some of which come when all is done."""
    model = make_model(config("llama", 64, 3))
    executor = LiveExecutor(model, 40, segments=[decoder.LocalSegment([fuse_layer(one) for one in model.model.layers])])
    requests = [Request(i, range(i + 1, i + 30), Sampling(4), 0.0) for i in range(20)]
    for number, request in enumerate(requests):
        request.blocks = [2 * number, 2 * number + 1]
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7, 1):
            torch.set_num_threads(threads)
            for _ in range(5):
                seen.append(logits_of(executor, [ScheduledChunk(one, 0, 29, 0) for one in requests]))
    finally:
        torch.set_num_threads(before)
        executor.close()
    assert all(torch.equal(one, seen[0]) for one in seen)


def test_a_layer_that_is_fused_goes_though_no_step_follows(make_model) -> None:
    """What a segment remembers of layers that run in one call holds none that another will stand for."""
    model = make_model(config("llama", 16, 3, depth=3))
    layers = [fuse_layer(layer) if i == 0 else layer for i, layer in enumerate(model.model.layers)]
    segment = decoder.LocalSegment(layers)
    executor = LiveExecutor(model, 4, segments=[segment])
    request = Request(0, [1, 2, 3], Sampling(4), 0.0)
    request.blocks = [0]
    logits_of(executor, [ScheduledChunk(request, 0, 3, 0)])
    plain = weakref.ref(model.model.layers[1])
    model.model.layers = torch.nn.ModuleList()
    del layers
    for _ in segment.fuse():
        pass
    gc.collect()
    assert plain() is None
    executor.close()
