"""The formats in which the files of parts hold tensors: as they are, or in a format whose handler is found by name.

A manifest names the format of a part and keeps what the part says of itself in it. Whoever reads, checks, loads or
stages parts asks the handler, which knows how to read a part into tensors, and how to refine tensors that are there. It
is registered by name (``study.extensions``) and imported when the first part of its format is met. Only the standard
library is imported, here and by a handler before weights are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from firsttoken.progressiveserve.checkpoint.names import torch_dtype
from firsttoken.study.errors import ModelError
from firsttoken.study.extensions import extension, registered
from firsttoken.study.parsing.parse_errors import ParseError
from firsttoken.study.parsing.safetensors_header import TensorEntry

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

KIND = "PART_FORMATS"

AllocateTensor = Callable[[tuple[int, ...]], "Tensor"]
"""Gives a tensor of a shape in memory that is there for it, its values whatever they are."""


class PartTensor(Protocol):
    """A tensor of a model as it is when all parts of it are there; ``dtype`` is in safetensors' words ("BF16")."""

    dtype: str
    shape: tuple[int, ...]


Entries = Mapping[str, TensorEntry]
"""What a file's header says of what lies in it."""


class PartCoding:
    """The coding of one part: what its manifest says of its tensors, whose file has these ``entries``.

    As it stands it is that of parts without a format, of which a manifest has nothing more to say.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    @property
    def refines(self) -> bool:
        """Return whether the part refines tensors that are there, and brings none."""
        return False

    def tensors(self, entries: Entries) -> Mapping[str, PartTensor]:
        """The model's tensors that the part brings or refines. Those that lie in the file as they are have their own
        name there, and no other has."""
        return entries

    def identity(self, name: str) -> str:
        """Return what all parts of the tensor ``name`` must say alike; "" where the part knows nothing of the kind: a
        rounded tensor and the exact one are of different bytes."""
        return ""

    def check(self, entries: Entries, subject: str) -> None:
        """Raise ParseError unless the file's ``entries`` are what the coding says; ``subject`` names the part."""
        if self._content:
            raise ParseError(f"{subject} says more of its tensors and names no format")

    def planned(self, entries: Entries) -> Any:
        """Return the part's coding in a plan (``plan.PlannedCoding``); None where its tensors lie as they are."""
        return None


class StoredPart(Protocol):
    """A part as its format's handler meets it (``manifest.PartFile``); ``coding`` is what the handler has read."""

    name: str
    tensors: dict[str, TensorEntry]
    coding: Any
    carried: Mapping[str, PartTensor]
    data_start: int


class PartReader:
    """Reads parts of one format that bring tensors, for one thread.

    As it stands it takes tensors as they lie in the file, in its memory where they are of ``dtype``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def copied_shapes(self, part: StoredPart) -> list[tuple[int, ...]]:
        """The shapes of the tensors that cannot stay where the file was read."""
        return [tensor.shape for tensor in part.carried.values() if torch_dtype(tensor.dtype) != self._dtype]

    def read(self, part: StoredPart, file: memoryview, data: Tensor, allocate: AllocateTensor) -> dict[str, Tensor]:
        """The tensors of ``part`` by name. ``data``, uint8, are the bytes of ``file`` behind its header, where the
        model computes; ``allocate`` gives memory there. Raises ModelError."""
        stored = {name: stored_tensor(part, name, data) for name in part.carried}
        return {
            name: tensor if tensor.dtype == self._dtype else allocate(tensor.shape).copy_(tensor)
            for name, tensor in stored.items()
        }


class WordUnpacker(Protocol):
    """Makes words of the parts of one format that bring tensors, without torch and for one thread."""

    def fill(self, part: StoredPart, name: str, file: memoryview, words: np.ndarray) -> None:
        """Fill ``words``, flat, with the bits of the tensor ``name`` in its dtype, from ``file``. Raises ModelError."""


class PartRefiner(Protocol):
    """Refines the weights of one model by parts of one format; by a part that comes again it refines nothing twice."""

    def refine(self, part: StoredPart, file: memoryview, parameters: Callable[[str], nn.Parameter]) -> None:
        """Refine ``parameters``, each found by its tensor's name, by what ``file`` holds. Raises ModelError."""


class PartFormat:
    """The handler of one format. Reading a coding needs no torch; what it makes may import it.

    As it stands it is that of parts without a format: a part that comes again takes the place of the one before.
    """

    def read(self, content: dict[str, Any]) -> PartCoding:
        """The coding of a part whose manifest says ``content``. Raises ParseError."""
        return PartCoding(content)

    def reader(self, dtype: torch.dtype) -> PartReader:
        """Return a new reader, whose tensors are of ``dtype``."""
        return PartReader(dtype)

    def word_unpacker(self, parts: Sequence[StoredPart]) -> WordUnpacker | None:
        """Return a new filler that needs no torch; None where ``parts`` need it."""
        return None

    def refiner(self, between: Callable[[Callable[[], None]], Any]) -> PartRefiner:
        """Return a new refiner. It gives each change of weights to ``between``, which calls it when nobody computes
        with them."""
        raise NotImplementedError("no such part refines what is there")


def stored_tensor(part: StoredPart, name: str, data: Tensor) -> Tensor:
    """The tensor ``name``, which lies as it is in the file of ``part``, whose bytes behind the header are ``data``."""
    entry, first = part.tensors[name], part.data_start
    return data[entry.start - first : entry.end - first].view(torch_dtype(entry.dtype)).reshape(entry.shape)


def format_of(name: str) -> PartFormat:
    """The handler of the format ``name``. Raises ModelError for one that is not registered, or cannot be imported."""
    if not name:
        return PartFormat()
    formats = registered(KIND)
    if name not in formats:
        raise ModelError(
            f"a part is in the format {name[:40]!r}, which nothing here reads (known: {', '.join(formats) or 'none'}); "
            "install firsttoken with its package firsttoken_extras, or stage the model in tensors as they are"
        )
    try:
        return extension(KIND, name)()
    except ImportError as error:
        raise ModelError(f"parts in the format {name!r} cannot be read ({error}); install what is missing") from error
