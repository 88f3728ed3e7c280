"""Messages: each fault of a header or of its numbers is refused before, or as soon as, it is read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from firsttoken.petals import wire
from firsttoken.petals.messages import MOST_TOKENS, SequenceChunk, most_bytes
from firsttoken.petals.wire import CODINGS, decode, encode
from firsttoken.study.errors import SwarmError

WIDTH = 32
TWO = (SequenceChunk(3, 0, 2), SequenceChunk(4, 9, 10))


def step(hidden, *chunks) -> bytes:
    return save({"hidden": hidden}, {"step": json.dumps({"chunks": chunks, "over": []})})


@pytest.mark.parametrize("coding", CODINGS)
def test_what_is_encoded_is_decoded(coding):
    hidden = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    data = encode(hidden, coding, TWO, [7])
    message = decode(data, coding, WIDTH, torch.float32)
    assert (message.chunks, message.over) == (TWO, (7,)) and len(data) < most_bytes(WIDTH)
    error = (message.hidden - hidden).abs().max()
    assert error <= {"float32": 0, "bfloat16": 0.02, "float16": 0.002, "int8": 0.02}[coding]
    answer = decode(encode(hidden, coding), coding, WIDTH, torch.bfloat16, tokens=3).hidden
    assert answer.dtype == torch.bfloat16 and answer.shape == (3, WIDTH)


def test_sequences_end_without_a_step():
    message = decode(encode(None, "float32", finished=[1, 2]), "float32", WIDTH, torch.float32)
    assert message.hidden is None and message.over == (1, 2)


FINE = torch.zeros(2, WIDTH)
BAD = {
    "nothing": (b"", "no safetensors of a step: it is truncated"),
    "text": (b"hello, this is no safetensors", "no safetensors of a step"),
    "cut": (step(FINE, [0, 0, 2])[:-4], "truncated or altered"),
    "no hidden": (step(FINE, [0, 0, 2]).replace(b"hidden", b"hodden"), "a message holds hodden, no hidden states"),
    "narrow": (step(torch.zeros(2, 31), [0, 0, 2]), r"hidden states of \[2, 31\] do not fit: the step has \[2, 32\]"),
    "too few rows": (step(FINE, [0, 0, 3]), r"\[2, 32\] do not fit: the step has \[3, 32\]"),
    "no rows": (step(FINE), r"\[2, 32\] do not fit: the step has \[0, 32\]"),
    "flat": (step(torch.zeros(64), [0, 0, 2]), r"\[64\] do not fit"),
    "dtype": (step(FINE.half(), [0, 0, 2]), "in F16 came where the session was opened for float32"),
    "integers": (step(FINE.long(), [0, 0, 2]), "in I64 came where"),
    "NaN": (step(FINE / 0, [0, 0, 2]), "hold NaN or infinity"),
    "twice": (step(FINE, [0, 0, 1], [0, 1, 2]), "a sequence is in one step twice"),
    "backwards": (step(FINE, [0, 2, 0]), r"sequence 0 has no tokens \[2, 0\)"),
    "long": (step(FINE, [0, 0, MOST_TOKENS + 1]), "a message of 513 tokens; at most 512"),
    "negative": (step(FINE, [0, -2, 0]), "no safetensors of a step: .*chunks"),
    "huge": (step(FINE, [0, 0, 2**40]), "no safetensors of a step: .*chunks"),
    "two tensors": (
        save({"hidden": FINE, "more": FINE + 1}, {"step": '{"chunks": [[0, 0, 2]]}'}),
        "a message holds hidden, more",
    ),
    "no step": (save({"hidden": FINE}, {"step": "{"}), "no safetensors of a step"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_step_is_named(kind):
    data, said = BAD[kind]
    with pytest.raises(SwarmError, match=said):
        decode(data, "float32", WIDTH, torch.float32)


def test_a_header_is_bounded_before_it_is_read():
    header = b'{"__metadata__": {"step": "' + b" " * (1 << 18) + b'"}}'
    with pytest.raises(SwarmError, match="its header of 262174 bytes is beyond 262144"):
        decode(len(header).to_bytes(8, "little") + header, "float32", WIDTH, torch.float32)


def test_an_answer_has_the_rows_that_were_asked():
    for tokens in (1, 3):
        with pytest.raises(SwarmError, match="do not fit"):
            decode(encode(FINE, "float32"), "float32", WIDTH, torch.float32, tokens=tokens)
    with pytest.raises(SwarmError, match="a message holds nothing, no hidden states float32"):
        decode(encode(None, "float32"), "float32", WIDTH, torch.float32, tokens=2)


@given(st.data())
def test_a_damaged_message_is_refused_or_a_message(data):
    """Any byte changed, any end cut: one kind of error, or hidden states that fit."""
    whole = bytearray(encode(FINE, data.draw(st.sampled_from(["float32", "int8"])), TWO[:1]))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3)):
        whole[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for coding in ("float32", "int8"):
        try:
            message = decode(bytes(whole[: cut or None]), coding, WIDTH, torch.float32)
        except SwarmError:
            continue
        assert message.hidden is None or message.hidden.shape == (2, WIDTH)


SHORT = st.integers(0, 3) | st.integers(-1, 1 << 34)
COMMITMENTS = st.text(st.sampled_from('{}:, "\\/aé\n\x7f')) | st.sampled_from(["", '{"server": "ab"}'])


@given(st.data(), st.lists(st.tuples(SHORT, SHORT, SHORT), max_size=3), COMMITMENTS)
def test_the_short_way_of_a_usual_message_says_what_the_long_one_says(data, chunks, commitment):
    """Whole, as another writes it, or with bytes that are not its own: the same message, or the same fault."""
    whole = bytearray(encode(FINE, "float32", chunks, commitment=commitment))
    assert torch.equal(load(bytes(whole))["hidden"], FINE)
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=2)):
        whole[place] = data.draw(st.sampled_from(b'0129 ,[]{}":\\aF') | st.integers(0, 255))
    cut, tokens = data.draw(st.just(0) | st.integers(0, len(whole))), data.draw(st.none() | st.integers(0, 3))
    said = []
    for short_way in (wire._usual, lambda *_: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "_usual", short_way)
            try:
                message = decode(bytes(whole[: cut or None]), "float32", WIDTH, torch.float32, tokens)
                said.append((repr(replace(message, hidden=None)), message.hidden is None or message.hidden.tolist()))
            except SwarmError as error:
                said.append(str(error))
    assert said[0] == said[1]


def test_the_usual_messages_go_the_short_way(monkeypatch):
    monkeypatch.delattr(wire, "header_of")
    commitment = json.dumps({"server": "ab", "steps": [[1, 2]]})
    assert decode(encode(FINE, "bfloat16", TWO[:1]), "bfloat16", WIDTH, torch.float32).chunks == TWO[:1]
    answer = decode(encode(FINE, "float32", commitment=commitment), "float32", WIDTH, torch.float32, 2)
    assert answer.commitment == commitment and torch.equal(answer.hidden, FINE)
