"""All five ideas in one replica that starts cold under load: none, each alone, all, and all but each."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firsttoken.assets.models import as_stored, load_model
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check
from firsttoken.droidspeak.identity import ModelIdentity, identify
from firsttoken.droidspeak.prefill import full_prefill
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.workload_items import Arrivals
from firsttoken.progressiveserve.base_model import load_served
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.simulation.workload.conversations import Conversations, conversations
from firsttoken.study import paths, timing
from firsttoken.study.canonical_json import sha256_of
from firsttoken.study.dtypes import computing, name_of, named
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.files import write_text
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.combined.borrowed.neighbour import warm_server
from firsttoken_studies.combined.borrowed.setting import StartSetting, start_setting
from firsttoken_studies.nb61_five_at_once.answers import Judge
from firsttoken_studies.nb61_five_at_once.trial import BLOCK_TOKENS, CHUNKS, IDEAS, WindowSpec
from firsttoken_studies.record import code
from firsttoken_studies.record.results import Outcome, Rows

NONE, ALL, WARM = "none", "all", "warm"
ARMS: dict[str, tuple[str, ...]] = {
    NONE: (),
    **{f"only {idea}": (idea,) for idea in IDEAS},
    ALL: IDEAS,
    **{f"without {idea}": tuple(other for other in IDEAS if other != idea) for idea in IDEAS},
}


@dataclass(frozen=True)
class FiveConfig:
    """``requests`` of ShareGPT's conversations with prompts of up to ``prompt_tokens`` and answers of up to
    ``new_tokens``, for each of ``seeds`` draws, at ``load`` times what the warm replica gets through a second.

    ``stored_share`` of them begin with one of ``prefixes`` texts of ``prefix_tokens`` (from, to), which the base model
    has cached with hidden states at ``edges``; layers [``group_start``, ``group_end``) are computed again. The model
    comes over ``gbit_per_s``, prefixes over ``prefix_gbit_per_s``. ``running`` requests run at once at most, and the
    pool holds ``pool_share`` of the blocks that so many of a draw need on average, and the longest request at least.
    A request is within its objectives when its first token comes within ``ttft_s`` and P99 of its gaps is at most
    ``tbt_s``; what has not ended after ``limit_s`` is cancelled. An answer is the whole model's own where no token's
    logit lies more than ``near_tie`` below the largest. Raises ProfileError for an unknown arm and for numbers that
    make no window.
    """

    arms: tuple[str, ...]
    seeds: int
    requests: int
    load: float
    prompt_tokens: int
    new_tokens: int
    stored_share: float
    prefixes: int
    prefix_tokens: tuple[int, int]
    group_start: int
    group_end: int
    edges: tuple[int, ...]
    gbit_per_s: float
    prefix_gbit_per_s: float
    running: int
    pool_share: float
    token_budget: int
    ttft_s: float
    tbt_s: float
    limit_s: float
    near_tie: float
    readers: int

    def __post_init__(self) -> None:
        if unknown_arm := next((arm for arm in self.arms if arm not in ARMS), ""):
            raise ProfileError(f"five_at_once: no arm {unknown_arm!r}; {unknown(unknown_arm, ARMS)}")
        if min(self.seeds, self.prefixes, self.running, self.token_budget, self.readers) < 1 or self.requests < 2:
            raise ProfileError("five_at_once: seeds, prefixes, running, token_budget and readers must be at least 1")
        if not (0 <= self.stored_share <= 1 and 0 < self.pool_share <= 1):
            raise ProfileError("five_at_once: stored_share and pool_share must be shares, the latter above 0")
        if min(self.load, self.gbit_per_s, self.prefix_gbit_per_s, self.ttft_s, self.tbt_s, self.limit_s) <= 0:
            raise ProfileError("five_at_once: load, rates, objectives and limit_s must be above 0")
        if not BLOCK_TOKENS <= self.prefix_tokens[0] <= self.prefix_tokens[1]:
            raise ProfileError(f"five_at_once: prefix_tokens must be {BLOCK_TOKENS} or more, the smaller first")
        if self.group_start not in self.edges:
            raise ProfileError("five_at_once: edges must have group_start, where what is computed again begins")

    def needs(self) -> list[Need]:
        """Require a model with the layers, and a context for the longest request."""
        longest = self.prefix_tokens[1] + self.prompt_tokens + self.new_tokens
        return [
            Need("five_at_once.group_end", self.group_end, LAYERS),
            Need("five_at_once.prefix_tokens + prompt_tokens + new_tokens", longest, CONTEXT),
        ]


Asked = dict[str, Any]


def drawn(texts: Conversations, prefixes: Sequence[Sequence[int]], config: FiveConfig, seed: int) -> list[Asked]:
    """Requests {prompt, new_tokens, stored} of one draw, in order. Raises ProfileError where no conversation fits."""
    rng = np.random.default_rng(seed)
    (fitting,) = np.nonzero((texts.prompt_tokens <= config.prompt_tokens) & (texts.output_tokens <= config.new_tokens))
    if not len(fitting):
        raise ProfileError("five_at_once: no conversation is as short as prompt_tokens and new_tokens; raise them")
    stored = np.zeros(config.requests, bool)
    stored[rng.permutation(config.requests)[: round(config.stored_share * config.requests)]] = True
    requests: list[Asked] = []
    for begins, index in zip(stored.tolist(), rng.choice(fitting, config.requests).tolist(), strict=True):
        item = texts.item(index)
        before = list(prefixes[rng.integers(len(prefixes))]) if begins else []
        requests.append({"prompt": [*before, *item.prompt], "new_tokens": item.output_tokens, "stored": begins})
    return requests


def drawn_prefixes(texts: Conversations, config: FiveConfig, seed: int) -> list[list[int]]:
    """The texts that the base model has cached: beginnings of long conversations, whole blocks of tokens.

    Raises ProfileError where none is long enough.
    """
    rng = np.random.default_rng([seed, 1])
    least, most = (tokens // BLOCK_TOKENS for tokens in config.prefix_tokens)
    (fitting,) = np.nonzero(texts.prompt_tokens >= most * BLOCK_TOKENS)
    if len(fitting) < config.prefixes:
        raise ProfileError(f"five_at_once: {len(fitting)} conversations are as long as prefix_tokens; lower them")
    chosen = rng.choice(fitting, config.prefixes, replace=False).tolist()
    lengths = rng.integers(least, most + 1, config.prefixes).tolist()
    return [list(texts.item(i).prompt[: BLOCK_TOKENS * blocks]) for i, blocks in zip(chosen, lengths, strict=True)]


def blocks_of(requests: Sequence[Asked], config: FiveConfig) -> int:
    """KV blocks of the pool of one draw."""
    needed = [-(-(len(request["prompt"]) + request["new_tokens"]) // BLOCK_TOKENS) for request in requests]
    return max(*needed, round(config.pool_share * config.running * float(np.mean(needed))))


def five_at_once(profile: Profile) -> Outcome:
    """Rows {arm, seed, tbt_p99_s, replica_s, neighbour_s, loaded_s, ended_s, blocks, capacity_per_s, and by request
    arrival_s, first_s, last_s, gap_p99_s, same, shortfall, f1, preemptions, own_prefill} of windows in fresh processes.

    Answers are held against those of the "warm" window of their draw, which has all requests and the whole model at
    once, and neither ``blocks`` nor a capacity. Each window is kept until all are there, and a run that was broken off
    goes on behind the last one.
    """
    config = profile.section("five_at_once", FiveConfig)
    check(config.needs(), ModelFacts(profile.model))
    setting = start_setting(profile, profile.section("quality", QualityConfig).questions, 2, config.readers)
    dtype = name_of(computing("cpu"))
    identity = {"config": asdict(config), "seed": profile.seed, "setting": setting.provenance, "dtype": dtype}
    finished_windows = FinishedWindows(sha256_of(identity | {"code": code.digest(__name__)}))
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        tokenizer, sender = cached(profile, config, store, dtype)
        texts = conversations(tokenizer)
        prefixes = drawn_prefixes(texts, config, profile.seed)
        judge = Judge(load_served(profile).model.to("cpu", torch.float32), tokenizer.decode)
        depth = setting.checkpoint.plan.depth
        with warm_server(setting.folder, depth, setting.theirs, setting.threads, dtype) as (address, pid):
            spec = WindowSpec(
                ideas=(),
                staged=str(setting.checkpoint.staged),
                ends_first=str(setting.folder),
                workload=str(Path(folder) / "workload.json"),
                store=str(store),
                sender=asdict(sender),
                receiver=asdict(replace(sender, adapters=str(setting.provenance.get("task_adapter_sha256", "")))),
                group=(config.group_start, config.group_end),
                edges=config.edges,
                gbit_per_s=config.gbit_per_s,
                prefix_gbit_per_s=config.prefix_gbit_per_s,
                neighbour=address,
                requests=config.running,
                blocks=0,
                token_budget=config.token_budget,
                limit_s=config.limit_s,
                readers=config.readers,
                threads=setting.threads,
                cores=setting.ours,
                dtype=dtype,
            )
            windows = Windows(spec, pid, finished_windows)
            seeds = range(profile.seed, profile.seed + config.seeds)
            total = config.seeds * (1 + len(config.arms))
            with track(total=total, desc="five at once", unit="window") as bar:
                for seed in seeds:
                    requests = drawn(texts, prefixes, config, seed)
                    for row in windows.of(requests, config, seed):
                        bar.set_postfix_str(f"seed {seed}, {row['arm']}")
                        bar.update()
                        if row["arm"] == WARM:
                            wanted = row["tokens"]
                        rows.append(row | judge.of(requests, row.pop("tokens"), wanted))
    finished_windows.drop()
    return Outcome(rows, provenance=provenance_of(setting) | {"computed_in": dtype})


def cached(profile: Profile, config: FiveConfig, folder: Path, dtype: str) -> tuple[Any, ModelIdentity]:
    """Store in ``folder`` what the base model computes of the prefixes in ``dtype``; return its tokenizer and what it
    is called."""
    base = load_model(profile.model, dtype=torch.float32, device="cpu")
    as_stored(base.model, profile.stored_dtype(), named(dtype))
    sender = identify(base.model, base.tokenizer, str(base.provenance.sha256))
    store = KVStore(folder, memory_bytes=0, disk_bytes=1 << 40, block_tokens=BLOCK_TOKENS)
    for tokens in drawn_prefixes(conversations(base.tokenizer), config, profile.seed):
        store.store(tokens, sender, full_prefill(base.model, Prefix.of([tokens]), config.edges))
    return base.tokenizer, sender


def provenance_of(setting: StartSetting) -> dict[str, Any]:
    """Return where weights, requests and prefixes are from."""
    return setting.provenance | {
        "requests": "ShareGPT's, Poisson arrivals",
        "prefixes": "ShareGPT's, cached by the base",
    }


class FinishedWindows:
    """The windows of a run that has not ended, as lines of a file that is named by what the run is asked."""

    def __init__(self, key: str) -> None:
        self._path = paths.CACHE / "five_at_once" / f"{key[:16]}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.is_file() else []
        # the last one may have been broken off
        complete_lines = [json.loads(line) for line in lines if line.endswith("\n")]
        if len(complete_lines) < len(lines):
            write_text(self._path, "".join(json.dumps(row) + "\n" for row in complete_lines))
        self._rows = {(row["seed"], row["arm"]): row for row in complete_lines}

    def find(self, seed: int, arm: str) -> dict[str, Any] | None:
        """Return the window that was measured before, or None."""
        if (row := self._rows.get((seed, arm))) is not None:
            timing.add_resumed(row["ended_s"])
        return row

    def add(self, row: Mapping[str, Any]) -> None:
        """Append the ``row`` of a window to the file."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def drop(self) -> None:
        """Remove the file of a run that has ended: its result holds all windows."""
        self._path.unlink(missing_ok=True)


