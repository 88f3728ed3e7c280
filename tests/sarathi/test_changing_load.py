"""A load that changes: how it is drawn, who is in time, and the experiment at its smallest."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from firsttoken.study.profile import load_profile
from firsttoken_studies.sarathi import changing_load as module
from firsttoken_studies.sarathi.changing_load import ChangingLoad, Phases, changing_load, changing_summary

PAIRS = np.array([[length, 8] for length in range(100, 1100, 10)])


def test_arrivals_follow_the_phases_and_prompts_the_tenants() -> None:
    """So many come in a phase as its factor says, within four standard deviations of a binomial."""
    phases = Phases(rate=10, factors=(0.5, 2.0, 0.5), phase_s=100, heavy=0.2)
    load = ChangingLoad.drawn(PAIRS, phases, seed=3)
    times = np.array([item.arrival_s for item in load.items])
    assert len(times) == phases.count == 3000 and (np.diff(times) >= 0).all()
    counts = np.bincount(phases.phase_at(times), minlength=3)
    shares = np.array([0.5, 2.0, 0.5]) / 3
    assert (np.abs(counts - 3000 * shares) <= 4 * np.sqrt(3000 * shares * (1 - shares))).all()
    prompts = np.array([item.prompt_tokens for item in load.items])
    assert load.heavy.sum() == 600 and prompts[load.heavy].min() >= 990 and prompts[~load.heavy].max() <= 600
    again = ChangingLoad.drawn(PAIRS, phases, seed=3)
    assert again.items == load.items and ChangingLoad.drawn(PAIRS, phases, seed=4).items != load.items


def test_who_is_within_late_and_overtaken() -> None:
    """Three light requests and a heavy one, by hand."""
    config = SimpleNamespace(light_s=2.0, heavy_s=20.0, wait_s=5.0)
    load = SimpleNamespace(heavy=np.array([False, True, False, False]))
    asked = [  # arrival, begun, times
        (0.0, 0.0, [1.0, 1.5, 2.0]),  # all in time
        (0.0, 9.0, [10.0, 10.5, 11.0]),  # heavy: waited nine seconds, and is in time
        (1.0, 6.0, [6.5, 7.0]),  # late, and begun after the heavy one had waited five
        (2.0, 2.0, [3.0, 5.0]),  # its gap is too long
    ]
    requests = [
        SimpleNamespace(arrival_s=at, begun_s=begun, times_s=times, ttft_s=times[0] - at) for at, begun, times in asked
    ]
    served = module._Served(config, load, requests)
    assert served.within(1.0) == 0.5 and served.within(2.0) == 0.75
    assert served.late(0.5) == 0.5 and served.late(1.0) == 0.25
    found = served.measures()
    assert found["overtaken"] == 1 and found["longest_wait_s"] == 9.0
    assert (found["light_ttft_p50_s"], found["heavy_ttft_p50_s"]) == (1.0, 10.0)


def test_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lengths", lambda source: PAIRS)
    chosen = {"rate": 1.0, "phase_s": 4.0, "seeds": 2, "objectives": [5, 25]}
    chosen["schedulers"] = ["sarathi 512", "earliest_due 512", "deadline", "shortest_first 512", "adaptive_budget"]
    profile = load_profile("quick", **{f"changing_load.{key}": value for key, value in chosen.items()})
    outcome = changing_load(profile)
    runs = [row for row in outcome.rows if row["what"] == "run"]
    assert len(runs) == 2 * (3 + 2 * 2), "who knows the objective is run once for each"
    summary = changing_summary(outcome.rows, profile.parameters())
    for times in chosen["objectives"]:
        share = {
            name: [
                r["share"]
                for r in outcome.rows
                if r["what"] == "within" and (r["scheduler"], r["objective"]) == (name, times)
            ]
            for name in chosen["schedulers"]
        }
        best = np.maximum(share["sarathi 512"], share["deadline"])
        above = summary.of("within_points", scheduler="adaptive_budget", than="best rival", objective=times)
        assert above["value"] == pytest.approx(100 * np.mean(share["adaptive_budget"] - best)) and above["n"] == 2
    assert summary.value("overtaken", scheduler="shortest_first", budget_tokens=512) == 0
    assert outcome.provenance["costs"] == "yi-34b-a100"
