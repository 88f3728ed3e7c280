"""The simulator against a second GPU that nobody tuned to: vLLM on an RTX PRO 6000, by two sources of costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.assets.manual_downloads import downloaded
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.costs.operator_tables import tables_from
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.latency_metrics import serve_items
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload.workload_items import Item
from firsttoken.sarathi.hardware import Hardware
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Result, Rows
from firsttoken.study.summary import Summary
from firsttoken_studies.sarathi.simulator_error import (
    METRICS,
    QUANTILES,
    VLLM,
    measured,
    off_pct,
    read_requests,
    simulated,
)

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
    requests = downloaded(config.costs) / config.requests
    rows = beside_vllm(requests, sources, by_operators.blocks, config.batch, config.token_budget)
    provenance = by_profile.provenance(sources[PROFILE]) | {"operators": tables_from()}
    return Outcome(rows, provenance=provenance)


def beside_vllm(requests: Path, sources: Mapping[str, Costs], blocks: int, batch: int, token_budget: int) -> Rows:
    """Rows {request, run, ttft_s, tpot_s, latency_s} of the run whose timestamps are the file ``requests``, and of the
    same lengths and arrivals on each of ``sources`` with ``blocks`` KV blocks and vLLM's settings.

    Raises CorpusError for a file that cannot be read.
    """
    served = read_requests(requests)
    start = min(row["queued_ts"] for row in served)
    items = [
        Item(row["queued_ts"] - start, tokens := int(row["input_toks"]), int(row["output_toks"]), (number,) * tokens)
        for number, row in enumerate(served)  # no two prompts begin alike: their text is not published
    ]
    settings = EngineConfig(
        scheduler="sarathi",
        watermark=0.0,
        requests=batch,
        token_budget=token_budget,
        share_prefixes=True,
    )
    rows: Rows = [{"request": number, "run": VLLM} | measured(row) for number, row in enumerate(served)]
    for run, costs in sources.items():
        answered = serve_items(Engine(SimulatedExecutor(costs, blocks), settings), items)
        rows += [{"request": number, "run": run} | simulated(request) for number, request in enumerate(answered)]
    return rows


def second_card_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """How far each source of costs is off, in % of vLLM's: mean, median and P99 of each time, and the worst of all and
    of those that do not wait for a place."""
    return off_summary(rows, (PROFILE, OPERATORS))


def off_summary(rows: Rows, runs: Sequence[str]) -> Summary:
    """The same for each of ``runs``."""
    summary = Summary()
    for run in runs:
        where = {"costs": run, "than": VLLM}
        off = {(metric, name): off_pct(rows, run, metric, name) for metric in METRICS for name in QUANTILES}
        for (metric, name), entry in off.items():
            summary.add(f"{metric}_{name}_off_pct", entry, **where)
        for measure, metrics in (("off_pct", METRICS), ("tpot_off_pct", ("tpot",))):
            worst = max(
                (off[metric, name] for metric in metrics for name in QUANTILES), key=lambda one: abs(one["value"])
            )
            summary.add(measure, worst | {"value": abs(worst["value"])}, **where, across="worst")
    return summary


def second_card_rows(result: Result) -> Rows:
    """A line a time: vLLM's on the card, and how far each source of costs is off."""
    return off_rows(result, (PROFILE, OPERATORS))


def off_rows(result: Result, runs: Sequence[str]) -> Rows:
    """The same for each of ``runs``."""
    lines: Rows = []
    for metric in METRICS:
        for name, statistic in QUANTILES.items():
            real = float(statistic([row[f"{metric}_s"] for row in result.rows if row["run"] == VLLM]))
            line = {"time": f"{metric}, {name}", "vLLM, s": f"{real:.3f}"}
            for run in runs:
                entry = result.summary.of(f"{metric}_{name}_off_pct", costs=run, than=VLLM)
                line[f"{run}, % off"] = f"{entry['value']:+.1f}"
            lines.append(line)
    return lines


def tails(result: Result) -> Figure:
    """The share of requests whose time is at most so long, by time: vLLM's, and both simulations'."""
    import matplotlib.pyplot as plt
    import numpy as np

    from firsttoken.study.plot import LOOKS

    looks = {VLLM: LOOKS["mark"], PROFILE: LOOKS["measured"], OPERATORS: LOOKS["report"]}
    names = {VLLM: "vLLM on the card", PROFILE: f"simulated, {PROFILE}", OPERATORS: f"simulated, {OPERATORS}"}
    axes_names = {"ttft": "time to first token, s", "tpot": "time per further token, s", "latency": "whole answer, s"}
    fig, axes = plt.subplots(1, len(METRICS), figsize=(9, 3.6), sharey=True)
    for ax, metric in zip(axes, METRICS, strict=True):
        for run, look in looks.items():
            values = np.sort([row[f"{metric}_s"] for row in result.rows if row["run"] == run])
            shares = 100 * np.arange(1, len(values) + 1) / len(values)
            ax.step(values, shares, where="post", color=look.colour, lw=2.6 if run == VLLM else 1.6, label=names[run])
        ax.set_xlabel(axes_names[metric])
    axes[0].set_ylabel("% of requests")
    off = result.summary.of("tpot_off_pct", costs=PROFILE, than=VLLM, across="worst")["value"]
    fig.suptitle(f"A card nobody tuned to: its own profile foretells the time per token within {off:.1f} %")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    return fig
