from __future__ import annotations

import re

import pytest

from firsttoken.study import paths, plot

pytestmark = pytest.mark.usefixtures("root")


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
    assert sorted(path.name for path in paths.FIGURES.iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]
    svg = first[".svg"].decode()
    assert ">measured here</text>" in svg and "<dc:date>" not in svg
    width, height = (int.from_bytes(first[".png"][at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1050, 600)


def test_every_colour_is_its_own() -> None:
    assert len(set(plot.COLOURS.values())) == len(plot.COLOURS)
    assert all(re.fullmatch("#[0-9A-F]{6}", colour) for colour in plot.COLOURS.values())


def test_the_comparison_table_shows_what_there_is() -> None:
    table = plot.comparison_table([{"what": "cold start", "paper": 114, "measured": 3.14159, "unit": "s"}])
    assert list(table.columns) == ["paper", "measured", "floor", "unit"]
    assert table.loc["cold start"].tolist() == ["114", "3.14", "", "s"]
