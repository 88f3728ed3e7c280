"""The simulator against runs of vLLM whose timestamps are published: on the card whose operators were profiled, on a
second one that nobody tuned to, and with a model that is split over two, by several sources of costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.assets.dense_shape import SHAPES
from firsttoken.assets.manual_downloads import downloaded
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.request import Request
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload_items import Item, serve_items
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import OperatorTables, tables_from
from firsttoken.simulation.costs.profiled import ProfiledCosts
from firsttoken.simulation.costs.tensor_parallel import ExchangingCosts, ScaledProfile
from firsttoken.simulation.hardware import Hardware
from firsttoken.study.errors import CorpusError, ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.stats import AxisStatistic, bootstrap
from firsttoken.study.summary import Entry, Summary
from firsttoken_studies.nb46_on_the_stated_gpus.operator_error import rounded
from firsttoken_studies.record.plot import LOOKS, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIELDS = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
VLLM, SIMULATED = "vllm", "simulated"
RUNS = {SIMULATED: True, "simulated without prefix caching": False}  # whether blocks are kept and found again
METRICS = ("ttft", "tpot", "latency")
QUANTILES = {"mean": np.mean, "p50": np.median, "p99": partial(np.percentile, q=99)}


OPERATORS, PROFILE = "measured operators", "the card's own profile"
SECOND = (PROFILE, OPERATORS)
SHARE = "the share's profile"
EXCHANGED = "the share's profile and all-reduces"
SCALED = "one GPU's profile, scaled"
LINKED = "the share's profile and its authors' link"
SPLIT = (EXCHANGED, SHARE, LINKED, SCALED, OPERATORS)


@dataclass(frozen=True)
class VllmRun:
    """The timestamps in ``requests`` (a file beside the profile), and vLLM's settings for that run: at most ``batch``
    requests and ``token_budget`` tokens a step."""

    requests: str
    token_budget: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.token_budget, self.batch) < 1:
            raise ProfileError("a run of vLLM: token_budget and batch must be at least 1")

    def beside(self, folder: str, costs: Mapping[str, Costs], blocks: int) -> Rows:
        """Return the rows of :func:`beside_vllm` by each of ``costs``, with ``blocks`` KV blocks and the requests in
        ``folder`` of the brought profiles."""
        engines = {run: as_vllm(source, blocks, self.batch, self.token_budget) for run, source in costs.items()}
        return beside_vllm(downloaded(folder) / self.requests, engines)


@dataclass(frozen=True)
class ErrorConfig(VllmRun):
    """A run of vLLM with ``blocks`` KV blocks. Its scheduler fills a step with decodes and then with chunks, as
    Sarathi's; a preempted request recomputes, from what is left of its own blocks, which prefix caching keeps as long
    as nobody needs them."""

    blocks: int


@dataclass(frozen=True)
class SecondCardConfig(VllmRun):
    """A run in the folder ``costs`` of the card's profile. The model has ``layers`` layers; its steps are also reckoned
    as ``model`` on one GPU of ``card`` whose operators were measured elsewhere."""

    costs: str
    layers: int
    model: str
    card: str


@dataclass(frozen=True)
class TwoCardsConfig(VllmRun):
    """A run with ``model`` on ``gpus`` of ``card``, in the folder ``share``, which has the profile of one GPU's share.

    ``whole`` is the profile of the whole model on one GPU. ``link_gbyte_s`` and ``link_latency_us`` are of the link
    between the two GPUs as the profile's authors state it (bench/examples/RTXPRO6000/Qwen3-32B/config.json), which was
    looked up when the all-reduces of the tables proved too fast for this run.
    """

    share: str
    whole: str
    model: str
    card: str
    gpus: int
    link_gbyte_s: float
    link_latency_us: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in SHAPES:
            raise ProfileError(f"two_cards: no shape is called {self.model!r}; known: {', '.join(SHAPES)}")


def simulator_error(profile: Profile) -> Outcome:
    """Rows {request, run, ttft_s, tpot_s, latency_s}; ``run`` is ``VLLM`` or one of ``RUNS``."""
    config, hardware = profile.section("simulator_error", ErrorConfig), profile.section("hardware", Hardware)
    costs = hardware.read()
    settings = config.blocks, config.batch, config.token_budget
    engines = {run: as_vllm(costs, *settings, share_prefixes=shared) for run, shared in RUNS.items()}
    rows = beside_vllm(downloaded(hardware.costs) / config.requests, engines)
    return Outcome(rows, provenance=hardware.provenance(costs))


def second_card(profile: Profile) -> Outcome:
    """Rows {request, run, ttft_s, tpot_s, latency_s}; ``run`` is ``VLLM`` or one of ``SECOND``.

    Both simulations have the KV blocks that fit beside the weights, by the operators' tables: more than ``batch``
    requests of this run can fill.
    """
    config = profile.section("second_card", SecondCardConfig)
    by_operators = Hardware(config.card, config.batch, 1024, model=config.model)
    by_profile = Hardware(config.costs, config.batch, 1024, layers=config.layers, blocks=by_operators.blocks)
    costs: dict[str, Costs] = {PROFILE: by_profile.read(), OPERATORS: by_operators.read()}
    rows = config.beside(config.costs, costs, by_operators.blocks)
    return Outcome(rows, provenance=by_profile.provenance(costs[PROFILE]) | {"operators": tables_from()})


def two_cards(profile: Profile) -> Outcome:
    """Rows {request, run, ttft_s, tpot_s, latency_s}; ``run`` is ``VLLM`` or one of ``SPLIT``.

    Every simulation has the KV blocks that fit beside the weights, by the operators' tables.
    """
    config = profile.section("two_cards", TwoCardsConfig)
    rows = rounded(config.beside(config.share, *split_costs(config)), 5)
    provenance = {"kind": "simulated on profiled costs", "costs": config.share, "operators": tables_from()}
    return Outcome(rows, provenance=provenance)


def split_costs(config: TwoCardsConfig) -> tuple[dict[str, Costs], int]:
    """The costs by source, and the number of KV blocks."""
    shape, tables = SHAPES[config.model], OperatorTables.read(config.card)
    operators = OperatorCosts.of(tables, shape, config.gpus)
    share = ProfiledCosts.read(downloaded(config.share), shape.layers, config.gpus)
    one_gpu = ProfiledCosts.read(downloaded(config.whole), shape.layers, 1)
    link = 1e9 * config.link_gbyte_s, 1e-6 * config.link_latency_us
    costs: dict[str, Costs] = {
        EXCHANGED: ExchangingCosts.of(share, tables, shape, config.gpus),
        SHARE: share,
        LINKED: ExchangingCosts.over_link(share, shape, config.gpus, *link),
        SCALED: ScaledProfile(one_gpu, OperatorCosts.of(tables, shape), operators),
        OPERATORS: operators,
    }
    return costs, operators.blocks


def as_vllm(costs: Costs, blocks: int, batch: int, token_budget: int, *, share_prefixes: bool = True) -> Engine:
    """The simulator on ``costs`` with ``blocks`` KV blocks and vLLM's settings: at most ``batch`` requests and
    ``token_budget`` tokens a step."""
    settings = EngineConfig(
        scheduler="sarathi", watermark=0.0, requests=batch, token_budget=token_budget, share_prefixes=share_prefixes
    )
    return Engine(SimulatedExecutor(costs, blocks), settings)


def beside_vllm(requests: Path, engines: Mapping[str, Engine]) -> Rows:
    """Rows {request, run, ttft_s, tpot_s, latency_s} of the run whose timestamps are the file ``requests``, and of the
    same lengths and arrivals in each of ``engines``.

    Raises CorpusError for a file that cannot be read.
    """
    served = read_requests(requests)
    start = min(row["queued_ts"] for row in served)
    items = [
        Item(row["queued_ts"] - start, tokens := int(row["input_toks"]), int(row["output_toks"]), (number,) * tokens)
        for number, row in enumerate(served)  # no two prompts begin alike: their text is not published
    ]
    rows: Rows = [{"request": number, "run": VLLM} | measured(row) for number, row in enumerate(served)]
    for run, engine in engines.items():
        answered = enumerate(serve_items(engine, items))
        rows += [{"request": number, "run": run} | simulated(request) for number, request in answered]
    return rows


def read_requests(path: Path) -> list[dict[str, float]]:
    """vLLM's timestamps, a JSON object a line, by the time of queueing.

    Raises CorpusError naming file, line and mend for a line that is no such object, or whose times run backwards.
    """
    requests = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path}: cannot be read ({error}); bring it again") from error
    for line, text in enumerate(lines, 1):
        try:
            row = {name: float(json.loads(text)[name]) for name in FIELDS}
        except (ValueError, TypeError, KeyError) as error:
            raise CorpusError(f"{path}, line {line}: is no request with {', '.join(FIELDS)}; bring it again") from error
        if not row["queued_ts"] <= row["first_token_ts"] <= row["last_token_ts"] or min(row.values()) < 0:
            raise CorpusError(f"{path}, line {line}: its times run backwards; bring it again")
        requests.append(row)
    if not requests:
        raise CorpusError(f"{path}: holds no request; bring it again")
    return sorted(requests, key=lambda row: row["queued_ts"])


def measured(row: Mapping[str, float]) -> dict[str, float]:
    decoding_s = row["last_token_ts"] - row["first_token_ts"]
    return {
        "ttft_s": row["first_token_ts"] - row["queued_ts"],
        "tpot_s": decoding_s / max(1.0, row["output_toks"] - 1),
        "latency_s": row["last_token_ts"] - row["queued_ts"],
    }


def simulated(request: Request) -> dict[str, float]:
    return {
        "ttft_s": request.ttft_s,
        "tpot_s": request.tpot_s or 0.0,
        "latency_s": request.times_s[-1] - request.arrival_s,
    }


def error_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize how far the simulator is off, in % of vLLM's: mean, median and P99 of each metric, and the worst; the
    worst without prefix caching, too."""
    summary = Summary()
    for run in RUNS:
        for measure, entry in off_pct(rows, run).items() if run == SIMULATED else ():
            summary.add(measure, entry, source=run, than=VLLM)
        summary.add("off_pct", worst(rows, run), source=run, than=VLLM, across="worst")
    return summary


