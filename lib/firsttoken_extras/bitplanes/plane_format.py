"""Planes as a format of parts: what a manifest and a plan say of tensors that travel in them (standard library only).

It is registered under its name, and the library's loader, writer and manifest find it there. What makes weights of
planes needs numpy or torch, and is imported when the first weights are made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from firsttoken.progressiveserve.checkpoint.part_formats import Entries, PartCoding, PartFormat, PartTensor, StoredPart
from firsttoken.progressiveserve.checkpoint.plan import Part, TensorSource
from firsttoken.study.parsing.parse_errors import ParseError, shown
from firsttoken.study.parsing.schema import at_least, digits, parse_as
from firsttoken_extras.bitplanes.codec import Codec, encode
from firsttoken_extras.bitplanes.layouts import SPLITS, planes_of, stream_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from firsttoken_extras.bitplanes.decode import PlaneReader, PlaneRefiner
    from firsttoken_extras.bitplanes.streams import FirstWords

FORMAT = "planes"


@dataclass(frozen=True)
class PlaneTensor:
    """A tensor of which a file has one plane: what it is when all are there, with the sha256 of its bytes then.

    ``codecs`` say how each stream of the plane is coded.
    """

    dtype: Literal["F16", "BF16"]
    shape: tuple[Annotated[int, at_least(1)], ...]
    sha256: Annotated[str, digits(64)]
    codecs: tuple[Codec, ...]


@dataclass(frozen=True)
class PlaneCoding(PartCoding):
    """The entry in a manifest for a part in planes: of the tensors ``cut`` it brings ``plane`` (0-based) by
    ``split``."""

    split: str
    plane: Annotated[int, at_least(0)]
    cut: dict[str, PlaneTensor]

    @property
    def refines(self) -> bool:
        """Return whether planes came before this one."""
        return self.plane > 0

    def tensors(self, entries: Entries) -> Mapping[str, PartTensor]:
        """Return the tensors that are cut, and those of the file's ``entries`` that are no stream."""
        streams = {key for name in self.cut for key in self.entries(name)}
        return {name: entry for name, entry in entries.items() if name not in streams} | dict(self.cut)

    def identity(self, name: str) -> str:
        """The dtype and the sha256 of a tensor when all of its planes are there."""
        return f"{self.cut[name].dtype} {self.cut[name].sha256}" if name in self.cut else ""

    def entries(self, name: str) -> list[str]:
        """Return the file's names of the streams of its plane of a cut tensor."""
        return [stream_name(name, self.plane, index) for index in range(len(self.cut[name].codecs))]

    def check(self, entries: Entries, subject: str) -> None:
        """Raise ParseError unless the file has, for each cut tensor, the streams of its plane, none above its size."""
        if not (self.split and self.cut):
            raise ParseError(f"{subject} is cut and names no split, or the other way round")
        for name, tensor in self.cut.items():
            layout = SPLITS.get(self.split, {}).get(tensor.dtype)
            planes = layout.planes if layout else ()
            if self.plane >= len(planes) or len(planes[self.plane]) != len(tensor.codecs):
                split = f"the split {shown(self.split)} of {tensor.dtype}"
                raise ParseError(f"{subject} has a plane of {name} that {split} has not")
            for stream, key, codec in zip(planes[self.plane], self.entries(name), tensor.codecs, strict=True):
                entry, size = entries.get(key), stream.bytes(math.prod(tensor.shape))
                if entry is None or entry.dtype != "U8" or len(entry.shape) != 1:
                    raise ParseError(f"{subject} has no stream {key}")
                if entry.shape[0] > size or (codec == "raw" and entry.shape[0] != size):
                    raise ParseError(
                        f"{subject}: the stream {key} has {entry.shape[0]:,} bytes, and decoded it has {size:,}"
                    )
        if self.refines and (uncoded := self.tensors(entries).keys() - self.cut.keys()):
            raise ParseError(f"{subject} refines tensors, and brings {shown(min(uncoded))} beside them")
        if both := self.cut.keys() & entries.keys():
            raise ParseError(f"{subject} brings {shown(min(both))} cut and whole")

    def planned(self, entries: Entries) -> PlannedPlane:
        """Return the part's coding in a plan."""
        return PlannedPlane(
            self.split, self.plane, tuple(name for name in self.tensors(entries) if name not in self.cut)
        )


