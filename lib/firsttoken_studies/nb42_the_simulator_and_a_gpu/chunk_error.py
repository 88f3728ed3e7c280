"""What the attention of a chunk behind a prefix takes: three ways to reckon it from a table whose prompts begin with an
empty cache, held against profiles of the same card that have prefixes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from firsttoken.assets.dense_shape import SHAPES
from firsttoken.assets.manual_downloads import downloaded
from firsttoken.simulation.costs.operator_tables import CONTEXT, Curve, OperatorTables, tables_from
from firsttoken.simulation.costs.profiled import GRID
from firsttoken.simulation.costs.tables import number, rows
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.summary import Summary
from firsttoken_studies.nb46_on_the_stated_gpus.operator_error import add_errors
from firsttoken_studies.record.cell_mechanism import is_changed
from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import log_ticks, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of, rows_where
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIFFERENCE, WAVES = "two rows of the table", "waves of tiles"
WAYS = {DIFFERENCE: "difference_us", WAVES: "waves_us"}
HELD_OUT, SEEN = "held out", "seen"
PROFILED = "profile"
_SERIES = {  # in the figure: the look, the dashes, the marker and the name
    WAYS[DIFFERENCE]: ("other", "--", "", DIFFERENCE),
    WAYS[WAVES]: ("ours", "-", "", WAVES),
    "profiled_us": ("measured", "", "o", "profiled inside vLLM"),
}
_POINTS = ("prefix", "profiled_us", *WAYS.values())  # the columns of a row that are lists
_BANDS = ((1, 256), (257, 1024), (1025, math.inf))  # tokens of a chunk, and of a prefix


@dataclass(frozen=True)
class ChunkErrorConfig:
    """``profiles`` of "FOLDER MODEL GPUS": brought profiles of one GPU's share of a model on ``card``; what the second
    way assumes was found with the first of them in view.

    A thread block of the attention kernel takes ``tile`` queries of a head, and ``processors`` of them run at once: the
    streaming multiprocessors that the card's data sheet states.
    """

    profiles: tuple[str, ...]
    card: str
    tile: int
    processors: int

    def __post_init__(self) -> None:
        if min(self.tile, self.processors) < 1:
            raise ProfileError("chunk_error: tile and processors must be at least 1")
        if len(set(self.profiles)) < len(self.profiles) or not self.profiles:
            raise ProfileError("chunk_error: name at least one profile, and each once")


def chunk_error(profile: Profile) -> Outcome:
    """Rows {model, gpus, seen, chunk, prefix, profiled_us, difference_us, waves_us}, the last four lists [points]:
    microseconds of one layer."""
    config = profile.section("chunk_error", ChunkErrorConfig)
    tables = OperatorTables.read(config.card)
    rows: Rows = []
    for text in config.profiles:
        folder, model, gpus = _named(text)
        heads, prompts = of_share(tables, model, gpus)
        labels = {"model": model, "gpus": gpus, "seen": SEEN if text == config.profiles[0] else HELD_OUT}
        by_chunk: dict[int, Rows] = {}
        for chunk, prefix, profiled_us in behind_prefixes(folder):
            difference_s = by_difference(prompts, prefix, chunk)
            waves_s = by_waves(prompts, heads, prefix, chunk, config.tile, config.processors)
            point = {"difference_us": round(1e6 * difference_s, 2), "waves_us": round(1e6 * waves_s, 2)}
            by_chunk.setdefault(chunk, []).append({"prefix": prefix, "profiled_us": profiled_us} | point)
        for chunk, points in by_chunk.items():
            rows.append(labels | {"chunk": chunk} | {name: [point[name] for point in points] for name in points[0]})
    return Outcome(rows, provenance={"kind": "arithmetic on measured operators", "costs": tables_from()})


def of_share(tables: OperatorTables, model: str, gpus: int) -> tuple[int, Curve]:
    """Return the heads of one GPU's share of ``model``, and the attention of prompts that begin with an empty cache."""
    shape = SHAPES[model]
    heads, kv_heads = shape.heads // gpus, max(shape.kv_heads // gpus, 1)
    return heads, tables.attention(CONTEXT, heads, kv_heads, shape.head_dim, "bfloat16")[1]


