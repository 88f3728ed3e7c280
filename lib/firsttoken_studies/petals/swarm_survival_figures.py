"""The figures and tables of notebook 50, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.stats import bootstrap
from firsttoken_studies.petals.fleet import FAULTS
from firsttoken_studies.petals.swarm_survival import LOCAL, bound_s, recoveries
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, handle, log_ticks, panels
from firsttoken_studies.record.results import Result, Table
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def recovery_times(recorded: Result | None, now: Result) -> Figure:
    """Seconds of each recovery by the token that it came before, and the most that it may take."""
    results = over(recorded, now)
    faults = results[0].result.parameters["survival"]["faults"]
    fig, axes = panels(2, 2, figsize=(9, 5.6), sharex=True)
    for ax, fault in zip(axes.flat, faults, strict=False):
        for drawn in results:
            for row, seconds in recoveries(drawn.result.rows):
                if row["faults_in_it"] == 1 and row["fault"] == fault:
                    place, most = row["position"], bound_s(row)
                    ax.plot(
                        [place - 0.35, place + 0.35], 2 * [most], color=COLOURS["target"], linewidth=2, **drawn.style
                    )
                    drawn.point(ax, place, {"value": seconds}, "measured")
        ax.axhline(0, color=COLOURS["floor"], linewidth=0.8)
        ax.set_title(FAULTS[fault], fontsize=10)
        ax.set_ylim(top=1.15 * ax.dataLim.y1)
    for ax in axes[:, 0]:
        ax.set_ylabel("recovery, s")
    for ax in axes[1]:
        ax.set_xlabel("the token before whose step it came")
        ax.xaxis.get_major_locator().set_params(integer=True)
    handles = [
        handle(color=COLOURS["measured"], marker=LOOKS["measured"].marker, linestyle="", label="recovery"),
        handle(color=COLOURS["target"], linewidth=2, label="time-out + prefill + two round trips"),
    ]
    fig.suptitle("A lost server costs its successor's prefill, or the client's time-out of 1 s")
    axes[0, 1].legend(handles=handles, loc="center right", bbox_to_anchor=(1, 0.3), fontsize=9)
    name_results(fig, results, "recovery_s")
    return fig


def token_times(recorded: Result | None, now: Result) -> Figure:
    """Seconds of each token of the generation with several faults, beside the median of undisturbed steps."""
    fig, ax = panels(figsize=(9, 4))
    results = over(recorded, now)
    for drawn in results:
        struck = [pair for pair in recoveries(drawn.result.rows) if pair[0]["faults_in_it"] > 1]
        if not struck:
            continue
        first, (usual, *_) = struck[0][0]["generation"], (row["step_s"] - more for row, more in struck)
        tokens = drawn.result.frame(what="token", generation=first)
        entries, label = [{"value": seconds} for seconds in tokens.seconds], f"three faults, {drawn.who(1)}"
        drawn.line(ax, tokens.token, entries, "measured", label=label)
        label = f"median undisturbed step, {drawn.who()}"
        ax.axhline(usual, color=COLOURS["floor"], linestyle="--", linewidth=1.2, label=label, **drawn.style)
        for row, _ in struck if drawn is results[0] else ():
            if row["generation"] == first:
                at = (row["position"], row["step_s"])
                ax.annotate(FAULTS[row["fault"]], at, (6, 4), textcoords="offset points", fontsize=9)
    ax.set(yscale="log", xlabel="token", ylabel="its step, s")
    log_ticks(ax.yaxis)
    ax.yaxis.set_ticks([], minor=True)
    ax.margins(x=0.03, y=0.18)
    fig.suptitle("Three servers fail in one answer: only the struck steps are longer")
    fig.legend(loc="outside lower center", ncols=2, fontsize=9, handlelength=3.2)
    return fig


def survival_rows(recorded: Result | None, now: Result) -> Table:
    """Return by fault how many answers are the local model's, and the recovery beside the most that it may take."""
    for drawn in over(recorded, now):
        summary, struck = drawn.result.summary, recoveries(drawn.result.rows)
        for fault in drawn.result.parameters["survival"]["faults"]:
            here = [(row, s) for row, s in struck if row["fault"] == fault and row["faults_in_it"] == 1]
            yield {
                "a server is": FAULTS[fault],
                "whose": drawn.who(len(here)),
                "same answers": f"{sum(row['equal'] for row, _ in here)} of {len(here)}",
                "recovery, s": interval(bootstrap([s for _, s in here], "median").summary(), 3),
                "may take, s": interval(summary.of("bound_s", case=fault), 3),
                "within it": f"{sum(s <= bound_s(row) for row, s in here)} of {len(here)}",
            }
        several = {row["generation"]: row["equal"] for row, _ in struck if row["faults_in_it"] > 1}
        if several:
            name = f"{len(drawn.result.parameters['survival']['together'])} faults in one answer"
            same = f"{sum(several.values())} of {len(several)}"
            yield {"a server is": name, "whose": drawn.who(len(several)), "same answers": same}


def transport_rows(recorded: Result | None, now: Result) -> Table:
    """Tokens a second through chains of servers and of the same blocks in one process, and what the transport takes."""
    for drawn in over(recorded, now):
        summary, whose = drawn.result.summary, {"whose": drawn.who()}
        alone = interval(summary.of("tokens_per_s", servers=LOCAL), 1)
        yield {"blocks": "in one process"} | whose | {"tokens/s": alone}
        for servers in drawn.result.parameters["transport"]["chains"]:
            place = {"servers": servers, "than": "one process"}
            yield (
                {"blocks": f"on {servers} server{'s'[: servers > 1]}"}
                | whose
                | {
                    "tokens/s": interval(summary.of("tokens_per_s", servers=servers), 1),
                    "of one process": interval(summary.of("tokens_per_s_x", **place), 2),
                    "transport, ms a step": interval(summary.of("transport_ms", **place), 2),
                }
            )