class Windows:
    """The windows that ``spec`` describes but for ideas, requests and pool, beside the neighbour of process ``pid``;
    those that are ``finished`` are not measured again."""

    def __init__(self, spec: WindowSpec, pid: int, finished: FinishedWindows) -> None:
        self._spec, self._pid, self._kept = spec, pid, finished

    def of(self, requests: Sequence[Asked], config: FiveConfig, seed: int) -> Iterator[dict[str, Any]]:
        """The warm window of a draw, all requests at once, which says the capacity and the wanted answers; then those
        of all arms in random order."""
        needed = [len(request["prompt"]) + request["new_tokens"] + BLOCK_TOKENS for request in requests]
        warm = replace(self._spec, ideas=(CHUNKS,), gbit_per_s=0.0, blocks=sum(needed) // BLOCK_TOKENS, limit_s=600.0)
        window = self._window(WARM, seed, warm, [request | {"arrival_s": 0.0} for request in requests])
        yield window
        served_s = max(window["last_s"]) - window["loaded_s"]
        capacity = len(requests) / served_s
        times = Arrivals(config.load * capacity, seed=seed).times_s(len(requests)).tolist()
        coming = [request | {"arrival_s": arrival_s} for request, arrival_s in zip(requests, times, strict=True)]
        blocks, arms = blocks_of(requests, config), list(config.arms)
        random.Random(seed).shuffle(arms)
        for arm in arms:
            row = self._window(arm, seed, replace(self._spec, ideas=ARMS[arm], blocks=blocks), coming)
            yield row | {"capacity_per_s": round(capacity, 4), "blocks": blocks}

    def _window(self, arm: str, seed: int, spec: WindowSpec, requests: Sequence[Asked]) -> dict[str, Any]:
        if (row := self._kept.find(seed, arm)) is not None:
            return dict(row)
        workload = Path(spec.workload)
        workload.write_text(json.dumps(requests), encoding="utf-8")
        file = workload.with_name("spec.json")
        file.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        before = processor_s(self._pid)
        command = [sys.executable, "-m", "firsttoken_studies.nb61_five_at_once.trial", str(file)]
        environment = os.environ | {"OMP_NUM_THREADS": str(spec.threads)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise FirstTokenError(f"the window of {arm!r}, seed {seed}, failed: {reason}")
        row = {"arm": arm, "seed": seed} | json.loads(done.stdout.strip().splitlines()[-1])
        row |= {
            "arrival_s": [round(request["arrival_s"], 4) for request in requests],
            "stored": [request["stored"] for request in requests],
            "neighbour_s": processor_s(self._pid) - before,
        }
        self._kept.add(row)
        return row


def processor_s(pid: int) -> float:
    """Seconds of processors that a running process has used; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# What the windows say.


def ttfts(row: Mapping[str, Any], limit_s: float) -> np.ndarray:
    """Seconds from arrival to first token [requests]; to the end of the window for those that had none."""
    firsts = [limit_s if first is None else first for first in row["first_s"]]
    return np.maximum(np.subtract(firsts, row["arrival_s"]), 0.0)


def goodput(row: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Requests within both objectives a second of the time in which requests arrive."""
    in_time = ttfts(row, config["limit_s"]) <= config["ttft_s"]
    smooth = [gap is None or gap <= config["tbt_s"] for gap in row["gap_p99_s"]]
    answered = [first is not None for first in row["first_s"]]
    return float(np.sum(in_time & smooth & answered)) / row["arrival_s"][-1]


def answered_pct(row: Mapping[str, Any], right: Sequence[bool]) -> float:
    """Return the percentage of ``right`` answers among the requests that said anything; 0 where none did."""
    answered = [first is not None for first in row["first_s"]]
    return 100 * float(np.mean(np.array(right)[answered])) if any(answered) else 0.0


def near(row: Mapping[str, Any], config: Mapping[str, Any]) -> list[bool]:
    """Return whether each answer is the whole model's own but for near ties."""
    return [shortfall <= config["near_tie"] for shortfall in row["shortfall"]]


def five_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Return means over draws by arm, goodput of all five over the best single idea, and what is lost without each."""
    config, summary = parameters["five_at_once"], Summary()
    by_arm: dict[str, dict[int, float]] = {}
    for arm in (name for name in ARMS if any(row["arm"] == name for row in rows)):
        arm_rows = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])
        by_arm[arm] = {row["seed"]: goodput(row, config) for row in arm_rows}
        late = [ttfts(row, config["limit_s"]) for row in arm_rows]
        measures = {
            "goodput_per_s": (list(by_arm[arm].values()), "requests/s"),
            "first_token_s": ([window[0] for window in late], "s"),
            "ttft_p50_s": ([np.percentile(window, 50) for window in late], "s"),
            "ttft_p95_s": ([np.percentile(window, 95) for window in late], "s"),
            "tbt_p99_s": ([row["tbt_p99_s"] for row in arm_rows if row["tbt_p99_s"] is not None], "s"),
            "processor_s": ([row["replica_s"] + row["neighbour_s"] for row in arm_rows], "s"),
            "loaded_s": ([row["loaded_s"] for row in arm_rows], "s"),
            "same_tokens_pct": ([answered_pct(row, row["same"]) for row in arm_rows], "% of requests"),
            "own_answers_pct": ([answered_pct(row, near(row, config)) for row in arm_rows], "% of requests"),
            "f1": ([np.mean(row["f1"]) for row in arm_rows], ""),
            "preemptions": ([sum(row["preemptions"]) for row in arm_rows], ""),
        }
        for measure, (values, unit) in measures.items():
            if values:
                summary.add(measure, bootstrap(values).summary(unit), variant=arm)
    compared(summary, by_arm)
    return summary


def compared(summary: Summary, by_arm: Mapping[str, Mapping[int, float]]) -> None:
    """Add what all five have above the best single idea in ``by_arm``, goodput by arm and seed, and what is lost
    without each."""
    if ALL not in by_arm:
        return
    means = {arm: float(np.mean(list(values.values()))) for arm, values in by_arm.items()}
    singles = [f"only {idea}" for idea in IDEAS if f"only {idea}" in by_arm]
    if singles and (best := max(singles, key=means.__getitem__)) and means[best]:
        pairs = np.array([[by_arm[ALL][seed], by_arm[best][seed]] for seed in by_arm[ALL]])
        above = bootstrap(pairs, lambda sample: float(np.divide(*sample.mean(0)) - 1))
        summary.add("goodput_above_pct", above.summary("%", 100), variant=ALL, than="best single")
    lost = []
    for idea in IDEAS:
        if (arm := f"without {idea}") in by_arm:
            differences = [by_arm[ALL][seed] - by_arm[arm][seed] for seed in by_arm[ALL]]
            entry = bootstrap(differences).summary("requests/s")
            lost.append(summary.add("goodput_lost_per_s", entry, variant=ALL, than=arm))
    if lost:
        worst = min(lost, key=lambda lost_entry: lost_entry["value"])
        summary.add("goodput_lost_per_s", worst, variant=ALL, across="worst")
