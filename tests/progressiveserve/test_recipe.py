"""Recipes: the report's values and the arithmetic of their length."""

from __future__ import annotations

import dataclasses

import pytest

from firsttoken.progressiveserve.recipe import OURS, REPORT


def test_the_report_recipe_is_the_report():
    assert (REPORT.rank, REPORT.alpha, REPORT.dropout) == (8, 16, 0.05)
    assert (REPORT.batch, REPORT.accumulate, REPORT.epochs, REPORT.learning_rate) == (4, 16, 3, 2e-4)
    assert set(REPORT.targets) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (REPORT.schedule, REPORT.warmup_steps) == ("linear", 0)
    assert (REPORT.answer_weight, REPORT.text_weight, REPORT.distill_weight, REPORT.text_batch) == (1.0, 0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("questions", "steps"),
    [(1, 1), (21, 1), (22, 1), (43, 2), (64, 3), (511, 23), (640, 30), (87_599, 4_106)],
)
def test_steps_are_three_epochs_of_64_questions_each(questions, steps):
    assert REPORT.total_steps(questions) == steps
    assert abs(steps - 3 * questions / 64) < 1


def test_steps_that_are_given_win():
    assert (OURS.total_steps(1), OURS.total_steps(10**6)) == (OURS.steps, OURS.steps)
    assert dataclasses.replace(REPORT, steps=7).total_steps(640) == 7
