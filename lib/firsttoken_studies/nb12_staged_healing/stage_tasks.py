"""The stages on a second task: multiple-choice questions without a passage, on which no adapter was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from firsttoken.assets.needs import ModelFacts, check
from firsttoken.progressiveserve.base_model import ServedConfig, at_stage, load_served
from firsttoken.progressiveserve.quality_gates import GATES
from firsttoken.study.profile import Profile
from firsttoken.study.summary import Scalar, Summary
from firsttoken_studies.choice_tasks import TASKS
from firsttoken_studies.multiple_choice import ChoiceTasksConfig, Choose, accuracy_summary, likeliest
from firsttoken_studies.progressiveserve.layers import LETTERS
from firsttoken_studies.progressiveserve.stage_figures import NAMES, draw_stages, name_recipes
from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import COLOURS, panels
from firsttoken_studies.record.results import Outcome, Result, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES: dict[str, dict[str, Scalar]] = {
    "s0": {"stage": 0},
    **{f"s{stage}_{recipe}": {"stage": stage, "recipe": recipe} for stage in LETTERS for recipe in NAMES},
    "s3": {"stage": 3},
}


def stage_tasks(profile: Profile, *, choose: Choose = likeliest) -> Outcome:
    """Measure the options that every stage is taken to ``choose``, unhealed and healed by each recipe."""
    config = profile.section("stage_tasks", ChoiceTasksConfig)
    served_config = profile.section("served", ServedConfig)
    check(served_config.needs(), ModelFacts(profile.model))
    served_config.check_adapters(recipe for recipe in NAMES if recipe != "none")
    served = load_served(profile)
    rows = config.right()
    for variant, variant_labels in PLACES.items():
        stage, recipe = int(variant_labels["stage"]), variant_labels.get("recipe", "none")
        adapter = None if recipe == "none" else served_config.folder / f"{LETTERS[stage]}-{recipe}"
        with at_stage(served, stage or max(GATES), adapter) as model:
            rows += config.chosen(variant, model, served.tokenizer, choose)
    return Outcome(rows, provenance=served.provenance | {"block": list(served.plan.block)})


def stage_tasks_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """Accuracy of every stage by task, and the points that it has less than the full model."""
    return accuracy_summary(rows, PLACES, "s0")


def accuracy_by_stage(recorded: Result | None, now: Result) -> Figure:
    """Points of accuracy that each stage loses against the full model, by recipe, and what the report allows."""
    results = over(recorded, now)
    tasks = [task for task in TASKS if now.summary.get("accuracy_pct", stage=0, task=task)]
    fig, axes = panels(1, len(tasks), figsize=(9, 4.4), layout="constrained", squeeze=False)
    for ax, task in zip(axes[0], tasks, strict=True):
        draw_stages(ax, results, "accuracy_change", task=task)
        for stage, limit in GATES.items():
            named = {"label": "the report allows at most (EM, F1)"} if stage == min(GATES) else {}
            ax.plot([stage - 0.45, stage + 0.45], [limit] * 2, color=COLOURS["target"], linewidth=2.5, **named)
        ax.set_title(TASKS[task].title)
    name_recipes(axes[0][0], results)
    axes[0][0].set_ylabel("points of accuracy lost")
    full, title = results[0].result.summary.of("accuracy_pct", stage=0, task=tasks[0]), TASKS[tasks[0]].title
    fig.suptitle(f"{title}: what each stage loses of the full model's {full['value']:.0f} % (n = {full['n']})")
    legend(fig, axes[0][0], results, "accuracy_change")
    return fig
