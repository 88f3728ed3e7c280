"""What streams notice of a long prompt is measured as it says, on a tiny model."""

from __future__ import annotations

import pytest

from firsttoken.assets.models import load_model
from firsttoken.engine.config import EngineConfig
from firsttoken.together.under_chunks import prompt_under_streams


@pytest.mark.parametrize("scheduler", ["sarathi", "adaptive_budget"])
def test_a_prompt_under_streams(scheduler: str) -> None:
    model = load_model("random:tiny-2", with_tokenizer=False).model
    config = EngineConfig(scheduler=scheduler, token_budget=64, requests=8, watermark=0.0, stretch=1.3)
    rows = prompt_under_streams(model, config, streams=6, prompt_tokens=200, plain_tokens=20, rounds=2)
    assert [(row["round"], row["wrong"]) for row in rows] == [(0, 0), (1, 0)]
    for row in rows:
        assert min(row["ttft_s"], row["beside_tbt_s"], row["plain_tbt_s"]) > 0
