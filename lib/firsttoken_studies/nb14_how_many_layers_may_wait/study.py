"""How many layers may wait: TTFT against quality, for 0 to 12 deferred layers (the report's second pain point)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check, text_of
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, at_stage, load_base, load_served, passing
from firsttoken.progressiveserve.checkpoint.plan import by_layers
from firsttoken.progressiveserve.distance import angular_distances, choose_block
from firsttoken.progressiveserve.evaluation import Evaluation, QualityConfig
from firsttoken.progressiveserve.quality import text_scores
from firsttoken.progressiveserve.quality_gates import summarise
from firsttoken.progressiveserve.staging import best_recipe, served_source, stage_adapters
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.nb13_cold_start.study import disk_speed, trial_specs
from firsttoken_studies.progressiveserve.coldstart.checkpoints import Checkpoint, written
from firsttoken_studies.progressiveserve.coldstart.harness import one_trial, wire_for
from firsttoken_studies.progressiveserve.coldstart.summary import REQUEST
from firsttoken_studies.progressiveserve.layers import BlockRule, last_tokens
from firsttoken_studies.record.results import Outcome, Rows


@dataclass(frozen=True)
class LayerSweepConfig:
    """``sizes`` of the deferred block; ``trials`` cold starts each over a link of ``gbit_per_s``.

    Blocks are chosen on ``calibration`` windows of ``tokens`` training tokens: by angular distance, and, on the first
    ``search_windows`` of them (0: not), by trying every start and keeping the one that costs least perplexity.
    ``items`` questions and ``windows`` of text score each.
    """

    sizes: tuple[int, ...]
    trials: int
    gbit_per_s: float
    readers: int
    calibration: int
    tokens: int
    search_windows: int
    items: int
    windows: int

    def __post_init__(self) -> None:
        if 0 not in self.sizes or max(self.sizes) < 1:
            raise ProfileError("deferral.sizes: name 0, to compare with, and a size above it")

    def needs(self) -> list[Need]:
        """Require room for a block of every size below the last layer, which always stays, and a text that fills all
        windows."""
        return [
            Need("deferral.sizes (and one that stays)", max(self.sizes) + 1, LAYERS),
            Need("deferral.tokens", self.tokens, CONTEXT),
            Need("deferral.calibration x tokens", self.calibration * self.tokens, text_of("train")),
        ]


def deferral_sweep(profile: Profile, *, rule: BlockRule | None = None) -> Outcome:
    """Both sides of the trade, by the number of layers that wait: first tokens timed, and quality without healing.

    A reader's ``rule`` chooses in place of the angular distance. The times do not depend on it, nor does the search for
    the best start, and are not taken again.
    """
    config = profile.section("deferral", LayerSweepConfig)
    quality = profile.section("quality", QualityConfig)
    sizes = quality.smaller(config.items, config.windows)
    served_config = profile.section("served", ServedConfig)
    check([*served_config.needs(), *config.needs(), *sizes.needs()], ModelFacts(profile.model))
    served = load_served(profile)
    rows = _first_tokens(profile, config, quality.questions, served) if rule is None else []
    rows += _qualities(profile, config, Evaluation(sizes, served.tokenizer), served, rule)
    return Outcome(rows, provenance=served.provenance)


def deferral_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Scores of every block; and where starts were timed, the median TTFT by the number of deferred layers, and what
    each of them saves of it."""
    scored = [row for row in rows if "task" in row]
    places = {row["variant"]: {"variant": row["selection"], "layers": row["deferred_layers"]} for row in scored}
    summary = summarise(scored, places, judged=QualityConfig.recorded(parameters).judged)
    sizes = parameters["deferral"]["sizes"]
    for size in sizes:
        if times := [row[REQUEST] for row in rows if REQUEST in row and row["deferred_layers"] == size]:
            summary.add("ttft_p50_s", bootstrap(times, "median").summary("s"), layers=size)
    if summary.all("ttft_p50_s"):
        whole_s, deferred = (summary.value("ttft_p50_s", layers=size) for size in (0, max(sizes)))
        saved = {"value": 1000 * (whole_s - deferred) / max(sizes), "unit": "ms of TTFT a layer"}
        summary.add("saved_a_layer_ms", saved)
    return summary


