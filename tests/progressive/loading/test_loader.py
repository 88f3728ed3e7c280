"""Loads of one stage or several: the right model, layer by layer, beside the stage before; one line when it fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from firsttoken.link import Link, LinkConfig
from firsttoken.progressive.checkpoint.manifest import Manifest, read_manifest, write_manifest
from firsttoken.progressive.checkpoint.plan import LoadPlan, Stage, by_layers, coarse_first, whole
from firsttoken.progressive.loading import loader as loading
from firsttoken.progressive.loading.blobs import open_reader, parts_of
from firsttoken.progressive.loading.loader import Skeleton, StageLoad
from firsttoken.progressive.loading.memory import HostMemory
from firsttoken.progressive.loading.views import StageView, lowest_changed
from firsttoken.progressive.passlayer import PassLayer
from firsttoken.progressive.served import at_stage
from firsttoken.study.errors import FirstTokenError, LinkError, ModelError, StageError

ALL = (1, 2, 3)


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    mine = [t for t in threading.enumerate() if t.name == "placer" or t.name.startswith("reader-")]
    deadline = time.monotonic() + 60
    for thread in mine:
        thread.join(max(0, deadline - time.monotonic()))
    assert not [thread for thread in mine if thread.is_alive()]


class Held(Link):
    """A link that moves its first ``mark`` bytes, and no more until it is let go."""

    def __init__(self, mark: int) -> None:
        super().__init__()
        self._mark, self.go = mark, threading.Event()

    def read_into(self, handle: int, buffer: memoryview, offset: int) -> None:
        assert self.bytes_moved < self._mark or self.go.wait(60)
        super().read_into(handle, buffer, offset)


class Loads:
    """Loads one after another into one model."""

    def __init__(self, staged, links: int = 1) -> None:
        self.staged, self.links = staged, [Link() for _ in range(links)]
        self.manifest: Manifest = read_manifest(staged.folder)
        self.skeleton = Skeleton(staged.folder, self.manifest)
        self.model = self.skeleton.model
        self.view = self.skeleton.empty_view()

    def begin(self, *stages: int, links: list[Link] | None = None, **options) -> StageLoad:
        wires = links or self.links
        return StageLoad(self.staged.folder, self.manifest, stages, wires, self.skeleton, self.view, **options)

    def bring(self, *stages: int) -> StageView:
        self.view = self.begin(*stages).wait()
        return self.view

    @torch.inference_mode()
    def answer(self, ids: Tensor, view: StageView | None = None) -> Tensor:
        (view or self.view).activate(self.model)
        return self.model(ids, use_cache=False).logits


@torch.inference_mode()
def stock_answer(folder, ids: Tensor) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).eval()(ids, use_cache=False).logits


def spoil(staged, stage: int, index: int):
    """Another byte in a part's data; returns the part and how to mend it."""
    part = staged.manifest.stages[stage - 1].parts[index]
    path = staged.folder / part.file
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    return part, lambda: path.write_bytes(before)


# what is loaded


@pytest.mark.parametrize("links", [1, 3])
@pytest.mark.parametrize(
    ("kind", "tied", "dtype"),
    [("llama", True, torch.float32), ("qwen2", False, torch.bfloat16), ("llama", False, torch.bfloat16)],
    ids=["llama", "qwen2", "llama-untied"],
)
def test_the_whole_model_streamed_is_the_stock_one(stage, ids, kind, tied, dtype, links):
    staged = stage(kind, tied, dtype)
    loads = Loads(staged, links)
    load = loads.begin(*ALL)
    with load.streaming():
        streamed = loads.answer(ids, load.view)
    assert load.wait() is load.view and load.arrived
    expected = stock_answer(staged.folder, ids)
    assert torch.equal(streamed, expected) and torch.equal(loads.answer(ids, load.view), expected)
    assert sum(link.bytes_moved for link in loads.links) == staged.manifest.bytes
    assert all(link.bytes_moved for link in loads.links)
    assert (loads.model.lm_head.weight is loads.model.model.embed_tokens.weight) == tied
    assert not any(parameter.is_meta for parameter in loads.model.parameters())


def test_a_reader_that_began_before_the_model_was_there(stage, ids):
    staged = stage()
    link = Link()
    reader = open_reader(staged.folder, staged.manifest, ALL, [link])
    loads = Loads(staged)
    load = loads.begin(*ALL, links=[link], reader=reader)
    assert torch.equal(loads.answer(ids, load.wait()), stock_answer(staged.folder, ids))
    assert link.bytes_moved == staged.manifest.bytes, "nothing is read twice"


