"""The figures and tables of notebook 56, drawn from a result alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firsttoken.study.overlay import over
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken_studies.combined.borrowed.summary import ALONE, TTFT
from firsttoken_studies.combined.borrowed.trial import BORROWED, PRUNED, WAYS, WHOLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAY_LOOKS = {WHOLE: "S3", PRUNED: "S1", BORROWED: "measured"}


def first_tokens(recorded: Result | None, now: Result) -> Figure:
    """Seconds to the first token by the rate of the link, of the three ways; borrowing at every round trip."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    fig, ax = plt.subplots(figsize=(9, 4.6))
    results = over(recorded, now)
    for drawn in results:
        asked, summary = drawn.result.parameters["borrowed"], drawn.result.summary
        rates = sorted(asked["gbit_per_s"])
        for way, name in WAYS.items():
            for rtt in sorted(asked["rtt_ms"]) if way == BORROWED else [None]:
                trip = {} if rtt is None else {"rtt_ms": rtt}
                entries = [summary.get("ttft_p50_s", variant=way, gbit_per_s=rate, **trip) for rate in rates]
                label = f"{name}, {drawn.who()}" if rtt in (None, asked["main_rtt_ms"]) else None
                drawn.line(ax, rates, entries, WAY_LOOKS[way], label=label)
        if drawn is results[0]:
            half = [summary.value("ttft_p50_s", variant=WHOLE, gbit_per_s=rate) / 2 for rate in rates]
            label = f"goal: half of the whole model's, {drawn.who()}"
            ax.plot(rates, half, "--", color=COLOURS["target"], linewidth=1.2, label=label)
    ax.set(xscale="log", yscale="log", xlabel="link, Gbit/s", ylabel="first token after the request, s")
    rates = sorted({rate for drawn in results for rate in drawn.result.parameters["borrowed"]["gbit_per_s"]})
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ax.set_xticks([], minor=True)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    ax.yaxis.set_minor_formatter("{x:g}")
    fig.suptitle("Who borrows layers says the first token first, whatever the round trip to the neighbour")
    fig.legend(loc="outside lower center", ncols=2, fontsize=9, handlelength=3.2)
    return fig


def taking_over(recorded: Result | None, now: Result) -> Figure:
    """One start of each way over the main link: its own layers over time, and its tokens."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    ratios = {"height_ratios": [3, 1.3]}
    fig, axes = plt.subplots(
        2, len(results), figsize=(9, 4.6), sharex="col", sharey="row", squeeze=False, gridspec_kw=ratios
    )
    for drawn, (upper, lower) in zip(results, axes.T, strict=True):
        chosen = main_starts(drawn.result)
        taken = chosen[BORROWED]["taken"]
        times = [0.0, *(at for at, _ in taken)]
        shares = [0.0, *(100 * layers / taken[-1][1] for _, layers in taken)]
        end = max(row["times_s"][-1] for row in chosen.values())
        upper.fill_between([*times, end], [*shares, 100], step="post", color=COLOURS["single"], alpha=0.5, linewidth=0)
        upper.step([*times, end], [*shares, 100], where="post", color=COLOURS["measured"])
        upper.set(ylim=(0, 104), title=drawn.who())
        for place, (way, row) in enumerate(chosen.items()):
            look, at = LOOKS[WAY_LOOKS[way]], row["times_s"]
            lower.plot(at, [place] * len(at), "|", color=look.colour, markersize=14, markeredgewidth=1.5)
        lower.set(xlim=(0, None), xlabel="after the request, s")
    axes[0, 0].set_ylabel("layers computed locally, %")
    axes[1, 0].set_yticks(range(len(WAYS)), [f"tokens, {name}" for name in WAYS.values()])
    axes[1, 0].set_ylim(len(WAYS) - 0.4, -0.6)
    fig.suptitle("A borrowing start speaks early and takes the layers over while it speaks")
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


def start_rows(recorded: Result | None, now: Result) -> Rows:
    """The table of first tokens, of last ones and of bytes, by link and round trip."""
    rows: Rows = []
    for drawn in over(recorded, now):
        summary, asked = drawn.result.summary, drawn.result.parameters["borrowed"]
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
                        "last token over whole": interval(summary.of("last_token_x", **beside), 2),
                        "all layers here, over whole": interval(summary.of("loaded_x", **beside), 2),
                        "lent, MB": interval(summary.of("lent_mb", **place), 2),
                        "tokens before all are here": interval(summary.of("lent_tokens", **place), 0),
                        "whose": drawn.who(),
                    }
                )
    return rows


def whose_rows(recorded: Result | None, now: Result) -> Rows:
    """Whose tokens a start says."""
    rows: Rows = []
    for drawn in over(recorded, now):
        for way in (PRUNED, BORROWED):
            same = drawn.result.summary.of("same_tokens_pct", variant=way, than=WHOLE)
            first = drawn.result.summary.value("same_first_token_pct", variant=way, than=WHOLE)
            told = {"first token is the whole model's, %": first, "all tokens are, %": same["value"]}
            rows.append({"start": WAYS[way], "starts": same["n"], **told, "whose": drawn.who()})
    return rows


def neighbour_rows(recorded: Result | None, now: Result) -> Rows:
    """What the neighbour's own request had meanwhile; nothing where it was not measured."""
    names = {ALONE: "alone", WHOLE: "beside a start that waits", BORROWED: "beside a start that borrows"}
    return [
        {
            "the neighbour's own request": name,
            "tokens/s": interval(drawn.result.summary.get("neighbour_tokens_per_s", case=case), 1),
            "lost, %": interval(drawn.result.summary.get("neighbour_lost_pct", case=case, than=ALONE), 1),
            "whose": drawn.who(),
        }
        for drawn in over(recorded, now)
        for case, name in names.items()
    ]
