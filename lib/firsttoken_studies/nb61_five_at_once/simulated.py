"""All five at once, simulated: the live windows on costs that were measured beforehand, and a GPU that is not here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from firsttoken.assets.dense_shape import DenseShape, dense_shape
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.costs.cost_model import Costs, follow, step_parts
from firsttoken.engine.costs.fitted import FittedCosts, relative_fit
from firsttoken.engine.engine import Engine
from firsttoken.engine.kv import KVShape
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.engine.trace import Step, Trace
from firsttoken.engine.workload_items import Arrivals
from firsttoken.progressiveserve.base_model import load_served
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import OperatorTables, tables_from
from firsttoken.simulation.workload.conversations import Conversations, conversations
from firsttoken.study.dtypes import computing
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import Bar, track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken.study.timing import torch_threads
from firsttoken_extras.layer_borrowing.prefix_offer import GroupRule, group_at
from firsttoken_studies.combined.borrowed.setting import StartSetting, start_setting
from firsttoken_studies.nb61_five_at_once.study import (
    ALL,
    ARMS,
    LIVE,
    TWIN,
    WARM,
    Asked,
    FiveConfig,
    blocks_of,
    compared,
    drawn,
    drawn_prefixes,
    goodput,
    ttfts,
)
from firsttoken_studies.nb61_five_at_once.trial import BLOCK_TOKENS, CHUNKS, engine_config
from firsttoken_studies.nb61_five_at_once.twin import TwinModel, capacity_of, window
from firsttoken_studies.record.results import Outcome, Result, Rows, frame_of, load_result

MEASURES = {  # of a window: what it is called in the rows, and its unit
    "goodput_per_s": "requests/s",
    "first_token_s": "s",
    "ttft_p50_s": "s",
    "ttft_p95_s": "s",
    "tbt_p99_s": "s",
}
NUMBER_BYTES = 2
MEASURED = 32  # tokens of an answer, whose steps are measured
STEP_PRICES = ("step", "prefill_token", "pair", "request", "context_token", "padded_token")


@dataclass(frozen=True)
class SimulatedConfig:
    """A larger window on one GPU: ``model`` on ``card``, with the keys of ``FiveConfig`` that differ from the live
    window's. A hop to the neighbour goes over a link of ``gbit_per_s``, too. Raises ProfileError as FiveConfig."""

    model: str
    card: str
    arms: tuple[str, ...]
    seeds: int
    requests: int
    load: float
    prompt_tokens: int
    new_tokens: int
    prefixes: int
    group_start: int
    group_end: int
    edges: tuple[int, ...]
    gbit_per_s: float
    prefix_gbit_per_s: float
    running: int
    token_budget: int
    ttft_s: float
    tbt_s: float
    limit_s: float

    def over(self, live: FiveConfig) -> FiveConfig:
        """Return the window's settings; those that are not named here are those of the ``live`` one."""
        return replace(live, **{key: value for key, value in asdict(self).items() if key not in ("model", "card")})