@pytest.mark.parametrize(
    ("kind", "adapters"),
    [("llama", ()), ("llama", (1, 2)), ("llama", (2,)), ("qwen2", (1, 2)), ("qwen2", (1, 3))],
    ids=str,
)
def test_stage_after_stage_is_what_peft_serves_and_in_the_end_the_original(stage, ids, kind, adapters):
    staged = stage(kind, dtype=torch.bfloat16, adapters=adapters)
    loads, answers = Loads(staged), {}
    for number in ALL:
        before = sum(link.bytes_moved for link in loads.links)
        view = loads.bring(number)
        moved = sum(link.bytes_moved for link in loads.links) - before
        assert 0 <= moved - staged.manifest.stages[number - 1].bytes < 2000, "a stage's own bytes and no others"
        passed = {i for i, layer in enumerate(view.layers) if isinstance(layer, PassLayer)}
        assert passed == set(staged.served.plan.missing(number)) and view.stage == number
        answers[number] = view, loads.answer(ids)
        with torch.inference_mode(), at_stage(staged.served, number, staged.adapters.get(number)) as model:
            assert torch.equal(answers[number][1], model(ids, use_cache=False).logits), number
    if 3 not in adapters:
        assert torch.equal(answers[3][1], stock_answer(staged.folder, ids))
        stock = AutoModelForCausalLM.from_pretrained(staged.folder).state_dict()
        assert {n: t.dtype for n, t in loads.model.state_dict().items()} == {n: t.dtype for n, t in stock.items()}
        assert all(torch.equal(tensor, stock[name]) for name, tensor in loads.model.state_dict().items())
    for view, answer in answers.values():
        assert torch.equal(loads.answer(ids, view), answer), "stages serve side by side"


def test_several_stages_at_once_take_the_last_ones_adapter(stage, ids):
    staged = stage(adapters=(1, 2))
    loads = Loads(staged)
    loads.bring(1, 2)
    with torch.inference_mode(), at_stage(staged.served, 2, staged.adapters[2]) as model:
        assert torch.equal(loads.answer(ids), model(ids, use_cache=False).logits)
    loads.bring(3)
    assert torch.equal(loads.answer(ids), stock_answer(staged.folder, ids))


def test_stages_share_their_weights(stage):
    staged = stage(adapters=(1,))
    loads = Loads(staged)
    first, second = loads.bring(1), loads.bring(2)
    assert first.layers[0] is not second.layers[0], "one has an adapter"
    assert first.base[0] is second.base[0] is second.layers[0]
    assert first.layers[0].mlp.up_proj.base is second.layers[0].mlp.up_proj
    assert first.ends["lm_head"] is second.ends["lm_head"]
    assert lowest_changed(first, second) == 0 and lowest_changed(second, loads.bring(3)) == 4


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)])
@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3"])
def test_coarse_first_then_exact(stage, ids, kind, tied, dtype):
    staged = stage(kind, tied, torch.bfloat16, plan=lambda names: coarse_first(names, 6, dtype))
    expected = stock_answer(staged.folder, ids)
    loads = Loads(staged)
    coarse = loads.bring(1)
    rounded = loads.answer(ids)
    assert {parameter.dtype for parameter in loads.model.parameters()} == {torch.bfloat16}
    for name, tensor in staged.served.model.named_parameters():
        stored = getattr(torch, {"F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn"}[dtype])
        assert torch.equal(loads.model.get_parameter(name), tensor.to(stored).to(torch.bfloat16)), name
    assert not torch.equal(rounded, expected) and rounded.isfinite().all()
    exact = loads.bring(2)
    assert torch.equal(loads.answer(ids), expected)
    assert torch.equal(loads.answer(ids, coarse), rounded), "who began coarsely ends coarsely"
    assert torch.equal(loads.answer(ids, exact), expected)
    assert lowest_changed(coarse, exact) == 0
    assert (loads.model.lm_head.weight is loads.model.model.embed_tokens.weight) == tied


def test_of_what_is_refined_at_once_only_the_refinement_is_read(stage, ids):
    staged = stage(plan=lambda names: coarse_first(names, 6))
    loads = Loads(staged)
    loads.bring(1, 2)
    assert torch.equal(loads.answer(ids), stock_answer(staged.folder, ids))
    assert loads.links[0].bytes_moved == sum(part.bytes for part in staged.manifest.stages[1].parts)


