from __future__ import annotations

import io
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from firsttoken.study import paths
from firsttoken_studies.record import plot
from firsttoken_studies.record.plot import few_colours

pytestmark = pytest.mark.usefixtures("root")

UNLIKE, TOLD_APART = 0.048, 0.08  # in Oklab, where 0.02 is about the least difference that an eye sees
DRAWN_TOGETHER = (
    ("paper", "measured", "not reproduced", "other"),  # 90
    ("S1", "S2", "S3", "paper", "measured", "floor"),  # 15
    ("none", "report", "ours", "S0", "paper"),  # 12
    ("by perplexity", "none", "ours", "measured", "floor"),  # 14
    ("weights", "other", "configuration", "prefill", "floor"),  # 13
    ("none", "ours", "S0", "measured", "other", "mixed", "sparse"),  # 17
    ("request boundary", "recompute", "boundary states", "droidspeak", "naive", "floor"),  # 16
    ("swap", "recompute", "cross-point", "bandwidth only", "online", "oracle", "floor", "other", "paper"),  # 22, 23
    ("coalesced", "swap", "overlapped", "recompute", "paper", "floor"),  # 21
    ("measured", "other", "single", "floor", "target", "cross-point", "mark"),  # 20, 22, 30, 31
    ("full reuse", "recompute", "droidspeak", "cacheblend", "smaller model", "sender", "paper", "floor"),  # 30, 33
    ("send all", "recompute", "send reused", "droidspeak", "floor", "mark"),  # 32
    ("E-cache", "full reuse", "in vain", "recompute", "mark"),  # 32
    ("droidspeak", "recompute", "floor", "target", "other", "single"),  # 31, 35
    ("paper", "measured", "single", "mark"),  # 52
    ("measured", "recompute"),  # 06
    ("S1", "S3", "measured", "single"),  # 56
    ("sarathi", "prefill first", "hybrid batches", "chunks alone", "other", "mark", "floor", "target"),  # 40, 41
    ("droidspeak", "paper", "target"),  # 33
    ("droidspeak", "recompute", "full reuse", "target"),  # 36
    ("sarathi", "chunks alone", "measured", "paper", "floor"),  # 43
    ("sarathi", "prefill first", "short first", "measured", "other", "target"),  # 45
    ("measured", "prefill", "mark"),  # 02
)
# Machado, Oliveira and Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency, IEEE TVCG 15
# (2009), Table 1, severity 1.0: on linear RGB.
SIGHT = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
# Ottosson, A perceptual color space for image processing (2020): linear sRGB to cones, their cube roots to Lab.
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def oklab(colour: str, sight: np.ndarray) -> np.ndarray:
    """ "#RRGGBB" as it is seen, [L, a, b]."""
    code = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(code <= 0.04045, code / 12.92, ((code + 0.055) / 1.055) ** 2.4)
    return TO_LAB @ np.cbrt(TO_CONES @ np.clip(sight @ linear, 0, 1))


def distance(one: str, two: str, sight: np.ndarray) -> float:
    return float(np.linalg.norm(oklab(plot.COLOURS[one], sight) - oklab(plot.COLOURS[two], sight)))


def draw(name: str) -> dict[str, bytes]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plot.style()
    fig, axes = plt.subplots()
    axes.plot([1, 2], [3, 4], color=plot.COLOURS["measured"], label="measured here")
    axes.legend()
    png = plot.save(fig, name)
    plt.close(fig)
    return {path.suffix: path.read_bytes() for path in (png, png.with_suffix(".svg"))}


