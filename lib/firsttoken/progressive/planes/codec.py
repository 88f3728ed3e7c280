"""Streams of bytes coded by Zstandard (RFC 8878) where that makes them smaller, and never decoded beyond their size."""

from __future__ import annotations

from typing import Literal

from firsttoken.progressive.loading.reader import host_memory
from firsttoken.study.errors import ModelError

Codec = Literal["raw", "zstd"]

WORTH = 0.95
"""A coded stream must come to this share of its bytes or less: decoding runs at 1 to 2 GB/s a core, so what saves a
twentieth costs more than it saves on every link of more than 0.8 Gbit/s."""

_NO_MATCHES = {"window_log": 17, "hash_log": 6, "chain_log": 6, "min_match": 7}
"""Nothing in a weight repeats, and matches that are chance cost more than they save: with a table of 64 entries hardly
any is found, the exponents of bf16 come to their entropy (2.66 bits; level 1 gives 2.91, level 3 3.27), and both ways
are half again as fast."""


def encode(data: bytes) -> tuple[Codec, bytes]:
    """``data`` as it travels: coded where it is worth it."""
    import zstandard

    settings = zstandard.ZstdCompressionParameters.from_level(1, **_NO_MATCHES)
    coded = zstandard.ZstdCompressor(compression_params=settings).compress(data)
    return ("zstd", coded) if len(coded) <= WORTH * len(data) else ("raw", data)


def decode(codec: Codec, data: memoryview, size: int, what: str) -> memoryview:
    """The ``size`` bytes of a stream. Raises ModelError where ``data`` says or holds another size, or is no code."""
    if codec == "raw":
        if len(data) != size:
            raise ModelError(f"{what} has {len(data):,} bytes, by its shape {size:,}; stage it again")
        return data
    import zstandard

    try:
        declared = zstandard.get_frame_parameters(data).content_size  # before any memory is taken
        if declared != size:
            raise ModelError(f"{what} would expand to {declared:,} bytes, by its shape {size:,}; stage it again")
        decoded = host_memory(size)[:size]
        reader = zstandard.ZstdDecompressor().stream_reader(data)
        filled, more = reader.readinto(decoded), reader.read(1)
    except zstandard.ZstdError as error:
        raise ModelError(f"{what} cannot be decoded ({error}); copy it again") from error
    if filled != size or more:
        raise ModelError(f"{what} cannot be decoded (it holds another size than it says); copy it again")
    return decoded
