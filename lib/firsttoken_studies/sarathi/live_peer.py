"""A live peer: vLLM and `firsttoken serve` with the same tokens a step, asked the same by somebody else's client."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from firsttoken.assets.models import load_model, model_name
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.engine.kv import KVShape
from firsttoken.study import paths
from firsttoken.study.dtypes import AUTO, name_of, resolve, serving
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.sarathi import aiperf, peers
from firsttoken_studies.sarathi.aiperf import PeerLoad
from firsttoken_studies.sarathi.peers import LONGEST_ANSWER, LONGEST_PROMPT, OURS, VLLM, PeerModel

Turns = list[tuple[int, int, str]]  # round, budget, system
TIMES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "gap_p99", "latency_p50")
METRICS = {name: (f"{name}_s", "s", min) for name in TIMES} | {"tokens_per_s": ("tokens_per_s", "tokens/s", max)}
"""Of each its column, its unit, and which value is the better one."""
BEST = {"case": "each at its best budget"}
CPU = "cpu"
LONGER = 4  # standard deviations above the mean that a prompt may have


@dataclass(frozen=True)
class PeerConfig:
    """``rounds`` times each of ``budgets`` (tokens a step) on either server, which is started anew for it.

    The load of a round is that of :class:`PeerLoad`, ``rate`` requests a second: the same for all of its turns.
    """

    budgets: tuple[int, ...]
    requests: int
    rate: float
    prompt_tokens: int
    prompt_spread: int
    new_tokens: int
    rounds: int

    def __post_init__(self) -> None:
        counts = (*self.budgets, self.requests, self.prompt_tokens, self.rounds)
        if not self.budgets or min(counts) < 1 or self.rate <= 0 or self.prompt_spread < 0 or self.new_tokens < 2:
            raise ProfileError(
                "live_peer: budgets, requests, prompt_tokens and rounds must be at least 1, new_tokens 2, rate above 0 "
                "and prompt_spread 0"
            )
        if len(set(self.budgets)) < len(self.budgets):
            raise ProfileError("live_peer: a budget is there twice; name each once")
        if self.longest_prompt > LONGEST_PROMPT or self.new_tokens > LONGEST_ANSWER:
            raise ProfileError(
                f"live_peer: `firsttoken serve` takes {LONGEST_PROMPT} tokens and gives {LONGEST_ANSWER}; lower "
                f"prompt_tokens + {LONGER} prompt_spread = {self.longest_prompt}, or new_tokens = {self.new_tokens}"
            )

    @property
    def longest_prompt(self) -> int:
        """Tokens that a drawn prompt has at most, but for one draw of 30,000."""
        return self.prompt_tokens + LONGER * self.prompt_spread

    @property
    def longest(self) -> int:
        """Tokens of such a prompt and its answer."""
        return self.longest_prompt + self.new_tokens

    def needs(self) -> list[Need]:
        """The context holds the longest prompt and its answer."""
        return [Need(f"live_peer.prompt_tokens + {LONGER} prompt_spread + new_tokens", self.longest, CONTEXT)]

    def load(self, seed: int) -> PeerLoad:
        """What is asked with ``seed``."""
        return PeerLoad(self.requests, self.rate, self.prompt_tokens, self.prompt_spread, self.new_tokens, seed)

    def turns(self, seed: int) -> Turns:
        """Each budget and system in every round, in an order drawn for the round."""
        rng, pairs = random.Random(seed), [(budget, system) for budget in self.budgets for system in (OURS, VLLM)]
        return [(number, *pair) for number in range(self.rounds) for pair in rng.sample(pairs, len(pairs))]


def live_peer(profile: Profile) -> Outcome:
    """Rows {system, budget, round, order, seed, start_s, requests, errors, prompt_tokens, output_tokens, tokens_per_s,
    <metric>_<statistic>_s}.

    The metrics are aiperf's: ``ttft``, ``itl`` (a request's time after its first token over its other tokens), ``gap``
    (between two events of a stream) and ``latency`` (of a request), each with ``mean``, ``p50`` and ``p99``. Raises
    FirstTokenError where one of the environments is missing, a server does not come up, or any request fails.
    """
    config = profile.section("live_peer", PeerConfig)
    check(config.needs(), ModelFacts(profile.model))
    rows: Rows = []
    with _stored(profile, config.longest) as (model, provenance):
        turns = tqdm(config.turns(profile.seed), desc="live peer", disable=None)
        for order, (number, budget, system) in enumerate(turns):
            load = config.load(profile.seed + number)
            case = {"system": system, "budget": budget, "round": number, "order": order, "seed": load.seed}
            rows.append(case | turn(system, model, budget, load))
    return Outcome(rows, provenance=provenance)


def turn(system: str, model: PeerModel, budget: int, load: PeerLoad) -> dict[str, float]:
    """Start ``system``, have it asked, end it: the rest of a row of :func:`live_peer`, which see for what it raises."""
    peers.check_there("live_peer")
    aiperf.check_there("live_peer")
    with tempfile.TemporaryDirectory(dir=paths.CACHE, prefix="peer-") as folder:
        out, start = Path(folder), time.perf_counter()
        with peers.served(system, model, budget, out / "server.log") as url:
            start_s = time.perf_counter() - start
            command = aiperf.aiperf_command(url, model.folder, load, out)
            return {"start_s": start_s} | aiperf.ask(command, load, out, peers.environment(model.threads))


@contextmanager
def _stored(profile: Profile, longest: int) -> Iterator[tuple[PeerModel, dict[str, Any]]]:
    """The profile's model in a folder of its own, in the dtype that it computes in, and where it comes from.

    Both servers compute in what they find there, on the CPU whatever else there is: the pinned vLLM is built for that.
    Raises ProfileError for a model without a tokenizer.
    """
    dtype = resolve(profile.dtype, CPU)
    loaded = load_model(profile.model, dtype=dtype)
    if loaded.tokenizer is None:
        raise ProfileError(f"live_peer: {model_name(profile.model)} has no tokenizer; name a model that has one")
    paths.CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=paths.CACHE, prefix="peer-") as above:
        folder = Path(above) / "model"
        with quiet_transformers():
            loaded.model.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
        served = serving(AUTO, dtype, CPU)
        kv_bytes = KVShape.of(loaded.model.config, served).bytes_per_token
        provenance = loaded.provenance.as_dict() | {"served_dtype": name_of(served)}
        del loaded  # its memory is the servers'
        yield PeerModel(folder, name_of(served), torch.get_num_threads(), longest, kv_bytes), provenance


def peer_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Medians over rounds by system and budget; ours over vLLM's, round by round, at each budget and with each at its
    own best one, that of the best median."""
    budgets = parameters["live_peer"]["budgets"]
    found = {(row["system"], row["budget"], row["round"]): row for row in rows}
    rounds = sorted({number for _, _, number in found})
    summary = Summary()
    for name, (column, unit, better) in METRICS.items():
        values = {
            (system, budget): [found[system, budget, number][column] for number in rounds]
            for system in (OURS, VLLM)
            for budget in budgets
        }
        medians = {case: bootstrap(each, "median") for case, each in values.items()}
        for (system, budget), one in medians.items():
            summary.add(column, one.summary(unit), engine=system, budget_tokens=budget)
        best = {
            system: better(budgets, key=lambda budget, of=system: medians[of, budget].estimate)
            for system in (OURS, VLLM)
        }
        for system, budget in best.items():
            summary.add(f"{name}_best_budget_tokens", {"value": budget, "unit": "tokens"}, engine=system)
        pairs = [({"budget_tokens": budget}, budget, budget) for budget in budgets]
        for where, mine, theirs in [*pairs, (BEST, best[OURS], best[VLLM])]:
            both = zip(values[OURS, mine], values[VLLM, theirs], strict=True)
            over = bootstrap([ours / other for ours, other in both], "median").summary("x")
            summary.add(f"{name}_x", over, engine=OURS, than=VLLM, **where)
    return summary
