"""Loads that go wrong: one line for all who wait, the stage before as it was, and nothing left running."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from dying_link import DyingLink
from edited import set_keys
from loads import ALL, Loads, held_until_closed, spoil, stock_answer
from torch import Tensor

from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.base_model import at_stage
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest, write_manifest
from firsttoken.progressiveserve.loading import loader as loading
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.read_memory import Memory
from firsttoken.progressiveserve.loading.read_plan import parts_of
from firsttoken.study.errors import FirstTokenError, LinkError, ModelError, StageError


def failing(loads: Loads, load: StageLoad, ids: Tensor, kind: type[FirstTokenError], words: str) -> None:
    """The forward pass and the wait both raise the same line."""
    with load.streaming(), pytest.raises(kind, match=words) as streamed:
        loads.answer(ids, load.view)
    with pytest.raises(kind, match=words) as waited:
        load.wait()
    assert streamed.value is waited.value and "\n" not in str(waited.value)
    assert not any(module._forward_pre_hooks for module in load.view.layers)


@pytest.mark.parametrize("links", [1, 3])
def test_an_altered_shard(stage, ids, links):
    """What else a file may be, ``test_reader_faults.py`` tries."""
    staged = stage()
    loads = Loads(staged, links)
    part, mend = spoil(staged, 1, 2)
    failing(loads, loads.begin(*ALL), ids, ModelError, f"{part.name}: 002-layer-01.safetensors has a wrong sha256")
    mend()
    loads.bring(*ALL)
    assert torch.equal(loads.answer(ids), stock_answer(staged.folder, ids)), "the same model, after it all"


def test_without_verification_an_altered_shard_is_taken(stage, ids):
    staged = stage()
    spoil(staged, 1, 2)
    loads = Loads(staged)
    assert torch.equal(loads.answer(ids, loads.begin(*ALL, verify=False).wait()), stock_answer(staged.folder, ids))


def test_a_link_that_dies_under_a_forward_pass(stage, ids):
    staged = stage()
    parts = parts_of(staged.manifest, ALL)
    link = DyingLink(sum(part.bytes for part in parts[:3]) + 5)
    loads, reached = Loads(staged), []
    load = loads.begin(*ALL, links=[link], threads=1)
    for i, layer in enumerate(load.view.layers):
        layer.register_forward_hook(lambda *_, i=i: reached.append(i))
    with load.streaming(), pytest.raises(LinkError, match=r"layer 02: .* the link died after"):
        loads.answer(ids, load.view)
    with pytest.raises(LinkError, match="the link died"):
        load.wait()
    assert reached == [0, 1], "what had arrived has computed"
    link.restore()
    load = loads.begin(*ALL, links=[link])
    with load.streaming():
        assert torch.equal(loads.answer(ids, load.view), stock_answer(staged.folder, ids))
    load.wait()


def test_a_later_stage_that_fails_leaves_the_one_before(stage, ids):
    staged = stage(adapters=(1, 2))
    loads = Loads(staged)
    first = loads.bring(1)
    expected = loads.answer(ids)
    part, mend = spoil(staged, 2, 1)
    for _ in range(2):
        with pytest.raises(ModelError, match=f"{part.name}: .* wrong sha256"):
            loads.begin(2).wait()
        assert torch.equal(loads.answer(ids, first), expected)
    mend()
    loads.bring(2)
    with torch.inference_mode(), at_stage(staged.served, 2, staged.adapters[2]) as model:
        assert torch.equal(loads.answer(ids), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("fault", ["missing", "altered", "variant", "other layers"])
def test_an_adapter_that_fails_ends_the_load_before_it_begins(stage, fault, monkeypatch):
    staged = stage(adapters=(1,))
    manifest = read_manifest(staged.folder)
    folder = staged.folder / manifest.stages[0].adapter.folder
    link = held_until_closed(monkeypatch, sum(file.stat().st_size for file in folder.iterdir()))
    if fault == "missing":
        (folder / "adapter_model.safetensors").unlink()
    elif fault == "altered":
        (folder / "adapter_config.json").write_text((folder / "adapter_config.json").read_text().replace("8", "9"))
    elif fault == "variant":
        set_keys(folder / "adapter_config.json", use_dora=True)
    else:
        weights = (folder / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").write_bytes(weights.replace(b"layers.5.", b"layers.3."))
    if fault in ("variant", "other layers"):  # staged so: their sums are right
        entries = {
            name: replace(entry, bytes=(folder / name).stat().st_size)
            for name, entry in manifest.stages[0].adapter.files.items()
        }
        adapter = replace(manifest.stages[0].adapter, files=entries)
        write_manifest(
            staged.folder,
            replace(manifest, stages=(replace(manifest.stages[0], adapter=adapter), *manifest.stages[1:])),
        )
    loads = Loads(staged)
    words = {
        "missing": "the adapter of stage 1: adapter_model.safetensors is missing",
        "altered": "the adapter of stage 1: adapter_config.json has",
        "variant": r"adapter of stage A: its 'use_dora' True is none of plain LoRA",
        "other layers": r"adapter of stage A: holds .*layers\.3\..*, which the target_modules of its adapter",
    }[fault]
    kind = ModelError if fault in ("missing", "altered") else StageError
    with pytest.raises(kind, match=words) as caught:
        loads.begin(1, links=[link], threads=1, verify=fault == "altered")
    assert "\n" not in str(caught.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader-")]
    assert link.bytes_moved < staged.manifest.stages[0].bytes, "nobody reads on for a load that has failed"


def test_closing_ends_a_load_and_whoever_waits_in_it(stage, ids, monkeypatch):
    staged = stage()
    link = held_until_closed(monkeypatch, 1)
    loads, raised = Loads(staged), []
    load = loads.begin(*ALL, links=[link], threads=1)

    def client() -> None:
        with load.streaming():
            try:
                loads.answer(ids, load.view)
            except FirstTokenError as error:
                raised.append(error)

    waiting = threading.Thread(target=client)
    waiting.start()
    load.close()
    waiting.join(60)
    assert len(raised) == 1 and isinstance(raised[0], LinkError) and "was stopped" in str(raised[0])
    with pytest.raises(LinkError, match="was stopped"):
        load.wait()
    assert link.bytes_moved < staged.manifest.bytes / 2 and load.arrived


class FewBuffers(Memory):
    """As pinned memory is, on a machine without CUDA: a buffer is free again when the next one has been used."""

    def __init__(self, count: int) -> None:
        self.free, self.held, self.closed = threading.Semaphore(count), 0, threading.Event()

    def allocate(self, size: int) -> memoryview:
        while not self.free.acquire(timeout=0.01):
            if self.closed.is_set():
                raise LinkError("the load was stopped")
        return super().allocate(size)

    def to_device(self, data: memoryview):
        self.held += 1
        if self.held > 1:
            self.held -= 1
            self.free.release()
        return super().to_device(data)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def few_buffers(monkeypatch):
    """The loader as on CUDA: the fewest buffers that a pipeline needs, or with several links one for each file."""
    monkeypatch.setattr(loading, "cpu_memory", lambda refines, links: FewBuffers(2 if links == 1 else 10))


@pytest.mark.parametrize("links", [1, 2, 4])
@pytest.mark.parametrize("threads", [1, 4])
def test_readers_ahead_of_their_buffers(stage, ids, few_buffers, links, threads):
    """With several links the last group's files are read before their turn, and hold what they were read into."""
    staged = stage(adapters=(1,))
    loads = Loads(staged, links)
    result = []
    waiting = threading.Thread(target=lambda: result.append(loads.begin(*ALL, threads=threads).wait()), daemon=True)
    waiting.start()
    waiting.join(60)
    assert result, "the readers wait for buffers, and the buffers for the readers"
    assert torch.equal(loads.answer(ids, result[0]), stock_answer(staged.folder, ids))


@pytest.mark.parametrize("end", ["fault", "close"])
def test_readers_that_wait_for_a_buffer_when_the_load_ends(stage, few_buffers, end, monkeypatch):
    staged = stage()
    if end == "fault":
        spoil(staged, 1, 0)
    loads = Loads(staged)
    load = loads.begin(*ALL, threads=4, links=[held_until_closed(monkeypatch, 1) if end == "close" else Link()])
    if end == "close":
        load.close()
    with pytest.raises(FirstTokenError):
        load.wait()