def test_refining_one_layer_or_the_norm_alone(stage, ids):
    """Stage 1 is exact but for layer 3 and the norm; stage 2 mends one, stage 3 the other."""

    def plan(names: list[str]) -> LoadPlan:
        (first,) = whole(names, 6).stages
        layer = next(part for part in first.parts if part.layer == 3)
        head = first.parts[-1]
        coarse = tuple(replace(part, dtype="F8_E5M2") if part in (layer, head) else part for part in first.parts)
        refined = [Stage(name, (replace(part, action="refine"),)) for name, part in (("B", layer), ("C", head))]
        return LoadPlan((Stage("A", coarse), *refined))

    loads = Loads(stage(plan=plan))
    first, answer = loads.bring(1), loads.answer(ids)
    second = loads.bring(2)
    middle = loads.answer(ids)
    assert lowest_changed(first, second) == 3 and first.layers[2] is second.layers[2]
    third = loads.bring(3)
    assert third.layers[3] is second.layers[3] and third.ends["norm"] is not second.ends["norm"]
    assert torch.equal(loads.answer(ids), stock_answer(loads.staged.folder, ids))
    assert torch.equal(loads.answer(ids, second), middle) and torch.equal(loads.answer(ids, first), answer)


def test_parts_come_in_forward_order_whatever_the_stages(stage):
    staged = stage(plan=lambda names: by_layers(names, [(4, 5), (0, 2), (1, 3)]))
    assert [part.name for part in parts_of(staged.manifest, (3, 1, 2))] == [
        "embedding",
        *(f"layer {i:02}" for i in range(6)),
        "head",
    ]


# as it arrives


def test_a_streamed_prefill_computes_while_the_rest_is_on_its_way(stage, ids):
    """One reader, so the files come one after another; 0.005 Gbit/s are 0.4 s for this model."""
    staged = stage(dtype=torch.float32)
    link = Link(LinkConfig(0.005))
    loads = Loads(staged)
    load = loads.begin(*ALL, links=[link], threads=1)
    seen: dict[int, tuple[int, float, bool]] = {}

    def mark(i: int):
        return lambda *_: seen.update({i: (link.bytes_moved, time.monotonic(), load.arrived)})

    with load.streaming():
        for i, layer in enumerate(load.view.layers):
            layer.register_forward_hook(mark(i))
        streamed = loads.answer(ids, load.view)
    load.wait()
    parts = parts_of(staged.manifest, ALL)
    assert torch.equal(streamed, stock_answer(staged.folder, ids))
    for i in range(6):
        assert seen[i][0] >= sum(part.bytes for part in parts[: i + 2]), "no layer computes before its bytes are there"
    assert seen[0][0] < staged.manifest.bytes / 2 and not seen[0][2] and not seen[3][2]
    assert seen[0][1] < seen[3][1] < load.arrived_s
    assert 0 < load.stalled_s < 30 and load.placing_s > 0


def test_gates_go_when_the_block_ends_and_hold_up_no_other_stage(stage, ids):
    """A refinement on its way, its forward passes waiting; the stage before answers meanwhile."""
    staged = stage(plan=lambda names: coarse_first(names, 6), dtype=torch.bfloat16)
    loads = Loads(staged)
    coarse = loads.bring(1)
    expected = loads.answer(ids)
    link = Held(1)
    load = loads.begin(2, links=[link], threads=1)
    with load.streaming():
        assert torch.equal(loads.answer(ids, coarse), expected)
        assert not load.arrived and load.stalled_s == 0
        link.go.set()
    view = load.wait()
    for module in [*view.layers, *view.ends.values()]:
        assert not module._forward_pre_hooks
    assert torch.equal(loads.answer(ids, view), stock_answer(staged.folder, ids))


def test_a_load_of_nothing_new_is_there_at_once(stage, ids):
    loads = Loads(stage())
    loads.bring(*ALL)
    expected = loads.answer(ids)
    loads.bring(3)
    assert torch.equal(loads.answer(ids), expected)


# what goes wrong


def failing(loads: Loads, load: StageLoad, ids: Tensor, kind: type[FirstTokenError], words: str) -> None:
    """The forward pass and the wait both raise the same line."""
    with load.streaming(), pytest.raises(kind, match=words) as streamed:
        loads.answer(ids, load.view)
    with pytest.raises(kind, match=words) as waited:
        load.wait()
    assert streamed.value is waited.value and "\n" not in str(waited.value)
    assert not any(module._forward_pre_hooks for module in load.view.layers)


