"""What a stage that lacks layers takes of another model's cache: DroidSpeak where ProgressiveServe has begun.

No report has the two together. A stage of ProgressiveServe computes with a part of the layers; the cache that a sender
offers was computed by all of them. Each rule here is tried at every stage, on the same requests: what it costs until
the first token, and how near the answer is to that of the whole model.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from firsttoken.droidspeak.identity import ModelIdentity
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.accelerator import build_model
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.base_model import load_served
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.staged_serving.stage_versions import FusedBeside, StagedModelVersion
from firsttoken.progressiveserve.staged_serving.transitions import PrefillAgain
from firsttoken.simulation.workload.conversations import conversations
from firsttoken.study.dtypes import computing, name_of, named
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import FEW, paired_bootstrap, ratio_of_means
from firsttoken.study.summary import Summary
from firsttoken_studies.combined.borrowed.setting import start_setting
from firsttoken_studies.nb61_five_at_once.answers import Judge
from firsttoken_studies.nb61_five_at_once.study import (
    Asked,
    FiveConfig,
    cached,
    drawn,
    drawn_prefixes,
    provenance_of,
)
from firsttoken_studies.nb61_five_at_once.trial import BLOCK_TOKENS, CHUNKS, engine_config
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of
from firsttoken_studies.record.show import cells

OWN, AS_IT_IS = "own prefill", "the cache as it is"
GROUP, TO_THE_END = "the group computed again", "the group and all above it computed again"
RULES: dict[str, Callable[[Group, int], Group | None]] = {  # of the group and the layers: what is computed again
    OWN: lambda group, depth: None,
    AS_IT_IS: lambda group, depth: NOTHING,
    GROUP: lambda group, depth: group,
    TO_THE_END: lambda group, depth: Group(group.lo, depth),
}


@dataclass(frozen=True)
class StagePrefixesConfig:
    """``requests`` as ``five_at_once`` draws them, each behind one of ``prefixes`` texts that the base model has
    cached, with answers of up to ``new_tokens``. Raises ProfileError for numbers that make no request."""

    requests: int
    prefixes: int
    new_tokens: int

    def __post_init__(self) -> None:
        if min(self.requests, self.prefixes, self.new_tokens) < 1:
            raise ProfileError("stage_prefixes: requests, prefixes and new_tokens must be at least 1")

    def over(self, config: FiveConfig) -> FiveConfig:
        """Return the draw of ``config`` with these settings, in which every request has a stored prefix."""
        return replace(config, **asdict(self), stored_share=1.0)


def stage_prefixes(profile: Profile) -> Outcome:
    """Rows {request, stage, rule, tokens, taken, ttft_s, same, shortfall, f1}: requests alone in an engine of the
    stage, in random order. Answers are held against those of the last stage's own prefill, and ``shortfall`` against
    the whole model in float32, as in ``five_at_once``."""
    config = profile.section("stage_prefixes", StagePrefixesConfig).over(profile.section("five_at_once", FiveConfig))
    setting = start_setting(profile, profile.section("quality", QualityConfig).questions, 2, config.readers)
    dtype, rng = name_of(computing("cpu")), random.Random(profile.seed)
    adapters = str(setting.provenance.get("task_adapter_sha256", ""))
    answered: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, sender = cached(profile, config, Path(folder), dtype)
        texts = conversations(tokenizer)
        requests = drawn(texts, drawn_prefixes(texts, config, profile.seed), config, profile.seed)
        longest = max(len(asked_request["prompt"]) + asked_request["new_tokens"] for asked_request in requests)
        executor, versions = stages(setting.checkpoint.staged, dtype, -(-longest // BLOCK_TOKENS) + 1, config.readers)
        with closing(executor):
            store = KVStore(Path(folder), memory_bytes=0, disk_bytes=1 << 40, block_tokens=BLOCK_TOKENS)
            serving = ServedPrefixes(executor, store, sender, replace(sender, adapters=adapters), config)
            cases = [(stage, rule) for stage in range(1, len(versions) + 1) for rule in RULES]
            for stage, rule in cases:  # which warms up
                serving.answer(requests[0], versions[stage - 1], rule)
            for number, asked_request in enumerate(track(requests, desc="prefixes at stages")):
                for stage, rule in rng.sample(cases, len(cases)):
                    request, taken = serving.answer(asked_request, versions[stage - 1], rule)
                    row = {"taken": taken, "ttft_s": request.ttft_s, "said": request.output}
                    answered.setdefault((stage, rule), {})[number] = row
    judge = Judge(load_served(profile).model.to("cpu", torch.float32), tokenizer.decode)
    wanted = [answered[len(versions), OWN][number]["said"] for number in range(len(requests))]
    rows: Rows = []
    for (stage, rule), by_request in track(sorted(answered.items()), desc="judging answers"):
        answers = [by_request[number].pop("said") for number in range(len(requests))]
        judged = judge.of(requests, answers, wanted)
        rows += [
            {"request": number, "stage": stage, "rule": rule, "tokens": len(asked_request["prompt"])}
            | by_request[number]
            | {name: values[number] for name, values in judged.items()}
            for number, asked_request in enumerate(requests)
        ]
    present = [sorted(setting.checkpoint.plan.present(stage)) for stage in range(1, len(versions) + 1)]
    return Outcome(rows, provenance=provenance_of(setting) | {"computed_in": dtype, "present": present})


def stages(folder: Path, dtype: str, blocks: int, readers: int) -> tuple[LiveExecutor, list[StagedModelVersion]]:
    """An executor with so many KV ``blocks``, and all stages of the checkpoint ``folder`` beside each other in it,
    fused as a replica that grows has them one after another."""
    manifest = read_manifest(folder)
    meta_model = MetaModel(folder, manifest, "cpu", named(dtype), build_model)
    views, view = [], meta_model.empty_view()
    for stage in range(1, len(manifest.stages) + 1):
        options = {"threads": readers, "verify": False}
        view = StageLoad(folder, manifest, [stage], [Link(LinkConfig(0.0))], meta_model, view, **options).wait()
        views.append(view)
    views[0].activate(meta_model.model)
    executor, fused = LiveExecutor(meta_model.model, blocks, block_tokens=BLOCK_TOKENS), FusedBeside()
    versions = [StagedModelVersion(meta_model.model, view, PrefillAgain()) for view in views]
    versions[0].decoder.pack_head()
    for version in versions:
        for _ in version.fuse_beside(fused):
            pass
        version.decoder.take_head(versions[0].decoder)
    executor.version = versions[-1]
    return executor, versions


class ServedPrefixes:
    """Answers one request at a time on ``executor``; ``receiver`` takes what ``sender`` has in ``store``."""

    def __init__(
        self, executor: LiveExecutor, store: KVStore, sender: ModelIdentity, receiver: ModelIdentity, config: FiveConfig
    ) -> None:
        self._executor, self._store, self._config = executor, store, config
        self._between = {"sender": sender, "receiver": receiver}

    def answer(self, question: Asked, version: StagedModelVersion, rule: str) -> tuple[Request, int]:
        """The request when it is over, and how many of its tokens were taken from the sender."""
        source, prompt = None, question["prompt"]
        again = RULES[rule](Group(self._config.group_start, self._config.group_end), version.depth)
        if again is not None:
            source = StoredPrefix(self._store, prompt, **self._between, group=again)
        engine = Engine(self._executor, engine_config((CHUNKS,), self._config.token_budget, self._config.running))
        sampling, now = Sampling(question["new_tokens"]), self._executor.now()
        request = engine.submit(prompt, sampling, now, source=source, version=version)
        engine.run()
        return request, source.tokens if source is not None and not request.fell_back else 0


# What the rows say.


def stage_prefixes_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By stage and rule: seconds to the first token, F1 to the whole model's words, and the percentage of answers that
    are its own but for near ties. Beside the stage's own prefill: the share of its seconds, what is lost of F1, and the
    percentage that is kept."""
    summary, near_tie = Summary(), parameters["five_at_once"]["near_tie"]
    frame = frame_of(rows).sort_values("request")
    frame["own"] = frame.shortfall <= near_tie
    measures = {"ttft_s": ("ttft_s", "mean", "s"), "f1": ("f1", "mean", "")}
    measures |= {"own_answers_pct": ("own", "mean", "% of requests", 100)}
    for (stage, rule), rule_rows in frame.groupby(["stage", "rule"], sort=False):
        labels = {"stage": int(stage), "method": rule}
        summary.by(rule_rows, {}, measures, **labels)
        if rule != OWN:
            own_rows = frame[(frame.stage == stage) & (frame.rule == OWN)]
            share = ratio_of_means(rule_rows.ttft_s, own_rows.ttft_s)
            summary.add("ttft_share", share.summary(""), than=OWN, **labels)
            summary.add("f1_lost", paired_bootstrap(own_rows.f1, rule_rows.f1).summary(""), than=OWN, **labels)
            if (own_rows.f1 > 0).sum() >= FEW:  # else draws in which the own prefill is never right have no share
                summary.add(
                    "f1_kept_pct", ratio_of_means(rule_rows.f1, own_rows.f1).summary("%", 100), than=OWN, **labels
                )
    return summary


def stage_rows(result: Result) -> Table:
    """A line for each stage and rule."""
    columns = {
        "first token, s": ("ttft_s", 3),
        "of own prefill's": ("ttft_share", 2, {"than": OWN}),
        "F1 to the whole model's words": ("f1", 2),
        "below own prefill's": ("f1_lost", 2, {"than": OWN}),
        "its own answers, %": ("own_answers_pct", 0),
    }
    for stage, rule in product(range(1, 1 + len(result.provenance["present"])), RULES):
        yield {"stage": stage, "taken": rule} | cells(result.summary, columns, stage=stage, method=rule)
