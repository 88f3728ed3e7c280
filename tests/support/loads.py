"""Loads into one model, a link that can be held, and a shard with another byte."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from waiting import until

from firsttoken.assets.lock import file_sha256
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import Manifest, PartFile, read_manifest, write_manifest
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.loading.reader import BlobReader
from firsttoken.progressiveserve.loading.views import StageView
from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.safetensors_header import read_header

ALL = (1, 2, 3)


class Held(Link):
    """A link that moves its first ``mark`` bytes, and no more until it is let go, or has a later mark."""

    def __init__(self, mark: int) -> None:
        super().__init__()
        self.mark, self.go = mark, threading.Event()

    def read_into(self, handle: int, buffer: memoryview, offset: int) -> None:
        until(lambda: self.bytes_moved < self.mark or self.go.is_set(), "the link is let go")
        super().read_into(handle, buffer, offset)


def held_until_closed(monkeypatch: pytest.MonkeyPatch, mark: int) -> Held:
    """One that is let go when a reader is closed which has not read all, however late that is."""
    link, close = Held(mark), BlobReader.close

    def let_go(reader: BlobReader) -> None:
        if any(reader._remaining):
            reader._stop = True
            link.go.set()
        close(reader)

    monkeypatch.setattr(BlobReader, "close", let_go)
    return link


class Loads:
    """Loads one after another into one model."""

    def __init__(self, staged, links: int = 1, dtype: torch.dtype | None = None) -> None:
        self.staged, self.links = staged, [Link() for _ in range(links)]
        self.manifest: Manifest = read_manifest(staged.folder)
        self.meta_model = MetaModel(staged.folder, self.manifest, dtype=dtype)
        self.model = self.meta_model.model
        self.view = self.meta_model.empty_view()

    def begin(self, *stages: int, links: list[Link] | None = None, **options) -> StageLoad:
        wires = links or self.links
        return StageLoad(self.staged.folder, self.manifest, stages, wires, self.meta_model, self.view, **options)

    def bring(self, *stages: int) -> StageView:
        self.view = self.begin(*stages).wait()
        return self.view

    @torch.inference_mode()
    def answer(self, ids: Tensor, view: StageView | None = None) -> Tensor:
        (view or self.view).activate(self.model)
        return self.model(ids, use_cache=False).logits


def refused(staged, words: str) -> None:
    """What reads the manifest, builds the model or loads the stages says so, in one line; those before it load."""
    with pytest.raises(ModelError, match=words) as caught:
        loads = Loads(staged)
        for stage in range(1, len(loads.manifest.stages) + 1):
            loads.bring(stage)
    assert "\n" not in str(caught.value)


def retold(staged, stage: int, index: int, change: Callable[[PartFile], list[PartFile]]) -> None:
    """The manifest with other parts in the place of one, summed again as somebody would who knows of its hash."""
    manifest = read_manifest(staged.folder)
    stages, parts = list(manifest.stages), list(manifest.stages[stage - 1].parts)
    parts[index : index + 1] = change(parts[index])
    stages[stage - 1] = replace(stages[stage - 1], parts=tuple(parts))
    write_manifest(staged.folder, replace(manifest, stages=tuple(stages)))


def rewritten(staged, stage: int, index: int, change: Callable[[dict[str, Tensor]], object]) -> None:
    """The file of a part with its tensors changed, and a manifest that knows its new sizes and its new hash."""

    def told(part: PartFile) -> list[PartFile]:
        path = staged.folder / part.file
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        sizes = {"tensors": read_header(path).tensors, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        return [replace(part, **sizes)]

    retold(staged, stage, index, told)


@torch.inference_mode()
def stock_answer(folder, ids: Tensor) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).eval()(ids, use_cache=False).logits


@torch.inference_mode()
def source_answer(staged, ids: Tensor) -> Tensor:
    """What the model says that was staged."""
    return staged.served.model(ids, use_cache=False).logits


def check_exact(staged, model) -> None:
    """Hold every bit of a model's parameters to those that were staged."""
    parameters = dict(model.named_parameters())
    for name, parameter in staged.served.model.named_parameters():
        stored = parameters[name].data.to(parameter.dtype)
        assert torch.equal(stored.view(torch.uint8), parameter.data.view(torch.uint8)), name


def spoil(staged, stage: int, index: int):
    """Another byte in a part's data; returns the part and how to mend it."""
    part = staged.manifest.stages[stage - 1].parts[index]
    path = staged.folder / part.file
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    return part, lambda: path.write_bytes(before)
