"""The adapters of the committed pairs, trained again (an adapter that exactly this recipe made is kept)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from firsttoken.assets.adapter_files import read_recipe
from firsttoken.assets.adapters import export_adapter
from firsttoken.assets.models import as_stored, load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.study import timing
from firsttoken.study.dtypes import autocast
from firsttoken.study.errors import CorpusError, ProfileError
from firsttoken.study.machine import describe
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken_studies.droidspeak.constructed_tasks import load_items
from firsttoken_studies.droidspeak.pairs import HALF, adapters_folder, half_the_layers
from firsttoken_studies.droidspeak.reuse_items import Encoded, encode
from firsttoken_studies.droidspeak.setting import ReuseConfig
from firsttoken_studies.record.results import Outcome, Rows

# Senders and receivers: LoRA adapters that tune one base to different tasks, so that there are models to pair.
#
# The package registries hold no two fine-tunes of one small model; the paper's own pairs are folders or Hub ids.

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_WARMUP = 10


@dataclass(frozen=True)
class TuningConfig:
    """Settings that tune a model of a pair: ``steps`` of ``batch`` items each, drawn from its tasks in turn.

    ``tokens`` is the longest prefix, ``items`` the number of each task to draw from (0: all there are).
    """

    rank: int
    learning_rate: float
    steps: int
    batch: int
    tokens: int
    items: int


def tune(
    model: PreTrainedModel, tasks: Sequence[Sequence[Encoded]], config: TuningConfig, seed: int = 0
) -> tuple[PeftModel, list[dict[str, float]]]:
    """Train LoRA weights on all projections of ``model`` to continue each item's prefix and suffix with its target.

    Returns the model and one row a step. The base keeps its dtype, the adapter is fp32, bf16 autocast where that is
    fast; a cosine schedule. Raises CorpusError for a task without items.
    """
    if not tasks or not all(tasks):  # before the model gets an adapter
        raise CorpusError("a task has no training items; lower the profile's reuse_training.items or use a larger file")
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=config.rank, lora_alpha=2 * config.rank, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"
    )
    peft = get_peft_model(model, lora)
    weights = [p for p in peft.parameters() if p.requires_grad]
    for weight in weights:
        weight.data = weight.data.float()
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=0.0)
    schedule = get_scheduler("cosine", optimizer, _WARMUP, config.steps)
    batches, rows = _draws(tasks, seed), []
    peft.train()
    for step in track(range(1, config.steps + 1), desc="tuning", unit="step"):
        loss = answer_loss(peft.get_base_model(), [next(batches) for _ in range(config.batch)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        rows.append({"step": step, "answer_loss": round(loss.item(), 5)})
    return peft.eval(), rows


def tuned(
    folder: Path,
    model: PreTrainedModel,
    base_sha256: str | None,
    tasks: dict[str, Sequence[Encoded]],
    config: TuningConfig,
    seed: int = 0,
) -> dict[str, Any]:
    """The recipe.json of the adapter in ``folder``, trained now unless exactly this run was finished before."""
    sequences = [(name, *e.tokens) for name, encoded in tasks.items() for e in encoded]
    wanted = {
        "tuning": asdict(config),
        "tasks": list(tasks),
        "data_sha256": hashlib.sha256(repr(sequences).encode()).hexdigest(),
        "base_sha256": base_sha256,
        "seed": seed,
    }
    if (folder / "recipe.json").exists():
        recipe = read_recipe(folder)
        if all(recipe.get(key) == value for key, value in wanted.items()):
            timing.add_resumed(recipe["train_s"])
            return recipe
    start = time.perf_counter()
    peft, curve = tune(model, list(tasks.values()), config, seed)
    machine = describe()
    made = {
        "curve": curve,
        "train_s": round(time.perf_counter() - start, 1),
        "machine": {key: machine[key] for key in ("slug", "cpu", "gpu", "packages")},
    }
    export_adapter(peft, folder, wanted | made)
    peft.unload()
    return wanted | made


def training_items(task: str, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int) -> list[Encoded]:
    """``count`` (0: all) training items of ``task`` with prefixes of at most ``tokens`` tokens.

    Raises CorpusError as ``load_items``.
    """
    return [encode(item, tokenizer) for item in load_items(task, "train", tokenizer, tokens, count or None)]


def answer_loss(model: PreTrainedModel, items: Sequence[Encoded]) -> Tensor:
    """Mean cross-entropy of the target's tokens, nats; logits are made at those positions only."""
    rows = [[*item.prefix, *item.suffix, *item.target] for item in items]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
    end = torch.tensor([[len(row) - 1] for row in rows], device=model.device)
    start = torch.tensor([[len(row) - len(i.target) - 1] for row, i in zip(rows, items, strict=True)]).to(model.device)
    column = torch.arange(width, device=model.device)
    answered = (column >= start) & (column < end)
    with autocast(model):
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[answered]).float()
    return F.cross_entropy(logits, ids.roll(-1, 1)[answered])