def nested_checkpoint(served: ServedModel, deepest: int) -> Checkpoint:
    """One staged checkpoint for every size: stage 1 lacks ``deepest`` layers, each later stage brings one of them."""
    source, depth = served_source(served), served.plan.depth
    block = tuple(range(depth - 1 - deepest, depth - 1))
    remaining_layers = [layer for layer in range(depth) if layer not in block]
    order = by_layers(source.names, [remaining_layers, *([layer] for layer in block)])
    return written(source, order, served.sha256[:12], f"nested-{deepest}", served.plan, served.provenance)


def _first_tokens(profile: Profile, config: LayerSweepConfig, questions: str, served: ServedModel) -> Rows:
    deepest = max(config.sizes)
    checkpoint = nested_checkpoint(served, deepest)
    specs = trial_specs(profile, checkpoint, questions, config.readers)
    wire = wire_for(config.gbit_per_s, checkpoint.staged, disk_speed(specs("read")))
    rows: Rows = []
    with track(total=config.trials * len(config.sizes), desc="cold starts", unit="trial") as bar:
        for trial in range(config.trials):
            # forwards and backwards in turn, so that a machine that drifts does not bend the curve
            for size in config.sizes if trial % 2 == 0 else config.sizes[::-1]:
                stages = tuple(range(1, deepest - size + 2))
                spec = dataclasses.replace(specs("whole_streamed"), stages=stages)
                rows.append({"deferred_layers": size, "trial": trial} | one_trial(spec, wire))
                bar.update()
    return rows


def _qualities(
    profile: Profile, config: LayerSweepConfig, evaluation: Evaluation, served: ServedModel, rule: BlockRule | None
) -> Rows:
    base = load_base(profile)
    windows = token_windows(running_text("train"), base.tokenizer, config.tokens, config.calibration)
    choose = _choice(base.model, windows, rule)
    rows = _labelled(evaluation.rows("s0", served.model), 0, "none", ())
    for size in track([size for size in config.sizes if size], desc="quality", unit="block"):
        blocks = {"distance": tuple(choose(size))}
        if config.search_windows and rule is None:
            blocks["perplexity"] = search_block(served, windows[: config.search_windows], size)
        for selection, block in blocks.items():
            with passing(served.model, block) as model:
                rows += _labelled(evaluation.rows(f"{selection}_{size}", model), size, selection, block)
    adapter = stage_adapters(profile.section("served", ServedConfig), best_recipe(profile))[1]
    if adapter.exists():
        with at_stage(served, 1, adapter) as model:
            size = len(served.plan.block)
            rows += _labelled(evaluation.rows(f"healed_{size}", model), size, "healed", served.plan.block)
    return rows


def _choice(model: PreTrainedModel, windows: torch.Tensor, rule: BlockRule | None) -> Callable[[int], Sequence[int]]:
    """Return what chooses a block of a size, on ``windows`` [count, tokens]."""
    if rule is None:
        return partial(choose_block, angular_distances(model, windows))
    stream = last_tokens(model, windows, batch=8)
    return lambda size: rule(stream, size)[0]


def _labelled(rows: Rows, size: int, selection: str, block: tuple[int, ...]) -> Rows:
    return [row | {"deferred_layers": size, "selection": selection, "block": list(block)} for row in rows]


def search_block(served: ServedModel, windows: torch.Tensor, size: int) -> tuple[int, ...]:
    """The ``size`` layers in a row whose absence costs least perplexity on ``windows`` [count, tokens]."""

    def loss(start: int) -> float:
        with passing(served.model, tuple(range(start, start + size))) as model:
            scored = text_scores(model, windows)
        return sum(row["text_nll"] for row in scored)

    best = min(range(served.plan.depth - size + 1), key=loss)
    return tuple(range(best, best + size))