WavesRule: TypeAlias = Callable[[Curve, int, int, int, int, int], float]
"""A function of (prompts, heads, prefix, chunk, tile, processors): the seconds of one layer's attention."""


def counted_by(recorded: Result, waves: WavesRule) -> Result:
    """Return the ``recorded`` result, and with it, where ``waves`` is a reader's changed rule, the same points by it.

    The profiles are not needed for that: their points are in the record.
    """
    result, config = replace(recorded), recorded.parameters["chunk_error"]
    if is_changed(waves):
        rows, tables = [], OperatorTables.read(config["card"])
        for row in recorded.rows:
            heads, prompts = of_share(tables, row["model"], row["gpus"])
            kernel = config["tile"], config["processors"]
            counted = [1e6 * waves(prompts, heads, prefix, row["chunk"], *kernel) for prefix in row["prefix"]]
            rows.append(row | {"waves_us": counted})
        changed = replace(recorded, rows=rows, summary=chunk_summary(rows, recorded.parameters))
        object.__setattr__(result, "with_mechanism", changed)
    return result


def _named(text: str) -> tuple[str, str, int]:
    """The folder, the model and the number of GPUs of "FOLDER MODEL GPUS". Raises ProfileError for another text."""
    words = text.split()
    if len(words) != 3 or words[1] not in SHAPES or not words[2].isdigit() or int(words[2]) < 1:
        raise ProfileError(
            f"chunk_error: {text!r} is no profile; write FOLDER MODEL GPUS, the model of {', '.join(SHAPES)}"
        )
    return words[0], words[1], int(words[2])


def behind_prefixes(folder: str) -> list[tuple[int, int, float]]:
    """(chunk, prefix, microseconds of a layer's attention) of the profile ``folder`` wherever nothing decodes.

    Raises CorpusError for a table that cannot be read, ProfileError for one without such a point.
    """
    path = downloaded(folder) / "attention.csv"
    points = []
    for line, row in rows(path, (*GRID, "time_us")):
        chunk, prefix, decodes, _ = (int(number(path, line, row, name)) for name in GRID)
        if chunk and prefix and not decodes:
            points.append((chunk, prefix, number(path, line, row, "time_us", least=1e-3)))
    if not points:
        raise ProfileError(
            f"chunk_error: {path} has no chunk behind a prefix; take a profile that was made with prefixes"
        )
    return points


def by_difference(prompts: Curve, prefix: int, chunk: int) -> float:
    """Seconds of a whole prompt up to the chunk's end less those of one up to its beginning, at least the least
    kernel's, as :class:`~firsttoken.simulation.costs.operator_costs.OperatorCosts` has it."""
    sizes, seconds = prompts
    upto, before = (
        float(np.interp(tokens, sizes, seconds) * max(1.0, tokens / sizes[-1]) ** 2)
        for tokens in (prefix + chunk, prefix)
    )
    return max(upto - before, float(seconds[0]))


def by_waves(prompts: Curve, heads: int, prefix: int, chunk: int, tile: int, processors: int) -> float:
    """Return the seconds of the thread blocks of a chunk, ``processors`` of them at once, each of which reads all keys
    before it.

    The time of a block for a key is that of the longest prompt of the table, whose many blocks keep every processor
    busy. A chunk of one tile keeps ``heads`` processors busy, and takes as long as one of as many tiles as fill them.
    It takes no less than by two rows of the table.
    """
    sizes, seconds = prompts
    longest = float(sizes[-1])
    key_s = float(seconds[-1]) / (heads * longest / tile / processors) / (longest / 2)
    waves = math.ceil(math.ceil(chunk / tile) * heads / processors)
    counted_s = float(seconds[0]) + waves * (prefix + chunk / 2) * key_s
    return max(counted_s, by_difference(prompts, prefix, chunk))


