"""The tensors of a model folder, read from the one list of its files and under the model's names."""

from collections.abc import Callable, Iterator

import torch
from safetensors import safe_open
from torch import Tensor

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
