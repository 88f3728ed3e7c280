"""Tokens before torch: those of the stock model, and an engine that goes on in the middle of an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_tokens import check_greedy, judged
from safetensors.torch import load_file, save_file
from small_models import packed_by_kernels, small_model
from transformers import PreTrainedModel

from firsttoken.assets.servable import check_servable
from firsttoken.engine import live_executor
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling, ScheduledChunk
from firsttoken.study.errors import LengthError, ModelError, NotLean, OutputError, RequestError
from firsttoken_cpu.before_torch import numpy_weights
from firsttoken_cpu.before_torch.numpy_model import CacheSource, NumpyModel
from firsttoken_cpu.before_torch.numpy_weights import FolderWeights
from firsttoken_cpu.before_torch.torch_behind import take_over
from firsttoken_cpu.native import exports
from firsttoken_cpu.native.exports import Exports, load_exports, narrowed, widened
from firsttoken_cpu.native.library import kernels

LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPES = [
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("Llama", {"rope_parameters": LLAMA_3 | {"original_max_position_embeddings": 64}, "intermediate_size": 98}),
    ("Qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
]
PROMPT = torch.randint(97, (29,), generator=torch.Generator().manual_seed(1)).tolist()
ANSWER = 24
# of a logit that reaches 10: what bf16 rounds to in two ways differs by a few of its steps of 2**-5
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.3}
Made = tuple[PreTrainedModel, Path]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if kernels() is None:
        pytest.skip("there is no C++ compiler")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    """A stock model in eval mode, its norms and biases random too, and its folder."""

    def made(family: str = "Llama", dtype: torch.dtype = torch.float32, **keys: Any) -> Made:
        model = small_model(family, **keys)
        model.to(dtype).save_pretrained(tmp_path)
        return model, tmp_path

    return made


def numpy_of(folder: Path, **options: Any) -> NumpyModel:
    threads = options.pop("threads", 1)
    return NumpyModel(FolderWeights(check_servable(folder), threads), threads=threads, **options)


def greedy(model: NumpyModel, count: int = ANSWER) -> list[int]:
    said = [model.next_token(PROMPT)]
    while len(said) < count:
        said.append(model.next_token(said[-1:]))
    return said


def taken_over(model: NumpyModel, before: int) -> tuple[Engine, list[int]]:
    """An engine with the weights of ``model``, and the answer of which that has said the tokens ``before``."""
    output, engine = greedy(model, before), Engine(take_over(model, 64))
    if before < ANSWER:
        request = engine.submit([*PROMPT, *output], Sampling(ANSWER - before), source=CacheSource(model))
        engine.run()
        output += request.output
    return engine, output


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("family", "keys"), SHAPES)
def test_tokens_are_those_of_the_stock_model(make, family, keys, dtype) -> None:
    stock, folder = make(family, dtype, **keys)
    model = numpy_of(folder)
    wanted = stock if model.dtype == str(dtype).removeprefix("torch.") else stock.float()
    said = greedy(model)
    assert check_greedy(said, judged(wanted, PROMPT, said), TOLERANCES[dtype]) == ANSWER
    assert model.cached == len(PROMPT) + ANSWER - 1


@pytest.mark.parametrize("stored", TOLERANCES)
@pytest.mark.parametrize("halves", [True, False])
def test_panels_are_those_that_the_engine_packs(make, monkeypatch, stored, halves) -> None:
    """Bit for bit, by several threads, and where halves are stored and floats compute."""
    right = load_exports()
    monkeypatch.setattr(right, "has_bfloat16", halves and right.has_bfloat16)
    monkeypatch.setattr(numpy_weights, "load_exports", lambda: right)
    for family, keys in SHAPES[2:]:
        stock, folder = make(family, stored, **keys)
        model = numpy_of(folder, threads=3)
        layers = stock.to(getattr(torch, model.dtype)).model.layers
        for layer, panels in zip(layers, model.weights.panels, strict=True):
            packed = packed_by_kernels(layer)
            for name, mine in panels.items():
                theirs = packed[name].panels.view(torch.uint8).numpy()
                assert np.array_equal(mine.view(np.uint8).ravel(), theirs.ravel())


def test_a_prompt_in_parts_and_threads_that_share_it(make) -> None:
    _, folder = make()
    whole, parts = numpy_of(folder, threads=2), numpy_of(folder)
    parts.next_token(PROMPT[:17])
    assert whole.next_token(PROMPT) == parts.next_token(PROMPT[17:])
    assert np.array_equal(whole.cache, parts.cache)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("before", [1, 3, 19, ANSWER])
def test_the_engine_takes_an_answer_over(make, dtype, before) -> None:
    """Whenever that is, also across the end of a block; and it says what it would have said alone."""
    stock, folder = make(dtype=dtype)
    model = numpy_of(folder)
    engine, output = taken_over(model, before)
    alone = engine.submit(PROMPT, Sampling(ANSWER))
    while not alone.finished:
        engine.step()
    wanted = stock if model.dtype == str(dtype).removeprefix("torch.") else stock.float()
    for one in (output, alone.output):
        assert check_greedy(one, judged(wanted, PROMPT, one), TOLERANCES[dtype]) == ANSWER


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_logits_are_the_engines(make, monkeypatch, dtype) -> None:
    """Over the same cache and over one of its own: what is drawn hangs on all of them. In bfloat16 bit for bit; floats
    show that torch and numpy round the cosines of angles differently."""
    _, folder = make(dtype=dtype)
    model, seen, right = numpy_of(folder), [], live_executor.next_tokens

    def noted(logits: torch.Tensor, chunks: Sequence[ScheduledChunk]) -> list[int]:
        seen.append(logits[0].double().numpy())
        return right(logits, chunks)

    monkeypatch.setattr(live_executor, "next_tokens", noted)
    tokens, logits = list(PROMPT), [model.logits(PROMPT)]
    source = CacheSource(model)
    while len(logits) < ANSWER:
        tokens.append(int(logits[-1].argmax()))
        logits.append(model.logits(tokens[-1:]))
    engine = Engine(take_over(model, 64))
    engine.submit(PROMPT, Sampling(ANSWER))
    engine.run()
    engine.submit(tokens[: len(PROMPT) + 1], Sampling(ANSWER - 1), source=source)
    engine.run()
    assert logits[0].dtype == np.float32 and len(seen) == 2 * ANSWER - 1
    most = 1e-4 if model.dtype == "float32" else 0.0
    assert np.abs(np.stack([*logits, *logits[1:]]) - np.stack(seen)).max() <= most


def test_nothing_is_computed_twice_and_no_weight_copied(make, monkeypatch) -> None:
    _, folder = make()
    steps, right = [], LiveExecutor.execute

    def noted(self: LiveExecutor, chunks: Sequence[ScheduledChunk]) -> list[int]:
        steps.append(sum(chunk.tokens for chunk in chunks))
        return right(self, chunks)

    monkeypatch.setattr(LiveExecutor, "execute", noted)
    model = numpy_of(folder)
    engine, output = taken_over(model, 2)
    assert len(output) == ANSWER and steps == [1] * (ANSWER - 2)
    (segment,) = engine.executor.version.decoder.segments
    for layer, panels in zip(segment.modules, model.weights.panels, strict=True):
        for name, packed in panels.items():
            assert getattr(layer, name).panels.data_ptr() == packed.ctypes.data


def test_a_model_in_the_room_of_its_context(make) -> None:
    _, folder = make()
    model = numpy_of(folder, context=len(PROMPT) + 1)
    with pytest.raises(LengthError, match=r"31 tokens do not fit a context of 30; shorten it"):
        model.next_token([*PROMPT, 1, 2])
    assert greedy(model, 2)
    with pytest.raises(LengthError):
        model.next_token([1])
    assert numpy_of(folder).context == 256


@pytest.mark.parametrize("prompt", [[], [97], [-1, 2]])
def test_a_prompt_that_is_none(make, prompt) -> None:
    _, folder = make()
    with pytest.raises(RequestError, match="is empty, or holds no token id of the model's 97"):
        numpy_of(folder).next_token(prompt)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"num_attention_heads": 2, "head_dim": 24}, "its head_dim is 24"),
        ({"intermediate_size": 111}, "its products have 111 inputs, an odd number"),
        ({"hidden_act": "gelu"}, "its hidden_act is 'gelu'"),
    ],
)
def test_a_shape_that_the_kernels_do_not_run(make, keys, reason) -> None:
    _, folder = make(**keys)
    with pytest.raises(NotLean, match=reason):
        numpy_of(folder)


def test_weights_of_other_kinds(make) -> None:
    _, folder = make(dtype=torch.float16)
    with pytest.raises(NotLean, match="its weights are stored in F16"):
        numpy_of(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(NotLean, match="its weights are stored in F16, F32"):
        numpy_of(folder)


def test_damaged_weights(make) -> None:
    _, folder = make()
    file = folder / "model.safetensors"
    weights = load_file(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(ModelError, match="truncated or altered"):
        numpy_of(folder)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, file)
    with pytest.raises(OutputError, match="no finite number; copy its weights again"):
        numpy_of(folder).next_token(PROMPT)


def test_weights_that_lie_at_odd_bytes(make) -> None:
    """A header of odd length is legal, though safetensors itself pads its own."""
    _, folder = make()
    wanted = greedy(numpy_of(folder))
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length])).encode()
    header += b" " * (1 - len(header) % 2)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    assert len(header) % 2 and greedy(numpy_of(folder)) == wanted


def test_without_a_compiler(make, monkeypatch) -> None:
    _, folder = make()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotLean, match=r"its kernels cannot be built here \(there is no C\+\+ compiler"):
        numpy_of(folder)


def test_kernels_that_multiply_wrongly(make, monkeypatch) -> None:
    _, folder = make()
    right = exports.widened
    monkeypatch.setattr(exports, "widened", lambda numbers: right(numbers) + 1)
    with pytest.raises(NotLean, match="its float32 products are wrong on this processor"):
        numpy_of(folder)


def test_a_processor_without_bfloat16(make, monkeypatch) -> None:
    """It computes in float32 what is stored in bfloat16."""
    stock, folder = make(dtype=torch.bfloat16, tie_word_embeddings=True)

    def lacking() -> Exports:
        found = load_exports()
        found.has_bfloat16 = False
        return found

    monkeypatch.setattr(numpy_weights, "load_exports", lacking)
    model = numpy_of(folder)
    _, output = taken_over(model, 5)
    assert model.dtype == "float32"
    assert check_greedy(output, judged(stock.float(), PROMPT, output)) == ANSWER


def test_the_first_token_finds_no_torch(make) -> None:
    _, folder = make()
    code = (
        "import sys; from pathlib import Path; from firsttoken.assets.servable import check_servable; "
        "from firsttoken_cpu.before_torch.numpy_model import NumpyModel; "
        "from firsttoken_cpu.before_torch.numpy_weights import FolderWeights; "
        f"model = NumpyModel(FolderWeights(check_servable(Path({str(folder)!r})), 1), threads=1); "
        f"first = model.next_token({PROMPT}); "
        "print(first, [name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    first = numpy_of(folder).next_token(PROMPT)
    assert done.stdout.strip() == f"{first} []", done.stderr


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    draw = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    halves = draw.to(torch.bfloat16)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    for numbers in (draw, ties):
        bits = numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(narrowed(numbers.numpy(), "bfloat16"), bits)
    assert np.array_equal(widened(halves.view(torch.int16).numpy().view(np.uint16)), halves.float().numpy())
