"""The sum of measured operators against servers on the same cards: runs of vLLM that the same wheel publishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from firsttoken.assets.dense_shape import SHAPES
from firsttoken.assets.lock import asset_path
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.costs.operator_costs import OperatorCosts
from firsttoken.engine.costs.operator_tables import OperatorTables, tables_from
from firsttoken.engine.costs.tables import number, rows
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.study.errors import ProfileError
from firsttoken.study.overlay import Drawn, name_results, over
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUNS = "gpu-server-runs.csv"
_FIELDS = ("isl", "osl", "batch_size", "tp_size", "silicon_ttft_ms", "silicon_tpot_ms")
_TEXTS = ("backend", "mode", "system", "model_path", "gemm_quant_mode")
_CARDS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200-sxm"}
_MODELS = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
}
_WEIGHTS = {"": "bfloat16", "fp8": "fp8"}
# InferenceMAX, which these runs are taken to be from, draws lengths from 80 to 100 % of what is stated, and keeps keys
# and values in 8 bits on the B200 (the commands are in its README).
_LEAST_SHARE = {"llama-3.1-70b": 0.8, "minimax-m2.5": 0.8}
_FP8_CACHE = {("llama-3.1-70b", "b200-sxm")}
_LOOKS = ("sarathi", "prefill first", "measured", "other", "short first", "hybrid batches")  # a look a model and card
_PLACES = {"model": "model", "machine": "card"}  # of the summary, and the column of the rows
METRICS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "latency": "latency_ms"}


@dataclass(frozen=True)
class OperatorErrorConfig:
    """Every ``every``-th published run; ``rounds`` requests for each client.

    ``token_budget`` is vLLM's default for a server on these cards.
    """

    every: int
    rounds: int
    token_budget: int

    def __post_init__(self) -> None:
        if min(self.every, self.rounds, self.token_budget) < 1:
            raise ProfileError("operator_error: every, rounds and token_budget must be at least 1")


@dataclass(frozen=True)
class ServerRun:
    """One published run: a closed loop of ``clients``, each sending its next request when the last has ended."""

    card: str
    model: str
    weights: str
    gpus: int
    prompt_tokens: int
    output_tokens: int
    clients: int
    ttft_ms: float
    tpot_ms: float


def server_runs() -> list[ServerRun]:
    """The runs of dense models under vLLM, prefill and decode in one engine, whose tables are pinned.

    Raises AssetError for a table that is not fetched, CorpusError for one that cannot be read.
    """
    path = asset_path(RUNS)
    found = []
    for line, row in rows(path, (*_TEXTS, *_FIELDS)):
        card, model, weights = (
            _CARDS.get(row["system"]),
            _MODELS.get(row["model_path"]),
            _WEIGHTS.get(row["gemm_quant_mode"]),
        )
        if row["backend"] != "vllm" or row["mode"] != "agg" or not card or not model or not weights:
            continue
        isl, osl, clients, gpus = (int(number(path, line, row, name, least=1)) for name in _FIELDS[:4])
        ttft, tpot = (number(path, line, row, name) for name in _FIELDS[4:])
        found.append(ServerRun(card, model, weights, gpus, isl, osl, clients, ttft, tpot))
    return found


def operator_error(profile: Profile) -> Outcome:
    """Rows {card, model, weights, gpus, prompt_tokens, output_tokens, clients, source, ttft_ms, tpot_ms, latency_ms,
    beyond}; ``source`` is "vllm" or "simulated", ``latency_ms`` the time of a whole answer."""
    config = profile.section("operator_error", OperatorErrorConfig)
    found: Rows = []
    for run in tqdm(server_runs()[:: config.every], desc="operator_error", disable=None):
        costs = costs_of(run)
        where = {
            "card": run.card,
            "model": run.model,
            "weights": run.weights,
            "gpus": run.gpus,
            "prompt_tokens": run.prompt_tokens,
            "output_tokens": run.output_tokens,
            "clients": run.clients,
            "beyond": "; ".join(costs.beyond),
        }
        ttft, tpot = simulated(run, costs, config, profile.seed)
        for source, times in (("vllm", (run.ttft_ms, run.tpot_ms)), ("simulated", (ttft, tpot))):
            latency = times[0] + times[1] * (run.output_tokens - 1)
            found.append(where | {"source": source, "ttft_ms": times[0], "tpot_ms": times[1], "latency_ms": latency})
    return Outcome(found, provenance={"kind": "simulated on measured operators", "costs": tables_from()})


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
    requests = served(run, costs, costs.blocks, config, seed)
    return (
        1e3 * float(np.mean([request.ttft_s for request in requests])),
        1e3 * float(np.mean([request.tpot_s or 0.0 for request in requests])),
    )


def served(run: ServerRun, costs: Costs, blocks: int, config: OperatorErrorConfig, seed: int) -> list[Request]:
    """The requests of the clients of ``run``, answered on ``costs`` with ``blocks`` KV blocks.

    All begin at once, and every request counts, as InferenceMAX runs them: ten for each client.
    """
    engine = Engine(
        SimulatedExecutor(costs, blocks),
        EngineConfig(scheduler="sarathi", watermark=0.0, requests=1024, token_budget=config.token_budget),
    )
    lengths = _lengths(run, seed)
    requests: list[Request] = []

    def send(arrival_s: float) -> None:
        prompt, output = next(lengths)
        requests.append(engine.submit((0,) * prompt, Sampling(output), arrival_s))

    while len(requests) < run.clients * config.rounds:
        while engine.open_requests < run.clients and len(requests) < run.clients * config.rounds:
            send(engine.executor.now())
        engine.advance()
    engine.run()
    return requests


def _lengths(run: ServerRun, seed: int) -> Iterator[tuple[int, int]]:
    """(prompt, answer) tokens of one request after another."""
    least, draw = _LEAST_SHARE.get(run.model, 1.0), np.random.default_rng(seed)
    while True:
        yield tuple(int(draw.integers(int(most * least), most + 1)) for most in (run.prompt_tokens, run.output_tokens))


def operator_summary(found: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The error of each metric in %: median, 90th percentile and mean over the runs, of all, by model and by card."""
    summary = Summary()
    pairs = _pairs(found)
    cases: list[tuple[dict[str, Any], list[tuple[Any, Any]]]] = [({}, pairs)]
    for place, key in _PLACES.items():
        cases += [({place: value}, [pair for pair in pairs if pair[0][key] == value]) for value in _values(found, key)]
    for where, chosen in cases:
        for metric, column in METRICS.items():
            off = [100 * (ours[column] / theirs[column] - 1) for theirs, ours in chosen]
            at = where | {"source": "simulated", "than": "vllm"}
            size = np.abs(off)
            summary.add(f"{metric}_off_pct", bootstrap(size, np.median).summary("%"), **at, across="median")
            tail = bootstrap(size, lambda sample: float(np.percentile(sample, 90)))
            summary.add(f"{metric}_off_pct", tail.summary("%"), **at, across="p90")
            summary.add(f"{metric}_off_pct", bootstrap(off).summary("%"), **at, across="mean")
    return summary


