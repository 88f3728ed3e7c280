"""The attention kernel against its definition in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firsttoken.engine.kv import KVPool, KVShape
from firsttoken_cpu.native.exports import WIDTHS
from firsttoken_cpu.native.library import Kernels

DTYPES = (torch.float32, torch.bfloat16)
HALF_ULP = 2**-8  # the most that rounding to bf16 changes a number, as a share of it
FEW = settings(max_examples=50, deadline=None)


@dataclass(frozen=True)
class Case:
    """Some requests' caches in a pool, and tokens that read them; everything else follows from ``seed``."""

    dtype: torch.dtype = torch.float32
    head_dim: int = 16
    kv_heads: int = 2
    group: int = 3
    block_tokens: int = 4
    layers: int = 2
    sequences: int = 2
    tokens: int = 5
    longest: int = 40
    seed: int = 0

    def draw(self, loud: float = 1.0) -> Step:
        """Keys and values are numbers where a request has some, and NaN everywhere else; queries times ``loud``."""
        draw = torch.Generator().manual_seed(self.seed)
        width = -(-self.longest // self.block_tokens)
        pool = KVPool(KVShape(self.layers, self.kv_heads, self.head_dim, self.dtype, self.block_tokens), width * 5)
        tables = torch.randperm(width * 5, generator=draw)[: self.sequences * width].view(self.sequences, width)
        sequences = torch.randint(self.sequences, (self.tokens,), generator=draw)
        contexts = torch.randint(1, self.longest + 1, (self.tokens,), generator=draw)
        pool.rows.fill_(torch.nan)
        layer = int(torch.randint(self.layers, (), generator=draw))
        for sequence in range(self.sequences):
            for at in range(int(contexts[sequences == sequence].max()) if (sequences == sequence).any() else 0):
                row = pool.rows[tables[sequence, at // self.block_tokens], layer, :, at % self.block_tokens]
                row.copy_(torch.randn(row.shape, generator=draw))
        heads = self.kv_heads * self.group
        joint = torch.randn(self.tokens, heads + 2 * self.kv_heads, self.head_dim, generator=draw) * loud
        return Step(joint.to(self.dtype)[:, :heads], pool.rows, layer, tables, sequences, contexts, self.head_dim**-0.5)


@dataclass(frozen=True)
class Step:
    """What ``Kernels.attend`` is given."""

    query: Tensor
    rows: Tensor
    layer: int
    tables: Tensor
    sequences: Tensor
    contexts: Tensor
    scale: float

    def run(self, native: Kernels) -> Tensor:
        return native.attend(self.query, self.rows, self.layer, self.tables, self.sequences, self.contexts, self.scale)

    def place(self, token: int, at: int) -> tuple[int, int]:
        """The block, and the row in it, of what ``token`` sees at ``at``."""
        block_tokens = self.rows.shape[3]
        return int(self.tables[self.sequences[token], at // block_tokens]), at % block_tokens

    def definition(self) -> Tensor:
        """In float64, one token at a time."""
        out = self.query.new_empty(self.query.shape, dtype=torch.float64)
        for token, (sequence, context) in enumerate(zip(self.sequences.tolist(), self.contexts.tolist(), strict=True)):
            keys, values = (
                self.rows[self.tables[sequence], self.layer].double().transpose(0, 1).flatten(1, 2)[:, :context]
            )
            grouped = self.query[token].double().unflatten(0, (keys.shape[1], -1))
            shares = (torch.einsum("kgd,tkd->kgt", grouped, keys) * self.scale).softmax(-1)
            out[token] = torch.einsum("kgt,tkd->kgd", shares, values).flatten(0, 1)
        return out


cases = st.builds(
    Case,
    head_dim=st.sampled_from(WIDTHS),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    block_tokens=st.integers(1, 17),
    layers=st.integers(1, 3),
    sequences=st.integers(1, 4),
    tokens=st.integers(0, 6),
    longest=st.sampled_from((1, 2, 15, 16, 17, 70)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)


@FEW
@given(case=cases)
def test_attention_is_its_definition(native: Kernels, case: Case) -> None:
    """What no token sees is NaN in every case: unused blocks, other layers, the tail of a last block."""
    step = case.draw()
    got, exact = step.run(native), step.definition()
    assert got.dtype == case.dtype and got.shape == step.query.shape and got.is_contiguous()
    rtol = HALF_ULP if case.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=1e-5)


@FEW
@given(case=cases)
def test_large_scores_do_not_overflow(native: Kernels, case: Case) -> None:
    """Scores of hundreds, which e to the power of is beyond float32."""
    step = case.draw(loud=100.0)
    rtol = HALF_ULP if case.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(step.run(native).double(), step.definition(), rtol=rtol, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_far_keys_weigh_nothing(native: Kernels, dtype: torch.dtype) -> None:
    """The first key's score is 0 and the second's is far below: e to the power of that, down to where it vanishes."""
    below = torch.linspace(0, 200, 401)
    rows = torch.zeros(1, 1, 2, 2, 1, 16, dtype=dtype)
    rows[0, 0, 0, 1, 0, 0] = -1
    rows[0, 0, 1, 1] = 1
    query = torch.zeros(len(below), 1, 16, dtype=dtype)
    query[:, 0, 0] = below
    none = torch.zeros(len(below), dtype=torch.int64)
    step = Step(query, rows, 0, torch.zeros(1, 1, dtype=torch.int64), none, none + 2, 1.0)
    rtol = HALF_ULP if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(step.run(native).double(), step.definition(), rtol=rtol, atol=2e-38)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("at", [0, 1, 15, 16, 17, 38, 39])
def test_nan_that_is_seen_shows(native: Kernels, dtype: torch.dtype, side: int, at: int) -> None:
    """To the tokens that see it, in the heads that share its KV head, and nowhere else."""
    step = Case(dtype=dtype, tokens=8, seed=at).draw()
    step.contexts[0] = 40
    others = step.sequences != step.sequences[0]
    step.rows.nan_to_num_(0.5)
    before = step.run(native)
    assert before.isfinite().all() and others.any()
    block, row = step.place(0, at)
    step.rows[block, step.layer, side, row, 1, 3] = torch.nan
    got = step.run(native)
    sees = ~others & (step.contexts > at)
    hit = got[sees, 3:] if side == 0 else got[sees, 3:, 3]
    assert hit.numel() and hit.isnan().all()
    assert torch.equal(got[~sees], before[~sees]) and torch.equal(got[:, :3], before[:, :3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_query_shows_in_its_head_only(native: Kernels, dtype: torch.dtype) -> None:
    step = Case(dtype=dtype).draw()
    before = step.run(native)
    step.query[2, 4, 5] = torch.nan
    got = step.run(native)
    assert got[2, 4].isnan().all()
    got[2, 4] = before[2, 4]
    assert torch.equal(got, before)


def test_block_tables_may_be_shared_and_end_in_anything(native: Kernels) -> None:
    """Tokens of one prefill read one table; what stands in it behind their contexts is not looked up."""
    step = Case(sequences=1, tokens=6, longest=21).draw()
    step.contexts.copy_(torch.arange(3, 9))
    step.tables[:, 2:] = 2**40
    got = step.run(native)
    step.tables[:, 2:] = 0
    torch.testing.assert_close(got.double(), step.definition(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_threads_say_what_one_does(native: Kernels, set_threads, dtype: torch.dtype) -> None:
    step, said = Case(dtype=dtype, sequences=3, tokens=80, kv_heads=3, head_dim=64).draw(), []
    for threads in (1, 2):
        set_threads(threads)
        said.append(step.run(native))
    assert torch.equal(*said)
