"""ProgressiveServe's offline half as experiments: functions from a profile to rows, and from rows to a summary."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check, text_of
from firsttoken.progressiveserve.base_model import ServedConfig, at_stage, load_base, load_served
from firsttoken.progressiveserve.distance import angular_distances, check_size, compute_layer_inputs, resampled_starts
from firsttoken.progressiveserve.evaluation import Evaluation, QualityConfig
from firsttoken.progressiveserve.healing import HealingLosses, Loss, Teacher, answer_loss, distill_loss
from firsttoken.progressiveserve.quality import Score
from firsttoken.progressiveserve.quality_gates import recoveries, summarise
from firsttoken.progressiveserve.recipe import RECIPES
from firsttoken.progressiveserve.training import HealingConfig, heal, healed, training_data
from firsttoken.scoring import exact_match
from firsttoken.study.errors import StageError
from firsttoken.study.profile import Profile
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Rows, rows_where

LOGITS = "logits"  # the task of a row that says whether a variant's logits are the full model's
LETTERS = {1: "A", 2: "AB"}  # the layers that a stage's adapters are for
BlockRule = Callable[[Tensor, int], tuple[list[int], Tensor]]
"""Chooses a block of a size from the residual stream [depth + 1, texts, hidden] at the last token: its layers, and the
distance of the block at each start."""


@dataclass(frozen=True)
class DistanceConfig:
    """Calibration: ``passages`` windows of ``tokens`` tokens of running text; blocks of 1 to ``max_block`` layers.

    ``block`` is the size that is deployed (the report: 8 of 32), ``resamples`` the calibration sets drawn for the
    stability of its start.
    """

    passages: int
    tokens: int
    batch: int
    max_block: int
    block: int
    resamples: int

    def needs(self) -> list[Need]:
        """Require a layer beside the block, a context that holds a window, and a text that fills all windows."""
        return [
            Need("distance.block (and one that stays)", self.block + 1, LAYERS),
            Need("distance.tokens", self.tokens, CONTEXT),
            Need("distance.passages x tokens", self.passages * self.tokens, text_of("train")),
        ]


def layer_distance(profile: Profile, *, rule: BlockRule | None = None) -> Outcome:
    """Angular distance of every block of 1 to ``max_block`` layers, and the block that it chooses.

    A reader's ``rule`` in place of the library's has rows of its own distances at the last token, and in the row of the
    block that it chooses ``left_out``, as that need not be the one of the least distance.
    """
    config = profile.section("distance", DistanceConfig)
    check(config.needs(), ModelFacts(profile.model))
    loaded = load_model(profile.model, dtype=profile.torch_dtype(), device=profile.torch_device())
    if loaded.tokenizer is None:
        raise StageError(f"model {profile.model} has no tokenizer, and calibration needs text: choose another")
    depth = len(layers_of(loaded.model))
    check_size(depth, config.block)
    windows = token_windows(running_text("train"), loaded.tokenizer, config.tokens, config.passages)
    start = time.perf_counter()
    distances = angular_distances(loaded.model, windows, config.batch)
    elapsed = round(time.perf_counter() - start, 2)
    stream = None if rule is None else last_tokens(loaded.model, windows, config.batch)
    rows = []
    for size in sorted({*range(1, min(config.max_block, depth - 1) + 1), config.block}):
        by_last = list(_block_rows(distances.block(size), profile.seed))
        if rule is not None and stream is not None:
            layers, _ = rule(stream, size)
            by_last = list(_block_rows(torch.stack([rule(text, size)[1] for text in stream.split(1, 1)]), profile.seed))
            by_last[layers[0]]["left_out"] = True
        by_all = _block_rows(distances.block(size, "all"), profile.seed)
        rows += [{"size_layers": size, "tokens": "last", "compute_s": elapsed} | row for row in by_last]
        rows += [{"size_layers": size, "tokens": "all", "compute_s": elapsed} | row for row in by_all]
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def last_tokens(model: PreTrainedModel, windows: Tensor, batch: int) -> Tensor:
    """Return the residual stream [depth + 1, passages, hidden] of ``windows`` at the last token, as a rule reads it."""
    return torch.cat([compute_layer_inputs(model, ids)[:, :, -1].float().cpu() for ids in windows.split(batch)], 1)


def chosen(rows: Rows) -> dict[str, Any]:
    """Return the row of the block that was chosen of ``rows`` of one size: by the library's, that of least distance."""
    return next((row for row in rows if row.get("left_out")), min(rows, key=lambda row: row["distance"]))