def five_at_once_simulated(profile: Profile, live: Result, *, group_now: GroupRule = group_at) -> Outcome:
    """Rows {run, arm, seed, and ``MEASURES``, preemptions, loaded_s}: of ``live``, of its windows simulated on measured
    costs, and of larger ones on a card.

    Arrivals are those of the live windows; on the card they are drawn at ``load`` times its simulated capacity. Before
    the arms of a draw stands its warm window, {run, arm: "warm", seed, capacity_per_s}. ``group_now`` says which layers
    a request that takes the other model's cache computes again.
    """
    config = profile.section("five_at_once", FiveConfig)
    larger = profile.section("five_simulated", SimulatedConfig)
    on_card = card_model(larger)
    scaled = larger.over(config)
    setting = start_setting(profile, profile.section("quality", QualityConfig).questions, 2, config.readers)
    texts = conversations(load_served(profile).tokenizer)
    prefixes = drawn_prefixes(texts, config, profile.seed)
    model = model_here(profile, config, setting, texts, prefixes)
    rows = [seen_of(row, config, LIVE) for row in live.rows if row["arm"] in ARMS]
    by_seed = {row["seed"]: row for row in live.rows if row["arm"] in ARMS}
    total = len(by_seed) * len(config.arms) + scaled.seeds * len(scaled.arms)
    with track(total=total, desc="simulated", unit="window") as bar:
        for seed, row in by_seed.items():
            requests = stored(drawn(texts, prefixes, config, seed), prefixes)
            if [bool(request["stored_tokens"]) for request in requests] != row["stored"]:
                raise ProfileError(f"five_at_once: draw {seed} of the live run had other requests; measure it again")
            warm = {"run": TWIN, "arm": WARM, "seed": seed, "capacity_per_s": capacity_of(model, config, requests)}
            rows.append(warm | {"live_capacity_per_s": row["capacity_per_s"]})
            coming = [
                request | {"arrival_s": arrival_s}
                for request, arrival_s in zip(requests, row["arrival_s"], strict=True)
            ]
            rows += arms(model, config, coming, seed, TWIN, bar, group_now)
        prefixes = drawn_prefixes(texts, scaled, profile.seed)
        for seed in range(profile.seed, profile.seed + scaled.seeds):
            requests = stored(drawn(texts, prefixes, scaled, seed), prefixes)
            capacity = capacity_of(on_card, scaled, requests)
            rows.append({"run": larger.card, "arm": WARM, "seed": seed, "capacity_per_s": capacity})
            times_s = Arrivals(scaled.load * capacity, seed=seed).times_s(len(requests)).tolist()
            coming = [request | {"arrival_s": arrival_s} for request, arrival_s in zip(requests, times_s, strict=True)]
            rows += arms(on_card, scaled, coming, seed, larger.card, bar, group_now)
    costs = f"{larger.model} on {larger.card}, {tables_from()}"
    provenance = {
        "kind": "simulated",
        "prices": asdict(model.costs),
        "hop_s": model.hop_s,
        "costs": costs,
        "live": live.slug,
    }
    return Outcome(rows, provenance=setting.provenance | provenance)


def arms(
    model: TwinModel,
    config: FiveConfig,
    requests: Sequence[Asked],
    seed: int,
    run: str,
    bar: Bar,
    group_rule: GroupRule,
) -> Iterator[dict[str, Any]]:
    """The simulated windows of one draw."""
    blocks = blocks_of(requests, config)
    for arm in config.arms:
        served = window(model, config, ARMS[arm], requests, blocks, group_rule=group_rule)
        yield seen_of(served.row | {"arm": arm, "seed": seed}, config, run)
        bar.update()


def seen_of(row: Mapping[str, Any], config: FiveConfig, run: str) -> dict[str, Any]:
    """Return the measures of a window that are kept."""
    late = ttfts(row, config.limit_s)
    measures = {"goodput_per_s": goodput(row, vars(config)), "first_token_s": late[0], "tbt_p99_s": row["tbt_p99_s"]}
    measures |= {"ttft_p50_s": np.percentile(late, 50), "ttft_p95_s": np.percentile(late, 95)}
    measures = {name: None if value is None else round(float(value), 4) for name, value in measures.items()}
    counts = {"preemptions": sum(row["preemptions"]), "loaded_s": round(row["loaded_s"], 4)}
    return {"run": run, "arm": row["arm"], "seed": row["seed"]} | measures | counts


def stored(requests: Sequence[Asked], prefixes: Sequence[Sequence[int]]) -> list[Asked]:
    """The requests with ``stored_tokens``: those of the longest of ``prefixes``, which the sender has, that each begins
    with."""

    def tokens(prompt: Sequence[int]) -> int:
        return max((len(text) for text in prefixes if prompt[: len(text)] == list(text)), default=0)

    return [request | {"stored_tokens": tokens(request["prompt"]) if request["stored"] else 0} for request in requests]


# What the windows are simulated on.


@dataclass(frozen=True)
class SizedCosts(Costs):
    """Steps of up to ``tokens`` new tokens by ``small``, longer ones by ``large``, which the engine computes by other
    kernels."""

    small: FittedCosts
    large: FittedCosts
    tokens: int

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        new = sum(new for _, new in prefills) + len(contexts)
        return (self.small if new <= self.tokens else self.large).step_s(prefills, contexts)

    def swap_out_s(self, tokens: int) -> float:
        return self.small.swap_out_s(tokens)

    def swap_in_s(self, tokens: int) -> float:
        return self.small.swap_in_s(tokens)


