"""Healing: LoRA adapters that stand in for the layers that have not arrived (ProgressiveServe, 3.3.3).

Adapter A is trained with B and C passed, adapter AB with C passed. Both are stock PEFT folders: plain
``PeftModel.from_pretrained`` loads them on the staged model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, get_scheduler

from firsttoken.progressiveserve.recipe import Recipe
from firsttoken.progressiveserve.samples import Sample, padded
from firsttoken.study.dtypes import autocast
from firsttoken.study.errors import CorpusError
from firsttoken.study.files import replacing
from firsttoken.study.progress import track


@dataclass(frozen=True)
class Curve:
    """The course of a healing run: one row a step, and the seconds that it took."""

    rows: list[dict[str, float]]
    duration_s: float


def answer_loss(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """The mean cross-entropy of ``next_tokens`` [positions] under ``logits`` [positions, vocabulary], in nats."""
    return F.cross_entropy(logits, next_tokens)


def distill_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """The mean KL divergence of the student's ``logits`` [positions, vocabulary] from those of the ``teacher`` at the
    same positions, in nats."""
    log_probs, wanted = F.log_softmax(logits, -1), F.log_softmax(teacher, -1)
    return F.kl_div(log_probs, wanted, log_target=True, reduction="batchmean")


Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class HealingLosses(NamedTuple):
    """The functions whose weighted sum is trained on: of what is told, and of what the full model predicts."""

    answer: Loss = answer_loss
    distill: Loss = distill_loss


LOSSES = HealingLosses()


class Teacher:
    """The full model's final hidden states, remembered by sample, so that each sequence is run once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._states: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def hidden(self, samples: Sequence[Sample], width: int) -> Tensor:
        """Hidden states after the final norm, [samples, width, hidden], zero beyond each sample's end."""
        new = [s for s in samples if s.tokens not in self._states]
        if new:
            states = self._model.get_decoder()(padded(new).to(self._model.device), use_cache=False).last_hidden_state
            self._states |= {s.tokens: row[: len(s.tokens)].clone() for s, row in zip(new, states, strict=True)}
        rows = [self._states[s.tokens] for s in samples]
        return torch.stack([F.pad(r, (0, 0, 0, width - len(r))) for r in rows])


def attach(model: PreTrainedModel, recipe: Recipe, layers: Sequence[int]) -> PeftModel:
    """Fresh LoRA weights on the named projections of ``layers`` (0-based), and nowhere else."""
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=recipe.dropout,
        target_modules=list(recipe.targets),
        layers_to_transform=list(layers),
        layers_pattern="layers",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


