"""A person before a notebook: all cells run, a slider is moved, a line of the mechanism is changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from lab import opened

pytestmark = pytest.mark.skipif(
    not shutil.which("chromedriver"), reason="no browser here: apt install chromium chromium-driver"
)
pytest.importorskip("selenium", reason="not in .venv-clients: run tests/run.sh --clients")
SLIDER, CHANGE = "slider.turn(", "def recovers("  # what stands in the two cells


def test_a_slider_moves_a_picture_and_a_changed_line_its_output(tmp_path: Path) -> None:
    """With FIRSTTOKEN_SHOTS a picture of the notebook is left there."""
    with opened("23", tmp_path) as lab:
        lab.run_all()
        drawn, told = lab.picture(SLIDER), lab.outputs(CHANGE).text.splitlines()
        assert lab.turn(SLIDER, steps=3) == "40"
        lab.page.browser.save_screenshot(str(Path(os.environ.get("FIRSTTOKEN_SHOTS", tmp_path)) / "slider.png"))
        assert lab.turn(SLIDER, steps=-3) == "25"
        assert lab.picture(SLIDER) == drawn
        lab.rewrite('"explore=0": online(explore=0.0),', '"explore=0": online(explore=0.5),')
        lab.run_all()
        again = lab.outputs(CHANGE).text.splitlines()
        assert again[0] == told[0] and again[1] != told[1], "the changed line says something else"
