"""Streams of bytes coded by Zstandard (RFC 8878) where that makes them smaller, and never decoded beyond their size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

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
    """Return ``data`` as it travels: coded where it is worth it."""
    import zstandard

    settings = zstandard.ZstdCompressionParameters.from_level(1, **_NO_MATCHES)
    coded = zstandard.ZstdCompressor(compression_params=settings).compress(data)
    return ("zstd", coded) if len(coded) <= WORTH * len(data) else ("raw", data)


class Decoding:
    """A stream of ``size`` bytes, coded as ``data``, taken a piece at a time.

    The pieces of one that is coded are in the same memory, one after the other, which ``room`` gives: so what is
    decoded lies in the cache when it is made weights, and of the whole stream no page is taken from the system. Raises
    ModelError where ``data`` says or holds another size, or is no code.
    """

    def __init__(self, codec: Codec, data: memoryview, size: int, subject: str, room: Callable[[], memoryview]) -> None:
        self.size = self._remaining = size
        self._subject = subject
        self._data: memoryview | None = None
        if codec == "raw":
            if len(data) != size:
                raise ModelError(f"{subject} has {len(data):,} bytes, by its shape {size:,}; stage it again")
            self._data = data
            return
        import zstandard

        self._error = zstandard.ZstdError
        try:
            declared = zstandard.get_frame_parameters(data).content_size  # before any memory is taken
            if declared != size:
                raise ModelError(f"{subject} would expand to {declared:,} bytes, by its shape {size:,}; stage it again")
            self._reader = zstandard.ZstdDecompressor().stream_reader(data)
        except zstandard.ZstdError as error:
            raise ModelError(f"{subject} cannot be decoded ({error}); copy it again") from error
        self._piece = room()

    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes, until the next call; with the last ones it is held that nothing follows."""
        self._remaining -= count
        if self._data is not None:
            piece, self._data = self._data[:count], self._data[count:]
            return piece
        piece = self._piece[:count]
        try:
            filled = self._reader.readinto(piece)
            more = b"" if self._remaining else self._reader.read(1)
        except self._error as error:
            raise ModelError(f"{self._subject} cannot be decoded ({error}); copy it again") from error
        if filled != count or more:
            raise ModelError(f"{self._subject} cannot be decoded (it holds another size than it says); copy it again")
        return piece