@dataclass(frozen=True)
class TrainingState:
    """The file in which a training keeps weights, AdamW's moments, torch's random state and its rows, so that a run
    that is cut goes on there as if it had not been; only the teacher's states may be rounded in another batch."""

    path: Path

    def write(self, weights: Sequence[Tensor], optimizer: torch.optim.Optimizer, curve: Curve) -> None:
        """Keep the state after the last row of ``curve``."""
        tensors = {"random": torch.get_rng_state()}
        for index, weight in enumerate(weights):
            moments = {"weight": weight.detach(), **optimizer.state[weight]}
            tensors |= {f"{index}.{name}": value.contiguous() for name, value in moments.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            save_file(
                tensors, temporary, metadata={"rows": json.dumps(curve.rows), "duration_s": str(curve.duration_s)}
            )

    @torch.no_grad()
    def read(self, weights: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> Curve:
        """Take over what was kept, and return the curve until then; an empty one where nothing was."""
        if not self.path.exists():
            return Curve([], 0.0)
        with safe_open(self.path, "pt") as file:
            for name in {*file.keys()} - {"random"}:
                index, _, moment = name.partition(".")
                weight, value = weights[int(index)], file.get_tensor(name)
                if moment == "weight":
                    weight.copy_(value)
                else:  # AdamW counts its steps on the CPU, wherever the weights are
                    optimizer.state[weight][moment] = value if moment == "step" else value.to(weight.device)
            torch.set_rng_state(file.get_tensor("random"))
            return Curve(json.loads(file.metadata()["rows"]), float(file.metadata()["duration_s"]))


def train(
    peft: PeftModel,
    recipe: Recipe,
    questions: Sequence[Sample],
    text: Sequence[Sample] = (),
    teacher: Teacher | None = None,
    watch: Callable[[int], dict[str, float]] | None = None,
    watch_every: int = 0,
    losses: HealingLosses = LOSSES,
    state: TrainingState | None = None,
) -> Curve:
    """Train the adapter of ``peft`` in place by ``recipe``.

    ``watch`` is called with the step number every ``watch_every`` steps and at the end; what it returns, validation
    scores, joins that step's row, and ``state`` is written then. The base stays in its own dtype, the adapter is fp32;
    bf16 autocast where that is fast.
    """
    torch.manual_seed(recipe.seed)
    steps = recipe.total_steps(len(questions))
    weights = [p for p in peft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = get_scheduler(recipe.schedule, optimizer, recipe.warmup_steps, steps)
    draw = torch.Generator().manual_seed(recipe.seed)
    batches = zip(_endless(questions, recipe.batch, draw), _endless(text, recipe.text_batch, draw), strict=False)
    before = state.read(weights, optimizer) if state else Curve([], 0.0)
    rows, start = before.rows, time.perf_counter() - before.duration_s
    for _ in range(len(rows) * recipe.accumulate):  # what was drawn for them is drawn again
        question_batch, text_batch = next(batches)
        _targets(question_batch, text_batch, padded([*question_batch, *text_batch]).shape[1], recipe, draw)
    schedule.last_epoch = len(rows)
    for group, rate in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group["lr"] = group["initial_lr"] * rate(len(rows))
    peft.train()
    for step in track(range(len(rows) + 1, steps + 1), desc=f"healing ({recipe.name})", unit="step"):
        means: dict[str, float] = {}
        for _ in range(recipe.accumulate):
            question_batch, text_batch = next(batches)
            parts = _losses(peft, recipe, question_batch, text_batch, teacher, draw, losses)
            (sum(parts.values()) / recipe.accumulate).backward()
            for name, loss in parts.items():
                means[name] = means.get(name, 0.0) + loss.item() / recipe.accumulate
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        rows.append({"step": step, **{name: round(loss, 5) for name, loss in means.items()}})
        if watch and (step == steps or (watch_every and step % watch_every == 0)):
            peft.eval()
            rows[-1] |= watch(step)
            peft.train()
            if state:
                state.write(weights, optimizer, Curve(rows, time.perf_counter() - start))
    peft.eval()
    return Curve(rows, time.perf_counter() - start)


def _endless(samples: Sequence[Sample], size: int, draw: torch.Generator) -> Iterator[list[Sample]]:
    """Batches of ``size`` without end, every sample once before any comes again; empty ones where size is 0."""
    if size and not samples:
        raise CorpusError("no samples to learn from: the train split is empty, use a larger file")
    order: list[int] = []
    while True:
        while len(order) < size:
            order += torch.randperm(len(samples), generator=draw).tolist()
        yield [samples[i] for i in order[:size]]
        del order[:size]


def _losses(
    peft: PeftModel,
    recipe: Recipe,
    questions: list[Sample],
    texts: list[Sample],
    teacher: Teacher | None,
    draw: torch.Generator,
    losses: HealingLosses,
) -> dict[str, Tensor]:
    """The weighted losses of one micro-batch. Logits, a third of the work, are made at the positions needed only."""
    model = peft.get_base_model()
    ids = padded([*questions, *texts])
    answer, running, distilled = _targets(questions, texts, ids.shape[1], recipe, draw)
    needed = answer | (running & (recipe.text_weight > 0)) | (distilled & (recipe.distill_weight > 0))
    head, device = model.get_output_embeddings(), model.device
    with autocast(peft):
        hidden = model.get_decoder()(ids.to(device), use_cache=False).last_hidden_state
        logits = head(hidden[needed.to(device)]).float()
    next_tokens = ids.roll(-1, 1)[needed].to(device)
    parts = {}
    for name, weight, mask in (
        ("answer_loss", recipe.answer_weight, answer),
        ("text_loss", recipe.text_weight, running),
    ):
        if weight and mask.any():
            learnt = mask[needed].to(device)
            parts[name] = weight * losses.answer(logits[learnt], next_tokens[learnt])
    if recipe.distill_weight and teacher is not None:
        target = teacher.hidden([*questions, *texts], ids.shape[1])[distilled.to(device)]
        with torch.no_grad():
            wanted = head(target.to(head.weight.dtype)).float()
        parts["distill_loss"] = recipe.distill_weight * losses.distill(logits[distilled[needed].to(device)], wanted)
    return parts


def _targets(
    questions: list[Sample], texts: list[Sample], width: int, recipe: Recipe, draw: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks of the positions [samples, width] that predict an answer token, predict running text, and are
    distilled."""
    samples = [*questions, *texts]
    next_token = torch.arange(1, width + 1).expand(len(samples), width)
    start = torch.tensor([[s.answer_start] for s in samples])
    end = torch.tensor([[len(s.tokens)] for s in samples])
    answer = (next_token >= start) & (next_token < end)
    running = (next_token < end) & (torch.arange(len(samples))[:, None] >= len(questions))
    sampled = (next_token <= end) & (torch.rand(answer.shape, generator=draw) < recipe.distill_share)
    # After an open "Answer:" no label follows, yet what the teacher would say there is the best target there is.
    opening = (next_token == end) & (start == end)
    return answer, running, answer | sampled | opening