def second_card_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize the error of each of ``SECOND``, in % of vLLM's, as :func:`off_summary` has it."""
    return off_summary(rows, SECOND)


def two_cards_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize the error of each of ``SPLIT``, in % of vLLM's, as :func:`off_summary` has it."""
    return off_summary(rows, SPLIT)


def off_summary(rows: Rows, runs: Sequence[str]) -> Summary:
    """Summarize the error of each of ``runs``, in % of vLLM's: mean, median and P99 of each time, and the worst of all
    and of those that do not wait for a place."""
    summary = Summary()
    for run in runs:
        labels = {"costs": run, "than": VLLM}
        for measure, entry in off_pct(rows, run).items():
            summary.add(measure, entry, **labels)
        summary.add("off_pct", worst(rows, run), **labels, across="worst")
        summary.add("tpot_off_pct", worst(rows, run, ("tpot",)), **labels, across="worst")
    return summary


def off_pct(rows: Rows, run: str) -> dict[str, Entry]:
    """Return the error of ``run``, in % of vLLM's, by measure: each of ``QUANTILES`` of each of ``METRICS``, with an
    interval over the requests, each drawn with both its times."""
    return {
        f"{metric}_{name}_off_pct": bootstrap(_times(rows, run, (metric,)), AxisStatistic(_off(made))).summary("%", 100)
        for metric, (name, made) in product(METRICS, QUANTILES.items())
    }


