"""One house style for every figure. matplotlib, seaborn and pandas load on first use: measuring needs none of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.study import paths
from firsttoken.study.files import replacing
from firsttoken.study.storage import storing

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

# The colour-blind-safe palette of Okabe and Ito (2008). A colour means the same thing in every figure; stages and
# recipes never share one with paper, measured and recorded, because they are drawn beside each other.
COLOURS = {
    "paper": "#999999",
    "measured": "#0072B2",
    "recorded": "#56B4E9",
    "floor": "#000000",
    "S0": "#4D4D4D",
    "S1": "#E69F00",
    "S2": "#CC79A7",
    "S3": "#009E73",
    "none": "#8B6B4A",
    "report": "#D55E00",
    "ours": "#6A3D9A",
}


def style() -> None:
    """Make ``env/matplotlibrc`` the style of the figures that follow."""
    import matplotlib
    import seaborn

    seaborn.set_theme(style="whitegrid", context="notebook")
    matplotlib.rc_file(paths.ENV / "matplotlibrc")


def save(fig: Figure, name: str) -> Path:
    """Write ``fig`` to figures/``name``.svg and .png without a date, atomically; returns the path of the PNG.

    Raises StorageError.
    """
    png = paths.FIGURES / f"{name}.png"
    for path, metadata in ((png.with_suffix(".svg"), {"Date": None}), (png, {"Software": None})):
        with storing(paths.FIGURES), replacing(path) as temporary:
            fig.savefig(temporary, metadata=metadata)
    return png


def comparison_table(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Table of paper, measured and floor, indexed by what was measured.

    Each row is {"what", "paper", "measured", "floor"} with "recorded" and "unit" if there are any; numbers are shown
    to three significant digits and what is absent as an empty cell.
    """
    import pandas

    columns = ["paper", "recorded", "measured", "floor", "unit"]
    table = pandas.DataFrame(
        [{key: _cell(row.get(key)) for key in ["what", *columns]} for row in rows], columns=["what", *columns]
    ).set_index("what")
    return table[[name for name in columns if name not in ("recorded", "unit") or table[name].any()]]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
