"""Training runs: which data heals, who teaches, what is watched, and what is written beside the adapter."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from peft import PeftModel

from firsttoken.assets.adapter_files import read_recipe
from firsttoken.assets.adapters import export_adapter
from firsttoken.assets.corpora import QAItem, boolq_prompts, load_qa, running_text, token_windows
from firsttoken.assets.needs import CONTEXT, Need, questions_of, text_of
from firsttoken.progressiveserve.base_model import ServedModel
from firsttoken.progressiveserve.healing import LOSSES, Curve, HealingLosses, Teacher, TrainingState, attach, train
from firsttoken.progressiveserve.passlayer import pass_layers
from firsttoken.progressiveserve.quality import AnswerConfig, answer_scores, perplexity, text_scores
from firsttoken.progressiveserve.recipe import Recipe
from firsttoken.progressiveserve.samples import Sample, prompt_samples, qa_sample, text_samples
from firsttoken.study import paths, timing
from firsttoken.study.errors import CorpusError
from firsttoken.study.machine import describe
from firsttoken.study.parsing.schema import between

WATCHED_TOKENS = 256  # of a window whose perplexity is watched
PROMPTS = "open questions, train"


@dataclass(frozen=True)
class HealingConfig:
    """The data that training reads and watches.

    ``questions`` is a source that ``load_qa`` knows; ``windows`` windows of ``window_tokens`` of running text and
    ``prompts`` open questions join recipes that use text. Every ``watch_every`` steps ``watch_questions`` validation
    questions and ``watch_windows`` windows are scored. Questions have up to ``max_tokens`` tokens, 0: the recipe's own;
    a longer one loses the beginning of its passage, or with ``only_whole`` is left out. ``steps`` and ``learning_rate``
    are for a recipe that counts in steps, ``distill_share`` for any that is taught; 0: as the recipe has it.
    """

    questions: str
    windows: int
    window_tokens: int
    prompts: int
    watch_every: int
    watch_questions: int
    watch_windows: int
    max_tokens: int = 0
    only_whole: bool = False
    steps: int = 0
    learning_rate: float = 0.0
    distill_share: Annotated[float, between(0, 1)] = 0.0

    def needs(self) -> list[Need]:
        """Require that the splits hold what is read and watched, and the context the longest sequence."""
        return [
            Need("healing.watch_questions", self.watch_questions, questions_of(self.questions, "validation")),
            Need("healing.windows x window_tokens", self.windows * self.window_tokens, text_of("train")),
            Need("healing.prompts", self.prompts, PROMPTS),
            Need("healing.watch_windows x 256", self.watch_windows * WATCHED_TOKENS, text_of("validation")),
            Need("healing.window_tokens", self.window_tokens, CONTEXT),
            Need("healing.max_tokens", self.max_tokens, CONTEXT),
        ]

    def sized(self, recipe: Recipe) -> Recipe:
        """``recipe`` with what this configuration sets of it."""
        chosen = {"max_tokens": self.max_tokens, "distill_share": self.distill_share}
        if recipe.steps:
            chosen |= {"steps": self.steps, "learning_rate": self.learning_rate}
        return dataclasses.replace(recipe, **{name: value for name, value in chosen.items() if value})


@dataclass(frozen=True)
class TrainingData:
    """Training and validation data as tokens, and the hash of the training part."""

    questions: list[Sample]
    text: list[Sample]
    validation: list[QAItem]
    windows: torch.Tensor
    sha256: str

    @property
    def cut_questions(self) -> int:
        """Return the number of training questions that were longer than the recipe takes and lost the beginning of
        their passage."""
        return sum(sample.cut > 0 for sample in self.questions)


def training_data(config: HealingConfig, recipe: Recipe, tokenizer: Any) -> TrainingData:
    """Training questions, text and open prompts, and the validation split of questions and text.

    Open prompts join only where the full model teaches: without it there is nothing to learn after "Answer:".
    """
    questions = [qa_sample(item, tokenizer, recipe.max_tokens) for item in load_qa(config.questions, "train")]
    questions = [sample for sample in questions if not (config.only_whole and sample.cut)]
    text: list[Sample] = []
    if recipe.text_batch:
        windows = token_windows(running_text("train"), tokenizer, config.window_tokens, config.windows)
        text = text_samples(windows, "text-")
    if recipe.text_batch and recipe.distill_weight:
        pairs = boolq_prompts("train")[: config.prompts]
        text += prompt_samples(pairs, tokenizer, config.window_tokens, "prompt-")
    digest = hashlib.sha256(repr([s.tokens for s in (*questions, *text)]).encode()).hexdigest()
    return TrainingData(
        questions,
        text,
        load_qa(config.questions, "validation")[: config.watch_questions],
        token_windows(running_text("validation"), tokenizer, WATCHED_TOKENS, config.watch_windows),
        digest,
    )


def heal(
    served: ServedModel,
    missing: Sequence[int],
    recipe: Recipe,
    data: TrainingData,
    config: HealingConfig,
    teacher: Teacher | None = None,
    losses: HealingLosses = LOSSES,
    state: TrainingState | None = None,
) -> tuple[PeftModel, Curve]:
    """Train an adapter on the layers that compute while ``missing`` are passed; ``teacher`` is the full model.

    ``served`` stays whole: a copy is trained, and the adapter comes back in that copy, its gaps in place. A run that
    was cut goes on from ``state``.
    """
    student = copy.deepcopy(served.model)
    pass_layers(student, missing)
    torch.manual_seed(recipe.seed)
    peft = attach(student, recipe, present_without(served.plan.depth, missing))

    def watch(_: int) -> dict[str, float]:
        return _validation(peft, served.tokenizer, data)

    return peft, train(peft, recipe, data.questions, data.text, teacher, watch, config.watch_every, losses, state)


def healed(
    folder: Path,
    served: ServedModel,
    missing: Sequence[int],
    recipe: Recipe,
    config: HealingConfig,
    teacher: Teacher | None = None,
) -> dict[str, Any]:
    """The recipe.json of the adapter in ``folder``, trained now unless exactly this run was finished before."""
    recipe, source = config.sized(recipe), Path(config.questions)
    data = training_data(config, recipe, served.tokenizer)
    wanted = {
        "recipe": dataclasses.asdict(recipe) | {"targets": list(recipe.targets)},
        "layers": present_without(served.plan.depth, missing),
        "depth": served.plan.depth,
        "base_sha256": served.sha256,
        # of a file its name, not where it lay: the hash beside it tells data apart
        "data": {
            "questions": source.name if source.expanduser().is_absolute() else config.questions,
            "split": "train",
            "sha256": data.sha256,
        },
        "steps": recipe.total_steps(len(data.questions)),
        "seed": recipe.seed,
    }
    if (folder / "recipe.json").exists():
        recorded = read_recipe(folder)
        if all(recorded.get(key) == value for key, value in wanted.items()):
            timing.add_resumed(recorded["train_s"])
            return recorded
    key = hashlib.sha256(json.dumps([wanted, dataclasses.asdict(config)]).encode()).hexdigest()
    state = TrainingState(paths.CACHE / "training" / f"{key[:16]}.safetensors")
    peft, curve = heal(served, missing, recipe, data, config, teacher, state=state)
    machine = describe()
    made = {
        "curve": curve.rows,
        "train_s": round(curve.duration_s, 1),
        "cut_questions": data.cut_questions,
        "machine": {key: machine[key] for key in ("slug", "cpu", "gpu", "packages")},
    }
    export_adapter(peft, folder, wanted | made)
    state.path.unlink(missing_ok=True)
    return wanted | made


def present_without(depth: int, missing: Sequence[int]) -> list[int]:
    """The layers of a model of ``depth`` that are not ``missing``."""
    return [i for i in range(depth) if i not in set(missing)]


def _validation(peft: PeftModel, tokenizer: Any, data: TrainingData) -> dict[str, float]:
    if not data.validation:
        raise CorpusError("no validation questions: set healing.watch_questions to 1 or more, or use a larger file")
    model = peft.get_base_model()
    answers = answer_scores(model, tokenizer, data.validation, AnswerConfig(batch=8))
    mean = {key: sum(row[key] for row in answers) / len(answers) for key in ("em", "f1", "answer_nll")}
    return {f"validation_{key}": value for key, value in mean.items()} | {
        "validation_perplexity": perplexity(text_scores(model, data.windows))
    }
