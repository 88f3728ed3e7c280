"""The tensors of a model folder, read from the one list of its files and under the model's names.

They are read, where safetensors' own reader maps the file (``weight_files.py`` says why).
"""

import math
import mmap
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from firsttoken.assets.checkpoint import EMBEDDING, HEAD, STORED, ModelFiles, StoredTensor
from firsttoken.assets.empty_model import set_parameter, tie_head
from firsttoken.assets.model_config import CONFIG
from firsttoken.assets.weight_files import WeightFile
from firsttoken.study.errors import ModelError
from firsttoken.study.system.direct_io import back

_WHOLE = {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_TYPES = STORED | _WHOLE | {"BOOL": "bool"}
_ROWS = 4096  # that are compared at a time: two embeddings of gigabytes are never both in memory


def tensors_of(
    files: ModelFiles, wanted: Callable[[str], bool] = lambda name: True, device: str | torch.device = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``files`` that are ``wanted``, by the model's name, each once, file by file.

    Each has memory of its own. A tied head comes as the embedding that it is. Raises ModelError as :func:`check_tied`,
    before the first tensor comes, and as :func:`read_tensor`.
    """
    if wanted(EMBEDDING):
        check_tied(files)
    for file in files.files:
        tensors = [(name, stored) for name, stored in files.tensors.items() if stored.file == file and wanted(name)]
        if tensors:
            opened = WeightFile(file)
            for name, stored in tensors:
                yield name, _read(opened, stored).to(device)


def fill(model: nn.Module, files: ModelFiles, device: str | torch.device = "cpu") -> nn.Module:
    """``model``, which is empty, with the weights of ``files`` on ``device``, in memory of their own.

    Raises ModelError for a parameter that ``files`` lack, or that is another there.
    """
    model.model.rotary_emb.to(device)
    for name, tensor in tensors_of(files, device=device):
        set_parameter(model, name, tensor)
    return tie_head(model)


def read_tensor(stored: StoredTensor) -> Tensor:
    """The tensor, in memory of its own. Raises ModelError for a file that ends before it."""
    return _read(WeightFile(stored.file), stored)


def _read(opened: WeightFile, stored: StoredTensor, rows: range | None = None) -> Tensor:
    """The tensor, or these ``rows`` of it."""
    entry = stored.entry
    dtype, shape = getattr(torch, _TYPES[entry.dtype]), list(entry.shape)
    start, size = entry.start, entry.end - entry.start
    if rows is not None:
        row = size // shape[0]
        start, size, shape[0] = start + rows.start * row, len(rows) * row, len(rows)
    if not size:
        return torch.empty(shape, dtype=dtype)
    # in what is shared, Python's default, copies of the process would write, too; each mapping goes with its tensor
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = memoryview(memory)
    back(room)
    opened.read(start, room)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def check_tied(files: ModelFiles) -> None:
    """Raise ModelError where a head is tied to the embedding, and both are stored and differ.

    transformers unties such a head with a warning, and whoever ties it as config.json says computes something else.
    """
    if files.second is None:
        return
    first = files.tensors[EMBEDDING]
    rows = first.entry.shape[0]
    embedding, head = WeightFile(first.file), WeightFile(files.second.file)
    same = first.entry.shape == files.second.entry.shape and all(
        torch.equal(_read(embedding, first, some).double(), _read(head, files.second, some).double())
        for some in (range(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS))
    )
    if not same:
        raise ModelError(
            f"{files.folder} has a {HEAD} that is not the embedding it is tied to; set tie_word_embeddings to false in "
            f"its {CONFIG}"
        )
