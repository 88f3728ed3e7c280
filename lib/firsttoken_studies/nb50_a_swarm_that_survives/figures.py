"""The figures and tables of notebook 50, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.stats import bootstrap
from firsttoken_studies.nb50_a_swarm_that_survives.study import LOCAL, bound_s, recoveries
from firsttoken_studies.petals.fleet import FAULTS
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
        for shown in results:
            for row, seconds in recoveries(shown.result.rows):
                if row["faults_in_it"] == 1 and row["fault"] == fault:
                    position, most = row["position"], bound_s(row)
                    ax.plot(
                        [position - 0.35, position + 0.35],
                        2 * [most],
                        color=COLOURS["target"],
                        linewidth=2,
                        **shown.style,
                    )
                    shown.point(ax, position, {"value": seconds}, "measured")
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
    for shown in results:
        struck = [pair for pair in recoveries(shown.result.rows) if pair[0]["faults_in_it"] > 1]
        if not struck:
            continue
        first, (usual, *_) = struck[0][0]["generation"], (row["step_s"] - more for row, more in struck)
        tokens = shown.result.frame(what="token", generation=first)
        entries, label = [{"value": seconds} for seconds in tokens.seconds], f"three faults, {shown.who(1)}"
        shown.line(ax, tokens.token, entries, "measured", label=label)
        label = f"median undisturbed step, {shown.who()}"
        ax.axhline(usual, color=COLOURS["floor"], linestyle="--", linewidth=1.2, label=label, **shown.style)
        for row, _ in struck if shown is results[0] else ():
            if row["generation"] == first:
                point = (row["position"], row["step_s"])
                ax.annotate(FAULTS[row["fault"]], point, (6, 4), textcoords="offset points", fontsize=9)
    ax.set(yscale="log", xlabel="token", ylabel="its step, s")
    log_ticks(ax.yaxis)
    ax.yaxis.set_ticks([], minor=True)
    ax.margins(x=0.03, y=0.18)
    fig.suptitle("Three servers fail in one answer: only the struck steps are longer")
    fig.legend(loc="outside lower center", ncols=2, fontsize=9, handlelength=3.2)
    return fig


def survival_rows(recorded: Result | None, now: Result) -> Table:
    """Return by fault how many answers are the local model's, and the recovery beside the most that it may take."""
    for shown in over(recorded, now):
        summary, struck = shown.result.summary, recoveries(shown.result.rows)
        for fault in shown.result.parameters["survival"]["faults"]:
            fault_rows = [(row, s) for row, s in struck if row["fault"] == fault and row["faults_in_it"] == 1]
            yield {
                "a server is": FAULTS[fault],
                "whose": shown.who(len(fault_rows)),
                "same answers": f"{sum(row['equal'] for row, _ in fault_rows)} of {len(fault_rows)}",
                "recovery, s": interval(bootstrap([s for _, s in fault_rows], "median").summary(), 3),
                "may take, s": interval(summary.of("bound_s", case=fault), 3),
                "within it": f"{sum(s <= bound_s(row) for row, s in fault_rows)} of {len(fault_rows)}",
            }
        several = {row["generation"]: row["equal"] for row, _ in struck if row["faults_in_it"] > 1}
        if several:
            name = f"{len(shown.result.parameters['survival']['together'])} faults in one answer"
            same = f"{sum(several.values())} of {len(several)}"
            yield {"a server is": name, "whose": shown.who(len(several)), "same answers": same}


def transport_rows(recorded: Result | None, now: Result) -> Table:
    """Tokens a second through chains of servers and of the same blocks in one process, and what the transport takes."""
    for shown in over(recorded, now):
        summary, whose = shown.result.summary, {"whose": shown.who()}
        alone = interval(summary.of("tokens_per_s", servers=LOCAL), 1)
        yield {"blocks": "in one process"} | whose | {"tokens/s": alone}
        for servers in shown.result.parameters["transport"]["chains"]:
            labels = {"servers": servers, "than": "one process"}
            yield (
                {"blocks": f"on {servers} server{'s'[: servers > 1]}"}
                | whose
                | {
                    "tokens/s": interval(summary.of("tokens_per_s", servers=servers), 1),
                    "of one process": interval(summary.of("tokens_per_s_x", **labels), 2),
                    "transport, ms a step": interval(summary.of("transport_ms", **labels), 2),
                }
            )