def test_a_figure_drawn_twice_is_the_same_file() -> None:
    first, second = draw("a"), draw("b")
    assert first == second
    assert sorted(path.name for path in paths.own_figures().iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]
    svg = first[".svg"].decode()
    assert ">measured here</text>" in svg and "<dc:date>" not in svg
    width, height = (int.from_bytes(first[".png"][at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1050, 600)


def test_few_colours_keep_that_of_a_small_marker() -> None:
    drawn, png = Image.linear_gradient("L").convert("RGB"), io.BytesIO()
    drawn.paste((12, 131, 0), (100, 100, 103, 103))
    drawn.save(png, "PNG")
    few = Image.open(io.BytesIO(few_colours(png.getvalue()))).convert("RGB")
    assert np.abs(np.subtract(few, drawn, dtype=int)).max() < 10


def test_no_colour_means_two_things() -> None:
    assert all(re.fullmatch("#[0-9A-F]{6}", colour) for colour in plot.COLOURS.values())
    apart = {(one, two): distance(one, two, SIGHT["all cones"]) for one, two in combinations(plot.LOOKS, 2)}
    assert {pair: found for pair, found in apart.items() if found < UNLIKE} == {}


@pytest.mark.parametrize("names", DRAWN_TOGETHER, ids=lambda names: names[0])
@pytest.mark.parametrize("sight", SIGHT)
def test_what_is_drawn_together_is_told_apart_by_every_reader(names: tuple[str, ...], sight: str) -> None:
    apart = {(one, two): distance(one, two, SIGHT[sight]) for one, two in combinations(names, 2)}
    assert {pair: found for pair, found in apart.items() if found < TOLD_APART} == {}


def test_distances_of_colours_are_those_of_their_authors() -> None:
    """White is L = 1 in Oklab; without red cones red and green come near; grey stays as it is."""
    assert oklab("#FFFFFF", SIGHT["all cones"]) == pytest.approx([1, 0, 0], abs=1e-3)
    assert oklab("#808080", SIGHT["no green cones"]) == pytest.approx(oklab("#808080", SIGHT["all cones"]), abs=1e-3)
    assert np.linalg.norm(oklab("#FF0000", SIGHT["no red cones"]) - oklab("#00FF00", SIGHT["no red cones"])) < 0.5
    assert np.linalg.norm(oklab("#FF0000", SIGHT["all cones"]) - oklab("#00FF00", SIGHT["all cones"])) > 0.5


def test_a_legend_shows_three_dashes_of_a_dashed_line() -> None:
    """Behind a marker fewer look like a solid line."""
    from matplotlib import rcParams

    plot.style()
    dash, gap = rcParams["lines.dashed_pattern"]
    shown = rcParams["legend.handlelength"] * 9  # of the smallest letters that a legend has, points
    assert shown >= (3 * dash + 2 * gap) * rcParams["lines.linewidth"]


def test_categories_stand_from_the_top_down() -> None:
    _, axes = plot.panels()
    plot.categories(axes, ("whole", "staged", "warm"))
    assert [text.get_text() for text in axes.get_yticklabels()] == ["whole", "staged", "warm"]
    assert (list(axes.get_yticks()), axes.get_ylim()) == ([0, 1, 2], (2.5, -0.5))
    plot.categories(axes, ("whole", "staged"), 0.6)
    assert axes.get_ylim() == (1.4, -0.4)


def test_ticks_stand_where_they_are_asked_alone() -> None:
    fig, axes = plot.panels()
    axes.set_xscale("log")
    plot.ticks(axes.xaxis, (1, 2.5, 16), "{:g} s")
    fig.canvas.draw()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1 s", "2.5 s", "16 s"]
    assert not any(text.get_text() for text in axes.get_xticklabels(minor=True))


def test_an_axis_has_plain_numbers_at_1_2_and_5() -> None:
    fig, axes = plot.panels(figsize=(6, 2))
    axes.set(xscale="log", xlim=(1, 100))
    plot.log_ticks(axes.xaxis)
    fig.canvas.draw()
    shown = [text.get_text() for text in axes.get_xticklabels() if 1 <= text.get_position()[0] <= 100]
    assert shown == ["1", "2", "5", "10", "20", "50", "100"]
    assert not any(text.get_text() for text in axes.get_xticklabels(minor=True))


def test_a_narrow_axis_has_numbers_between_1_and_2() -> None:
    fig, axes = plot.panels(figsize=(6, 2))
    axes.set(xscale="log", xlim=(0.95, 1.5))
    plot.log_ticks(axes.xaxis)
    fig.canvas.draw()
    shown = [text.get_text() for text in axes.get_xticklabels() if 0.95 <= text.get_position()[0] <= 1.5]
    assert shown == ["1", "1.1", "1.2", "1.4"]


def test_figures_take_their_colours_from_the_table() -> None:
    """No module but the table writes a colour of its own, by code or by name; black and white mean nothing."""
    own = re.compile(r'"#[0-9A-Fa-f]{3,8}"|(?:color|colors|edgecolor|facecolor)="(?!black"|white"|none")\w+"')
    library = Path(plot.__file__).parents[2]
    found = {path.name: own.findall(path.read_text(encoding="utf-8")) for path in library.rglob("*.py")}
    assert {name for name, colours in found.items() if colours} == {"plot.py"}


def test_the_comparison_table_shows_what_there_is() -> None:
    table = plot.comparison_table([{"what": "cold start", "paper": 114, "measured": 3.14159, "unit": "s"}])
    assert list(table.columns) == ["paper", "measured", "floor", "unit"]
    assert table.loc["cold start"].tolist() == ["114", "3.14", "", "s"]
    rows = plot.compared(("cold start", 114, 3.14159, "s"), ("one layer", None, 0.2, "s", 0.1))
    assert plot.comparison_table(rows).loc["cold start"].tolist() == table.loc["cold start"].tolist()
    assert plot.comparison_table(rows).loc["one layer"].tolist() == ["", "0.2", "0.1", "s"]
