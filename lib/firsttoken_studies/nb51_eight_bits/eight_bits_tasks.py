"""Table 1 on its own tasks: the accuracy of 16-bit and 8-bit weights on HellaSwag, LAMBADA and WinoGrande.

In 8 bits the model computes by the engine's two products: as in the paper (LLM.int8: the inputs are rounded, too, and
outliers taken apart), and with the inputs as they are, as servers compute. With instructions for 8-bit products the
first takes half of the time of float32 (8 questions, AVX-512), without them more than twice (32 questions, AVX2).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import load_model
from firsttoken.engine.linear8 import THRESHOLD, UNROUNDED, Linear8, to_8_bits
from firsttoken.study.errors import StageError
from firsttoken.study.profile import Profile
from firsttoken.study.summary import Summary
from firsttoken_studies.choice_tasks import TASKS
from firsttoken_studies.multiple_choice import ChoiceTasksConfig, accuracy_summary
from firsttoken_studies.nb51_eight_bits.eight_bits import (
    INPUTS_KEPT,
    VARIANTS,
    WEIGHTS,
    WHOLE,
    Product,
    ProductOfCell,
    by_model,
    replace_products,
)
from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import LOOKS, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IN_8_BITS: dict[str, dict[str, Any]] = {name: {"variant": name, "than": WHOLE} for name in (WEIGHTS, INPUTS_KEPT)}
PAPER = {"OPT-175B": -0.4, "BLOOM-176B": 0.2}
"""Points of accuracy that 8 bits gain or lose in Table 1, averaged over HellaSwag, LAMBADA and WinoGrande."""
FEWEST_TO_TELL = 100  # questions: fewer tell nothing of a change of half a point


def eight_bits_tasks(profile: Profile, *, mixed_product: Product | None = None) -> Outcome:
    """Measure the option that the model chooses for every question in float32: with its own weights, with those of 8
    bits by LLM.int8's product, or by ``mixed_product`` in its place, and with these and the inputs as they are."""
    config = profile.section("eight_bits_tasks", ChoiceTasksConfig)
    loaded = load_model(profile.model, device=profile.torch_device())
    if loaded.tokenizer is None:
        raise StageError(f"model {profile.model} has no tokenizer, and the tasks are text: choose another")
    chosen = partial(config.chosen, model=loaded.model, tokenizer=loaded.tokenizer)
    weights = str(loaded.provenance.sha256)
    rows = config.right() + chosen(WHOLE, weights=weights)
    to_8_bits(layers_of(loaded.model), UNROUNDED)
    rows += chosen(INPUTS_KEPT, weights=weights)
    for module in loaded.model.modules():
        if isinstance(module, Linear8):
            module.threshold = THRESHOLD
    if mixed_product is not None:
        replace_products(loaded.model, partial(ProductOfCell, mixed_product))
    rows += chosen(WEIGHTS, weights="" if mixed_product else weights)
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def tasks_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """Accuracy by task in 16 and in 8 bits, the change in points, and how many answers are the same."""
    return accuracy_summary(rows, {WHOLE: {"variant": WHOLE}} | IN_8_BITS, WHOLE)


def accuracy_change(recorded: Result | None, now: Result, able: Result | None = None) -> Figure:
    """Points of accuracy that 8 bits gain (right) or lose, by task and averaged, beside the paper's two models."""
    results, paper, places = over(recorded, now), LOOKS["paper"], dict[str, int]()
    fig, ax = panels(figsize=(9, 4.6 if able is None else 7.2), layout="constrained")
    for model, shown in by_model(recorded, now, able):
        for entry in shown.result.summary.all("accuracy_change"):
            task, variant = entry["where"].get("task"), entry["where"]["variant"]
            name = f"{model}, {VARIANTS[variant]}: {TASKS[task].title if task else 'mean of tasks'}"
            shown.point(ax, places.setdefault(name, len(places)) + shown.shift, entry, "measured", along="x")
    first, names = len(places), [*places, *(f"{larger}, mean of three tasks" for larger in PAPER)]
    style = {"color": paper.colour, "markeredgecolor": "black", "markersize": 9, "linestyle": "none"}
    ax.plot(list(PAPER.values()), range(first, len(names)), marker=paper.marker, label="paper, Table 1", **style)
    ax.axvline(0, color=LOOKS["mark"].colour, linewidth=1)
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(len(names) - 0.5, -0.5), xlabel="accuracy in 8 bits minus accuracy in 16 bits, points, paired")
    mean = results[0].result.summary.all("accuracy_change", variant=WEIGHTS)[-1]  # behind the tasks' own
    change_text = "no change that the questions show" if mean["low"] <= 0 <= mean["high"] else "a change beyond chance"
    message = f"{mean['n']} questions are too few to tell" if mean["n"] < FEWEST_TO_TELL else change_text
    fig.suptitle(f"8-bit weights: {message}, {mean['low']:+.1f} to {mean['high']:+.1f} points")
    legend(fig, ax, results, "accuracy_change")
    return fig


def accuracy_rows(recorded: Result | None, now: Result, able: Result | None = None) -> Table:
    """Table 1 by task: accuracy in 16 and in 8 bits, the change, and how many answers stay the same."""
    for model, shown in by_model(recorded, now, able):
        for (task, choice), variant in product(TASKS.items(), IN_8_BITS):
            summary, labels = shown.result.summary, {"task": task} | IN_8_BITS[variant]
            if accuracy := summary.get("accuracy_pct", **labels):
                row = {"task": choice.title, "in 8 bits": VARIANTS[variant], "model": model}
                row["16 bits, %"] = interval(summary.of("accuracy_pct", task=task, variant=WHOLE), 1)
                row["8 bits, %"] = interval(accuracy, 1)
                row["8 bits minus 16, points, paired"] = interval(summary.of("accuracy_change", **labels), 1)
                row["same answer, %"] = interval(summary.of("same_choice_pct", **labels), 1)
                yield row | {"whose": shown.who(accuracy["n"])}
