"""Layouts: the bits of a weight that travel in each plane (standard library only: a manifest is read before torch is
there).

A word is the pattern of one 16-bit weight. Its planes are brought in order; each is one or more streams of bytes, and a
stream holds one field of every word, packed. So the size of everything that is decoded follows from the tensor's shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """``width`` bits (1, 2, 4 or 8) of every word, of which the lowest is the word's bit ``low``; within one byte."""

    width: int
    low: int

    def bytes(self, count: int) -> int:
        """Bytes of the field of ``count`` words."""
        return -(-count * self.width // 8)


@dataclass(frozen=True)
class Scales:
    """A factor of 16 bits for each ``group`` words in a row."""

    group: int

    def bytes(self, count: int) -> int:
        """Bytes of the factors of ``count`` words."""
        return 2 * -(-count // self.group)


Stream = Field | Scales


@dataclass(frozen=True)
class Layout:
    """The cut of words of a dtype (in safetensors' words) into ``planes``, each of one or more streams.

    ``code_bits`` is 0 where the fields are those of the word itself, from its highest bits down; ``exponent_apart``
    when its sign is moved between exponent and mantissa first. Otherwise the first plane holds a blockwise rounding to
    so many bits and its factors, and the second what that is off by.
    """

    planes: tuple[tuple[Stream, ...], ...]
    code_bits: int = 0
    exponent_apart: bool = False

    def unknown(self, plane: int) -> int:
        """Return the number of bits of a word, the lowest, that are not there with the planes up to ``plane``
        (0-based), of a layout whose fields are those of the word itself."""
        return 16 - sum(field.width for fields in self.planes[: plane + 1] for field in fields)

    def middle(self, plane: int) -> int:
        """Return the bit that stands for those that are not there with ``plane``; 0 where all are."""
        return 1 << unknown - 1 if (unknown := self.unknown(plane)) else 0


INFINITE = {"F16": 0x7C00, "BF16": 0x7F80}
"""The pattern of an infinity, by dtype; without its sign, a word from there on is that or a NaN."""


BLOCK = 1 << 20
"""Words that are packed together, 2 MB of weights: so a tensor can be rebuilt and refined a block at a time, in the
cache of a core, whatever its size (0.9 ns a word; 2.0 with blocks of an eighth). A multiple of every group and of the
words of a byte."""

GROUP = 32
"""Weights that share a factor, as in the common 4- and 8-bit files."""

_BYTES = (Field(8, 8),), (Field(8, 0),)
_CODES = {8: (Field(8, 0),), 6: (Field(4, 2), Field(2, 0)), 5: (Field(4, 1), Field(1, 0)), 4: (Field(4, 0),)}
_EXPONENT_AND_TWO = Field(8, 8), Field(1, 7), Field(2, 5)
_RESIDUAL = (Field(8, 8), Field(8, 0))


def _blockwise(bits: int) -> dict[str, Layout]:
    layout = Layout(((*_CODES[bits], Scales(GROUP)), _RESIDUAL), bits)
    return {"F16": layout, "BF16": layout}


SPLITS: dict[str, dict[str, Layout]] = {
    # of bf16 it is the exponent that can be coded (2.6 of its 8 bits are news); sign and mantissa are noise
    "bits": {
        "F16": Layout(_BYTES),
        "BF16": Layout((_EXPONENT_AND_TWO, (Field(4, 1), Field(1, 0))), exponent_apart=True),
    },
    "bits in three": {
        "F16": Layout(((Field(8, 8),), (Field(4, 4),), (Field(4, 0),))),
        "BF16": Layout((_EXPONENT_AND_TWO, (Field(2, 3),), (Field(2, 1), Field(1, 0))), exponent_apart=True),
    },
    "8 bits": _blockwise(8),
    "6 bits": _blockwise(6),
    "5 bits": _blockwise(5),
    "4 bits": _blockwise(4),
    "lossless": {
        "F16": Layout((_BYTES[0] + _BYTES[1],)),
        "BF16": Layout((_BYTES[0] + _BYTES[1],), exponent_apart=True),
    },
}
"""The layouts by the name of the split and by dtype: sign, exponent and two mantissa bits first; the same with the rest
in two steps; blockwise rounding first; everything at once, coded without loss (as DFloat11 and ZipNN do)."""


def planes_of(split: str | None) -> int:
    """Return the number of planes a tensor comes in, whatever its dtype; 1 without a split, or by one that does not
    exist."""
    return max((len(layout.planes) for layout in SPLITS.get(split or "", {}).values()), default=1)


def stream_name(tensor: str, plane: int, index: int) -> str:
    """Return the name in its file of the stream ``index`` of a plane of ``tensor``."""
    return f"{tensor}.plane{plane}.{index}"
