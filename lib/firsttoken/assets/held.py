"""Weights that are served are held: no file that changes afterwards changes an answer, or ends the process."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.study.errors import ModelError

if TYPE_CHECKING:
    from torch import nn


def hold(model: nn.Module) -> nn.Module:
    """``model`` with its weights on a CPU in memory of their own, in place.

    safetensors maps a file, and a weight that keeps its dtype stays on the map: whoever overwrites the file changes
    answers, and whoever cuts it ends the process with SIGBUS. Each weight has a mapping of its own, which goes with it.
    """
    import torch

    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # in what is shared, copies of the process would write, too
    for weight in [*model.parameters(), *model.buffers()]:
        if weight.device.type == "cpu" and weight.nbytes:
            memory = mmap.mmap(-1, weight.nbytes, flags=private)
            weight.data = torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape).copy_(weight.data)
    return model


def seen(files: Sequence[Path]) -> str:
    """What tells whether ``files`` have been changed: sizes, times and places on the disk."""
    found = [file.stat() for file in files]
    return " ".join(f"{one.st_dev}:{one.st_ino}:{one.st_size}:{one.st_mtime_ns}" for one in found)


@contextmanager
def unchanged(files: Sequence[Path], before: str = "") -> Iterator[None]:
    """Raises ModelError where ``files`` are others at the end of the block than at its beginning, or than ``before``
    says, which :func:`seen` has said of them."""
    start = before or seen(files)
    yield
    if seen(files) != start:
        raise ModelError(f"the weights in {files[0].parent} were changed while they were in use; start again")
