"""Fine-tunes of one base in one engine: what the requests of several cost beside those of one, and beside engines of
their own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from firsttoken.assets.adapter_files import CONFIG, WEIGHTS
from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.lora import Adapter, parse_adapter
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.request import Sampling
from firsttoken.engine.shared_base import SharedBase
from firsttoken.study import paths
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.parse_errors import read_bytes
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import median_ratio
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of
from firsttoken_studies.record.show import interval

BASE, ONE, IN_TURNS = "the base alone", "one adapter", "one after the other"
BLOCK_TOKENS = 16
_MOST_BYTES = 1 << 30  # of an adapter's file
Prompts = list[list[int]]
Answers = list[list[int]]


@dataclass(frozen=True)
class VariantsConfig:
    """``requests`` at once, with prompts of ``prompt_tokens`` (fewest, most) random ids and ``new_tokens`` greedy ones
    each, are those of the base, of the first of ``variants``, and of each number of them in ``counts`` in turns; all
    ``repeats`` times in random order after one round that warms up. ``adapters`` is the folder of the variants.
    """

    adapters: str
    variants: tuple[str, ...]
    counts: tuple[int, ...]
    requests: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    repeats: int

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 2 or max(self.counts) > min(len(self.variants), self.requests):
            raise ProfileError(
                f"variants.counts must be from 2 to the {min(len(self.variants), self.requests)} variants and requests"
            )

    def needs(self) -> list[Need]:
        """Require a context that holds the longest prompt and its answer."""
        return [Need("variants.prompt_tokens + new_tokens", max(self.prompt_tokens) + self.new_tokens, CONTEXT)]


def variants_at_once(profile: Profile) -> Outcome:
    """Rows {case, repeat, tokens_per_s, same_tokens}: ``same_tokens`` is the share of requests whose answers are those
    that their variant gives in an engine of its own.

    Cases are the base, one adapter, "N adapters" in one engine, and N of them one after the other: as many engines,
    each with its share of the requests.
    """
    config = profile.section("variants", VariantsConfig)
    check(config.needs(), ModelFacts(profile.model))
    loaded = load_model(profile.model, dtype=profile.torch_dtype(), device=profile.torch_device(), with_tokenizer=False)
    model, rng = loaded.model, random.Random(profile.seed)
    prompts = [
        [rng.randrange(model.config.vocab_size) for _ in range(rng.randint(*config.prompt_tokens))]
        for _ in range(config.requests)
    ]
    needed = sum(-(-(len(prompt) + config.new_tokens) // BLOCK_TOKENS) + 1 for prompt in prompts)
    executor = LiveExecutor(model, needed, block_tokens=BLOCK_TOKENS)
    try:
        versions = hosted(executor, model, [read_adapter(config.adapters, name) for name in config.variants])
        serve = partial(served, executor, prompts, config.new_tokens)
        cases: dict[str, Callable[[], Answers]] = {BASE: partial(serve, [executor.version])}
        cases[ONE] = partial(serve, versions[:1])
        for count in config.counts:
            cases[f"{count} adapters"] = partial(serve, versions[:count])
            cases[f"{count} adapters, {IN_TURNS}"] = partial(in_turns, serve, versions[:count], config.requests)
        alone = {case: compute() for case, compute in cases.items()}  # which warms up
        rows: Rows = []
        rounds = [(repeat, case) for repeat in range(config.repeats) for case in rng.sample(list(cases), len(cases))]
        for repeat, case in track(rounds, desc="variants"):
            start = time.perf_counter()
            answers = cases[case]()
            seconds = time.perf_counter() - start
            wanted = alone.get(f"{case}, {IN_TURNS}", alone[case])
            same = sum(answer == theirs for answer, theirs in zip(answers, wanted, strict=True)) / len(wanted)
            rate = config.requests * config.new_tokens / seconds
            rows.append({"case": case, "repeat": repeat, "tokens_per_s": rate, "same_tokens": same})
    finally:
        executor.close()
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def read_adapter(folder: str, name: str) -> Adapter:
    """The adapter ``name`` in a profile's ``folder``. Raises StageError for one that is damaged or no plain LoRA."""
    adapter_folder = paths.ADAPTERS / folder / name  # an absolute folder stands for itself
    return parse_adapter(name, *(read_bytes(adapter_folder / file, _MOST_BYTES) for file in (CONFIG, WEIGHTS)), "cpu")


def hosted(executor: LiveExecutor, model: nn.Module, adapters: Sequence[Adapter]) -> list[ModelVersion]:
    """Have ``executor`` host the ``adapters`` of its ``model`` too, all layers fused; return the versions in order."""
    executor.version = base = SharedBase(executor.version.decoder)
    versions = [base.variant(model, adapter) for adapter in adapters]
    for _ in base.fuse():
        pass
    return versions


def served(
    executor: LiveExecutor,
    prompts: Prompts,
    new_tokens: int,
    versions: Sequence[ModelVersion],
    chosen: Sequence[int] | None = None,
) -> Answers:
    """The answers to ``prompts``, those with the numbers ``chosen`` or all; request n is for version n in turns."""
    engine = Engine(executor)
    numbers = range(len(prompts)) if chosen is None else chosen
    requests = [engine.submit(prompts[n], Sampling(new_tokens), version=versions[n % len(versions)]) for n in numbers]
    engine.run()
    return [request.output for request in requests]


def in_turns(serve: Callable[..., Answers], versions: Sequence[ModelVersion], requests: int) -> Answers:
    """Serve the requests of one variant before those of the next; return the answers in the order of the requests."""
    answers: Answers = [[] for _ in range(requests)]
    for version_index in range(len(versions)):
        numbers = range(version_index, requests, len(versions))
        for number, answer in zip(numbers, serve(versions, numbers), strict=True):
            answers[number] = answer
    return answers


def variants_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Tokens a second by case; those of several adapters over one adapter's and over the same one after the other; and
    how many answers were the variant's own."""
    summary, frame = Summary(), frame_of(rows)
    summary.by(frame, {"case": "case"}, {"tokens_per_s": ("tokens_per_s", "median", "tokens/s")})
    frame["same_pct"] = 100 * frame.same_tokens
    for count in parameters["variants"]["counts"]:
        case = f"{count} adapters"
        for than in (ONE, f"{case}, {IN_TURNS}"):
            ratio = median_ratio(*(frame.tokens_per_s[frame.case == name].to_numpy() for name in (case, than)))
            summary.add("tokens_per_s_x", ratio.summary("x"), case=case, than=than)
        summary.by(frame[frame.case == case], {}, {"same_tokens_pct": ("same_pct", "mean", "% of requests")}, case=case)
    return summary


def variants_rows(result: Result) -> Table:
    """A line a case: tokens a second, and over one adapter."""
    for entry in result.summary.all("tokens_per_s"):
        case = entry["where"]["case"]
        ratio = result.summary.get("tokens_per_s_x", case=case, than=ONE)
        same = result.summary.get("same_tokens_pct", case=case)
        line = {"whose requests": case, "tokens/s": interval(entry, 0), "over one adapter": interval(ratio, 2)}
        yield line | {"answers as alone, %": f"{same['value']:.0f}" if same else ""}
