"""The experiment at its smallest: both objectives, searched for real on the published batch times."""

from __future__ import annotations

from pathlib import Path

import pytest

from firsttoken.study.errors import CorpusError, ProfileError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb41_serving_capacity.bench import capacity_summary, serving_capacity


def test_both_objectives(tmp_path: Path) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text("num_prefill_tokens,num_decode_tokens\n" + "2000,12\n" * 40)
    chosen = {"lengths": str(table), "requests": 40, "seeds": 1, "objectives": ["strict", "relaxed"], "ablation": []}
    chosen["schedulers"] = ["prefill_first", "sarathi 512", "sarathi 2048", "adaptive_budget"]
    profile = load_profile("quick", **{f"capacity.{key}": value for key, value in chosen.items()})
    outcome = serving_capacity(profile)
    by = {(row["objective"], row["scheduler"]): row for row in outcome.rows}
    iteration_s = outcome.floors["decode_iteration"]["value"]
    for scheduler in chosen["schedulers"]:
        strict, relaxed = (by[objective, scheduler] for objective in chosen["objectives"])
        assert (strict["tbt_s"], relaxed["tbt_s"]) == pytest.approx((5 * iteration_s, 25 * iteration_s))
        assert 0 < strict["requests_per_s"] <= 1.05 * relaxed["requests_per_s"]
        assert relaxed["tbt_p99_s"] <= relaxed["tbt_s"] and relaxed["delay_p50_s"] <= 2.0
    assert by["relaxed", "sarathi 2048"]["requests_per_s"] > by["strict", "sarathi 2048"]["requests_per_s"]
    summary = capacity_summary(outcome.rows, profile.parameters())
    for objective in chosen["objectives"]:
        sarathi = {"scheduler": "sarathi", "budget_tokens": 512, "objective": objective}
        assert summary.value("capacity_x", **sarathi, than="prefill_first") == pytest.approx(
            by[objective, "sarathi 512"]["requests_per_s"] / by[objective, "prefill_first"]["requests_per_s"]
        )
        assert summary.of("capacity_x", scheduler="adaptive_budget", objective=objective, than="best fixed")


def test_an_objective_that_is_none() -> None:
    with pytest.raises(ProfileError, match="capacity: no objective 'lax'; known: strict, relaxed"):
        serving_capacity(load_profile("quick", **{"capacity.objectives": ["lax"]}))


def test_a_card_a_model_and_the_requests_of_a_trace(tmp_path: Path) -> None:
    """The knobs of notebook 41: one's own case in place of the profile's."""
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:{n // 60:02}:{n % 60:02}.0,{6000 + n},40" for n in range(240)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    chosen = {"arrivals": str(trace), "requests": 240, "objectives": ["strict"], "ablation": []}
    chosen["schedulers"] = ["prefill_first", "sarathi 512"]
    asked = {f"capacity.{key}": value for key, value in chosen.items()}
    asked |= {"hardware.costs": "h100-sxm", "hardware.model": "llama-3.1-8b"}
    asked |= {"hardware.layers": 0, "hardware.blocks": 0}  # follow from the model
    first, sarathi = serving_capacity(load_profile("quick", **asked)).rows
    assert 0 < first["requests_per_s"] < sarathi["requests_per_s"]
    with pytest.raises(CorpusError, match=r"other\.csv cannot be read"):
        serving_capacity(load_profile("quick", **asked | {"capacity.arrivals": str(tmp_path / "other.csv")}))
