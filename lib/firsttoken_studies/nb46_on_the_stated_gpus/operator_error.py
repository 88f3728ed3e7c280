"""The sum of measured operators against servers on the same cards: runs of vLLM that the same wheel publishes, of dense
models and of mixtures of experts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from firsttoken.assets.dense_shape import MIXTURES, SHAPES
from firsttoken.assets.lock import asset_path
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.simulated import SimulatedExecutor, without_garbage_collection
from firsttoken.simulation.costs.mixture_costs import mixture_costs
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import OperatorTables, tables_from
from firsttoken.simulation.costs.tables import number, rows
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import Statistic, bootstrap, ratio_of_means
from firsttoken.study.summary import Summary
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, handle, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, distinct, frame_of
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

RUNS = "gpu-server-runs.csv"
_TEXTS = ("backend", "mode", "system", "model_path", "gemm_quant_mode")
_COUNTS = ("isl", "osl", "batch_size", "tp_size")
_SPLITS = ("moe_tp_size", "moe_ep_size")
_TIMES = ("silicon_ttft_ms", "silicon_tpot_ms")
_CARDS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200-sxm"}
_MODELS = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
}
_WEIGHTS = {"": "bfloat16", "fp8": "fp8"}
_MIXTURES = {"Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b", "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5"}
# InferenceMAX, which these runs are taken to be from, draws lengths from 80 to 100 % of what is stated, and keeps keys
# and values in 8 bits on the B200 (the commands are in its README).
_LEAST_SHARE = {"llama-3.1-70b": 0.8, "minimax-m2.5": 0.8}
_FP8_CACHE = {("llama-3.1-70b", "b200-sxm")}
# If every prompt were computed, the runs of Llama-3.1-8B would need more than all of the time of their cards
# (``busy_share``): most prompts must have been found in vLLM's prefix cache. The command of the wheel's authors
# (aiconfigurator's bench_run.sh) names no number of prompts, of which AIPerf then makes 100 and draws among them; it
# sends two requests of each client before it begins to measure.
_REPEATED = {"llama-3.1-8b": 100}
_WARM_UP_ROUNDS = 2
_LOOKS = ("sarathi", "prefill first", "measured", "other", "short first", "hybrid batches")  # a look a model and card
_PLACES = {"model": "model", "machine": "card"}  # of the summary, and the column of the rows
METRICS = ("ttft", "tpot", "latency")
_RUN = ["card", "model", "weights", "gpus", "prompt_tokens", "output_tokens", "clients"]
_PAIR = {"source": "simulated", "than": "vllm"}
NEW = "simulated, every prompt new"
KIND = "simulated on measured operators"


@dataclass(frozen=True)
class OperatorErrorConfig:
    """Every ``every``-th published run; ``rounds`` requests for each client.

    ``token_budget`` is vLLM's default for a server on these cards.
    """

    section: ClassVar[str] = "operator_error"
    every: int
    rounds: int
    token_budget: int

    def __post_init__(self) -> None:
        if min(self.every, self.rounds, self.token_budget) < 1:
            raise ProfileError(f"{self.section}: every, rounds and token_budget must be at least 1")


@dataclass(frozen=True)
class MixtureErrorConfig(OperatorErrorConfig):
    """Settings of :class:`OperatorErrorConfig` for mixtures; ``routing`` is the tables' name for how unevenly tokens
    choose experts."""

    section: ClassVar[str] = "mixture_error"
    routing: str


@dataclass(frozen=True)
class ServerRun:
    """One published run: a closed loop of ``clients``, each sending its next request when the last has ended.

    Each client draws from ``prompts`` texts, of which some were sent before the measurement begins; 0: every prompt is
    new.
    """

    card: str
    model: str
    weights: str
    gpus: int
    prompt_tokens: int
    output_tokens: int
    clients: int
    ttft_ms: float
    tpot_ms: float
    prompts: int = 0


@dataclass(frozen=True)
class MixtureRun:
    """A run whose experts are each split over ``split`` GPUs and spread over ``spread``."""

    server: ServerRun
    split: int
    spread: int


def server_runs() -> list[ServerRun]:
    """The runs of dense models under vLLM, prefill and decode in one engine, whose tables are pinned.

    Raises AssetError for a table that is not fetched, CorpusError for one that cannot be read.
    """
    return [run for run, _ in _published(_MODELS, _WEIGHTS)]


def mixture_runs() -> list[MixtureRun]:
    """Return the published runs of mixtures in 8 bits. Left out are those that compute attention for several batches
    apart, whose GPUs exchange tokens and no sums."""
    runs = _published(_MIXTURES, {"fp8": "fp8_block"}, _SPLITS)
    return [MixtureRun(run, split, spread) for run, (split, spread) in runs if split * spread == run.gpus]


def _published(
    models: Mapping[str, str], weights: Mapping[str, str], more: tuple[str, ...] = ()
) -> Iterator[tuple[ServerRun, list[int]]]:
    """The runs of ``models``, by their names in the table, whose ``weights`` are among these; the counts ``more``."""
    path = asset_path(RUNS)
    for line, row in rows(path, (*_TEXTS, *_COUNTS, *more, *_TIMES)):
        card, model = _CARDS.get(row["system"]), models.get(row["model_path"])
        quantisation = weights.get(row["gemm_quant_mode"])
        if (row["backend"], row["mode"]) == ("vllm", "agg") and card and model and quantisation:
            counts = (int(number(path, line, row, name, least=1)) for name in (*_COUNTS, *more))
            prompt, output, clients, gpus, *others = counts
            times = (number(path, line, row, name) for name in _TIMES)
            yield (
                ServerRun(card, model, quantisation, gpus, prompt, output, clients, *times, _REPEATED.get(model, 0)),
                others,
            )


def operator_error(profile: Profile) -> Outcome:
    """Rows {card, model, weights, gpus, prompt_tokens, output_tokens, clients, prompts, source, ttft_ms, tpot_ms,
    latency_ms, beyond, busy_share}; ``source`` is "vllm" or "simulated", ``latency_ms`` the time of a whole
    answer. A simulated one has {simulated_s, took_s}, too: the seconds that it simulated, and that it took. A run whose
    prompts repeat has a third row, as if every prompt were a new one."""
    config = profile.section("operator_error", OperatorErrorConfig)
    rows: Rows = []
    for run in track(server_runs()[:: config.every], desc="operator_error"):
        costs = costs_of(run)
        more = {"beyond": "; ".join(costs.beyond), "busy_share": busy_share(run, costs)}
        begun = time.perf_counter()
        requests = served(run, costs, costs.blocks, config, profile.seed)
        took_s = time.perf_counter() - begun
        rows += _both(run, mean_times(requests), **more)
        rows[-1] |= {"simulated_s": max(request.times_s[-1] for request in requests), "took_s": took_s}
        if run.prompts:
            new = replace(run, prompts=0)
            rows.append(_both(new, simulated(new, costs, config, profile.seed), **more)[-1] | {"source": NEW})
    return Outcome(rows, provenance={"kind": KIND, "costs": tables_from()})


def mixture_error(profile: Profile) -> Outcome:
    """Rows as those of :func:`operator_error`, without ``beyond`` and with {split, spread}; for a run that no table
    covers, none, and its reason is counted in the provenance."""
    config = profile.section("mixture_error", MixtureErrorConfig)
    rows: Rows = []
    left_out: Counter[str] = Counter()
    for run in track(mixture_runs()[:: config.every], desc="mixture_error"):
        server, split, spread = run.server, run.split, run.spread
        try:
            tables, shape = OperatorTables.read(server.card), MIXTURES[server.model]
            costs = mixture_costs(tables, shape, split, spread, routing=config.routing)
        except ProfileError as error:
            left_out[str(error)] += 1
            continue
        rows += _both(server, simulated(server, costs, config, profile.seed), split=split, spread=spread)
    reasons = "; ".join(f"{times} runs: {reason}" for reason, times in left_out.items())
    return Outcome(rounded(rows, 3), provenance={"kind": KIND, "costs": tables_from(), "left_out": reasons})


def _both(run: ServerRun, ours: tuple[float, float], **more: Any) -> Rows:
    """Return a row of the times that the server measured in ``run``, and one of the simulated times."""
    columns = asdict(run) | more
    theirs = columns.pop("ttft_ms"), columns.pop("tpot_ms")
    rows: Rows = []
    for source, (ttft, tpot) in (("vllm", theirs), ("simulated", ours)):
        latency = ttft + tpot * (run.output_tokens - 1)
        rows.append(columns | {"source": source, "ttft_ms": ttft, "tpot_ms": tpot, "latency_ms": latency})
    return rows


def rounded(rows: Rows, digits: int) -> Rows:
    """The rows with so many ``digits`` behind the point: a record of thousands of numbers needs no more."""
    return [
        {name: round(value, digits) if isinstance(value, float) else value for name, value in row.items()}
        for row in rows
    ]


def busy_share(run: ServerRun, costs: OperatorCosts) -> float:
    """Return the share of the time of its cards that a run needs at least if every prompt is computed; above 1 it
    cannot be.

    Each client waits for its answer, so that the requests a second are the clients over the time of an answer (Little's
    law). Every token is charged the cost of one in a step of the best size; attention and head are left out.
    """
    token_s = float((costs.once[1:] / np.arange(1, len(costs.once))).min())
    tokens = (run.prompt_tokens + run.output_tokens) * (1 + _LEAST_SHARE.get(run.model, 1.0)) / 2
    answer_s = (run.ttft_ms + run.tpot_ms * (run.output_tokens - 1)) / 1e3
    return run.clients / answer_s * tokens * token_s


def costs_of(run: ServerRun) -> OperatorCosts:
    """The sum of operators of a run, in the types that its server kept weights and cache in."""
    return OperatorCosts.of(
        OperatorTables.read(run.card),
        SHAPES[run.model],
        run.gpus,
        weights=run.weights,
        kv="fp8" if (run.model, run.card) in _FP8_CACHE else "bfloat16",
    )


def simulated(run: ServerRun, costs: OperatorCosts, config: OperatorErrorConfig, seed: int) -> tuple[float, float]:
    """Mean TTFT and TPOT in ms of what the clients of ``run`` would have seen."""
    return mean_times(served(run, costs, costs.blocks, config, seed))


def mean_times(requests: Iterable[Request]) -> tuple[float, float]:
    """Mean TTFT and TPOT in ms; an answer of one token has a TPOT of 0."""
    ttft, tpot = zip(*((request.ttft_s, request.tpot_s or 0.0) for request in requests), strict=True)
    return 1e3 * float(np.mean(ttft)), 1e3 * float(np.mean(tpot))


def served(run: ServerRun, costs: Costs, blocks: int, config: OperatorErrorConfig, seed: int) -> list[Request]:
    """Return the requests of the clients of ``run``, answered on ``costs`` with ``blocks`` KV blocks.

    All clients begin at once, and every request counts, as InferenceMAX runs them: ten for each client. Where the
    prompts of a run repeat, two requests for each client come before, which do not count, and blocks of prompts are
    kept and found again.
    """
    settings = EngineConfig(
        scheduler="sarathi",
        watermark=0.0,
        requests=1024,
        token_budget=config.token_budget,
        share_prefixes=run.prompts > 0,
    )
    engine = Engine(SimulatedExecutor(costs, blocks), settings)
    lengths, draw = _lengths(run, seed), np.random.default_rng([seed, run.prompts])

    def closed_loop(count: int) -> list[Request]:
        requests: list[Request] = []
        while len(requests) < count:
            while engine.open_requests < run.clients and len(requests) < count:
                prompt, output = next(lengths)
                text = int(draw.integers(run.prompts)) if run.prompts else 0
                requests.append(engine.submit((text,) * prompt, Sampling(output), engine.executor.now()))
            engine.advance()
        engine.run()
        return requests

    with without_garbage_collection():
        if run.prompts:
            closed_loop(_WARM_UP_ROUNDS * run.clients)
        return closed_loop(config.rounds * run.clients)


def _lengths(run: ServerRun, seed: int) -> Iterator[tuple[int, int]]:
    """(prompt, answer) tokens of one request after another."""
    least, draw = _LEAST_SHARE.get(run.model, 1.0), np.random.default_rng(seed)
    while True:
        yield tuple(int(draw.integers(int(most * least), most + 1)) for most in (run.prompt_tokens, run.output_tokens))


def operator_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The error of each metric in %: median, 90th percentile and mean over the runs, of all, by model and by card."""
    summary, off = Summary(), _off_pct(rows)
    cases = [(_PAIR, off)]
    for label, column in _PLACES.items():
        cases += [({label: value} | _PAIR, case_off) for value, case_off in off.groupby(column, sort=False)]
    for model, case_off in _off_pct(rows, NEW).groupby("model") if distinct(rows, "source", source=NEW) else ():
        cases.append(({"model": model, "source": NEW, "than": "vllm"}, case_off))
    for labels, case_off in cases:
        for metric in METRICS:
            add_errors(summary, f"{metric}_off_pct", case_off[metric], **labels)
    ran = [(row["simulated_s"], row["took_s"]) for row in rows if "took_s" in row]
    if ran:
        speed = ratio_of_means(*zip(*ran, strict=True))
        summary.add("real_time_x", speed.summary("s simulated in a second"), across="sum", source="simulated")
    for model, case_off in off.groupby("model", sort=False) if "busy_share" in off else ():
        most = float(case_off.busy_share.max())
        summary.add("busy_share", {"value": most, "n": len(case_off), "unit": ""}, model=model, across="most")
    return summary


