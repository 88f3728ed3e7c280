"""Every bit pattern of 16 bits comes back from its planes, and half a number lies where half a number should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.study.errors import StageError
from firsttoken_extras.bitplanes import encode
from firsttoken_extras.bitplanes.encode import plane_encoder
from firsttoken_extras.bitplanes.layouts import GROUP, SPLITS, planes_of
from firsttoken_extras.bitplanes.native_words import merger

TORCH = {"F16": torch.float16, "BF16": torch.bfloat16}
EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
CASES = [(split, dtype) for split, layouts in SPLITS.items() for dtype in layouts]
IN_BITS = [(split, dtype) for split, dtype in CASES if not SPLITS[split][dtype].code_bits]
BLOCKWISE = [(split, dtype) for split, dtype in CASES if SPLITS[split][dtype].code_bits]


@pytest.fixture(params=["compiled", "torch"], autouse=True, scope="module")
def way(request):
    """By what planes are merged; both do the same."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(encode, "merger", lambda: None)
        elif merger() is None:
            pytest.skip("there is no C++ compiler")
        yield request.param


def steps(words: torch.Tensor, split: str, dtype: str) -> list[torch.Tensor]:
    """What ``words`` are after each plane; every stream has the size that its layout says."""
    made, layout = plane_encoder(split, dtype), SPLITS[split][dtype]
    planes = [made.cut(words, plane) for plane in range(len(layout.planes))]
    for kinds, streams in zip(layout.planes, planes, strict=True):
        assert [kind.bytes(len(words)) for kind in kinds] == [stream.numel() for stream in streams]
    found = [made.first(planes[0], len(words))]
    for plane in range(1, len(planes)):
        found.append(found[-1].clone())
        made.refine(found[-1], plane, planes[plane])
    return found


def ordered(words: torch.Tensor) -> torch.Tensor:
    """The rank of each number among all, infinities at the ends."""
    wide = words.to(torch.int32)
    return torch.where(wide < 0, -(wide & 0x7FFF), wide)


@pytest.mark.parametrize(("split", "dtype"), CASES)
def test_all_65536_patterns_come_back(split, dtype):
    """NaN with every payload, infinities, subnormals and both zeros among them; in order, and among others."""
    mixed = EVERY[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))]
    for words in (EVERY, mixed, mixed[:65521]):
        assert torch.equal(steps(words, split, dtype)[-1], words)


@pytest.mark.parametrize(("split", "dtype"), CASES)
@settings(max_examples=25, deadline=None)
@given(patterns=st.lists(st.integers(-(1 << 15), (1 << 15) - 1), min_size=1, max_size=200), data=st.data())
def test_any_words_come_back_in_any_pieces(split, dtype, patterns, data):
    words, before = torch.tensor(patterns, dtype=torch.int16), encode.BLOCK
    encode.BLOCK = 64
    try:
        assert torch.equal(steps(words, split, dtype)[-1], words)
        made, piece = plane_encoder(split, dtype), 64 * data.draw(st.integers(1, 3))
        found = made.first(made.cut(words, 0), len(words))
        for plane in range(1, planes_of(split)):
            streams = made.cut(words, plane)
            for start in range(0, len(words), piece):
                made.refine(found[start : start + piece], plane, streams, start)
        assert torch.equal(found, words)
    finally:
        encode.BLOCK = before


@pytest.mark.parametrize("count", [1 << 16, 65521, 7, 1])
@pytest.mark.parametrize(("split", "dtype"), CASES)
def test_float32_is_what_the_words_are(split, dtype, count):
    """After each plane; a processor may set a bit of a NaN where it widens it."""
    words, made = EVERY[-count:], plane_encoder(split, dtype)
    wide = torch.full((count,), float("nan"))
    for plane, stored in enumerate(steps(words, split, dtype)):
        streams = made.cut(words, plane)
        made.refine(wide, plane, streams) if plane else made.fill(wide, streams)
        torch.testing.assert_close(wide, stored.view(TORCH[dtype]).float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(wide.signbit()[~wide.isnan()], (stored < 0)[~wide.isnan()])


@pytest.mark.parametrize(("dtype", "shift", "mantissa"), [("F16", 13, 0x3FF), ("BF16", 16, 0x7F)])
def test_compiled_float32_keeps_what_a_nan_carries(way, dtype, shift, mantissa):
    """So that its bits come back plane by plane."""
    if way == "torch":
        pytest.skip("a conversion of the processor's sets one of them")
    made, wide = plane_encoder("bits", dtype), torch.empty(1 << 16)
    made.fill(wide, made.cut(EVERY, 0))
    made.refine(wide, 1, made.cut(EVERY, 1))
    nan = EVERY.view(TORCH[dtype]).isnan()
    assert torch.equal(wide.isnan(), nan)
    assert torch.equal((wide.view(torch.int32) >> shift)[nan] & mantissa, EVERY[nan].to(torch.int32) & mantissa)


@pytest.mark.parametrize(("split", "dtype"), IN_BITS)
def test_what_is_not_there_stands_at_the_middle(split, dtype):
    """Never further than half of what the missing bits can make, with every plane less, and of the right sign."""
    made, layout = steps(EVERY, split, dtype), SPLITS[split][dtype]
    finite = torch.isfinite(EVERY.view(TORCH[dtype]))
    unknown = 16
    for found, plane in zip(made, layout.planes, strict=True):
        unknown -= sum(field.width for field in plane)
        off = (ordered(found) - ordered(EVERY)).abs()[finite]
        assert int(off.max()) == (1 << unknown >> 1)
        assert bool(((found < 0) == (EVERY < 0)).all())


@pytest.mark.parametrize(("split", "dtype"), IN_BITS)
def test_an_infinity_is_one_from_the_first_plane_on(split, dtype):
    words = torch.tensor([float("inf"), -float("inf")], dtype=TORCH[dtype]).view(torch.int16).repeat(40)
    words[2] = 0x3C00
    for found in steps(words, split, dtype):
        assert torch.equal(found[3:], words[3:])


@pytest.mark.parametrize(("split", "dtype"), BLOCKWISE)
def test_a_blockwise_stage_is_off_by_half_a_step(split, dtype):
    """A step is the largest weight of the group over the largest code; the factor's own rounding and the number's come
    on top. A group with an infinity in it keeps its finite weights."""
    weights = (0.05 * torch.randn(64 * GROUP, generator=torch.Generator().manual_seed(2))).to(TORCH[dtype])
    weights[7] = float("inf")
    found = steps(weights.view(torch.int16), split, dtype)[0].view(TORCH[dtype]).float().view(-1, GROUP)
    exact = weights.float().view(-1, GROUP)
    exact[0, 7] = found[0, 7] = 0
    largest = exact.abs().amax(1, keepdim=True)
    most = 2 ** (SPLITS[split][dtype].code_bits - 1) - 1
    assert bool(((found - exact).abs() <= largest * (0.5 / most + 2 * torch.finfo(TORCH[dtype]).eps)).all())


def test_a_split_has_as_many_planes_in_either_dtype():
    for split, layouts in SPLITS.items():
        assert {len(layout.planes) for layout in layouts.values()} == {planes_of(split)}


def test_dtypes_and_splits_that_are_none():
    with pytest.raises(StageError, match="no split cuts F32: store the weights as F16 or BF16"):
        plane_encoder("bits", "F32")
    with pytest.raises(StageError, match="no split of weights is called 'bytes': choose one of bits, "):
        plane_encoder("bytes", "BF16")
