"""The scenes measure what they say, on a tiny model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from firsttoken.assets.models import load_model
from firsttoken.engine.accelerator import fuse
from firsttoken_studies.nb60_one_engine.study import OneEngineConfig, over_a_link, shared_prompt, stage_arrives

ASKED = OneEngineConfig(
    rounds=1,
    token_budget=64,
    sessions=4,
    session_tokens=96,
    session_new_tokens=80,
    block_start=2,
    block_end=4,
    stored_tokens=64,
    stored_budget=16,
    beside_tokens=480,
    gbit_per_s=0.01,
    group_start=2,
    group_end=4,
    sharing=4,
    shared_tokens=64,
)


@pytest.fixture(scope="module")
def model():
    return load_model("random:tiny-6", with_tokenizer=False).model


def test_a_stage_arrives(model) -> None:
    rows = stage_arrives(model, replace(ASKED, rounds=2))
    assert [row["round"] for row in rows] == [0, 1]
    for row in rows:
        assert row["gap_s"] >= row["moving_s"] > 0 and row["with_prompt_s"] > 0 and row["decode_s"] > 0


def test_a_prefix_over_a_link(model, tmp_path: Path) -> None:
    (row,) = over_a_link(model, fuse(copy.deepcopy(model)), tmp_path, replace(ASKED, sessions=2))
    assert min(row["alone_s"], row["beside_s"]) > 0.03, "the link is slower than that"
    assert row["tbt_s"] > 0 and row["plain_tbt_s"] > 0


def test_a_shared_prompt(model) -> None:
    rows = shared_prompt(model, ASKED)
    assert {row["shared"]: row["prefilled_tokens"] for row in rows} == {True: 64 + 4, False: 4 * 65}
