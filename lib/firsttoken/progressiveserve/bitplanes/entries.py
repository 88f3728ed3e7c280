"""What a manifest says of a tensor that travels in planes (standard library only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from firsttoken.progressiveserve.bitplanes.codec import Codec
from firsttoken.study.parsing.schema import at_least, digits


@dataclass(frozen=True)
class CutTensor:
    """A tensor of which a file has one plane: what it is when all are there, with the sha256 of its bytes then.

    ``codecs`` say how each stream of the plane is coded.
    """

    dtype: Literal["F16", "BF16"]
    shape: tuple[Annotated[int, at_least(1)], ...]
    sha256: Annotated[str, digits(64)]
    codecs: tuple[Codec, ...]
