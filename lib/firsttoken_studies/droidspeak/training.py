"""The adapters of the committed pairs, trained again (an adapter that exactly this recipe made is kept)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.assets.models import as_stored, load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.droidspeak.items import encode
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken_studies.droidspeak.pairs import HALF, adapters_folder, half_the_layers
from firsttoken_studies.droidspeak.setting import ReuseConfig
from firsttoken_studies.droidspeak.tasks.load import load_items
from firsttoken_studies.droidspeak.tuning import TuningConfig, tuned


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
        """The context holds a prefix."""
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
            Path(task).stem: [  # of a file its name only: the recipe is given away
                encode(item, base.tokenizer)
                for item in load_items(task, "train", base.tokenizer, config.tokens, config.items or None)
            ]
            for task in tasks
        }
        tuning = TuningConfig(config.rank, config.learning_rate, steps, config.batch, config.tokens, config.items)
        recipe = tuned(folder / name, model, base.provenance.sha256, data, tuning, profile.seed)
        rows += [{"adapter": name, "seed": profile.seed} | row for row in recipe["curve"]]
        rows[-1]["train_s"] = recipe["train_s"]
        provenance["base"] = base.provenance.as_dict()
    return Outcome(rows, provenance=provenance)


def training_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By adapter, the seconds that its training took; of the rows that say so."""
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
