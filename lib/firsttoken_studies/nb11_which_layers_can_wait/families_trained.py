"""Families of models whose adapters are trained here: one that heals, and a fine-tune that reuses its base's KV cache.

``families`` says what a model loses without a block of its layers, before any training. Here an adapter is trained for
the model that lacks the block (ProgressiveServe), and another that tunes the whole model to questions: what it answers
on the cache of the model that it was tuned from is compared with what it answers on its own (DroidSpeak). Every step
count is small, so that two families take half an hour on two cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.progressiveserve.base_model import ServedModel, at_stage
from firsttoken.progressiveserve.distance import angular_distances, choose_block
from firsttoken.progressiveserve.evaluation import Evaluation, QualityConfig
from firsttoken.progressiveserve.healing import Teacher
from firsttoken.progressiveserve.quality_gates import recoveries, summarise
from firsttoken.progressiveserve.recipe import RECIPES
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.progressiveserve.training import HealingConfig, healed
from firsttoken.study import paths
from firsttoken.study.errors import ProfileError, StageError
from firsttoken.study.parsing.schema import non_empty
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, paired_bootstrap
from firsttoken.study.summary import Scalar, Summary
from firsttoken_studies.droidspeak.decoding import DROIDSPEAK, OWN, REUSE, decoded_scores, own, partial
from firsttoken_studies.droidspeak.pairs import BASE, Models, Pair, PairedModel, shown
from firsttoken_studies.droidspeak.setting import Run, chosen_and_judged
from firsttoken_studies.droidspeak.tables import relative_loss
from firsttoken_studies.nb11_which_layers_can_wait.families import FamiliesConfig
from firsttoken_studies.nb30_full_reuse_and_sensitivity.training import (
    ReuseTrainingConfig,
    TuningConfig,
    training_items,
    tuned,
)
from firsttoken_studies.record.overlay import over
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, rows_where
from firsttoken_studies.record.show import cells

TASK = "qa"  # what the fine-tune is tuned to and asked
RECIPE = "ours"  # what heals
CHOOSE, JUDGE = "choose", "judge"  # what the questions of a row are for


@dataclass(frozen=True)
class FamiliesTrainedConfig:
    """``models``, as ``load_model`` names them, and for each how many steps heal it and how many tune it.

    The block that waits, the windows of text and the recipes are those of other sections: ``families``, ``quality``,
    ``healing`` and ``reuse_training``. The whole, the pruned and the healed model answer ``questions``. The fine-tune
    is asked with prefixes of up to ``tokens`` tokens, ``batch`` at a time: ``items`` questions choose one group of
    layers for each of ``shares_pct``, the percentage of the layers that is recomputed, and ``eval_items`` others judge
    it.
    """

    models: Annotated[tuple[str, ...], non_empty]
    healing_steps: tuple[int, ...]
    tuning_steps: tuple[int, ...]
    questions: int
    tokens: int
    items: int
    eval_items: int
    batch: int
    shares_pct: Annotated[tuple[int, ...], non_empty]

    def __post_init__(self) -> None:
        for name in ("healing_steps", "tuning_steps"):
            steps = getattr(self, name)
            if len(steps) != len(self.models) or min(steps) < 1:
                raise ProfileError(f"families_trained.{name}: give each of the {len(self.models)} models 1 or more")
        if not 1 <= min(self.shares_pct) <= max(self.shares_pct) <= 99:
            raise ProfileError("families_trained.shares_pct: a share of the layers must be from 1 to 99 %")

    def needs(self) -> list[Need]:
        """Require a context that holds a prefix."""
        return [Need("families_trained.tokens", self.tokens, CONTEXT)]

    def groups(self, depth: int, share_pct: int) -> list[Group]:
        """The groups of ``share_pct`` of ``depth`` layers that may be chosen: each begins half a group after the one
        before."""
        size = max(1, round(depth * share_pct / 100))
        return [Group(start, start + size) for start in range(0, depth - size + 1, max(1, size // 2))]


def families_trained(profile: Profile) -> Outcome:
    """Rows of each model: {start, size} of the block that waits, the answers and losses of its variants as
    ``Evaluation`` has them, and {method, items, lo, hi, item_score} of each way to come by the fine-tune's cache.

    The adapters stay in the cache folder, and a run that was finished before is not repeated. Raises AssetError for a
    model that is not fetched, StageError for one that reads no text.
    """
    config = profile.section("families_trained", FamiliesTrainedConfig)
    families = profile.section("families", FamiliesConfig)
    quality = profile.section("quality", QualityConfig).smaller(config.questions, families.windows)
    healing = profile.section("healing", HealingConfig)
    healing = dataclasses.replace(healing, watch_every=0, watch_questions=1, watch_windows=1)
    tuning = profile.section("reuse_training", ReuseTrainingConfig)
    for name in config.models:
        check([*config.needs(), *families.needs(), *quality.needs(), *healing.needs()], ModelFacts(name))
    rows, origins = [], {}
    schedules = list(zip(config.models, config.healing_steps, config.tuning_steps, strict=True))
    for name, healing_steps, tuning_steps in track(schedules, desc="families"):
        folder = paths.CACHE / "adapters" / shown(name)
        models = Models(dataclasses.replace(profile, model=name), str(folder))
        base = models.load(BASE)
        if base.tokenizer is None:
            raise StageError(f"model {shown(name)} has no tokenizer, and its quality is judged on text: choose another")
        origins[shown(name)] = base.provenance
        table = _healed(base, families, healing, healing_steps, Evaluation(quality, base.tokenizer), folder / RECIPE)
        wanted = TuningConfig(tuning.rank, tuning.learning_rate, tuning_steps, tuning.batch, config.tokens, items=0)
        data = {TASK: training_items(TASK, base.tokenizer, config.tokens, wanted.items)}
        tuned(folder / TASK, base.model, base.weights, data, wanted, profile.seed)
        table += _reused(config, models.load(TASK), base)
        rows += [{"model": shown(name)} | row for row in table]
    return Outcome(rows, provenance=next(iter(origins.values())) | {"families": origins})


def _healed(
    base: PairedModel,
    families: FamiliesConfig,
    healing: HealingConfig,
    steps: int,
    evaluation: Evaluation,
    folder: Path,
) -> Rows:
    """The block of the least angular distance, and what the whole, the pruned and the healed model say to
    ``evaluation``."""
    model, size = base.model, families.waiting(base.model)
    distances = angular_distances(model, families.calibration(base.tokenizer), families.batch)
    block = choose_block(distances, size)
    plan = StagePlan.from_block(model.config.num_hidden_layers, block)
    served = ServedModel(model, base.tokenizer, plan, base.weights, base.provenance)
    recipe = dataclasses.replace(RECIPES[RECIPE], steps=steps)
    healed(folder, served, plan.missing(1), recipe, healing, Teacher(model))
    rows: Rows = [{"start": block[0], "size": size}, *evaluation.rows("s0", model)]
    for recipe_name, adapter in (("none", None), (RECIPE, folder)):
        with at_stage(served, 1, adapter) as staged:
            rows += evaluation.rows(f"s1_{recipe_name}", staged)
    return rows


def _reused(config: FamiliesTrainedConfig, receiver: PairedModel, base: PairedModel) -> Rows:
    """Return rows of the answers of ``receiver`` on its own cache, on that of ``base``, and with a group of layers
    recomputed."""
    receiver.check_sender(base)
    run = Run(Pair(TASK, BASE), TASK, config.tokens)
    to_choose, to_judge = chosen_and_judged(run, receiver.tokenizer, config.items, config.eval_items)
    depth = receiver.model.config.num_hidden_layers
    groups = {share: config.groups(depth, share) for share in config.shares_pct}
    candidates = sorted({group for those in groups.values() for group in those})
    methods = [partial(str(group), receiver, group) for group in candidates]
    scores = decoded_scores(run, receiver, base, methods, to_choose, config.batch)
    rows: Rows = [
        {
            "method": DROIDSPEAK,
            "items": CHOOSE,
            "lo": method_name.group.lo,
            "hi": method_name.group.hi,
            "item_score": scores[method_name.name],
        }
        for method_name in methods
    ]
    chosen = {share: max(those, key=lambda group: sum(scores[str(group)])) for share, those in groups.items()}
    methods = [own(receiver), partial(REUSE, receiver, NOTHING)]
    methods += [partial(f"{DROIDSPEAK}, {share} %", receiver, group) for share, group in chosen.items()]
    scores = decoded_scores(run, receiver, base, methods, to_judge, config.batch)
    for method, share in zip(methods, [None, None, *chosen], strict=True):
        row = {"method": method.name if share is None else DROIDSPEAK, "items": JUDGE, "share_pct": share}
        rows.append(row | {"lo": method.group.lo, "hi": method.group.hi, "item_score": scores[method.name]})
    return rows


def families_trained_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Scores of the whole, the pruned and the healed model and the share of the loss that healing brings back, paired
    by window and by question; scores of each way to come by a cache, and what it loses of the own prefill's."""
    summary, judged = Summary(), QualityConfig.recorded(parameters).judged
    for model in map(shown, parameters["families_trained"]["models"]):
        of_model = rows_where(rows, model=model)
        (start,) = (row["start"] for row in of_model if "start" in row)
        summary.add("chosen_start", {"value": start, "unit": "layer, 0-based"}, model=model)
        places: dict[str, dict[str, Scalar]] = {"s0": {"model": model, "stage": 0}}
        places |= {f"s1_{recipe}": {"model": model, "stage": 1, "recipe": recipe} for recipe in ("none", RECIPE)}
        answered = [row for row in of_model if "variant" in row]
        summary += summarise(answered, places, judged=judged)
        summary += recoveries(answered, places, judged)
        reused = rows_where(of_model, items=JUDGE)
        (own_scores,) = (row["item_score"] for row in rows_where(reused, method=OWN))
        for row in reused:
            labels: dict[str, Scalar] = {"model": model, "method": row["method"]}
            if row["share_pct"] is not None:
                labels["case"] = share_of_layers(row["share_pct"])
                summary.add("group", {"value": str(Group(row["lo"], row["hi"]))}, **labels)
            summary.add("score_pct", bootstrap(row["item_score"]).summary("%", 100), **labels)
            if row["method"] != OWN:
                lost = paired_bootstrap(own_scores, row["item_score"])
                summary.add("loss_points", lost.summary("points", 100), **labels)
                relative = relative_loss(own_scores, row["item_score"])
                summary.add("relative_loss_pct", relative.summary("% of own"), **labels)
    return summary


