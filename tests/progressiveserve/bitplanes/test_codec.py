"""A coded stream is never more than its tensor's shape says, whatever it claims or holds."""

from __future__ import annotations

import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.study.errors import ModelError
from firsttoken_extras.bitplanes.codec import WORTH, Codec, Decoding, encode

DATA = bytes(range(8)) * 512


def decode(codec: Codec, data: bytes, size: int, what: str) -> bytes:
    """A stream taken in one piece."""
    return bytes(Decoding(codec, memoryview(data), size, what, lambda: memoryview(bytearray(size))).take(size))


@given(st.one_of(st.binary(max_size=300), st.binary(min_size=1, max_size=3).map(lambda some: some * 200)))
def test_streams_come_back_and_are_coded_only_where_it_is_worth_it(data):
    codec, coded = encode(data)
    assert decode(codec, coded, len(data), "layer 00") == data
    assert (len(coded) <= WORTH * len(data)) if codec == "zstd" else coded == data


def refused(codec: Codec, data: bytes, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        decode(codec, data, len(DATA), "layer 03: q")
    assert "\n" not in str(caught.value)


def test_a_stream_that_says_it_expands_beyond_its_size():
    refused("zstd", zstandard.compress(DATA + b"!"), r"layer 03: q would expand to 4,097 bytes, by its shape 4,096")
    refused("zstd", zstandard.compress(bytes(1 << 24)), "would expand to 16,777,216 bytes")


def test_a_stream_that_expands_beyond_what_it_says():
    """The frame's header lies: the size in it is the right one, and its blocks hold more."""
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(DATA * 16))
    told = struct.pack("<I", len(DATA) * 16) if frame[4] & 0xC0 == 0x80 else struct.pack("<H", len(DATA) * 16 - 256)
    at = frame.find(told, 4)
    frame[at : at + len(told)] = struct.pack("<I", len(DATA)) if len(told) == 4 else struct.pack("<H", len(DATA) - 256)
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == len(DATA)
    refused("zstd", bytes(frame), "layer 03: q cannot be decoded")


def test_a_stream_without_its_size():
    refused("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(DATA), "would expand to")


def test_streams_that_are_torn_or_none():
    coded = zstandard.compress(DATA)
    refused("zstd", coded[:-3], "cannot be decoded")
    refused("zstd", b"not coded at all, only long", "cannot be decoded")
    refused("raw", DATA[:-1], "has 4,095 bytes, by its shape 4,096; stage it again")
