"""One paged step against the plain forward pass: the same logits, keys and values, and nothing written elsewhere.

Measured with tiny random models, logits up to 8: 1e-5 at most in fp32, held to 1e-4; in bf16 the paged step is as far
from fp32 as the plain forward pass is.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.request import GREEDY, Request, Work
from firsttoken.engine.varlen import VarlenAttend

TOLERANCE = 1e-4
VOCABULARY = 256


class Bench:
    """An executor driven by hand, beside the plain model; blocks are given out in no order."""

    def __init__(self, model, blocks: int = 200, block_tokens: int = 4, seed: int = 0) -> None:
        self.plain = copy.deepcopy(model)
        self.executor = LiveExecutor(model, blocks, block_tokens=block_tokens)
        self.rng = random.Random(seed)
        self.free = self.rng.sample(range(blocks), blocks)
        self.logits = torch.empty(0)
        self._hook = model.register_forward_hook(self._keep)
        self._requests = 0

    def _keep(self, _module, _inputs, output) -> None:
        self.logits = output.logits[0].float().cpu()

    def request(self, length: int) -> Request:
        self._requests += 1
        return Request(self._requests, [self.rng.randrange(VOCABULARY) for _ in range(length)], GREEDY, 0.0)

    def execute(self, works: Sequence[tuple[Request, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step; the logits after each work [works, vocabulary], and the plain ones. Checks the tokens' order."""
        for request, tokens in works:
            while len(request.blocks) * self.executor.block_tokens < request.cached + tokens:
                request.blocks.append(self.free.pop())
        chosen = self.executor.execute([Work(request, tokens) for request, tokens in works])
        first = sorted(range(len(works)), key=lambda i: works[i][1] > 1)  # works of one token lead the step
        rows = torch.empty_like(self.logits)
        rows[first] = self.logits
        assert chosen == rows.argmax(-1).tolist(), "the tokens are not in the order of the works"
        wanted = []
        for request, tokens in works:
            request.cached += tokens
            wanted.append(self.expected(request))
        return rows, torch.stack(wanted)

    @torch.inference_mode()
    def expected(self, request: Request) -> torch.Tensor:
        """Plain logits after all that is cached."""
        return self.plain(torch.tensor([request.tokens[: request.cached]])).logits[0, -1].float()

    def close(self) -> None:
        self._hook.remove()
        self.executor.close()


@pytest.fixture
def bench() -> Callable[..., Bench]:
    made: list[Bench] = []

    def make(model, **options) -> Bench:
        made.append(Bench(model, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference; infinite where one is not a number."""
    return float((got - wanted).abs().nan_to_num(torch.inf).max())


def grow(bench: Bench, request: Request) -> None:
    """Another token, any: what the model would have said does not matter here."""
    request.tokens.append(bench.rng.randrange(VOCABULARY))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "lora"])
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
            works = []
            for asked in one.rng.sample(open_, one.rng.randint(1, len(open_))):
                if not asked.todo:
                    grow(one, asked)
                works.append((asked, one.rng.choice((asked.todo, one.rng.randint(1, asked.todo)))))
            got, wanted = one.execute(works)
            worst = max(worst, apart(got, wanted))
        one.close()

    check()
    assert 0 < worst < TOLERANCE


def test_a_decode_beside_a_partial_and_a_whole_prefill(bench, llama) -> None:
    one = bench(llama.model)
    decoding, halfway, new = one.request(13), one.request(30), one.request(9)
    one.execute([(halfway, 11), (decoding, 13)])
    grow(one, decoding)
    got, wanted = one.execute([(new, 9), (halfway, 7), (decoding, 1)])
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    one_token, half_of_two = one.request(1), one.request(2)
    got, wanted = one.execute([(halfway, 11), (one_token, 1), (half_of_two, 1)])
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    assert (halfway.todo, one_token.todo, half_of_two.todo) == (1, 0, 1)


def test_what_lies_in_the_pool_does_not_show(bench, llama) -> None:
    """Blocks are not wiped between owners, and the last one of a request is rarely full."""
    one = bench(llama.model)
    one.executor.pool.rows.normal_(0, 100.0)
    asked = [one.request(length) for length in (1, 6, 17)]
    for _ in range(3):
        got, wanted = one.execute([(request, request.todo) for request in asked])
        torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
        for request in asked:
            grow(one, request)


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
    asked = [one.request(length) for length in (1, 8, 21, 40)]
    far = {"paged": 0.0, "plain": 0.0}
    for _ in range(6):
        got, plain = one.execute([(request, request.todo) for request in asked])
        for row, request in enumerate(asked):
            truth = exact(torch.tensor([request.tokens])).logits[0, -1]
            far["paged"] += float((got[row] - truth).norm())
            far["plain"] += float((plain[row] - truth).norm())
            grow(one, request)
    assert one.executor.pool.rows.dtype == torch.bfloat16
    assert far["paged"] < 1.3 * far["plain"]


def by_definition(q, k, v, ends, seen, longest, most, *, scale, window_size, enable_gqa) -> torch.Tensor:
    """``varlen_attn`` spelt out: requests end to end, the last query of each sees all of its keys."""
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


def ragged_steps(one: Bench) -> float:
    """Prefills, continued prefills and decodes over a few steps; the largest difference of a logit."""
    asked = [one.request(length) for length in (1, 7, 16, 33)]
    worst = 0.0
    for step in range(6):
        works = [(request, max(1, request.todo // 2) if step < 2 else request.todo) for request in asked]
        got, wanted = one.execute(works)
        worst = max(worst, apart(got, wanted))
        for request in asked:
            if not request.todo:
                grow(one, request)
    return worst


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_variable_length_call_is_told_the_same(bench, monkeypatch, kind: str, request) -> None:
    """Its kernel is CUDA's; here its definition runs on what it is given."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_definition)
    one = bench(request.getfixturevalue(kind).model, block_tokens=5)
    one.executor._attend = VarlenAttend
    assert ragged_steps(one) < TOLERANCE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_too(bench, llama, dtype: torch.dtype) -> None:
    model = copy.deepcopy(llama.model).to("cuda", dtype)
    one = bench(model)
    one.plain = llama.model
    assert (one.executor._attend is VarlenAttend) == (dtype != torch.float32)
    assert ragged_steps(one) < {torch.float32: 1e-3, torch.float16: 0.3, torch.bfloat16: 1.5}[dtype]
