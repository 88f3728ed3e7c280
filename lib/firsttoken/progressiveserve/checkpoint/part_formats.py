"""Formats in which a file may hold tensors otherwise than as they are, each behind a handler that is found by name.

A manifest names the format of a part and keeps what the part says of itself in it; whoever reads, checks, loads or
stages parts asks the handler. It is registered by name (``study.extensions``) and imported when the first part of its
format is met. Only the standard library is imported, here and by a handler before weights are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from firsttoken.study.errors import ModelError
from firsttoken.study.extensions import extension, registered
from firsttoken.study.parsing.safetensors_header import TensorEntry

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

KIND = "PART_FORMATS"


class CodedTensor(Protocol):
    """A tensor of a model that files hold in a format: what it is when all of its parts are there.

    ``dtype`` is in safetensors' words ("BF16"); ``sha256`` is that of its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class PartCoding(Protocol):
    """What one part says of the tensors that it holds in its format."""

    @property
    def tensors(self) -> Mapping[str, CodedTensor]:
        """The model's tensors that the part brings in its format, whole or a piece of each."""

    def entries(self, name: str) -> Sequence[str]:
        """The file's names of what it holds of the tensor ``name``."""

    def check(self, entries: Mapping[str, TensorEntry], what: str) -> None:
        """Raise Damaged unless the file's ``entries`` are what the coding says; ``what`` names the part."""

    def planned(self, whole: tuple[str, ...]) -> Any:
        """What a plan says of the part (``plan.PlannedCoding``), which brings ``whole`` as they are."""


class CodedPart(Protocol):
    """A part as its format's handler meets it (``manifest.PartFile``); ``coding`` is what the handler has read."""

    name: str
    tensors: dict[str, TensorEntry]
    coding: Any


class WeightFiller(Protocol):
    """Makes weights of the "add" parts of one format, for one thread."""

    def fill(self, part: CodedPart, name: str, file: memoryview, weights: Tensor) -> None:
        """Fill ``weights``, which have the shape of the tensor ``name``, from ``file``. Raises ModelError."""


class WordFiller(Protocol):
    """Makes words of the "add" parts of one format without torch, for one thread."""

    def fill(self, part: CodedPart, name: str, file: memoryview, words: np.ndarray) -> None:
        """Fill ``words``, flat, with the bits of the tensor ``name`` in its dtype, from ``file``. Raises ModelError."""


class WeightMerger(Protocol):
    """Merges the "refine" parts of one format into weights that are there."""

    def place(self, part: CodedPart, file: memoryview, parameters: Callable[[str], nn.Parameter]) -> None:
        """Merge ``file`` into ``parameters``, each found by its tensor's name. Raises ModelError."""


class PartFormat(Protocol):
    """The handler of one format. Reading a coding needs no torch; what it makes may import it."""

    def read(self, content: dict[str, Any]) -> PartCoding:
        """The coding of a part whose manifest says ``content``. Raises Damaged."""

    def filler(self) -> WeightFiller:
        """Return a new filler."""

    def word_filler(self, parts: Sequence[CodedPart]) -> WordFiller | None:
        """Return a new filler that needs no torch; None where ``parts`` need it."""

    def merger(self, run: Callable[[Sequence[Callable[[], None]], int], None]) -> WeightMerger:
        """Return a new merger. It gives its merges to ``run``, some at a time, with the bytes of weights that they
        change, and is called back when nobody computes with these."""


def format_of(name: str) -> PartFormat:
    """The handler of the format ``name``. Raises ModelError for one that is not registered, or cannot be imported."""
    known = registered(KIND)
    if name not in known:
        raise ModelError(
            f"a part is in the format {name[:40]!r}, which nothing here reads (known: {', '.join(known) or 'none'}); "
            "install firsttoken with its package firsttoken_extras, or stage the model in tensors as they are"
        )
    try:
        return extension(KIND, name)()
    except ImportError as error:
        raise ModelError(f"parts in the format {name!r} cannot be read ({error}); install what is missing") from error
