"""The scenes measure what they say, on a tiny model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from firsttoken.assets.models import load_model
from firsttoken.droidspeak.prefill import Group
from firsttoken.engine.fused import fuse
from firsttoken_studies.combined.one_engine import over_a_link, shared_prompt, stage_arrives


@pytest.fixture(scope="module")
def model():
    return load_model("random:tiny-6", with_tokenizer=False).model


def test_a_stage_arrives(model) -> None:
    rows = stage_arrives(model, sessions=4, prompt_tokens=96, new_tokens=80, budget=64, rounds=2, block=range(2, 4))
    assert [row["round"] for row in rows] == [0, 1]
    for row in rows:
        assert row["gap_s"] >= row["moving_s"] > 0 and row["with_prompt_s"] > 0 and row["decode_s"] > 0


def test_a_prefix_over_a_link(model, tmp_path: Path) -> None:
    asked = {
        "tokens": 64,
        "group": Group(2, 4),
        "gbit_per_s": 0.01,
        "running": 2,
        "new_tokens": 480,
        "budget": 16,
        "rounds": 1,
    }
    (row,) = over_a_link(model, fuse(copy.deepcopy(model)), tmp_path, **asked)
    assert min(row["alone_s"], row["beside_s"]) > 0.03, "the link is slower than that"
    assert row["tbt_s"] > 0 and row["plain_tbt_s"] > 0


def test_a_shared_prompt(model) -> None:
    rows = shared_prompt(model, requests=4, tokens=64, rounds=1)
    assert {row["shared"]: row["prefilled_tokens"] for row in rows} == {True: 64 + 4, False: 4 * 65}
