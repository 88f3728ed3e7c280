"""The tensors of a model folder, read from the one list of its files and under the model's names.

Weights that are served are held: no file that changes afterwards changes an answer, or ends the process.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from firsttoken.assets.checkpoint import EMBEDDING, HEAD, ModelFiles
from firsttoken.assets.model_config import CONFIG
from firsttoken.study.errors import ModelError

_ROWS = 4096  # that are compared at a time: two embeddings of gigabytes are never both in memory


def tensors_of(
    files: ModelFiles, wanted: Callable[[str], bool] = lambda name: True, device: str | torch.device = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``files`` that are ``wanted``, by the model's name, each once, file by file.

    They are views of the mapped file where ``device`` is the CPU. A tied head comes as the embedding that it is. Raises
    ModelError as :func:`check_tied`, before the first tensor comes.
    """
    if wanted(EMBEDDING):
        check_tied(files)
    for file in files.files:
        here = [(name, stored.name) for name, stored in files.tensors.items() if stored.file == file and wanted(name)]
        if here:
            with safe_open(file, "pt", str(device)) as opened:
                for name, stored_name in here:
                    yield name, opened.get_tensor(stored_name)


def check_tied(files: ModelFiles) -> None:
    """Raise ModelError where a head is tied to the embedding, and both are stored and differ.

    transformers unties such a head with a warning, and whoever ties it as config.json says computes something else.
    """
    if files.second is None:
        return
    first = files.tensors[EMBEDDING]
    with safe_open(first.file, "pt") as embedding, safe_open(files.second.file, "pt") as head:
        one, other = embedding.get_slice(first.name), head.get_slice(files.second.name)
        rows = first.entry.shape[0]
        same = first.entry.shape == files.second.entry.shape and all(
            torch.equal(one[at : at + _ROWS].double(), other[at : at + _ROWS].double()) for at in range(0, rows, _ROWS)
        )
    if not same:
        raise ModelError(
            f"{files.folder} has a {HEAD} that is not the embedding it is tied to; set tie_word_embeddings to false in "
            f"its {CONFIG}"
        )


def hold(model: nn.Module) -> nn.Module:
    """``model`` with its weights on a CPU in memory of their own, in place.

    safetensors maps a file, and a weight that keeps its dtype stays on the map: whoever overwrites the file changes
    answers, and whoever cuts it ends the process with SIGBUS. Each weight has a mapping of its own, which goes with it.
    """
    for weight in [*model.parameters(), *model.buffers()]:
        if weight.device.type == "cpu" and weight.nbytes:
            memory = torch.frombuffer(mmap.mmap(-1, weight.nbytes), dtype=weight.dtype).view(weight.shape)
            weight.data = memory.copy_(weight.data)
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
