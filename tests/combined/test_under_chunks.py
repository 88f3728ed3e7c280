"""What streams notice of a long prompt is measured as it says, on a tiny model."""

from __future__ import annotations

import pytest

from firsttoken.assets.models import load_model
from firsttoken.engine.async_engine import TokenEvent
from firsttoken.engine.engine import EngineConfig
from firsttoken.study.errors import FirstTokenError
from firsttoken_studies.combined.long_prompt_interference import (
    UnderChunksConfig,
    _between,
    _p99,
    prompt_under_streams,
    under_chunks_summary,
)


@pytest.mark.parametrize("scheduler", ["sarathi", "adaptive_budget", "prefill_first"])
def test_a_prompt_under_streams(scheduler: str) -> None:
    model = load_model("random:tiny-2", with_tokenizer=False).model
    config = EngineConfig(scheduler=scheduler, token_budget=64, requests=8, watermark=0.0, stretch=1.3)
    asked = UnderChunksConfig(streams=6, prompt_tokens=200, plain_tokens=20, budget=64, stretch=1.3, rounds=2)
    rows = prompt_under_streams(model, config, asked)
    assert [(row["round"], row["wrong"]) for row in rows] == [(0, 0), (1, 0)]
    for row in rows:
        assert min(row["ttft_s"], row["beside_tbt_s"], row["plain_tbt_s"]) > 0


def test_the_summary_of_a_run_made_by_hand() -> None:
    times = [{"plain_tbt_s": 0.1, "beside_tbt_s": 0.1 * more, "ttft_s": 2.0, "wrong": 0} for more in (1, 2, 3)]
    summary = under_chunks_summary([{"steps": "fixed"} | row for row in times], {})
    assert summary.value("tbt_p99_x", variant="fixed", case="beside", than="plain") == pytest.approx(2)
    assert summary.value("tbt_p99_ms", variant="fixed", case="plain") == pytest.approx(100)
    assert summary.of("tokens_wrong", variant="fixed")["n"] == 3


def test_a_gap_that_spans_the_whole_time_is_counted() -> None:
    """Where the prompt stops every stream, the gap begins before its arrival and ends after its first token."""
    events = [TokenEvent(0, 0, at_s) for at_s in (0.0, 1.0, 5.0, 6.0)]
    assert list(_between(events, 2.0, 4.0)) == [2]
    assert list(_between(events, 0.5, 5.5)) == [1, 2, 3]
    assert _p99([events], [range(2, 3)]) == 4.0


def test_no_gap_at_all_is_told_in_a_line() -> None:
    with pytest.raises(FirstTokenError, match="there is no gap to measure"):
        _p99([[]], [range(0)])