@pytest.mark.parametrize("links", [1, 3])
def test_a_shard_altered_missing_or_truncated(stage, ids, links):
    staged = stage()
    loads = Loads(staged, links)
    part, mend = spoil(staged, 1, 2)
    failing(loads, loads.begin(*ALL), ids, ModelError, f"{part.name}: 002-layer-01.safetensors has a wrong sha256")
    mend()
    path = staged.folder / part.file
    path.rename(path.with_suffix(".away"))
    failing(loads, loads.begin(*ALL), ids, ModelError, f"{part.name}: 002-layer-01.safetensors is missing")
    path.write_bytes(path.with_suffix(".away").read_bytes()[:-100])
    failing(loads, loads.begin(*ALL), ids, ModelError, f"{part.name}: 002-layer-01.safetensors has .* bytes")
    path.with_suffix(".away").replace(path)
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
    link = Link(fail_after_bytes=sum(part.bytes for part in parts[:3]) + 5)
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
def test_an_adapter_that_fails_ends_the_load_before_it_begins(stage, fault):
    staged = stage(adapters=(1,))
    manifest = read_manifest(staged.folder)
    folder = staged.folder / manifest.stages[0].adapter.folder
    link = Link(LinkConfig(0.005))
    if fault == "missing":
        (folder / "adapter_model.safetensors").unlink()
    elif fault == "altered":
        (folder / "adapter_config.json").write_text((folder / "adapter_config.json").read_text().replace("8", "9"))
    elif fault == "variant":
        config = json.loads((folder / "adapter_config.json").read_text()) | {"use_dora": True}
        (folder / "adapter_config.json").write_text(json.dumps(config))
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
        "variant": r"adapter of stage A is not plain LoRA \(use_dora\)",
        "other layers": "adapter of stage A is for layer 3 too, which stage 1 does not have",
    }[fault]
    kind = ModelError if fault in ("missing", "altered") else StageError
    with pytest.raises(kind, match=words) as caught:
        loads.begin(1, links=[link], threads=1, verify=fault == "altered")
    assert "\n" not in str(caught.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader-")]
    assert link.bytes_moved < staged.manifest.stages[0].bytes, "nobody reads on for a load that has failed"


def test_closing_ends_a_load_and_whoever_waits_in_it(stage, ids):
    staged = stage()
    link = Link(LinkConfig(0.001))  # 2 s for all of it
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


def test_a_manifest_of_another_depth(stage):
    staged = stage()
    manifest = replace(staged.manifest, depth=7)
    with pytest.raises(ModelError, match="stages 7 layers, its config has 6: stage again"):
        Skeleton(staged.folder, manifest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name: name.replace("q_proj", "r_proj"), "no parameter self_attn.r_proj.weight"),
        (lambda name: name.replace("layers.0", "layers.7"), r"no parameter model\.layers\.7\."),
        (lambda name: name.replace("model.norm", "model.tail"), r"head brings model\.tail\.weight"),
    ],
)
def test_tensors_that_this_architecture_does_not_have(stage, change, words):
    staged = stage()
    stages = [
        replace(s, parts=tuple(replace(p, tensors={change(n): e for n, e in p.tensors.items()}) for p in s.parts))
        for s in staged.manifest.stages
    ]
    loads = Loads(staged)
    loads.manifest = replace(staged.manifest, stages=tuple(stages))
    with pytest.raises(ModelError, match=words):
        loads.begin(*ALL).wait()


class FewBuffers(HostMemory):
    """As pinned memory is, on a machine without CUDA: a buffer is free again when the next one has been used."""

    def __init__(self, count: int) -> None:
        self.free, self.held, self.closed = threading.Semaphore(count), 0, threading.Event()

    def allocate(self, size: int) -> memoryview:
        while not self.free.acquire(timeout=0.01):
            if self.closed.is_set():
                raise LinkError("the load was stopped")
        return super().allocate(size)

    def settle(self, data: memoryview):
        self.held += 1
        if self.held > 1:
            self.held -= 1
            self.free.release()
        return super().settle(data)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def few_buffers(monkeypatch):
    """The loader as on CUDA, with the fewest buffers that a pipeline needs, or with as many as it asks for."""
    monkeypatch.setattr(loading, "BUFFERS", 2)
    monkeypatch.setattr(loading, "memory_for", lambda device, largest, buffers: FewBuffers(buffers))


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
def test_readers_that_wait_for_a_buffer_when_the_load_ends(stage, few_buffers, end):
    staged = stage()
    if end == "fault":
        spoil(staged, 1, 0)
    loads = Loads(staged)
    load = loads.begin(*ALL, threads=4, links=[Link(LinkConfig(0.002 if end == "close" else 0))])
    if end == "close":
        load.close()
    with pytest.raises(FirstTokenError):
        load.wait()
