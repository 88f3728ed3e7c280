"""Generation stalls (Figure 1a): running decodes while a long prompt arrives, by scheduler, live and simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.engine.engine import Engine
from firsttoken.engine.executor import Executor
from firsttoken.engine.fused import fuse
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.sarathi.capacity import Objective
from firsttoken.sarathi.hardware import Hardware
from firsttoken.sarathi.policy import Policy
from firsttoken.sarathi.policy_text import place_of
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary

LIVE, SIMULATED = "live", "simulated"
BATCH = 16  # requests at once at most


@dataclass(frozen=True)
class StallsConfig:
    """``running`` requests decode over ``context`` tokens; once each has ``before`` tokens a prompt arrives.

    It has ``prompt`` tokens, ``simulated_prompt`` on the simulated GPU; every answer ``new_tokens``. ``repeats``
    are of the live runs, the first of which warms up and is dropped. ``model`` overrides the profile's ("" keeps it).
    """

    running: int
    context: int
    before: int
    prompt: int
    simulated_prompt: int
    new_tokens: int
    repeats: int
    schedulers: tuple[str, ...]
    simulated_schedulers: tuple[str, ...]
    model: str = ""

    def __post_init__(self) -> None:
        if not (1 <= self.running < BATCH and 2 <= self.before < self.new_tokens and self.repeats >= 1):
            raise ProfileError(
                f"stalls: running must be from 1 to {BATCH - 1}, before from 2 to below new_tokens, repeats at least 1"
            )

    def needs(self) -> list[Need]:
        """The context holds the prompt and its answer."""
        return [Need("stalls.prompt", max(self.prompt, self.context) + self.new_tokens, CONTEXT)]


def generation_stalls(profile: Profile) -> Outcome:
    """Rows {run, repeat, scheduler, request, token, at_s, gap_s}, and of the prompt {..., request: "prompt", ttft_s}.

    ``at_s`` is from the arrival of the prompt; gaps are those that began after ``before`` tokens less two.
    """
    config, hardware = profile.section("stalls", StallsConfig), profile.section("hardware", Hardware)
    name = config.model or profile.model
    check(config.needs(), ModelFacts(name))
    loaded = load_model(name, dtype=profile.torch_dtype(), device=profile.torch_device())
    fuse(loaded.model)
    blocks = 4 + -(-(config.running * (config.context + config.new_tokens) + config.prompt + config.new_tokens) // 16)
    rows: Rows = []
    for repeat in tqdm(range(config.repeats + 1), desc="stalls", disable=None):
        for scheduler in config.schedulers:
            with closing(LiveExecutor(loaded.model, blocks + BATCH)) as executor:
                found = list(_stalled(executor, scheduler, config, config.prompt, loaded.model.config.vocab_size))
            rows += [{"run": LIVE, "repeat": repeat, "scheduler": scheduler} | row for row in found if repeat]
    costs = hardware.read()
    for scheduler in config.simulated_schedulers:
        executor = SimulatedExecutor(costs, hardware.blocks)
        found = _stalled(executor, scheduler, config, config.simulated_prompt, 2)
        rows += [{"run": SIMULATED, "repeat": 1, "scheduler": scheduler} | row for row in found]
    return Outcome(rows, provenance=loaded.provenance.as_dict() | {"simulated": hardware.provenance(costs)})


def _stalled(
    executor: Executor, scheduler: str, config: StallsConfig, prompt_tokens: int, vocabulary: int
) -> Iterator[dict[str, Any]]:
    draw = np.random.default_rng(0)
    engine = Engine(executor, Policy.named(scheduler).config(Objective(np.inf), BATCH))
    sampling = Sampling(config.new_tokens)
    running = [
        engine.submit(draw.integers(vocabulary, size=config.context).tolist(), sampling) for _ in range(config.running)
    ]
    while min(len(request.times_s) for request in running) < config.before:
        engine.step()
    prompt = engine.submit(draw.integers(vocabulary, size=prompt_tokens).tolist(), sampling)
    engine.run()
    for number, request in enumerate(running):
        for token in range(config.before - 1, len(request.times_s)):
            gap_s = request.times_s[token] - request.times_s[token - 1]
            yield {"request": number, "token": token, "at_s": request.times_s[token] - prompt.arrival_s, "gap_s": gap_s}
    yield {"request": "prompt", "ttft_s": prompt.ttft_s}


def stalls_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The longest gap of the running requests while the prompt is prefilled, beside a plain one, and the prompt's TTFT.

    A plain gap is the median of those that end before the prompt's arrival or a while after its first token. Raises
    FirstTokenError for a run in which one of these is missing.
    """
    summary = Summary()
    for run in (LIVE, SIMULATED):
        for scheduler in dict.fromkeys(row["scheduler"] for row in rows if row["run"] == run):
            here = [row for row in rows if (row["run"], row["scheduler"]) == (run, scheduler)]
            worst, over, ttft = [], [], []
            for repeat in dict.fromkeys(row["repeat"] for row in here):
                once = [row for row in here if row["repeat"] == repeat]
                first_s = next((row["ttft_s"] for row in once if row["request"] == "prompt"), None)
                gaps = [row for row in once if row["request"] != "prompt"]
                plain = [row["gap_s"] for row in gaps if first_s and not 0 < row["at_s"] <= first_s]
                stalled = [row["gap_s"] for row in gaps if row["at_s"] > 0]
                if not (plain and stalled):
                    missing = "the prompt has no first token" if not first_s else "a running request has no gap"
                    raise FirstTokenError(f"stalls, {run} under {scheduler}: {missing} to measure")
                worst.append(max(stalled))
                over.append(worst[-1] / float(np.median(plain)))
                ttft.append(first_s)
            where = {"source": run} | place_of(scheduler)
            summary.add("worst_gap_ms", bootstrap(worst).summary("ms", 1e3), **where)
            summary.add("worst_gap_x", bootstrap(over).summary("x"), **where, than="plain gap")
            summary.add("ttft_s", bootstrap(ttft).summary("s"), **where)
    return summary