def distance_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The block of the deployed size that turns the stream least: where it is, and how often resampling chooses it.

    ``compute_s`` is absent where the rows do not say how long the distances took.
    """
    config = parameters["distance"]
    depth = max(row["start_layer"] + row["size_layers"] for row in rows)
    by_last, by_all = (rows_where(rows, size_layers=config["block"], tokens=tokens) for tokens in ("last", "all"))
    start, start_all = (chosen(distances)["start_layer"] for distances in (by_last, by_all))
    by_passage = list(zip(*(row["by_passage"] for row in by_last), strict=True))
    starts = resampled_starts(by_passage, config["resamples"], parameters["seed"])
    stability_pct = 100 * starts.count(start) / len(starts)
    summary = Summary()
    summary.add("chosen_start", {"value": start, "unit": "layer, 0-based"})
    summary.add("chosen_end", {"value": start + config["block"] - 1, "unit": "layer, 0-based"})
    summary.add("chosen_start", {"value": start_all, "unit": "layer, 0-based"}, variant="all tokens")
    summary.add("relative_depth", {"value": start / depth, "unit": "start / depth"})
    summary.add("dropped_layers_pct", {"value": 100 * config["block"] / depth, "unit": "%"})
    summary.add("stability_pct", {"value": stability_pct, "n": len(starts), "unit": "% of resampled calibration sets"})
    if "compute_s" in rows[0]:
        summary.add("compute_s", {"value": rows[0]["compute_s"], "n": 1, "unit": "s"})
    return summary


def _block_rows(distances: Tensor, seed: int) -> Iterator[dict[str, Any]]:
    """One row a start of ``distances`` [passages, starts]: the mean with its interval, and that of each passage."""
    for start, by_passage in enumerate(distances.T.tolist()):
        interval = bootstrap(by_passage, seed=seed, resamples=500)
        yield {
            "start_layer": start,
            "distance": interval.estimate,
            "low": interval.low,
            "high": interval.high,
            "by_passage": [round(d, 5) for d in by_passage],
        }


@dataclass(frozen=True)
class TrainingConfig:
    """The adapters that are trained: the task adapter where it is named, then A and AB by each of ``recipes``."""

    recipes: tuple[str, ...]


def healing_training(profile: Profile) -> Outcome:
    """Train the adapters that are served, and keep their curves. A run that was finished before is not repeated."""
    served_config = profile.section("served", ServedConfig)
    config = profile.section("healing", HealingConfig)
    chosen = profile.section("training", TrainingConfig)
    check([*served_config.needs(), *config.needs()], ModelFacts(profile.model))
    runs: dict[str, dict[str, Any]] = {}
    if served_config.task_adapter:
        runs["task"] = healed(
            served_config.folder / served_config.task_adapter, load_base(profile), (), RECIPES["task"], config
        )
    served = load_served(profile)
    teacher = Teacher(served.model)
    for name in chosen.recipes:
        for stage, letters in LETTERS.items():
            folder = served_config.folder / f"{letters}-{name}"
            missing = served.plan.missing(stage)
            runs[folder.name] = healed(folder, served, missing, RECIPES[name], config, teacher)
    cut = {adapter: run.get("cut_questions") for adapter, run in runs.items()}
    curves = [_curve_rows({"adapter": adapter}, run["curve"], run["train_s"]) for adapter, run in runs.items()]
    return Outcome([row for curve in curves for row in curve], provenance=served.provenance | {"cut_questions": cut})


def _curve_rows(label: dict[str, Any], curve: Rows, train_s: float) -> Rows:
    """One row a step; the last one says how many seconds all of them took."""
    *before, last = ({**label, **row} for row in curve)
    return [*before, last | {"train_s": train_s}]


def training_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize the time that the training of each adapter took, where its rows tell."""
    places = {
        f"{letters}-{recipe}": {"stage": stage, "recipe": recipe}
        for stage, letters in LETTERS.items()
        for recipe in parameters["training"]["recipes"]
    }
    summary = Summary()
    for row in rows:
        if "train_s" in row:
            labels = places.get(row["adapter"], {"recipe": row["adapter"]})  # the task adapter's is called as it is
            summary.add("train_s", {"value": row["train_s"], "n": 1, "unit": "s"}, **labels)
    return summary


