"""Controls, without which the stage table misleads: what does healing owe to the block, the stages, the training?"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.needs import ModelFacts, Need, check, text_of
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, load_base, load_served, passing
from firsttoken.progressiveserve.distance import angular_distances, choose_block
from firsttoken.progressiveserve.evaluation import Evaluation, QualityConfig
from firsttoken.progressiveserve.healing import Teacher
from firsttoken.progressiveserve.quality_gates import recoveries, summarise
from firsttoken.progressiveserve.recipe import RECIPES, Recipe
from firsttoken.progressiveserve.stage_adapters import load_adapter
from firsttoken.progressiveserve.training import HealingConfig, healed, present_without
from firsttoken.study import paths
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Rows

CALIBRATION_TOKENS = 256  # of a window that the smaller blocks are chosen on
CONTROLS = ("chosen", "one_shot", "full", "random", "drop4", "drop6")


@dataclass(frozen=True)
class AblationConfig:
    """Each of ``variants`` is healed by ``recipe`` for ``steps`` steps, "one_shot" for twice as many."""

    recipe: str
    steps: int
    items: int
    windows: int
    calibration_passages: int
    variants: tuple[str, ...] = CONTROLS

    def __post_init__(self) -> None:
        if unknown := [name for name in self.variants if name not in CONTROLS]:
            raise ProfileError(f"controls.variants: no control is called {unknown[0]!r}; known: {', '.join(CONTROLS)}")

    def sizes(self, quality: QualityConfig) -> QualityConfig:
        """Return the sizes of a control's questions: fewer than a stage's, by the task that judges one."""
        return quality.smaller(self.items, self.windows)

    def needs(self) -> list[Need]:
        """Require the text to calibrate on."""
        wanted = self.calibration_passages * CALIBRATION_TOKENS
        return [Need(f"controls.calibration_passages x {CALIBRATION_TOKENS}", wanted, text_of("train"))]


def healing_controls(profile: Profile) -> Outcome:
    """Trained controls and their unhealed counterparts on the test items.

    "chosen" is the block that the distances chose; "random" a block of the same size that starts anywhere else; "full"
    the whole model trained further; "one_shot" the chosen block healed once with the steps of both stages, never to
    recover; "drop4" and "drop6" smaller blocks, chosen by distance. Their adapters stay in the cache.
    """
    config = profile.section("controls", AblationConfig)
    quality = profile.section("quality", QualityConfig)
    # A control is judged on the test items alone, so its run is not watched more than it must be.
    healing = profile.section("healing", HealingConfig)
    healing = dataclasses.replace(healing, watch_every=0, watch_questions=min(8, healing.watch_questions))
    sizes = config.sizes(quality)
    served_config = profile.section("served", ServedConfig)
    check([*served_config.needs(), *config.needs(), *sizes.needs(), *healing.needs()], ModelFacts(profile.model))
    served = load_served(profile)
    recipe = dataclasses.replace(RECIPES[config.recipe], steps=config.steps)
    twice = dataclasses.replace(recipe, steps=2 * config.steps)
    blocks = control_blocks(profile, config, served)
    runs: list[tuple[str, tuple[int, ...], Recipe]] = [(name, block, recipe) for name, block in blocks.items()]
    runs.insert(1, ("one_shot", blocks["chosen"], twice))
    runs.insert(2, ("full", (), recipe))
    runs = [run for run in runs if run[0] in config.variants]
    evaluation, teacher = Evaluation(sizes, served.tokenizer), Teacher(served.model)
    rows = evaluation.rows("s0", served.model)
    folder = paths.CACHE / "adapters" / served_config.folder.name
    for name, missing, wanted in runs:
        adapter = folder / f"control-{name}"
        healed(adapter, served, missing, wanted, healing, teacher)
        with passing(served.model, missing) as model:
            if missing and name != "one_shot":
                rows += evaluation.rows(f"{name}_none", model)
            peft = load_adapter(model, adapter, present_without(served.plan.depth, missing), served.sha256)
            rows += evaluation.rows(f"{name}_{wanted.name}", peft.get_base_model())
            peft.unload()
    removed = {name: list(block) for name, block in blocks.items() if name in config.variants}
    provenance = served.provenance | {"blocks": removed}
    return Outcome(rows, provenance=provenance)


def controls_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Scores of every control, and what healing brings back of those that were also asked unhealed."""
    judged = QualityConfig.recorded(parameters).judged
    places: dict[str, dict[str, Any]] = {"s0": {"stage": 0}}
    for recipe in ("none", parameters["controls"]["recipe"]):
        places |= {f"{name}_{recipe}": {"variant": name, "recipe": recipe} for name in CONTROLS}
    summary = summarise(rows, places, judged=judged)
    summary += recoveries(rows, places, judged)
    return summary


def control_blocks(profile: Profile, config: AblationConfig, served: ServedModel) -> dict[str, tuple[int, ...]]:
    """The removed layers of each control that removes some."""
    size = len(served.plan.block)
    base = load_base(profile)
    windows = token_windows(running_text("train"), base.tokenizer, CALIBRATION_TOKENS, config.calibration_passages)
    distances = angular_distances(base.model, windows)
    starts = [s for s in range(served.plan.depth - size + 1) if s != served.plan.block[0]]
    start = random.Random(profile.seed).choice(starts)
    smaller = {f"drop{n}": tuple(choose_block(distances, n)) for n in (4, 6) if n < size}
    return {"chosen": served.plan.block, "random": tuple(range(start, start + size)), **smaller}