def share_of_layers(share_pct: int) -> str:
    """The case of a summary's entries in which ``share_pct`` of the layers are recomputed."""
    return f"{share_pct} % of the layers"


def healed_family_rows(recorded: Result | None, now: Result) -> Table:
    """One row for each model: the layers that wait, perplexity whole, pruned and healed, and what healing recovers."""
    for result_drawn in over(recorded, now):
        summary = result_drawn.result.summary
        for row in result_drawn.result.rows:
            if "start" in row:
                pruned, mended = ({"stage": 1, "recipe": recipe} for recipe in ("none", RECIPE))
                columns = {
                    "perplexity": ("perplexity", 1, {"stage": 0}),
                    "pruned": ("perplexity", 0, pruned),
                    "healed": ("perplexity", 1, mended),
                    "log perplexity brought back, %": ("log_perplexity_recovered_pct", 0, mended),
                    "F1, %": ("f1_pct", 0, {"stage": 0}),
                    "F1 pruned, %": ("f1_pct", 0, pruned),
                    "F1 healed, %": ("f1_pct", 0, mended),
                }
                waits = {"model": row["model"], "waits": f"{row['start']} to {row['start'] + row['size'] - 1}"}
                yield waits | cells(summary, columns, model=row["model"]) | {"whose": result_drawn.who()}


def reusing_family_rows(recorded: Result | None, now: Result) -> Table:
    """One row for each model and way to come by the fine-tune's cache: its F1, and what that loses of the own."""
    for result_drawn in over(recorded, now):
        for row in rows_where(result_drawn.result.rows, items=JUDGE):
            labels = {"model": row["model"], "method": row["method"]}
            label, columns = row["method"], {"F1, %": ("score_pct", 1), "loses of its own, %": ("relative_loss_pct", 1)}
            if row["share_pct"] is not None:
                labels["case"] = share_of_layers(row["share_pct"])
                label = f"layers {Group(row['lo'], row['hi'])} recomputed"
            line = {"model": row["model"], "cache": label} | cells(result_drawn.result.summary, columns, **labels)
            yield line | {"whose": result_drawn.who()}