def chunk_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The error of each way in %: median, 90th percentile and mean, of all points that were held out and of those that
    were seen, by model and GPUs, and by bands of chunk and prefix."""
    summary, points = Summary(), frame_of(rows).explode(list(_POINTS), ignore_index=True)
    cases = {name: points[points.seen == name] for name in (SEEN, HELD_OUT)}
    cases |= {
        f"{model} on {gpus}": model_points
        for (model, gpus), model_points in points.groupby(["model", "gpus"], sort=False)
    }
    for chunk, prefix in product(_BANDS, _BANDS):
        within = points.chunk.between(*chunk) & points.prefix.between(*prefix)
        cases[f"chunks {_told(chunk)}, prefixes {_told(prefix)}"] = points[within]
    for case, chosen in cases.items():
        for way, column in WAYS.items() if len(chosen) else ():
            off = 100 * (chosen[column] / chosen.profiled_us - 1).astype(float)
            add_errors(summary, "attention_off_pct", off, case=case, costs=way, than=PROFILED)
    return summary


def _told(band: Sequence[float]) -> str:
    low, high = band
    return f"up to {high:,}" if low == 1 else f"{low:,} to {high:,}" if high < math.inf else f"from {low:,}"


def chunk_rows(result: Result) -> Table:
    """A line a case: how many points it has, and how far each way is off."""
    for case in dict.fromkeys(entry["where"]["case"] for entry in result.summary):
        line: dict[str, Any] = {"points": case}
        for way in WAYS:
            cells = {
                across: result.summary.of("attention_off_pct", case=case, costs=way, than=PROFILED, across=across)
                for across in ("median", "p90", "mean")
            }
            line["n"] = cells["median"]["n"]
            line[f"{way}, median %"] = interval(cells["median"], 0)
            line[f"{way}, p90 %"] = f"{cells['p90']['value']:.0f}"
            line[f"{way}, mean %"] = f"{cells['mean']['value']:+.0f}"
        yield line


def by_chunk(recorded: Result | None, now: Result) -> Figure:
    """Draw behind one long prefix what a chunk takes by its size: as profiled, and by both ways, a panel a profile."""
    results = over(recorded, now)
    profiles = list(dict.fromkeys((row["model"], row["gpus"], row["seen"]) for row in now.rows))
    shared = Counter(prefix for row in now.rows for prefix in row["prefix"])
    behind = max(shared, key=lambda prefix: (shared[prefix], prefix))
    fig, axes = panels(1, len(profiles), figsize=(9, 3.9), sharey=True, squeeze=False)
    for ax, (model, gpus, status) in zip(axes[0], profiles, strict=True):
        for shown, (column, (look, dashes, marker, name)) in product(results, _SERIES.items()):
            rows = rows_where(shown.result.rows, model=model, gpus=gpus, seen=status)
            points = {row["chunk"]: row[column][row["prefix"].index(behind)] for row in rows if behind in row["prefix"]}
            if not shown.library or column == WAYS[WAVES]:
                label, times = None if shown.library else name, [{"value": us} for us in points.values()]
                shown.line(ax, list(points), times, look, linestyle=dashes, marker=marker, ms=4, label=label)
        ax.set(xscale="log", yscale="log", xlabel="tokens of the chunk", title=f"{model}\non {gpus}, {status}")
        ax.title.set_fontsize("small")
        log_ticks(ax.yaxis)
    axes[0][0].set_ylabel(f"us of a layer, behind {behind:,} tokens")
    off = [now.summary.value("attention_off_pct", case=SEEN, costs=way, than=PROFILED, across="median") for way in WAYS]
    fig.suptitle(
        f"A chunk behind a prefix: half of the points within {off[1]:.0f} % in waves, {off[0]:.0f} % by two rows"
    )
    legend(fig, axes[0][0], results, size="small")
    return fig
