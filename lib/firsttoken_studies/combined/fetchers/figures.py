"""What notebook 56 shows of starts with fetchers, drawn from a result alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.overlay import name_results, over
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken_studies.combined.borrowed.trial import WHOLE
from firsttoken_studies.combined.fetchers.experiment import floor_name
from firsttoken_studies.combined.fetchers.summary import MODEL, SHARE
from firsttoken_studies.combined.fetchers.trial import FETCHED

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def first_tokens(recorded: Result | None, now: Result) -> Figure:
    """Seconds to the first token by the number of processes, one panel a rate: measured, T / k, and the floor."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    rates = sorted({rate for drawn in results for rate in drawn.result.parameters["fetchers"]["gbit_per_s"]})
    fig, axes = plt.subplots(1, len(rates), figsize=(9, 4.2), squeeze=False)
    for ax, rate in zip(axes[0], rates, strict=True):
        for drawn in results:
            asked, result = drawn.result.parameters["fetchers"], drawn.result
            if rate not in asked["gbit_per_s"]:
                continue
            counts = [1, *sorted(asked["servers"])]
            found = [result.summary.of("ttft_p50_s", **_place(rate, count)) for count in counts]
            for count, entry in zip(counts, found, strict=True):
                drawn.point(ax, count + 0.5 * drawn.shift, entry, "measured")
            paper = [found[0]["value"] / count for count in counts]
            ax.plot(counts, paper, "--", color=COLOURS["paper"], alpha=drawn.style["alpha"])
            floors = [result.floors[floor_name(rate, count)]["value"] for count in counts]
            ax.plot(counts, floors, ":", color=COLOURS["floor"], alpha=drawn.style["alpha"])
            ax.set_xticks(counts if drawn is results[0] else ax.get_xticks())
        ax.set(xlabel="processes", title=f"links of {rate:g} Gbit/s", ylim=(0, None))
    axes[0, 0].set_ylabel("first token after the request, s")
    look = LOOKS["measured"]
    handles = [
        plt.Line2D([], [], color=look.colour, marker=look.marker, linestyle="", label="measured"),
        plt.Line2D([], [], color=COLOURS["paper"], linestyle="--", label="paper: T / k"),
        plt.Line2D([], [], color=COLOURS["floor"], linestyle=":", label="floor: the largest part over its link"),
    ]
    axes[0, -1].legend(handles=handles, loc="lower left", fontsize=8)
    fig.suptitle("k processes that fetch a part each bring the first token in nearly T / k on slow links")
    name_results(fig, results, "ttft_p50_s")
    return fig


def fetch_rows(recorded: Result | None, now: Result) -> Rows:
    """The table of first tokens, of all layers being in the first process, and of bytes, by link and processes."""
    rows: Rows = []
    for drawn in over(recorded, now):
        summary, asked = drawn.result.summary, drawn.result.parameters["fetchers"]
        for rate in asked["gbit_per_s"]:
            whole = summary.of("ttft_p50_s", **_place(rate, 1))
            for count in (1, *asked["servers"]):
                place = _place(rate, count)
                rows.append(
                    {
                        "links and processes": f"{rate:g} Gbit/s, {count}",
                        "paper: T / k, s": f"{whole['value'] / count:.2f}",
                        "measured, s": interval(summary.of("ttft_p50_s", **place), 2),
                        "floor, s": f"{drawn.result.floors[floor_name(rate, count)]['value']:.2f}",
                        "over whole": interval(summary.get("ttft_x", **place, than=WHOLE), 2),
                        "over T / k": interval(summary.get("ttft_x", **place, than=SHARE), 2),
                        "all layers in the first, over whole": interval(
                            summary.get("loaded_x", **place, than=WHOLE), 2
                        ),
                        "bytes over the model's": interval(summary.get("moved_x", **place, than=MODEL), 2),
                        "whose": drawn.who(),
                    }
                )
    return rows


def _place(rate: float, count: int) -> dict[str, str | float | int]:
    if count == 1:
        return {"variant": WHOLE, "gbit_per_s": rate}
    return {"variant": FETCHED, "servers": count, "gbit_per_s": rate}
