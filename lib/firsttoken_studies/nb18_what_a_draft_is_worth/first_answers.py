"""When the whole model's first answer is there, of starts that wait for all bytes and of those that draft meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from firsttoken.assets.needs import ModelFacts, check
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, load_base, load_served
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.progressiveserve.samples import STOP
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import at_least
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_extras.bitplanes.plane_plan import plane_after_plane
from firsttoken_studies.nb13_cold_start.study import disk_speed
from firsttoken_studies.nb18_what_a_draft_is_worth.answer_trial import AnswerSpec
from firsttoken_studies.nb18_what_a_draft_is_worth.study import CHAT, CODE, SHORT, DraftsConfig, prompts_of
from firsttoken_studies.progressiveserve.coldstart.checkpoints import (
    Checkpoint,
    bare_checkpoint,
    checkpoint_root,
    planes_checkpoint,
    whole_checkpoint,
)
from firsttoken_studies.progressiveserve.coldstart.harness import one_trial, wire_for
from firsttoken_studies.progressiveserve.coldstart.spec import TrialSpec
from firsttoken_studies.progressiveserve.coldstart.summary import ratio, values
from firsttoken_studies.record.results import Outcome, Rows, distinct, rows_where

PLAIN, LOSSLESS, LAYERS, WAITS = "whole", "lossless", "layers", ", no drafts"
TRIAL = "firsttoken_studies.nb18_what_a_draft_is_worth.answer_trial"


@dataclass(frozen=True)
class AnswersConfig:
    """``starts`` prompts of each task, each asked of each of ``variants`` over a link of ``gbit_per_s``: ``whole``,
    ``layers``, ``lossless`` or a cut of a weight's bits whose first plane drafts; ``, no drafts``: a control."""

    variants: tuple[str, ...]
    starts: Annotated[int, at_least(1)]
    gbit_per_s: Annotated[float, at_least(0)]
    readers: Annotated[int, at_least(1)]

    def __post_init__(self) -> None:
        if PLAIN not in self.variants:
            raise ProfileError(f"answers.variants: {PLAIN} is missing, which the others are held against")


def first_answers(profile: Profile) -> Outcome:
    """Each prompt's answer by a plain start, by one whose bytes are coded without loss, and by stages of layers and of
    bits that draft. The control's prompt follows the layers, too, and nothing is drafted. All wait from the moment the
    server starts."""
    config, drafts = profile.section("answers", AnswersConfig), profile.section("drafts", DraftsConfig)
    quality = profile.section("quality", QualityConfig)
    check([*profile.section("served", ServedConfig).needs(), *drafts.needs(quality)], ModelFacts(profile.model))
    rows: Rows = []
    for task, load in {CHAT: load_base, CODE: load_base, SHORT: load_served}.items():
        served = replace(load(profile), stored=torch.bfloat16)  # whose bits the splits cut
        tokenizer = served.tokenizer
        if not (prompts := prompts_of(task, served, drafts, quality)[: config.starts]):
            continue
        tokens = drafts.short_tokens if task == SHORT else drafts.chat_tokens
        stop = (tokenizer.eos_token_id, *([tokenizer.encode(STOP)[-1]] if task == SHORT else []))
        with checkpoint_root(False) as root:
            starts = starts_of(served, {name.removesuffix(WAITS) for name in config.variants}, root)
        plain = starts[PLAIN]
        read = TrialSpec("read", str(plain.staged), str(plain.stock), "", readers=config.readers, stages=(1,))
        wire = wire_for(config.gbit_per_s, plain.staged, disk_speed(read))
        for round_, ids in enumerate(track(prompts, desc=f"{task}, {wire.name}", unit="prompt")):
            for name in config.variants[:: -1 if round_ % 2 else 1]:  # a machine that drifts favours nobody
                checkpoint = starts[name.removesuffix(WAITS)]
                spec = AnswerSpec(
                    *(name, str(checkpoint.staged), str(checkpoint.stock), ""),
                    readers=config.readers,
                    prompts=(tuple(ids),),
                    tokens=tokens,
                    stop=stop,
                    drafts=not name.endswith(WAITS),
                )
                rows.append(one_trial(spec, wire, module=TRIAL) | {"task": task, "round": round_})
        provenance = served.provenance
    return Outcome(rows, provenance=provenance)


def starts_of(served: ServedModel, names: Collection[str], root: Path) -> dict[str, Checkpoint]:
    """The checkpoints of ``served`` that are started, by name: whole, by layers, or by the planes of a cut."""
    by_name = {PLAIN: whole_checkpoint, LAYERS: bare_checkpoint}
    planes = {name: planes_checkpoint(served, name, plane_after_plane, root) for name in names if name not in by_name}
    return planes | {name: by_name[name](served) for name in names if name in by_name}


def answers_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """Summarize by task and start the seconds to the final answer's first and last token, over the plain start's and
    the losslessly coded one's, and whether all starts gave the same answers."""
    summary = Summary()
    for task in distinct(rows, "task"):
        of_task = rows_where(rows, task=task)
        plain = {row["round"]: row["tokens"] for row in rows_where(of_task, variant=PLAIN)}
        for name in distinct(of_task, "variant"):
            labels = {"variant": name, "task": task}
            for column in ("first_s", "answer_s"):
                summary.add(column, bootstrap(values(of_task, name, column), "median").summary("s"), **labels)
            shares = [100 * row["kept"] / max(1, row["drafted"]) for row in rows_where(of_task, variant=name)]
            summary.add("kept_pct", bootstrap(shares).summary("% of a draft"), **labels)
            same = all(row["tokens"] == plain[row["round"]] for row in rows_where(of_task, variant=name))
            summary.add("same_answers", {"value": same, "unit": "token by token, in every start"}, **labels)
            for base in (PLAIN, LOSSLESS):
                if base != name and rows_where(of_task, variant=base):
                    of_answer = ratio(of_task, name, base, "answer_s").summary("x")
                    summary.add("answer_x", of_answer, **labels, than=base)
    return summary
