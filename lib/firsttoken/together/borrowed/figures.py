"""The figures and tables of notebook 56, drawn from a result alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.together.borrowed.summary import ALONE, TTFT
from firsttoken.together.borrowed.trial import BORROWED, PRUNED, WAYS, WHOLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAY_LOOKS = {WHOLE: "S3", PRUNED: "S1", BORROWED: "measured"}


def first_tokens(result: Result) -> Figure:
    """Seconds to the first token by the rate of the link, of the three ways, one panel a round trip."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    asked = result.parameters["borrowed"]
    rates, trips = sorted(asked["gbit_per_s"]), sorted(asked["rtt_ms"])
    fig, axes = plt.subplots(1, len(trips), figsize=(3.1 * len(trips) + 1.2, 4), sharey=True, squeeze=False)
    for ax, rtt in zip(axes[0], trips, strict=True):
        for way, name in WAYS.items():
            trip = {"rtt_ms": rtt} if way == BORROWED else {}
            entries = [result.summary.of("ttft_p50_s", variant=way, gbit_per_s=rate, **trip) for rate in rates]
            _line(ax, rates, entries, way, name)
        half = [result.summary.value("ttft_p50_s", variant=WHOLE, gbit_per_s=rate) / 2 for rate in rates]
        ax.plot(rates, half, "--", color=COLOURS["S3"], linewidth=1.2, label="half of the whole model's")
        ax.set(xscale="log", yscale="log", xlabel="link, Gbit/s", title=f"neighbour {rtt:g} ms away")
        ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
        ax.set_xticks([], minor=True)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.tick_params(axis="y", which="minor", labelsize=8)
    axes[0, 0].set_ylabel("first token after the request, s")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9)
    return fig


def _line(ax: Axes, rates: list[float], entries: list[dict[str, Any]], way: str, name: str) -> None:
    look = LOOKS[WAY_LOOKS[way]]
    middle = [entry["value"] for entry in entries]
    ends = [[entry["value"] - entry["low"] for entry in entries], [entry["high"] - entry["value"] for entry in entries]]
    ax.errorbar(rates, middle, ends, color=look.colour, marker=look.marker, markersize=6, capsize=3, label=name)


def taking_over(result: Result) -> Figure:
    """One start of each way over the main link: its own layers over time, and its tokens."""
    import matplotlib.pyplot as plt

    fig, (upper, lower) = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, gridspec_kw={"height_ratios": [3, 1.3]})
    chosen = main_starts(result)
    borrowed = chosen[BORROWED]
    depth = borrowed["taken"][-1][1]
    times = [0.0, *(at for at, _ in borrowed["taken"])]
    shares = [0.0, *(100 * layers / depth for _, layers in borrowed["taken"])]
    end = max(row["times_s"][-1] for row in chosen.values())
    upper.fill_between([*times, end], [*shares, 100], step="post", color=COLOURS["single"], alpha=0.5, linewidth=0)
    upper.step([*times, end], [*shares, 100], where="post", color=COLOURS["measured"])
    upper.set(ylabel="own layers of the borrowing\nstart's steps, %", ylim=(0, 104))
    for place, (way, row) in enumerate(chosen.items()):
        look = LOOKS[WAY_LOOKS[way]]
        lower.plot(
            row["times_s"], [place] * len(row["times_s"]), "|", color=look.colour, markersize=14, markeredgewidth=1.5
        )
    lower.set_yticks(range(len(chosen)), [f"tokens, {WAYS[way]}" for way in chosen])
    lower.set(ylim=(len(chosen) - 0.4, -0.6), xlim=(0, None), xlabel="after the request, s")
    return fig


def main_starts(result: Result) -> dict[str, dict[str, Any]]:
    """Of each way the start over the main link whose first token is the middle one."""
    asked = result.parameters["borrowed"]
    chosen = {}
    for way in WAYS:
        rows = [
            row
            for row in result.rows
            if row["what"] == "start" and row["variant"] == way and row["gbit_per_s"] == asked["main_gbit_per_s"]
            if way != BORROWED or row["rtt_ms"] == asked["main_rtt_ms"]
        ]
        chosen[way] = sorted(rows, key=lambda row: row[TTFT])[(len(rows) - 1) // 2]
    return chosen


def start_rows(result: Result) -> Rows:
    """The table of first tokens, of last ones and of bytes, by link and round trip."""
    summary, rows = result.summary, []
    asked = result.parameters["borrowed"]
    for rate in asked["gbit_per_s"]:
        for rtt in asked["rtt_ms"]:
            place = {"variant": BORROWED, "gbit_per_s": rate, "rtt_ms": rtt}
            beside = place | {"than": WHOLE}
            rows.append(
                {
                    "link and round trip": f"{rate:g} Gbit/s, {rtt:g} ms",
                    "whole, s": interval(summary.of("ttft_p50_s", variant=WHOLE, gbit_per_s=rate), 2),
                    "stage 1, s": interval(summary.of("ttft_p50_s", variant=PRUNED, gbit_per_s=rate), 2),
                    "borrowing, s": interval(summary.of("ttft_p50_s", **place), 2),
                    "over whole": interval(summary.of("ttft_x", **beside), 2),
                    f"token {asked['tokens']} over whole": interval(summary.of("last_token_x", **beside), 2),
                    "all layers here, over whole": interval(summary.of("loaded_x", **beside), 2),
                    "lent, MB": interval(summary.of("lent_mb", **place), 2),
                    "tokens before all are here": interval(summary.of("lent_tokens", **place), 0),
                }
            )
    return rows


def whose_rows(result: Result) -> Rows:
    """Whose tokens a start says."""
    rows: Rows = []
    for way in (PRUNED, BORROWED):
        same = result.summary.of("same_tokens_pct", variant=way, than=WHOLE)
        first = result.summary.value("same_first_token_pct", variant=way, than=WHOLE)
        told = {"first token is the whole model's, %": first, "all tokens are, %": same["value"]}
        rows.append({"start": WAYS[way], "starts": same["n"], **told})
    return rows


def neighbour_rows(result: Result) -> Rows:
    """What the neighbour's own request had meanwhile; nothing where it was not measured."""
    names = {ALONE: "alone", WHOLE: "beside a start that waits", BORROWED: "beside a start that borrows"}
    return [
        {
            "the neighbour's own request": name,
            "tokens/s": interval(result.summary.get("neighbour_tokens_per_s", case=case), 1),
            "lost, %": interval(result.summary.get("neighbour_lost_pct", case=case, than=ALONE), 1),
        }
        for case, name in names.items()
    ]