def costs_here(model: nn.Module, config: FiveConfig, requests: Sequence[Asked], threads: int) -> SizedCosts:
    """The costs of ``model`` on so many ``threads``: fitted to the steps of ``requests``, with chunks and with whole
    prompts, up to ``MEASURED`` tokens of each answer; swaps as ``crosspoint_live`` has recorded them, on two cores."""
    items = [(request["prompt"], Sampling(min(request["new_tokens"], MEASURED)), 0.0) for request in requests]
    blocks = sum((len(prompt) + MEASURED) // BLOCK_TOKENS + 1 for prompt, _, _ in items)
    steps: list[Step] = []
    with torch_threads(threads), closing(LiveExecutor(model, blocks, block_tokens=BLOCK_TOKENS)) as executor:
        for ideas in ((CHUNKS,), ()):
            trace, settings = Trace(), engine_config(ideas, config.token_budget, config.running)
            Engine(executor, settings, trace=trace).serve(items)
            steps += trace.steps[1:]
    swaps = FittedCosts.from_dict(recorded("crosspoint_live").provenance["costs"])

    def fitted(steps: Sequence[Step]) -> FittedCosts:
        fit = relative_fit(
            [step_parts(step.prefills, step.contexts) for step in steps], [step.seconds for step in steps]
        )
        return replace(swaps, **dict(zip(STEP_PRICES, fit.tolist(), strict=True)))

    long = [step for step in steps if sum(new for _, new in step.prefills) + len(step.contexts) > config.token_budget]
    small = fitted([step for step in steps if step not in long])
    return SizedCosts(small, fitted(long) if long else small, config.token_budget)


def model_here(
    profile: Profile, config: FiveConfig, setting: StartSetting, texts: Conversations, prefixes: Sequence[Sequence[int]]
) -> TwinModel:
    """The served model on the cores that a live replica has, by the steps of a draw that no window has; a hop is that
    of the recorded ``swarm_transport``, for one token between two processes of this machine."""
    model = fuse(load_served(profile).model.to("cpu", computing("cpu")))
    costs = costs_here(model, config, drawn(texts, prefixes, config, profile.seed + config.seeds), setting.threads)
    shape, plan = KVShape.of(model.config, computing("cpu")), setting.checkpoint.plan
    stages = enumerate(setting.checkpoint.manifest.stages, 1)
    parts = tuple(part.bytes for part in read_manifest(setting.folder).stages[0].parts)
    head_s = costs.small.step * parts[0] / sum(parts)  # of a step's fixed price, which is reading the weights
    return TwinModel(
        costs,
        lambda rows: head_s if rows else 0.0,
        tuple((stage.bytes, frozenset(plan.present(number))) for number, stage in stages),
        parts,
        shape.bytes_per_token // plan.depth,
        model.config.hidden_size * shape.dtype.itemsize,
        hop_s(),
    )


def hop_s() -> float:
    """Seconds of a hop to a neighbour and back, as ``swarm_transport`` has recorded them."""
    return recorded("swarm_transport").summary.value("transport_ms", servers=1, than="one process") / 1e3


def recorded(experiment: str) -> Result:
    """The full result of ``experiment``. Raises ProfileError where there is none."""
    if (result := load_result(experiment, "full", machine="any")) is None:
        raise ProfileError(f"five_at_once_simulated needs a full result of {experiment}; measure that first")
    return result


def card_model(config: SimulatedConfig) -> TwinModel:
    """``config.model`` in 16 bits on ``config.card`` by measured operators, staged as the report stages 32 layers; its
    adapters, a five-hundredth of the bytes, are left out. A hop takes what one takes here, and its bytes the link's
    time. Raises ProfileError for a card that has no tables, ModelError for a model that is not known."""
    shape: DenseShape = dense_shape(config.model)
    costs = OperatorCosts.of(OperatorTables.read(config.card), shape)
    end_bytes = 2 * NUMBER_BYTES * shape.hidden * shape.vocabulary
    layer = (NUMBER_BYTES * shape.weights - end_bytes) // shape.layers
    plan = StagePlan.from_block(shape.layers, range(5 * shape.layers // 8, 7 * shape.layers // 8))
    brought = (end_bytes + len(plan.a) * layer, len(plan.b) * layer, len(plan.c) * layer)
    return TwinModel(
        costs,
        lambda rows: follow(costs.heads, rows),
        tuple((size, frozenset(plan.present(number))) for number, size in enumerate(brought, 1)),
        (end_bytes, *[layer] * shape.layers),
        shape.kv_bytes(NUMBER_BYTES) // shape.layers,
        NUMBER_BYTES * shape.hidden,
        hop_s(),
        config.gbit_per_s,
    )


# What the windows say.


def simulated_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Means by arm of each run; by how much the simulated windows are off the live ones, by arm, in the median and at
    most; the rank correlation of the arms; and on the card all five beside the best single idea and all but each."""
    summary, windows = Summary(), [row for row in rows if row["arm"] in ARMS]
    runs = list(dict.fromkeys(row["run"] for row in windows))
    for run in runs:
        labels = {"source": run} if run in (LIVE, TWIN) else {"machine": run, "source": TWIN}
        frame = frame_of(windows, run=run)
        measures = {name: (name, "mean", unit) for name, unit in (MEASURES | {"preemptions": ""}).items()}
        summary.by(frame, {"variant": "arm"}, measures, **labels)
        by_arm = frame.groupby("arm", sort=False)
        by_seed = {arm: dict(zip(arm_rows.seed, arm_rows.goodput_per_s, strict=True)) for arm, arm_rows in by_arm}
        if run != LIVE and ALL in by_seed:
            compared(summary, by_seed, **labels)
    _off(summary, windows)
    pairs = [(row["capacity_per_s"], row["live_capacity_per_s"]) for row in rows if "live_capacity_per_s" in row]
    off = [100 * (twin / live - 1) for twin, live in pairs]
    summary.add("capacity_off_pct", bootstrap(off).summary("%"), source=TWIN, than=LIVE)
    return summary


def _off(summary: Summary, windows: Rows) -> None:
    """Add how far the means of the simulated windows are off those of the live ones, in percent of these, and whether
    the arms stand in one order; draws are resampled, each with all its windows. An arm whose live mean is 0 is left out
    of the former, and so is whatever some draws alone have no number for, as where no request was in time in them."""
    both = frame_of(windows, run=TWIN).merge(frame_of(windows, run=LIVE), on=["arm", "seed"], suffixes=("", "_live"))
    labels = {"source": TWIN, "than": LIVE}
    for name in MEASURES:
        table = both.pivot(index="seed", columns="arm", values=[name, f"{name}_live"])
        values = table.to_numpy(float).reshape(len(table), 2, -1)  # [seeds, simulated or live, arms]
        measure = f"{name.rpartition('_')[0].removesuffix('_per')}"
        errors = [
            ({"variant": arm}, bootstrap(values[:, :, arm_index], lambda sample: float(_share(sample))))
            for arm_index, arm in enumerate(table[name].columns)
        ]
        for across, statistic in (("median", np.median), ("worst", np.max)):
            entry = bootstrap(values, lambda sample, statistic=statistic: _of_known(statistic, np.abs(_share(sample))))
            errors.append(({"across": across}, entry))
        for whose, entry in errors:
            if np.isfinite([entry.estimate, entry.low, entry.high]).all():
                summary.add(f"{measure}_off_pct", entry.summary("%", 100), **whose, **labels)
        if values.shape[2] > 2:
            entry = bootstrap(values, lambda sample: rank_correlation(*np.nanmean(sample, 0)))
            summary.add(f"{measure}_rank_correlation", entry.summary(""), **labels)


def _of_known(statistic: Callable[[np.ndarray], Any], shares: np.ndarray) -> float:
    """Return ``statistic`` over those of ``shares`` [arms] that are numbers; NaN where none is."""
    finite = shares[~np.isnan(shares)]
    return float(statistic(finite)) if len(finite) else math.nan


def _share(sample: np.ndarray) -> np.ndarray:
    """Return the mean over draws of the first of ``sample`` [seeds, 2, ...] over that of the second, less 1; NaN where
    the second is 0."""
    twin, live = np.nanmean(sample, 0)
    return np.asarray(twin / np.where(live > 0, live, np.nan) - 1)


def rank_correlation(first: np.ndarray, other: np.ndarray) -> float:
    """Spearman's correlation of two lists [n]; equal values share their mean rank. 0 where all of one are equal."""
    ranks = [np.searchsorted(np.sort(v), v) + np.searchsorted(np.sort(v), v, "right") for v in (first, other)]
    return float(np.corrcoef(*ranks)[0, 1]) if min(np.ptp(rank) for rank in ranks) else 0.0
