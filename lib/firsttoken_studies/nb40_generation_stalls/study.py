"""Generation stalls (Figure 1a): running decodes while a long prompt arrives, by scheduler, live and simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.engine import Engine
from firsttoken.engine.executor import Executor
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.engine.schedulers.sarathi import PrefillFirst, Sarathi
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.sarathi.capacity import Objective
from firsttoken.sarathi.policy import Policy, scheduler_labels
from firsttoken.simulation.hardware import Hardware
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Rows, frame_of

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
        """Require a context that holds the prompt and its answer."""
        return [Need("stalls.prompt", max(self.prompt, self.context) + self.new_tokens, CONTEXT)]


def generation_stalls(
    profile: Profile, *, sarathi: type[Scheduler] = Sarathi, prefill_first: type[Scheduler] = PrefillFirst
) -> Outcome:
    """Rows {run, repeat, scheduler, request, token, at_s, gap_s}, and of the prompt {..., request: "prompt", ttft_s}.

    ``at_s`` is from the arrival of the prompt; gaps are those that began after ``before`` tokens less two. A reader's
    ``sarathi`` and ``prefill_first`` stand for the library's at every budget, live and simulated.
    """
    classes = {"sarathi": sarathi, "prefill_first": prefill_first}
    config, hardware = profile.section("stalls", StallsConfig), profile.section("hardware", Hardware)
    name = config.model or profile.model
    check(config.needs(), ModelFacts(name))
    loaded = load_model(name, dtype=profile.torch_dtype(), device=profile.torch_device())
    fuse(loaded.model)
    blocks = 4 + -(-(config.running * (config.context + config.new_tokens) + config.prompt + config.new_tokens) // 16)
    rows: Rows = []
    for repeat in track(range(config.repeats + 1), desc="stalls"):
        for scheduler in config.schedulers:
            with closing(LiveExecutor(loaded.model, blocks + BATCH)) as executor:
                policy = _policy(scheduler, classes)
                stalled = list(_stalled(executor, policy, config, config.prompt, loaded.model.config.vocab_size))
            rows += [{"run": LIVE, "repeat": repeat, "scheduler": scheduler} | row for row in stalled if repeat]
    costs = hardware.read()
    for scheduler in config.simulated_schedulers:
        executor = SimulatedExecutor(costs, hardware.blocks)
        stalled = _stalled(executor, _policy(scheduler, classes), config, config.simulated_prompt, 2)
        rows += [{"run": SIMULATED, "repeat": 1, "scheduler": scheduler} | row for row in stalled]
    return Outcome(rows, provenance=loaded.provenance.as_dict() | {"simulated": hardware.provenance(costs)})


def _policy(text: str, classes: Mapping[str, type[Scheduler]]) -> Policy:
    """Return the policy that ``text`` names, with the class that stands for it."""
    policy = Policy.named(text)
    return replace(policy, kind=classes.get(scheduler_labels(text)["scheduler"], policy.kind))


def _stalled(
    executor: Executor, policy: Policy, config: StallsConfig, prompt_tokens: int, vocabulary: int
) -> Iterator[dict[str, Any]]:
    draw = np.random.default_rng(0)
    engine = Engine(executor, policy.config(Objective(np.inf), BATCH))
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
    stalled_rows: Rows = []
    for (run, scheduler, _), once in frame_of(rows).groupby(["run", "scheduler", "repeat"], sort=False):
        first_s, running = once.ttft_s.max(), once[once.request != "prompt"]
        stalled = running.gap_s[running.at_s > 0]
        plain = running.gap_s[~running.at_s.between(0, first_s, inclusive="right") & (first_s > 0)]
        if not (len(plain) and len(stalled)):
            missing = "a running request has no gap" if first_s > 0 else "the prompt has no first token"
            raise FirstTokenError(f"stalls, {run} under {scheduler}: {missing} to measure")
        ratio = stalled.max() / float(np.median(plain))
        stalled_rows.append(
            {"run": run, "scheduler": scheduler, "worst_s": stalled.max(), "over": ratio, "ttft_s": first_s}
        )
    summary = Summary()
    for (run, scheduler), run_rows in frame_of(stalled_rows).groupby(["run", "scheduler"], sort=False):
        labels = {"source": run} | scheduler_labels(scheduler)
        summary.by(run_rows, {}, {"worst_gap_ms": ("worst_s", "mean", "ms", 1e3)}, **labels)
        summary.by(run_rows, {}, {"worst_gap_x": ("over", "mean", "x")}, **labels, than="plain gap")
        summary.by(run_rows, {}, {"ttft_s": ("ttft_s", "mean", "s")}, **labels)
    return summary
