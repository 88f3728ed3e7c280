"""Tiny models whose layers matter, a tokenizer of bytes, and a study of them; no network and no cache of the user's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizers import byte_level
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

from firsttoken.assets import corpora
from firsttoken.assets.adapters import export_adapter
from firsttoken.assets.shapes import shape_config
from firsttoken.progressiveserve import training
from firsttoken.progressiveserve.base_model import ServedModel
from firsttoken.progressiveserve.checkpoint.manifest import Manifest
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, staged
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.healing import attach
from firsttoken.progressiveserve.recipe import Recipe
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study import paths
from firsttoken.study.profile import Profile, load_profile
from firsttoken_cpu.before_torch import numpy_weights
from firsttoken_cpu.native import library
from firsttoken_cpu.native.library import kernels
from firsttoken_extras.bitplanes.plane_plan import by_planes

VOCABULARY = 260  # end of text, 256 bytes, three merges
MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture(autouse=True)
def _private(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and results of its own; the pinned assets only where a test is marked `assets`."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    if not request.node.get_closest_marker("assets"):
        monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")


@pytest.fixture
def make_model() -> MakeModel:
    """Makes a tiny Llama or Qwen2 in eval mode with weights large enough that every layer changes the answer; with
    ``wide`` heads, which the kernels have."""

    def make(kind: str = "llama", layers: int = 4, seed: int = 0, wide: bool = False) -> PreTrainedModel:
        config = shape_config(f"tiny-{layers}")
        if wide:
            config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16})
        if kind == "qwen2":
            config = Qwen2Config(**{k: v for k, v in config.to_dict().items() if k not in ("model_type", "head_dim")})
        config.update(
            {
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 4096,
                "initializer_range": 0.2,
                "bos_token_id": None,
                "eos_token_id": 0,
            }
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)

    return make


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with three merges; token 0 is the end of text."""
    bpe = byte_level(merges=[("t", "h"), ("th", "e"), ("i", "n")])
    assert bpe.get_vocab_size() == VOCABULARY
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", clean_up_tokenization_spaces=False)


@pytest.fixture
def served(make_model: MakeModel, tokenizer: PreTrainedTokenizerFast) -> ServedModel:
    """A model of six layers, of which 2 and 3 wait for stage 2 and 4 for stage 3."""
    return ServedModel(
        make_model(layers=6), tokenizer, StagePlan.from_block(6, range(2, 5)), "5e12" * 16, {"source": "tiny"}
    )


@pytest.fixture
def randomised() -> Callable[..., Any]:
    """Attaches an adapter to some layers of a model, with weights that change its answers as training would."""

    def make(model: PreTrainedModel, layers: list[int], seed: int = 0, scale: float = 0.2) -> Any:
        peft = attach(model, Recipe(rank=4, alpha=8, dropout=0.0), layers).eval()
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if "lora_" in name:
                    parameter.copy_(scale * torch.randn(parameter.shape, generator=draw))
        return peft

    return make


@dataclass(frozen=True)
class Staged:
    """A tiny model in memory and its staged checkpoint; ``adapters`` are the PEFT folders by stage."""

    served: ServedModel
    folder: Path
    manifest: Manifest
    adapters: dict[int, Path]


