"""What the one engine is held to, side by side in one run: a stage arrives while sessions run, a stored prefix comes
over a link beside running requests, many requests share a prompt."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check
from firsttoken.droidspeak.prefill import Group
from firsttoken.engine.fused import fuse
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.combined.arrival import stage_arrives
from firsttoken_studies.combined.restored import over_a_link
from firsttoken_studies.combined.shared_prompt import shared_prompt

ARRIVAL, LINK, PROMPT = "arrival", "link", "prompt"
MEASURED = {
    "gap_s": ("longest_gap_s", "moving"),
    "moving_s": ("median_gap_s", "moving"),
    "with_prompt_s": ("median_gap_s", "with_prompt"),
    "decode_s": ("median_gap_s", "decode"),
    "alone_s": ("ttft_p50_s", "alone"),
    "beside_s": ("ttft_p50_s", "beside"),
    "tbt_s": ("tbt_p99_s", "beside"),
    "plain_tbt_s": ("tbt_p99_s", "plain"),
}
"""The columns of seconds: what each measures, and in which case."""

_RATIOS = (
    ("longest_gap_x", "gap_s", "with_prompt_s"),
    ("median_gap_x", "moving_s", "with_prompt_s"),
    ("ttft_x", "beside_s", "alone_s"),
    ("tbt_p99_x", "tbt_s", "plain_tbt_s"),
)


@dataclass(frozen=True)
class OneEngineConfig:
    """``rounds`` of each scene, ``token_budget`` tokens a step.

    ``sessions`` with ``session_tokens`` of prompt say ``session_new_tokens``; layers [``block_start``, ``block_end``)
    arrive and half of the sessions move. ``stored_tokens`` come over ``gbit_per_s`` beside as many requests that say
    ``beside_tokens``, layers [``group_start``, ``group_end``) computed again in steps of ``stored_budget`` tokens.
    ``sharing`` requests begin with the same ``shared_tokens``.
    """

    rounds: int
    token_budget: int
    sessions: int
    session_tokens: int
    session_new_tokens: int
    block_start: int
    block_end: int
    stored_tokens: int
    stored_budget: int
    beside_tokens: int
    gbit_per_s: float
    group_start: int
    group_end: int
    sharing: int
    shared_tokens: int

    def needs(self) -> list[Need]:
        """The model has the layers, and the context for the longest request."""
        return [
            Need("one_engine.block_end", self.block_end, LAYERS),
            Need("one_engine.group_end", self.group_end, LAYERS),
            Need("one_engine.session_tokens", self.session_tokens + self.session_new_tokens, CONTEXT),
            Need("one_engine.beside_tokens", self.beside_tokens + 16, CONTEXT),
            Need("one_engine.stored_tokens", self.stored_tokens + 16, CONTEXT),
            Need("one_engine.shared_tokens", self.shared_tokens + 2, CONTEXT),
        ]


@torch.inference_mode()
def one_engine(profile: Profile) -> Outcome:
    """Rows {scene, round, ...} as ``stage_arrives``, ``over_a_link`` and ``shared_prompt`` give them."""
    config = profile.section("one_engine", OneEngineConfig)
    check(config.needs(), ModelFacts(profile.model))

    def loaded() -> PreTrainedModel:
        found = load_model(profile.model, dtype=profile.torch_dtype(), device=profile.torch_device())
        provenance.update(found.provenance.as_dict())
        return found.model

    provenance: dict[str, Any] = {}
    model, served = loaded(), fuse(loaded())
    arrived = stage_arrives(
        model,
        sessions=config.sessions,
        prompt_tokens=config.session_tokens,
        new_tokens=config.session_new_tokens,
        budget=config.token_budget,
        rounds=config.rounds,
        block=range(config.block_start, config.block_end),
    )
    with tempfile.TemporaryDirectory() as folder:
        restored = over_a_link(
            model,
            served,
            Path(folder),
            tokens=config.stored_tokens,
            group=Group(config.group_start, config.group_end),
            gbit_per_s=config.gbit_per_s,
            running=config.sessions,
            new_tokens=config.beside_tokens,
            budget=config.stored_budget,
            rounds=config.rounds,
        )
    shared = shared_prompt(model, requests=config.sharing, tokens=config.shared_tokens, rounds=config.rounds)
    scenes = {ARRIVAL: arrived, LINK: restored, PROMPT: shared}
    return Outcome([{"scene": scene} | row for scene, rows in scenes.items() for row in rows], provenance=provenance)


def one_engine_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Medians over rounds: seconds of every scene, and the ratios that the goals are of."""
    summary, config = Summary(), parameters["one_engine"]
    for measure, column, base in _RATIOS:
        over = [row[column] / row[base] for row in rows if column in row]
        summary.add(measure, _median(over, "x"), case=MEASURED[column][1], than=MEASURED[base][1])
    for column, (measure, case) in MEASURED.items():
        summary.add(measure, _median([row[column] for row in rows if column in row], "s"), case=case)
    for shared, case in ((True, "shared"), (False, "apart")):
        mine = [row for row in rows if row.get("shared") is shared]
        beginnings = [(row["prefilled_tokens"] - config["sharing"]) / config["shared_tokens"] for row in mine]
        summary.add("prefills", _median(beginnings, "prefills"), case=case)
        summary.add("first_tokens_s", _median([row["seconds"] for row in mine], "s"), case=case)
    return summary


def _median(values: list[float], unit: str) -> dict[str, Any]:
    return bootstrap(values, "median").summary(unit)
