"""Which split is chosen, and what is said where none can be."""

from __future__ import annotations

import re

import pytest
import torch

from firsttoken.__main__ import main
from firsttoken.progressive.planes.layouts import SPLITS
from firsttoken.progressive.planes.planner import CONSIDERED, Sensitivity, choose, sensitivities
from firsttoken.study.errors import StageError

FOUND = [Sensitivity("4 bits", 0.28, 12.0), Sensitivity("bits", 0.35, 4.0), Sensitivity("8 bits", 0.53, 0.1)]


@pytest.mark.parametrize(
    ("told", "split"),
    [
        ({"budget": 0.36}, "bits"),
        ({"budget": 1.0}, "8 bits"),
        ({"bound": 5.0}, "bits"),
        ({"bound": 20.0}, "4 bits"),
        ({"budget": 0.6, "bound": 5.0}, "8 bits"),
    ],
)
def test_the_least_is_lost_within_a_budget_and_the_least_brought_within_a_bound(told, split):
    assert choose(FOUND, **told).split == split


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"budget": 0.2}, "no first stage comes to 0.2 of the bytes: the least is '4 bits' with 0.280"),
        ({"bound": 0.01}, "loses 0.01 % of perplexity or less: '8 bits' loses least, 0.1 %"),
        ({"budget": 0.3, "bound": 5.0}, "loses 5 % of perplexity or less: '4 bits' loses least, 12.0 %"),
    ],
)
def test_a_plan_beyond_its_budget(told, words):
    with pytest.raises(StageError, match=words):
        choose(FOUND, **told)


def test_more_bits_are_more_bytes_and_lose_less(make_model):
    model = make_model("llama", layers=2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    text = torch.randint(1, 100, (4, 24), generator=torch.Generator().manual_seed(1))
    found = {one.split: one for one in sensitivities(model, text, "BF16")}
    assert set(found) == set(CONSIDERED) < set(SPLITS)
    assert found["4 bits"].first_share < found["6 bits"].first_share < found["8 bits"].first_share < 1
    assert abs(found["8 bits"].lost_pct) < abs(found["4 bits"].lost_pct)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters()), "left as it was"


def test_the_command_line_measures_which_split(tmp_path, capsys):
    """A random model has no text that it knows; it is told so before anything is written."""
    for options, words in (
        (["--planes", "bits", "--budget", "0.4"], "--budget and --most-lost choose a split: add --planes auto"),
        (["--planes", "auto"], "--planes auto needs --budget SHARE, such as 0.36, or --most-lost PERCENT"),
        (["--planes", "auto", "--budget", "0.4", "--set", "model=random:tiny-6"], "random weights say nothing of text"),
    ):
        assert main(["stage", str(tmp_path / "staged"), *options]) == 2
        assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "staged").exists()
    with pytest.raises(SystemExit):
        main(["stage", str(tmp_path / "staged"), "--planes", "auto", "--budget", "1.5"])
