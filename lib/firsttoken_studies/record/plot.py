"""One house style for every figure. matplotlib, seaborn and pandas load on first use: measuring needs none of them."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from firsttoken.study import paths
from firsttoken.study.files import replacing
from firsttoken.study.progress import kernel
from firsttoken.study.storage import storing

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.axis
    import matplotlib.figure
    import pandas
    from matplotlib.lines import Line2D

Axes: TypeAlias = "matplotlib.axes.Axes"
Axis: TypeAlias = "matplotlib.axis.Axis"
Figure: TypeAlias = "matplotlib.figure.Figure"


class SeriesStyle(NamedTuple):
    """``colour`` as "#RRGGBB"; ``marker`` as matplotlib names it, "" for what is a line or an area."""

    colour: str
    marker: str = ""


LOOKS: dict[str, SeriesStyle] = {
    # in every figure
    "paper": SeriesStyle("#999999", "|"),
    "measured": SeriesStyle("#0072B2", "o"),
    "single": SeriesStyle("#56B4E9", "."),  # one observation behind a measured value
    "floor": SeriesStyle("#000000"),
    "your mechanism": SeriesStyle("#F0208A"),  # a ring around what the reader's changed cell does
    "target": SeriesStyle("#CC2200"),  # a number that somebody asks for: a goal, a bound
    # what stands beside: controls, other people's systems, choices that were not taken
    "other": SeriesStyle("#BBBBBB", "s"),
    "not reproduced": SeriesStyle("#A93807", "X"),  # a claim
    "mark": SeriesStyle("#333333"),  # a moment, a place, an interval over a bar
    # stages, and what heals them
    "S0": SeriesStyle("#4D4D4D", "o"),
    "S1": SeriesStyle("#E69F00", "o"),
    "S2": SeriesStyle("#CC83DA", "o"),
    "S3": SeriesStyle("#009C4D", "o"),
    "none": SeriesStyle("#836049", "o"),
    "report": SeriesStyle("#D55E00", "s"),
    "ours": SeriesStyle("#633791", "D"),
    "by perplexity": SeriesStyle("#3FA9C9", "s"),
    # which bits wait
    "mixed": SeriesStyle("#F07800", "P"),
    "sparse": SeriesStyle("#6C84FC", "X"),
    # phases of a cold start
    "configuration": SeriesStyle("#BACF67"),
    "weights": SeriesStyle("#330E6F"),
    "prefill": SeriesStyle("#00A699"),
    # what becomes of keys and values: everything is computed again, whoever says so
    "recompute": SeriesStyle("#BB5566", "s"),
    "request boundary": SeriesStyle("#1F720F", "o"),
    "boundary states": SeriesStyle("#9F9700", "^"),
    "naive": SeriesStyle("#DB797F", "X"),
    "swap": SeriesStyle("#004488", "o"),
    "coalesced": SeriesStyle("#579BE2", "^"),
    "overlapped": SeriesStyle("#9C8000", "v"),
    "cross-point": SeriesStyle("#D8B365", "D"),
    "bandwidth only": SeriesStyle("#A22158", "v"),
    "online": SeriesStyle("#0C8300", "^"),
    "oracle": SeriesStyle("#9E59FE", "*"),
    # another model's cache
    "full reuse": SeriesStyle("#C9BA00", "^"),
    "droidspeak": SeriesStyle("#002F8F", "o"),
    "cacheblend": SeriesStyle("#B740A1", "D"),
    "smaller model": SeriesStyle("#663333", "v"),
    "sender": SeriesStyle("#65C994", "P"),
    "send all": SeriesStyle("#896800", "^"),
    "send reused": SeriesStyle("#7295BC", "v"),
    "E-cache": SeriesStyle("#4FAC62"),
    "in vain": SeriesStyle("#F3E3BC"),
    # who fills a step
    "sarathi": SeriesStyle("#0F7967", "o"),
    "prefill first": SeriesStyle("#9699FD", "s"),
    "hybrid batches": SeriesStyle("#84B800", "^"),
    "chunks alone": SeriesStyle("#3E4E7A", "v"),
    "short first": SeriesStyle("#3F0451", "D"),
}
"""Who or what is drawn, with the one colour and marker that it has in every figure: no colour means two things. Those
that stand in one figure differ for readers without red or green cones, too (``tests/study/test_plot.py``)."""

COLOURS: dict[str, str] = {name: look.colour for name, look in LOOKS.items()}


def style() -> None:
    """Make ``env/matplotlibrc`` the style of the figures that follow, and in a notebook show them in it.

    The backend is chosen here and not by ``MPLBACKEND``: that of a batch system shows nothing in a notebook.
    """
    import matplotlib
    import seaborn

    if shell := kernel():
        shell.enable_matplotlib("inline")
    seaborn.set_theme(style="whitegrid", context="notebook")
    matplotlib.rc_file(paths.ENV / "matplotlibrc")


def categories(ax: Axes, names: Collection[str], margin: float = 0.5, **text: Any) -> None:
    """Name the places 0, 1, ... of the vertical axis, the first on top, with ``margin`` above it and below the last."""
    ax.set_yticks(range(len(names)), list(names), **text)
    ax.set_ylim(len(names) - margin, margin - 1)


def ticks(axis: Axis, places: Collection[float], text_format: str = "{:g}", **text: Any) -> None:
    """Set the ticks of ``axis`` at ``places`` alone, each as the format ``text_format`` writes it."""
    axis.set_ticks(list(places), [text_format.format(position) for position in places], **text)
    axis.set_minor_formatter("")


def save(fig: Figure, name: str) -> Path:
    """Write ``fig`` as ``name``.png and .svg without a date into the folder of this run's figures, atomically; returns
    the path of the PNG. In a notebook the figure is shown, and closed.

    Raises StorageError.
    """
    folder = paths.own_figures()
    png = folder / f"{name}.png"
    for path, metadata in ((png, {"Software": None}), (png.with_suffix(".svg"), {"Date": None})):
        with storing(folder), replacing(path) as temporary:
            fig.savefig(temporary, metadata=metadata)
            if path == png:
                temporary.write_bytes(few_colours(temporary.read_bytes()))
        fig.set_layout_engine("none")  # found once; to look again takes longer than to draw, here and where it is shown
    if kernel():
        import matplotlib.pyplot
        from IPython.display import display

        display(fig)
        matplotlib.pyplot.close(fig)  # else a backend of notebooks shows it at the end of the cell once more
    return png


_FEW = 64  # colours of a file: a third of the bytes, for a slightly other hue of pale bands


def few_colours(png: bytes) -> bytes:
    """Return the picture on white with a palette of ``_FEW`` colours; pure, so that a figure drawn twice is one file.

    The palette covers all colours of the picture. Pillow's usual one is made for the colours that most pixels have and
    leaves out that of a small marker: it drew a green triangle black.
    """
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGBA")
    flat = Image.new("RGB", image.size, "white")
    flat.paste(image, mask=image.getchannel("A"))
    small = io.BytesIO()
    few = flat.quantize(_FEW, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return small.getvalue()


def panels(rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes, with the ``options`` of ``matplotlib.pyplot.subplots``."""
    import matplotlib.pyplot

    return matplotlib.pyplot.subplots(rows, columns, **options)


def handle(**style: Any) -> Line2D:
    """A line or a mark by itself, for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def log_ticks(axis: Axis) -> None:
    """Plain numbers at 1, 2 and 5 times each power of ten, and nothing between them; an axis on which hardly two of
    these lie has one for each tenth to fifth part."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 2.5 * low else (1, 1.1, 1.2, 1.4, 1.7, 2, 2.5, 4, 7, 9)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def comparison_table(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return the table of paper, measured and floor, indexed by what was measured.

    Each row is {"what", "paper", "measured", "floor"} with "recorded" and "unit" if there are any; numbers are shown to
    three significant digits and absent values as empty cells.
    """
    import pandas

    columns = ["paper", "recorded", "measured", "floor", "unit"]
    table = pandas.DataFrame(
        [{key: _cell(row.get(key)) for key in ["what", *columns]} for row in rows], columns=["what", *columns]
    ).set_index("what")
    return table[[name for name in columns if name not in ("recorded", "unit") or table[name].any()]]


def compared(*lines: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of a comparison table, each of what is compared, the paper's number, the one measured, the unit, and the
    floor where there is one."""
    return [dict(zip(("what", "paper", "measured", "unit", "floor"), line, strict=False)) for line in lines]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