@pytest.fixture
def stage(
    tmp_path: Path, make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, randomised: Callable[..., Any]
) -> Callable[..., Staged]:
    """Stages a model of six layers, of which by default 2 and 3 wait for stage 2 and 4 for stage 3.

    ``plan`` makes another LoadPlan from the tensors' shapes by name. Norms and biases are random too, so that each of
    them shows in the answers, and no token ends an answer.
    """

    def make(
        kind: str = "llama",
        tied: bool = True,
        dtype: torch.dtype = torch.float32,
        block: Sequence[int] = (2, 3, 4),
        adapters: Sequence[int] = (),
        wide: bool = False,
        plan: Callable[[dict[str, tuple[int, ...]]], LoadPlan] | None = None,
    ) -> Staged:
        folder = tmp_path / f"staged-{kind}"
        model = make_model(kind, layers=6, wide=wide)
        model.config.update({"tie_word_embeddings": tied, "eos_token_id": None})
        model.generation_config.eos_token_id = None
        draw = torch.Generator().manual_seed(5)
        if not tied:
            model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(model.lm_head.weight.shape, generator=draw))
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=draw) * (parameter.dim() == 1)
            parameter.data = parameter.data.to(dtype)  # the module's own .to() rounds the rotary tables too
        stages = StagePlan.from_block(6, block)
        served = ServedModel(model.requires_grad_(False), tokenizer, stages, "5e12" * 16, {"source": "tiny"})
        made = {}
        for number in adapters:
            layers = list(stages.present(number))
            recipe = {"layers": layers, "base_sha256": served.sha256, "curve": []}
            peft = randomised(make_model(kind, layers=6, wide=wide), layers, seed=number)
            made[number] = export_adapter(peft, tmp_path / f"adapter-{number}", recipe)
        source = ModelSource(model, tokenizer, Origin("tiny", served.sha256, "real"))
        chosen = plan(source.shapes) if plan else staged(source.names, stages)
        return Staged(served, folder, write_staged(source, chosen, folder, made), made)

    return make


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are built once, though each test has a cache of its own; without a compiler it is skipped."""
    if (native := kernels()) is None:
        pytest.skip("there is no C++ compiler")
    for module in (numpy_weights, library):  # also where a test has them looked for again
        monkeypatch.setattr(module, "load_exports", lambda: native.exports)


@pytest.fixture
def wide(stage: Callable[..., Staged]) -> Callable[..., Staged]:
    """Stages a model whose heads the kernels have, by planes of the split ``planes`` where it is given."""

    def make(*told: Any, planes: str = "", **options: Any) -> Staged:
        if planes:
            options["plan"] = lambda shapes: by_planes(shapes, planes)
        return stage(*told, wide=True, **options)

    return make


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids [2, 12]."""
    return torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))


def _passages(split: str) -> list[tuple[str, str]]:
    first = {"train": 0, "validation": 100, "test": 200}[split]
    return [
        (f"The house number {i} stands in the wind.", f"is house {i} in the wind?") for i in range(first, first + 40)
    ]


@pytest.fixture
def own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up passages and questions where BoolQ's would be read."""
    monkeypatch.setattr(corpora, "boolq_prompts", _passages)
    monkeypatch.setattr(training, "boolq_prompts", _passages)


@pytest.fixture
def questions_file(tmp_path: Path) -> Path:
    """A SQuAD v1.1 file of 60 passages with one question each."""
    paragraphs = [
        {
            "context": f"In town {i} the mayor is Mr {name}.",
            "qas": [
                {
                    "id": f"q{i}",
                    "question": f"Who rules town {i}?",
                    "answers": [{"text": name, "answer_start": 0}, {"text": f"Mr {name}", "answer_start": 0}],
                }
            ],
        }
        for i, name in enumerate(f"{first}{last}" for first in ("Bo", "Ka", "Li") for last in "abcdefghijklmnopqrst")
    ]
    path = tmp_path / "train-v1.1.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "towns", "paragraphs": paragraphs}]}))
    return path


@pytest.fixture
def paper(
    tmp_path: Path, make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, questions_file: Path, own_text: None
) -> Profile:
    """The paper profile with a tiny Llama folder, tiny SQuAD and TriviaQA files, and small sizes."""
    make_model(layers=6).save_pretrained(tmp_path / "tiny-llama")
    tokenizer.save_pretrained(tmp_path / "tiny-llama")
    trivia = [
        {"QuestionId": f"t{i}", "Question": f"What is {i}?", "Answer": {"Value": f"n{i}", "Aliases": [f"N {i}"]}}
        for i in range(40)
    ]
    (tmp_path / "trivia.json").write_text(json.dumps({"Data": trivia}))
    overrides = {
        "model": str(tmp_path / "tiny-llama"),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "distance.passages": 4,
        "distance.tokens": 32,
        "distance.max_block": 4,
        "distance.block": 2,
        "distance.resamples": 20,
        "served.block_start": 2,
        "served.block_size": 3,
        "served.adapters": str(tmp_path / "adapters"),
        "healing.questions": str(questions_file),
        "healing.windows": 4,
        "healing.window_tokens": 48,
        "healing.prompts": 4,
        "healing.watch_every": 0,
        "healing.watch_questions": 3,
        "healing.watch_windows": 2,
        "training.recipes": ["report"],
        "live.steps": 2,
        "controls.steps": 1,
        "controls.items": 4,
        "controls.windows": 2,
        "controls.calibration_passages": 2,
        "quality.questions": str(questions_file),
        "quality.items": 8,
        "quality.closed_book_questions": str(tmp_path / "trivia.json"),
        "quality.closed_book": 4,
        "quality.windows": 3,
        "quality.window_tokens": 48,
        "quality.batch": 4,
        "quality.recipes": ["report"],
    }
    return load_profile("paper", **overrides)
