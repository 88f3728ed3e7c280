"""The figures and tables of notebook 50, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.stats import bootstrap
from firsttoken_studies.nb50_a_swarm_that_survives.study import LOCAL, bound_s, recoveries
from firsttoken_studies.petals.fleet import FAULTS
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, handle, log_ticks, panels
from firsttoken_studies.record.results import Result, Table
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def schematic() -> Schematic:
    """Draw the steps of an answer before and after a server of its chain is lost, and who serves each."""
    alt = (
        "An answer comes token by token through a chain of three servers. Before its fourth token the second server "
        "is killed. A spare takes its place, and is sent all that the lost server was sent. That step is longer, and "
        "the tokens that follow come as before: the answer is the same."
    )
    sketch = Schematic(20, 8.4, alt)
    sketch.text(0.2, 0.5, "One server of the chain is killed in the middle of an answer", heading=True)
    for row, (name, look) in enumerate((("server 1", "measured"), ("server 2", "measured"), ("server 3", "measured"))):
        sketch.text(3.3, 1.6 + 1.1 * row, name, align="right")
        for token in range(7):
            x = _step_at(token)
            if row != 1 or token < 3:
                sketch.box(x, 1.1 + 1.1 * row, "", look, width=3.0 if token == 3 else 1.6)
    sketch.box(_step_at(3), 2.2, "killed", "other", width=3.0, missing=True)
    sketch.text(3.3, 4.9, "its spare", align="right")
    sketch.box(_step_at(3), 4.4, "all states again", "recompute", width=3.0)
    for token in range(4, 7):
        sketch.box(_step_at(token), 4.4, "", "recompute", width=1.6)
    sketch.text(0.2, 6.2, "One step is longer, and the tokens are the same", heading=True)
    sketch.text(3.3, 7.3, "answer", align="right")
    for token, word in enumerate(("the", "cat", "sat", "on", "the", "mat", ".")):
        sketch.box(_step_at(token), 6.8, word, "single", width=3.0 if token == 3 else 1.6)
    return sketch


def _step_at(token: int) -> float:
    """Return where the step of ``token`` begins; that of the fourth is longer."""
    return 3.7 + 1.8 * token + (1.4 if token > 3 else 0.0)


def recovery_times(recorded: Result | None, now: Result) -> Figure:
    """Seconds of each recovery by the token that it came before, and the most that it may take; a cross where the
    answer was not the local model's."""
    results, wrong = over(recorded, now), False
    faults = results[0].result.parameters["survival"]["faults"]
    fig, axes = panels(2, 2, figsize=(9, 5.6), sharex=True)
    for ax, fault in zip(axes.flat, faults, strict=False):
        for shown in results:
            for row, seconds in recoveries(shown.result.rows):
                if row["faults_in_it"] == 1 and row["fault"] == fault:
                    position, edges = row["position"], [row["position"] - 0.35, row["position"] + 0.35]
                    if shown.library is None:  # a changed chain is held to what the library's may take
                        ax.plot(edges, 2 * [bound_s(row)], color=COLOURS["target"], linewidth=2, **shown.style)
                    shown.point(ax, position, {"value": seconds}, "measured")
                    if not row["equal"]:
                        wrong = True
                        ax.plot(position, seconds, "x", color="white", markersize=6, markeredgewidth=2, zorder=6)
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
    if wrong:
        handles.append(
            handle(
                color=COLOURS["measured"], marker="x", linestyle="", label="white cross: not the local model's answer"
            )
        )
    step_s = results[0].result.parameters["survival"]["step_s"]
    fig.suptitle(f"A lost server costs its successor's prefill, or the client's time-out of {step_s:g} s")
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