def _draws(tasks: Sequence[Sequence[Encoded]], seed: int) -> Iterator[Encoded]:
    """One item of each task in turn, without end; every item of a task once before any comes again."""
    draw = torch.Generator().manual_seed(seed)
    orders: list[list[int]] = [[] for _ in tasks]
    while True:
        for task, order in zip(tasks, orders, strict=True):
            if not order:
                order.extend(torch.randperm(len(task), generator=draw).tolist())
            yield task[order.pop()]


@dataclass(frozen=True)
class ReuseTrainingConfig:
    """``adapters`` as "name: task + task: steps"; a name that begins with "half" takes every second layer of the base.

    Each task has ``items`` training items (0: all there are) with prefixes of up to ``tokens`` tokens; a step takes
    ``batch`` of them.
    """

    adapters: tuple[str, ...]
    rank: int
    learning_rate: float
    batch: int
    tokens: int
    items: int

    def needs(self) -> list[Need]:
        """Require a context that holds a prefix."""
        return [Need("reuse_training.tokens", self.tokens, CONTEXT)]


def reuse_training(profile: Profile) -> Outcome:
    """One row a step and adapter: the loss of the answer's tokens, nats; an adapter's last has ``train_s``, too."""
    config = profile.section("reuse_training", ReuseTrainingConfig)
    check(config.needs(), ModelFacts(profile.model))
    folder = adapters_folder(profile.section("reuse", ReuseConfig).adapters)
    rows, provenance = [], {}
    for name, tasks, steps in [_parse(line) for line in config.adapters]:
        base = load_model(profile.model, dtype=profile.torch_dtype(), device=profile.torch_device())
        as_stored(base.model, profile.stored_dtype(), profile.torch_dtype())
        model = half_the_layers(base.model) if name.startswith(HALF) else base.model
        data = {
            # of a file its name only: the recipe is given away
            Path(task).stem: training_items(task, base.tokenizer, config.tokens, config.items)
            for task in tasks
        }
        tuning = TuningConfig(config.rank, config.learning_rate, steps, config.batch, config.tokens, config.items)
        recipe = tuned(folder / name, model, base.provenance.sha256, data, tuning, profile.seed)
        rows += [{"adapter": name, "seed": profile.seed} | row for row in recipe["curve"]]
        rows[-1]["train_s"] = recipe["train_s"]
        provenance["base"] = base.provenance.as_dict()
    return Outcome(rows, provenance=provenance)


def training_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by adapter the seconds that its training took, from the rows that say so."""
    summary = Summary()
    for row in rows:
        if "train_s" in row:
            summary.add("train_s", {"value": row["train_s"], "n": row["step"], "unit": "s"}, model=row["adapter"])
    return summary


def _parse(line: str) -> tuple[str, list[str], int]:
    parts = [part.strip() for part in line.split(":")]
    if len(parts) != 3 or not all(parts) or not parts[2].isdigit() or int(parts[2]) < 1:
        raise ProfileError(f"adapter {line!r}: write it as 'name: task + task: steps'")
    name, tasks, steps = parts
    return name, [task.strip() for task in tasks.split("+")], int(steps)