def worst(rows: Rows, run: str, metrics: Sequence[str] = METRICS) -> Entry:
    """The error of ``run`` that is farthest from 0, without its sign; in each draw the one that is farthest there."""

    def farthest(times: np.ndarray, axis: int) -> np.ndarray:
        pairs = np.split(times, len(metrics), axis=-1)
        return np.max([abs(_off(made)(pair, axis)) for pair in pairs for made in QUANTILES.values()], axis=0)

    return bootstrap(_times(rows, run, metrics), AxisStatistic(farthest)).summary("%", 100)


def _times(rows: Rows, run: str, metrics: Sequence[str]) -> np.ndarray:
    """Return the time of ``run`` and vLLM's for each of ``metrics``, by request: [requests, 2 x metrics]."""
    ours, real = (frame_of(rows, run=name).set_index("request").sort_index() for name in (run, VLLM))
    return np.column_stack([times[f"{metric}_s"] for metric in metrics for times in (ours, real)])


def _off(made: Callable[..., Any]) -> Callable[[np.ndarray, int], np.ndarray]:
    return lambda pairs, axis: made(pairs[..., 0], axis=axis) / made(pairs[..., 1], axis=axis) - 1


def off_rows(result: Result, runs: Sequence[str]) -> Table:
    """A line a time: vLLM's on the card or cards, and how far each of ``runs`` is off."""
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