@dataclass(frozen=True)
class PlannedPlane:
    """The entry in a plan for a part in planes: ``plane`` (0-based) by ``split`` of each tensor that comes, but for
    those of ``whole``."""

    format: ClassVar[str] = FORMAT
    split: str
    plane: int = 0
    whole: tuple[str, ...] = ()

    def fault(self, action: str, before: object) -> str:
        """Return what is wrong with the plane of a tensor that comes after ``before``; "" if nothing."""
        if self.split not in SPLITS:
            return f"is cut by {self.split!r}: no split of weights is called so; choose one of {', '.join(SPLITS)}"
        follows = isinstance(before, PlannedPlane) and before.split == self.split
        due = before.plane + 1 if follows else 0
        if self.plane != due or (action == "add") != (due == 0) or due >= planes_of(self.split):
            return f"comes as plane {self.plane} where plane {due} is due; bring each once and in order"
        return ""

    def lacking(self) -> str:
        """Return the planes that are still to come; "" if none."""
        return f"{missing} of its planes" if (missing := planes_of(self.split) - 1 - self.plane) else ""

    def most_bytes(self, source: TensorSource, part: Part) -> int:
        """Bytes of the plane that ``part`` brings, no stream of it coded. Raises StageError for a dtype that the split
        does not know."""
        from firsttoken_extras.bitplanes.encode import STORED_AS, layout_of

        total = 0
        for name in part.tensors:
            count, dtype = math.prod(source.shapes[name]), source.dtype(name)
            if name in self.whole:
                total += count * dtype.itemsize
            else:
                layout = layout_of(self.split, STORED_AS.get(dtype, str(dtype)))
                total += sum(stream.bytes(count) for stream in layout.planes[self.plane])
        return total

    def encoded(self, source: TensorSource, part: Part) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The streams of the plane of each tensor of ``part``, and those that travel whole, by their name in the file;
        and what the manifest says of those that are cut. Raises StageError for a tensor of a dtype that the split does
        not know."""
        import torch

        from firsttoken_extras.bitplanes.encode import STORED_AS, plane_encoder
        from firsttoken_extras.bitplanes.native_words import merger

        merger()  # is built here, so that no start on this machine waits for a compiler
        streams: dict[str, Tensor] = {}
        cut: dict[str, Any] = {}
        for name in part.tensors:
            tensor = source.get(name).to("cpu").contiguous()
            if name in self.whole:
                streams[name] = tensor
                continue
            dtype = STORED_AS[tensor.dtype]
            made = plane_encoder(self.split, dtype)
            words = tensor.view(torch.int16).flatten()
            sha256 = hashlib.sha256(words.numpy()).hexdigest()
            coded = [encode(stream.numpy().tobytes()) for stream in made.cut(words, self.plane)]
            for index, (_, data) in enumerate(coded):
                streams[stream_name(name, self.plane, index)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            codecs = [codec for codec, _ in coded]
            cut[name] = {"dtype": dtype, "shape": list(tensor.shape), "sha256": sha256, "codecs": codecs}
        return streams, {"split": self.split, "plane": self.plane, "cut": cut}


class PlaneFormat(PartFormat):
    """The handler of parts in planes."""

    def read(self, content: dict[str, Any]) -> PlaneCoding:
        """Return the coding of a part whose manifest says ``content``. Raises ParseError."""
        return parse_as(PlaneCoding, content)

    def reader(self, dtype: torch.dtype) -> PlaneReader:
        """Return what makes weights of first planes."""
        from firsttoken_extras.bitplanes.decode import PlaneReader

        return PlaneReader(dtype)

    def word_unpacker(self, parts: Sequence[StoredPart]) -> FirstWords | None:
        """Return a filler that makes words of the first planes of ``parts`` without torch; None where blocks are
        rounded, or there is no compiler."""
        from firsttoken_extras.bitplanes.streams import FirstWords, fills

        return FirstWords() if fills(parts) else None

    def refiner(self, between: Callable[[Callable[[], None]], Any]) -> PlaneRefiner:
        """Return what merges later planes into weights."""
        from firsttoken_extras.bitplanes.decode import PlaneRefiner

        return PlaneRefiner(between)