def stage_quality(profile: Profile, *, score: Score = exact_match) -> Outcome:
    """Every stage, unhealed and healed by each recipe, on the same test items; stage 3 is checked to the bit. Answers
    match or not by ``score``."""
    config = profile.section("quality", QualityConfig)
    served_config = profile.section("served", ServedConfig)
    check([*served_config.needs(), *config.needs()], ModelFacts(profile.model))
    served_config.check_adapters(config.recipes)
    served, folder = load_served(profile), served_config.folder
    evaluation = Evaluation(config, served.tokenizer, score)
    original = evaluation.logits(served.model)
    rows = evaluation.rows("s0", served.model)
    for stage, letters in LETTERS.items():
        for recipe in ("none", *config.recipes):
            adapter = None if recipe == "none" else folder / f"{letters}-{recipe}"
            with at_stage(served, stage, adapter) as model:
                rows += evaluation.rows(f"s{stage}_{recipe}", model)
    with at_stage(served, 3) as model:
        rows += evaluation.rows("s3", model)
        identical = bool(torch.equal(evaluation.logits(model), original))
    rows.append({"variant": "s3", "task": LOGITS, "bit_identical": identical, "logits": original.numel()})
    provenance = served.provenance | {"block": list(served.plan.block), "judged": config.judged}
    return Outcome(rows, provenance=provenance)


def stage_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Scores of every stage, the shares that healing brings back, and whether stage 3 is the full model to the bit.

    The latter is absent where no row compares the logits.
    """
    config = QualityConfig.recorded(parameters)
    places: dict[str, dict[str, Any]] = {"s0": {"stage": 0}, "s3": {"stage": 3}}
    for stage in LETTERS:
        places |= {f"s{stage}_{recipe}": {"stage": stage, "recipe": recipe} for recipe in ("none", *config.recipes)}
    summary = summarise(rows, places, judged=config.judged)
    summary += recoveries(rows, places, config.judged)
    for row in rows:
        if row["task"] == LOGITS:
            entry = {"value": row["bit_identical"], "n": row["logits"], "unit": "logits compared"}
            summary.add("bit_identical", entry, **places[row["variant"]])
    return summary


@dataclass(frozen=True)
class LiveHealingConfig:
    """A few steps of ``recipe`` on stage 1, to show that the code learns."""

    recipe: str
    steps: int


def healing_live(profile: Profile, *, answer_loss: Loss = answer_loss, distill_loss: Loss = distill_loss) -> Outcome:
    """Heal stage 1 from scratch for a few steps by these losses, and keep them, with what validation says at the
    end."""
    config = profile.section("live", LiveHealingConfig)
    healing = profile.section("healing", HealingConfig)
    check([*profile.section("served", ServedConfig).needs(), *healing.needs()], ModelFacts(profile.model))
    served = load_served(profile)
    recipe = dataclasses.replace(healing.sized(RECIPES[config.recipe]), steps=config.steps, warmup_steps=2)
    data = training_data(healing, recipe, served.tokenizer)
    teacher = Teacher(served.model) if recipe.distill_weight else None
    losses = HealingLosses(answer_loss, distill_loss)
    _, curve = heal(served, served.plan.missing(1), recipe, data, healing, teacher, losses)
    rows = _curve_rows({"seed": recipe.seed}, curve.rows, curve.duration_s)
    return Outcome(rows, provenance=served.provenance | {"cut_questions": data.cut_questions})


def live_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """The first third of the losses beside the last, what validation says after the last step, and the seconds a step
    where the rows say how long all took."""
    steps, third = len(rows), max(1, len(rows) // 3)
    losses = [sum(value for key, value in row.items() if key.endswith("_loss")) for row in rows]
    first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
    summary = Summary()
    for case, loss in (("first steps", first), ("last steps", last)):
        summary.add("loss", {"value": round(loss, 3), "n": third, "unit": "nats, all losses"}, case=case)
    answers, text = rows[-1]["validation_answer_nll"], math.log(rows[-1]["validation_perplexity"])
    for measure, nats in (("answer_nll", answers), ("text_nll", text)):
        summary.add(measure, {"value": nats, "unit": "nats a token"}, task="validation", stage=1)
    if "train_s" in rows[-1]:
        summary.add("step_s", {"value": round(rows[-1]["train_s"] / steps, 2), "n": steps, "unit": "s"})
    return summary
