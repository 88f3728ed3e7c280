"""The simulator against a second GPU that nobody tuned to: vLLM on an RTX PRO 6000, by two sources of costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.assets.manual_downloads import downloaded
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.costs.operator_tables import tables_from
from firsttoken.sarathi.hardware import Hardware
from firsttoken.study.errors import ProfileError
from firsttoken.study.plot import LOOKS, panels
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Result, Rows, Table
from firsttoken.study.summary import Summary
from firsttoken_studies.sarathi.simulator_error import METRICS, QUANTILES, VLLM, as_vllm, beside_vllm, off_pct, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATORS = "measured operators"
PROFILE = "the card's own profile"


@dataclass(frozen=True)
class SecondCardConfig:
    """A run of vLLM whose timestamps are ``requests`` in the folder ``costs`` of the card's profile, with vLLM's
    settings for it: at most ``batch`` requests and ``token_budget`` tokens a step. The model has ``layers`` layers;
    its steps are also reckoned as ``model`` on one GPU of ``card`` whose operators were measured elsewhere."""

    costs: str
    requests: str
    layers: int
    model: str
    card: str
    token_budget: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.layers, self.token_budget, self.batch) < 1:
            raise ProfileError("second_card: layers, token_budget and batch must be at least 1")


def second_card(profile: Profile) -> Outcome:
    """Rows {request, run, ttft_s, tpot_s, latency_s}; ``run`` is ``VLLM``, ``PROFILE`` or ``OPERATORS``.

    Both simulations have the KV blocks that fit beside the weights, by the operators' tables: more than ``batch``
    requests of this run can fill.
    """
    config = profile.section("second_card", SecondCardConfig)
    by_operators = Hardware(config.card, config.batch, 1024, model=config.model)
    by_profile = Hardware(config.costs, config.batch, 1024, layers=config.layers, blocks=by_operators.blocks)
    sources: dict[str, Costs] = {PROFILE: by_profile.read(), OPERATORS: by_operators.read()}
    settings = by_operators.blocks, config.batch, config.token_budget
    engines = {run: as_vllm(costs, *settings) for run, costs in sources.items()}
    rows = beside_vllm(downloaded(config.costs) / config.requests, engines)
    provenance = by_profile.provenance(sources[PROFILE]) | {"operators": tables_from()}
    return Outcome(rows, provenance=provenance)


def second_card_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """How far each source of costs is off, in % of vLLM's: mean, median and P99 of each time, and the worst of all and
    of those that do not wait for a place."""
    return off_summary(rows, (PROFILE, OPERATORS))


def off_summary(rows: Rows, runs: Sequence[str]) -> Summary:
    """The same for each of ``runs``."""
    summary = Summary()
    for run in runs:
        where, off = {"costs": run, "than": VLLM}, off_pct(rows, run)
        for measure, entry in off.items():
            summary.add(measure, entry, **where)
        summary.add("off_pct", worst(off.values()), **where, across="worst")
        tpot = [off[f"tpot_{name}_off_pct"] for name in QUANTILES]
        summary.add("tpot_off_pct", worst(tpot), **where, across="worst")
    return summary


def second_card_rows(result: Result) -> Table:
    """A line a time: vLLM's on the card, and how far each source of costs is off."""
    return off_rows(result, (PROFILE, OPERATORS))


def off_rows(result: Result, runs: Sequence[str]) -> Table:
    """The same for each of ``runs``."""
    real, value = result.frame(run=VLLM), result.summary.value
    for metric, (name, statistic) in product(METRICS, QUANTILES.items()):
        line = {"time": f"{metric}, {name}", "vLLM, s": f"{statistic(real[f'{metric}_s']):.3f}"}
        off = {run: value(f"{metric}_{name}_off_pct", costs=run, than=VLLM) for run in runs}
        yield line | {f"{run}, % off": f"{pct:+.1f}" for run, pct in off.items()}


def tails(result: Result) -> Figure:
    """The share of requests whose time is at most so long, by time: vLLM's, and both simulations'."""
    looks = {VLLM: LOOKS["mark"], PROFILE: LOOKS["measured"], OPERATORS: LOOKS["report"]}
    names = {VLLM: "vLLM on the card", PROFILE: f"simulated, {PROFILE}", OPERATORS: f"simulated, {OPERATORS}"}
    axes_names = {"ttft": "time to first token, s", "tpot": "time per further token, s", "latency": "whole answer, s"}
    fig, axes = panels(1, len(METRICS), figsize=(9, 3.6), sharey=True)
    for ax, metric in zip(axes, METRICS, strict=True):
        for run, look in looks.items():
            values = np.sort(result.frame(run=run)[f"{metric}_s"])
            shares = 100 * np.arange(1, len(values) + 1) / len(values)
            ax.step(values, shares, where="post", color=look.colour, lw=2.6 if run == VLLM else 1.6, label=names[run])
        ax.set_xlabel(axes_names[metric])
    axes[0].set_ylabel("% of requests")
    off = result.summary.of("tpot_off_pct", costs=PROFILE, than=VLLM, across="worst")["value"]
    fig.suptitle(f"A card nobody tuned to: its own profile foretells the time per token within {off:.1f} %")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    return fig
