"""Many prompts wait at a replica that starts: when each has its first token, and whether the last layer comes later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from firsttoken.assets.needs import ModelFacts, Need, check, questions_of
from firsttoken.progressiveserve.base_model import ServedConfig, load_base
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.study.parsing.schema import at_least
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.nb13_cold_start.study import disk_speed
from firsttoken_studies.nb18_what_a_draft_is_worth.answer_trial import AnswerSpec
from firsttoken_studies.nb18_what_a_draft_is_worth.first_answers import LAYERS, PLAIN, TRIAL, AnswersConfig, starts_of
from firsttoken_studies.nb18_what_a_draft_is_worth.study import CHAT, DraftsConfig, prompts_of
from firsttoken_studies.progressiveserve.coldstart.checkpoints import checkpoint_root
from firsttoken_studies.progressiveserve.coldstart.harness import one_trial, wire_for
from firsttoken_studies.progressiveserve.coldstart.spec import TrialSpec
from firsttoken_studies.progressiveserve.coldstart.summary import ratio, values
from firsttoken_studies.record.results import Outcome, Rows, rows_where

LATE = ", asked when loaded"


@dataclass(frozen=True)
class BurstConfig:
    """``waiting`` prompts are asked at once, each for ``tokens`` tokens, in each of ``rounds``, over a link of each of
    ``gbit_per_s``; ``split`` is the cut of a weight's bits whose first plane comes first."""

    waiting: Annotated[int, at_least(1)]
    tokens: Annotated[int, at_least(2)]
    rounds: Annotated[int, at_least(1)]
    gbit_per_s: tuple[float, ...]
    split: str


def waiting_burst(profile: Profile) -> Outcome:
    """Every start with the prompts behind its layers, and with prompts that are asked once the last layer is there."""
    config, answers = profile.section("burst", BurstConfig), profile.section("answers", AnswersConfig)
    quality, drafts = profile.section("quality", QualityConfig), profile.section("drafts", DraftsConfig)
    questions = Need("burst.waiting", config.waiting, questions_of(quality.closed_book_questions, "test"))
    check([*profile.section("served", ServedConfig).needs(), questions], ModelFacts(profile.model))
    served = replace(load_base(profile), stored=torch.bfloat16)
    prompts = tuple(map(tuple, prompts_of(CHAT, served, replace(drafts, chats=config.waiting), quality)))
    with checkpoint_root(False) as root:
        starts = starts_of(served, [PLAIN, LAYERS, config.split], root)
    plain = starts[PLAIN]
    read = TrialSpec("read", str(plain.staged), str(plain.stock), "", readers=answers.readers, stages=(1,))
    disk_gbit_per_s = disk_speed(read)
    names = [name + ending for name in (PLAIN, LAYERS, config.split) for ending in ("", LATE)]
    rows: Rows = []
    for rate in config.gbit_per_s:
        wire = wire_for(rate, plain.staged, disk_gbit_per_s)
        for round_ in track(range(config.rounds), desc=f"{config.waiting} prompts, {wire.name}", unit="round"):
            for name in names if round_ % 2 == 0 else names[::-1]:  # a machine that drifts favours nobody
                checkpoint = starts[name.removesuffix(LATE)]
                spec = AnswerSpec(
                    *(name, str(checkpoint.staged), str(checkpoint.stock), ""),
                    readers=answers.readers,
                    prompts=prompts,
                    tokens=config.tokens,
                    late=name.endswith(LATE),
                )
                rows.append(one_trial(spec, wire, module=TRIAL) | {"round": round_})
    return Outcome(rows, provenance=served.provenance)


def burst_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """Summarize by link and start the seconds to the last layer and to the last prompt's first token, the seconds and
    steps between the two, and both times over those of prompts that are asked when the last layer is there."""
    summary = Summary()
    for link, name in dict.fromkeys((row["link"], row["variant"]) for row in rows):
        of_link, labels = rows_where(rows, link=link), {"link": link, "variant": name}
        for column in ("loaded_s", "first_s", "step_s"):
            summary.add(column, bootstrap(values(of_link, name, column), "median").summary("s"), **labels)
        delays = [(row["first_s"] - row["loaded_s"], row["step_s"]) for row in rows_where(of_link, variant=name)]
        summary.add("behind_s", bootstrap([delay_s for delay_s, _ in delays], "median").summary("s"), **labels)
        summary.add(
            "behind_steps",
            bootstrap([delay_s / step_s for delay_s, step_s in delays], "median").summary("steps"),
            **labels,
        )
        if not name.endswith(LATE):
            for measure, column in (("loaded_x", "loaded_s"), ("first_x", "first_s")):
                summary.add(measure, ratio(of_link, name, name + LATE, column).summary("x"), **labels)
    return summary