def _values(found: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in found))


def against_servers(recorded: Result | None, now: Result) -> Figure:
    """Time per token and to the first token, simulated less measured, a point a run; the band is 10 % to each side."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    drawn = over(recorded, now)
    fig, axes = plt.subplots(1, 2, figsize=(9, 4.4))
    labels = {}
    for ax, (column, title) in zip(
        axes, {"tpot_ms": "time per token", "ttft_ms": "time to the first token"}.items(), strict=True
    ):
        for one in drawn:
            for (model, card), look in zip(_cases(drawn), _LOOKS, strict=False):
                pairs = [
                    pair for pair in _pairs(one.result.rows) if (pair[0]["model"], pair[0]["card"]) == (model, card)
                ]
                measured = [theirs[column] for theirs, _ in pairs]
                off = [100 * (ours[column] / theirs[column] - 1) for theirs, ours in pairs]
                edge = {"markeredgecolor": "black"} if one.own else {}
                marks = LOOKS[look]
                ax.plot(measured, off, marks.marker, ms=5, color=marks.colour, **edge, **one.style)
                labels[f"{model}, {card}"] = plt.Line2D([], [], linestyle="", color=marks.colour, marker=marks.marker)
        ax.axhspan(-10, 10, color=COLOURS["floor"], alpha=0.12, linewidth=0)
        ax.axhline(0, color=COLOURS["floor"], linewidth=1)
        ax.set_title(title, fontsize="medium")
        ax.set(xscale="log", xlabel="measured on the server, ms", ylim=(-100, 150))
        ax.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        ax.xaxis.set_minor_formatter("")  # within one power of ten they would lie upon each other
    axes[0].set_ylabel("simulated less measured")
    median = (recorded or now).summary.of("tpot_off_pct", source="simulated", than="vllm", across="median")
    fig.suptitle(f"Added up, measured operators miss the time per token by {median['value']:.0f} % (median run)")
    names = fig.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=3, fontsize="small")
    name_results(fig, drawn, legend=names)
    return fig


def error_table(result: Result) -> Rows:
    """The error by model and by card: median and 90th percentile of the time per token, of a whole answer, of TTFT."""
    lines: Rows = []
    places = [{place: value} for place, key in _PLACES.items() for value in _values(result.rows, key)]
    for where in ({}, *places):
        at = where | {"source": "simulated", "than": "vllm"}
        median = result.summary.of("tpot_off_pct", **at, across="median")
        line: dict[str, Any] = {"runs": next(iter(where.values()), "all"), "n": median["n"]}
        for metric, name in (("tpot", "time per token"), ("latency", "whole answer"), ("ttft", "TTFT")):
            line[f"{name}, median %"] = interval(result.summary.of(f"{metric}_off_pct", **at, across="median"), 1)
            line[f"{name}, p90 %"] = f"{result.summary.of(f'{metric}_off_pct', **at, across='p90')['value']:.0f}"
        lines.append(line)
    return lines


def _cases(drawn: Sequence[Drawn]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["model"], row["card"]) for one in drawn for row in one.result.rows))


def _pairs(found: Rows) -> list[tuple[Any, Any]]:
    """(measured, simulated) of each run."""
    return list(zip(islice(found, 0, None, 2), islice(found, 1, None, 2), strict=True))