def add_errors(summary: Summary, measure: str, off: Any, median: Statistic = np.median, **labels: str) -> None:
    """Add the error ``off`` [n], in %: the ``median`` and the 90th percentile of its size, and its mean."""
    tail: Statistic = lambda sample: float(np.percentile(sample, 90))  # noqa: E731
    size = np.abs(off)
    for across, statistic, values in (("median", median, size), ("p90", tail, size), ("mean", "mean", off)):
        summary.add(measure, bootstrap(values, statistic).summary("%"), **labels, across=across)


def _off_pct(rows: Rows, source: str = "simulated") -> pandas.DataFrame:
    """A run a row, with what the server measured, and by metric how far the simulation ``source`` is off, in %."""
    theirs, ours = (frame_of(rows, source=side) for side in ("vllm", source))
    if len(ours) < len(theirs):  # of those runs alone that have it
        theirs = theirs.merge(ours[_RUN], on=_RUN)
    return theirs.assign(**{name: 100 * (ours[f"{name}_ms"] / theirs[f"{name}_ms"] - 1) for name in METRICS})


def against_servers(recorded: Result | None, now: Result) -> Figure:
    """Time per token and to the first token, simulated less measured, a point a run; the band is 10 % to each side."""
    from matplotlib.ticker import PercentFormatter

    results, labels = over(recorded, now), {}
    cases = list(dict.fromkeys((row["model"], row["card"]) for shown in results for row in shown.result.rows))
    fig, axes = panels(1, 2, figsize=(9, 4.4))
    for ax, (metric, title) in zip(
        axes, {"tpot": "time per token", "ttft": "time to the first token"}.items(), strict=True
    ):
        for shown in results:
            off = _off_pct(shown.result.rows)
            for (model, card), look in zip(cases, _LOOKS, strict=False):
                server_off, marks = off[(off.model == model) & (off.card == card)], LOOKS[look]
                edge = {"markeredgecolor": "black"} if shown.own else {}
                style = {"ms": 5, "color": marks.colour} | edge | shown.style
                ax.plot(server_off[f"{metric}_ms"], server_off[metric], marks.marker, **style)
                labels[f"{model}, {card}"] = handle(linestyle="", color=marks.colour, marker=marks.marker)
        ax.axhspan(-10, 10, color=COLOURS["floor"], alpha=0.12, linewidth=0)
        ax.axhline(0, color=COLOURS["floor"], linewidth=1)
        ax.set_title(title, fontsize="medium")
        ax.set(xscale="log", xlabel="measured on the server, ms", ylim=(-100, 150))
        ax.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        ax.xaxis.set_minor_formatter("")  # within one power of ten they would lie upon each other
    axes[0].set_ylabel("simulated less measured")
    of_token, of_first = (
        (recorded or now).summary.value(f"{m}_off_pct", **_PAIR, across="median") for m in ("tpot", "ttft")
    )
    fig.suptitle(f"The median run is {of_token:.0f} % off in the time per token, {of_first:.0f} % in the first token's")
    names = fig.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=3, fontsize="small")
    name_results(fig, results, legend=names)
    return fig


def error_table(result: Result) -> Table:
    """The error by model and by card: median and 90th percentile of the time per token, of a whole answer, of TTFT.
    A model whose prompts repeat has a second line, for what they would say if every prompt were new."""
    places = [{label: value} for label, column in _PLACES.items() for value in distinct(result.rows, column)]
    cases = [(next(iter(case_labels.values()), "all"), case_labels | _PAIR) for case_labels in ({}, *places)]
    for model in distinct(result.rows, "model", source=NEW):
        cases.append((f"{model}, every prompt new", {"model": model, "source": NEW, "than": "vllm"}))
    for name, labels in cases:
        median = result.summary.of("tpot_off_pct", **labels, across="median")
        line: dict[str, Any] = {"runs": name, "n": median["n"]}
        for metric, name in (("tpot", "time per token"), ("latency", "whole answer"), ("ttft", "TTFT")):
            line[f"{name}, median %"] = interval(result.summary.of(f"{metric}_off_pct", **labels, across="median"), 1)
            line[f"{name}, p90 %"] = f"{result.summary.of(f'{metric}_off_pct', **labels, across='p90')['value']:.0f}"
        yield line
