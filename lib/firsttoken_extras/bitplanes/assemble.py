"""The ordinary checkpoint that planes come from: for whoever wants one file, or another program."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from firsttoken.progressiveserve.checkpoint.manifest import PartFile, read_manifest, verify
from firsttoken.progressiveserve.loading.read_plan import parts_of
from firsttoken.study.errors import ModelError, StageError
from firsttoken.study.files import new_folder
from firsttoken_extras.bitplanes.decode import FirstPlanes, LaterPlanes, Merge
from firsttoken_extras.bitplanes.encode import STORED


def assemble(folder: Path, target: Path) -> Path:
    """Write the model that is staged in ``folder``, in planes or not, to ``target`` as one safetensors file with its
    side files: bit by bit what was staged, as stock ``from_pretrained`` reads it.

    Every file is held against its sha256 first, and every tensor that came in planes against its own. Raises ModelError
    for what does not fit, and StageError where ``target`` is there already.
    """
    manifest = read_manifest(folder)
    if target.exists():
        raise StageError(f"{target} is there already: remove it or choose another folder")
    verify(folder, manifest)
    tensors: dict[str, Tensor] = {}
    first, later = FirstPlanes(), LaterPlanes(_at_once)
    for part in parts_of(manifest, range(1, len(manifest.stages) + 1)):
        whole = load_file(folder / part.file)
        tensors |= {name: whole[name] for name in part.carried if name not in part.coded}
        if part.format:
            file = memoryview(bytearray((folder / part.file).read_bytes()))
            _add(part, file, tensors, first, later)
    for part in (part for stage in manifest.stages for part in stage.parts):
        for name, tensor in part.coded.items():
            if hashlib.sha256(tensors[name].view(torch.int16).numpy()).hexdigest() != tensor.sha256:
                raise ModelError(f"the planes of {name} in {folder} are not of one tensor; stage it again")
    return _written(folder, target, tensors, manifest.side)


def _at_once(merges: Sequence[Merge], size: int) -> None:
    for merge in merges:
        merge()


def _add(part: PartFile, file: memoryview, tensors: dict[str, Tensor], first: FirstPlanes, later: LaterPlanes) -> None:
    if part.merged:
        later.place(part, file, lambda name: nn.Parameter(tensors[name], requires_grad=False))
        return
    for name, cut in part.coded.items():
        tensors[name] = torch.empty(cut.shape, dtype=STORED[cut.dtype])
        first.fill(part, name, file, tensors[name])


def _written(folder: Path, target: Path, tensors: dict[str, Tensor], side: dict[str, object]) -> Path:
    with new_folder(target) as draft:
        for name in side:
            shutil.copyfile(folder / name, draft / name)
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    return target
