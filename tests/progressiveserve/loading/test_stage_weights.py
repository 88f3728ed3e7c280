"""A first stage without torch: the tokens, weights and words that torch has of the same files, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dying_link import DyingLink
from loads import Held, Loads, retold
from plain_tokens import check_greedy, judged
from safetensors.torch import load_file, save_file
from small_models import packed_by_kernels
from waiting import until

from firsttoken.assets.lock import file_sha256
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.base_model import at_stage
from firsttoken.progressiveserve.checkpoint.manifest import ADAPTER_WEIGHTS
from firsttoken.study.errors import LinkError, ModelError, NotLean, StageError
from firsttoken_cpu.before_torch import numpy_weights
from firsttoken_cpu.before_torch.numpy_model import NumpyModel
from firsttoken_cpu.before_torch.stage_weights import StageWeights
from firsttoken_cpu.native.exports import load_exports

pytestmark = pytest.mark.usefixtures("compiled_once")
BF16, F32 = torch.bfloat16, torch.float32
PROMPT, ANSWER = [20, 31, 42, 53, 64, 75, 86], 20
TOLERANCES = {F32: 1e-3, BF16: 0.5}  # of a logit; what bf16 rounds to in two ways differs by a few of its steps


def numpy_of(staged, **options) -> NumpyModel:
    return NumpyModel(StageWeights(staged.folder, [Link()], **({"threads": 2} | options)), threads=1)


def said_by(model: NumpyModel) -> list[int]:
    said = [model.next_token(PROMPT)]
    while len(said) < ANSWER:
        said.append(model.next_token(said[-1:]))
    return said


def part_of(staged, name: str) -> Path:
    return staged.folder / next(part.file for part in staged.manifest.stages[0].parts if part.name == name)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("qwen2", False)])
@pytest.mark.parametrize("adapters", [(), (1,)])
def test_tokens_of_a_pruned_stage(wide, kind, tied, dtype, adapters):
    staged = wide(kind, tied, dtype, adapters=adapters)
    model = numpy_of(staged)
    said = said_by(model)
    with torch.inference_mode(), at_stage(staged.served, 1, staged.adapters.get(1)) as stock:
        stock = stock if model.dtype == str(dtype).removeprefix("torch.") else stock.float()
        assert check_greedy(said, judged(stock, PROMPT, said), TOLERANCES[dtype]) == ANSWER
    assert not model.cache[:, [2, 3, 4]].any(), "nothing is cached for layers that are passed"


@pytest.mark.parametrize("plan", ["bits", "bits in three", "lossless"])
def test_words_and_panels_are_those_that_torch_makes(wide, plan):
    staged = wide(dtype=BF16, tied=False, planes=plan)
    weights = StageWeights(staged.folder, [Link()], threads=3)
    read, loads = weights.read(), Loads(staged)
    view = loads.bring(1)
    parameters = dict(loads.model.named_parameters())
    cut = {name for part in staged.manifest.stages[0].parts if part.format for name in part.coding.cut}
    assert read.unpacked.keys() == cut and cut
    for name, words in read.unpacked.items():
        assert np.array_equal(words.view(np.int16), parameters[name].view(torch.int16).numpy()), name
    if weights.packer.dtype == "bfloat16":
        for number, panels in weights.panels.items():
            packed = packed_by_kernels(view.layers[number])
            for name, mine in panels.items():
                assert np.array_equal(mine.view(np.uint8), packed[name].panels.view(torch.uint8).numpy())


@pytest.mark.parametrize("computing", [F32, BF16])
def test_torch_begins_with_what_has_been_read(wide, ids, computing):
    """Bit for bit as if it had read and decoded all by itself, in either dtype; and no byte comes twice."""
    staged = wide(dtype=BF16, planes="bits")
    link = Link()
    read = StageWeights(staged.folder, [link], threads=2).read()
    moved = link.bytes_moved
    loads, alone = Loads(staged, dtype=computing), Loads(staged, dtype=computing)
    builder = read.builder(staged.manifest, [1], torch.device("cpu"), computing)
    view = loads.begin(1, links=[link], builder=builder).wait()
    assert torch.equal(loads.answer(ids, view), alone.answer(ids, alone.bring(1)))
    assert link.bytes_moved == moved == staged.manifest.stages[0].bytes


def test_a_layer_is_computed_before_the_last_one_has_come(wide):
    staged = wide()
    link = DyingLink(staged.manifest.stages[0].bytes - 3000)  # the norm and a part of the last layer never come
    weights = StageWeights(staged.folder, [link], threads=1)
    layers = weights.layers()
    assert len(next(layers)) == 1 and not weights.packed
    with pytest.raises(LinkError, match=r"cannot be read: the link died after"):
        NumpyModel(weights, threads=1).next_token(PROMPT)
    assert isinstance(weights.fault, LinkError)
    with pytest.raises(LinkError):
        weights.read()
    weights.close()


def test_an_end_while_bytes_are_on_their_way(wide):
    staged, link = wide(), Held(0)
    weights = StageWeights(staged.folder, [link], readers=1, threads=2)
    weights.wait(0.05)
    assert not weights.packed and weights.fault is None
    closing = threading.Thread(target=weights.close)
    closing.start()
    until(lambda: weights._reader._stop, "it is being closed")
    link.go.set()
    closing.join()
    weights.wait()
    with pytest.raises(LinkError, match="was stopped"):
        weights.read()


@pytest.mark.parametrize("name", ["embedding", "layer 01", "head"])
def test_a_file_with_another_sum(wide, name):
    staged = wide()
    file = part_of(staged, name)
    file.write_bytes(file.read_bytes()[:-1] + b"\x7e")
    with pytest.raises(ModelError, match=f"^{name}: .* has a wrong sha256; copy it again$"):
        said_by(numpy_of(staged))


def test_a_file_whose_header_lies(wide):
    staged = wide()
    index = next(i for i, part in enumerate(staged.manifest.stages[0].parts) if part.name == "layer 01")
    file = part_of(staged, "layer 01")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"input_layernorm", b"input_layernorn"))
    retold(staged, 1, index, lambda part: [replace(part, sha256=file_sha256(file))])
    with pytest.raises(ModelError, match=r"its header and manifest.json say different things of its tensors"):
        said_by(numpy_of(staged))


def test_another_config(wide):
    staged = wide()
    file = staged.folder / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    with pytest.raises(ModelError, match=r"config\.json"):
        numpy_of(staged)


def test_a_damaged_adapter(wide):
    staged = wide(adapters=(1,))
    file = staged.folder / staged.manifest.stages[0].adapter.folder / ADAPTER_WEIGHTS
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ModelError, match=r"the adapter of stage 1: adapter_model.safetensors has .* bytes; copy it"):
        said_by(numpy_of(staged, verify=False))


def test_an_adapter_with_numbers_that_are_not_finite(wide):
    staged = wide(adapters=(1,))
    file = staged.folder / staged.manifest.stages[0].adapter.folder / ADAPTER_WEIGHTS
    tensors = load_file(file)
    tensors[min(tensors)][0, 0] = float("nan")
    size = file.stat().st_size
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == size
    with pytest.raises(StageError, match=r"adapter of stage A: .* holds numbers that are not finite"):
        said_by(numpy_of(staged, verify=False))


@pytest.mark.parametrize(
    ("plan", "dtype", "reason"),
    [
        ("8 bits", BF16, "its parts in 'planes' are decoded by torch"),
        ("bits", torch.float16, "its weights are stored in F16"),
        ("", torch.float16, "its weights are stored in F16"),
    ],
)
def test_what_waits_for_torch(wide, plan, dtype, reason):
    with pytest.raises(NotLean, match=reason):
        numpy_of(wide(dtype=dtype, planes=plan))


def test_stages_that_refine_wait_for_torch(wide):
    staged = wide(dtype=BF16, planes="bits")
    with pytest.raises(NotLean, match="a later stage refines weights that are there"):
        numpy_of(staged, stages=(1, 2))


def test_all_stages_of_layers_at_once(wide):
    staged = wide(dtype=F32)
    said = said_by(numpy_of(staged, stages=(1, 2, 3)))
    assert check_greedy(said, judged(staged.served.model, PROMPT, said), 1e-3) == ANSWER


def test_without_a_compiler(wide, monkeypatch):
    staged = wide()
    monkeypatch.setattr(numpy_weights, "load_exports", load_exports)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotLean, match=r"its kernels cannot be built here \(there is no C\+\+ compiler"):
        numpy_of(staged)


def test_no_torch_is_imported(wide):
    staged = wide(adapters=(1,), dtype=BF16)
    code = (
        "import sys; from pathlib import Path; from firsttoken.link.shaped import Link; "
        "from firsttoken_cpu.before_torch.numpy_model import NumpyModel; "
        "from firsttoken_cpu.before_torch.stage_weights import StageWeights; "
        f"model = NumpyModel(StageWeights(Path({str(staged.folder)!r}), [Link()], threads=1), threads=1); "
        f"first = model.next_token({PROMPT}); "
        "print(first, [one for one in ('torch', 'transformers', 'safetensors') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"{numpy_of(staged).next_token(PROMPT)} []", done.stderr
