"""Titles and panels of Sarathi-Serve's figures follow the runs that they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from firsttoken_studies.nb40_generation_stalls import figures
from firsttoken_studies.record.results import Result, load_result
from firsttoken_studies.record.verdicts import compared


@pytest.mark.parametrize(("value", "other", "word"), [(0.43, 0.6, "sooner"), (0.6, 0.43, "later"), (1, 1, "later")])
def test_a_direction_comes_from_two_numbers(value: float, other: float, word: str) -> None:
    assert compared(value, other, "sooner", "later") == word


def turned(result: Result, *names: str) -> Result:
    """Return the result with the values of two schedulers exchanged."""
    exchanged = dict(zip(names, reversed(names), strict=True))

    def where(labels: dict[str, Any]) -> dict[str, Any]:
        return labels | {"scheduler": exchanged.get(labels.get("scheduler"), labels.get("scheduler"))}

    return replace(
        result, started="later", summary=[entry | {"where": where(entry["where"])} for entry in result.summary]
    )


def test_the_title_of_the_stalls_says_what_the_runs_say() -> None:
    recorded = load_result("generation_stalls", "full", machine="any")
    other = turned(recorded, "sarathi", "prefill_first")
    assert (
        figures.stall_title(None, recorded)
        == "Cutting a long prompt shortens the longest stall: live 65 ms instead of 608"
    )
    assert (
        figures.stall_title(None, other)
        == "Cutting a long prompt lengthens the longest stall: live 608 ms instead of 65"
    )
    assert figures.stall_title(recorded, other).endswith("(in your run it does not)")


def test_a_run_of_another_card_has_a_panel_of_its_own() -> None:
    recorded = load_result("generation_stalls", "full", machine="any")
    card = {"hardware": recorded.parameters["hardware"] | {"costs": "yi-34b-a100"}}
    other = replace(recorded, started="later", parameters=recorded.parameters | card)
    titles = [axes.get_title() for axes in figures.stalls(recorded, other).axes]
    assert titles[1:] == ["simulated, rtx4090-llama-3.1-8b", "simulated, yi-34b-a100"]
