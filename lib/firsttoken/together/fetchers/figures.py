"""What notebook 56 shows of starts with fetchers, drawn from a result alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.together.borrowed.trial import WHOLE
from firsttoken.together.fetchers.experiment import floor_name
from firsttoken.together.fetchers.summary import MODEL, SHARE
from firsttoken.together.fetchers.trial import FETCHED

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def first_tokens(result: Result) -> Figure:
    """Seconds to the first token by the number of processes, one panel a rate: measured, T / k, and the floor."""
    import matplotlib.pyplot as plt

    asked = result.parameters["fetchers"]
    rates, counts = sorted(asked["gbit_per_s"]), [1, *sorted(asked["servers"])]
    fig, axes = plt.subplots(1, len(rates), figsize=(3.1 * len(rates) + 1.2, 4), squeeze=False)
    look = LOOKS["measured"]
    for ax, rate in zip(axes[0], rates, strict=True):
        found = [result.summary.of("ttft_p50_s", **_place(rate, count)) for count in counts]
        middle = [entry["value"] for entry in found]
        ends = [[at - entry["low"] for at, entry in zip(middle, found, strict=True)]]
        ends.append([entry["high"] - at for at, entry in zip(middle, found, strict=True)])
        ax.errorbar(counts, middle, ends, color=look.colour, marker=look.marker, capsize=3, label="measured")
        ax.plot(counts, [middle[0] / k for k in counts], "--", color=COLOURS["paper"], label="paper: T / k")
        floors = [result.floors[floor_name(rate, count)]["value"] for count in counts]
        ax.plot(counts, floors, ":", color=COLOURS["floor"], label="floor: the largest part over its link")
        ax.set(xlabel="processes", title=f"links of {rate:g} Gbit/s", xticks=counts, ylim=(0, None))
    axes[0, 0].set_ylabel("first token after the request, s")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    return fig


def fetch_rows(result: Result) -> Rows:
    """The table of first tokens, of all layers being in the first process, and of bytes, by link and processes."""
    summary, rows = result.summary, []
    asked = result.parameters["fetchers"]
    for rate in asked["gbit_per_s"]:
        whole = summary.of("ttft_p50_s", **_place(rate, 1))
        for count in (1, *asked["servers"]):
            place = _place(rate, count)
            rows.append(
                {
                    "links and processes": f"{rate:g} Gbit/s, {count}",
                    "paper: T / k, s": f"{whole['value'] / count:.2f}",
                    "measured, s": interval(summary.of("ttft_p50_s", **place), 2),
                    "floor, s": f"{result.floors[floor_name(rate, count)]['value']:.2f}",
                    "over whole": interval(summary.get("ttft_x", **place, than=WHOLE), 2),
                    "over T / k": interval(summary.get("ttft_x", **place, than=SHARE), 2),
                    "all layers in the first, over whole": interval(summary.get("loaded_x", **place, than=WHOLE), 2),
                    "bytes over the model's": interval(summary.get("moved_x", **place, than=MODEL), 2),
                }
            )
    return rows


def _place(rate: float, count: int) -> dict[str, str | float | int]:
    if count == 1:
        return {"variant": WHOLE, "gbit_per_s": rate}
    return {"variant": FETCHED, "servers": count, "gbit_per_s": rate}
