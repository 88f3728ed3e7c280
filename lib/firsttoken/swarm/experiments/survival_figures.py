"""The figures and tables of notebook 50, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.swarm.experiments.swarm_survival import bound_s
from firsttoken.swarm.experiments.swarm_transport import LOCAL
from firsttoken.swarm.member import FAULTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def recoveries(result: Result) -> Figure:
    """Seconds of each recovery by the token that it came before, and the most that it may take."""
    import matplotlib.pyplot as plt

    faults = result.parameters["survival"]["faults"]
    fig, axes = plt.subplots(2, 2, figsize=(11, 5.6), sharex=True)
    for ax, fault in zip(axes.flat, faults, strict=False):
        here = [row for row in _alone(result) if row["fault"] == fault]
        for row in here:
            place, most = row["position"], bound_s(row)
            ax.plot([place - 0.35, place + 0.35], [most, most], color=COLOURS["target"], linewidth=2)
        places, seconds = [row["position"] for row in here], [row["recovery_s"] for row in here]
        ax.plot(places, seconds, LOOKS["measured"].marker, color=COLOURS["measured"])
        ax.set_title(FAULTS[fault], fontsize=10)
        top = max(max(map(bound_s, here)), *seconds)
        ax.set(ylim=(min(0.0, *seconds) - 0.02 * top, 1.15 * top))
    for ax in axes[:, 0]:
        ax.set_ylabel("recovery, s")
    for ax in axes[1]:
        ax.set_xlabel("the token before whose step it came")
        ax.xaxis.get_major_locator().set_params(integer=True)
    handles = [
        plt.Line2D([], [], color=COLOURS["measured"], marker=LOOKS["measured"].marker, linestyle="", label="measured"),
        plt.Line2D([], [], color=COLOURS["target"], linewidth=2, label="time-out + prefill + two round trips"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    return fig


def token_times(result: Result) -> Figure:
    """Seconds of each token of the generation with several faults, beside the undisturbed one's."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    fig, ax = plt.subplots(figsize=(9, 3.6))
    struck = [row for row in result.rows if row["what"] == "fault" and row["faults_in_it"] > 1]
    first = struck[0]["generation"] if struck else 0
    for generation, name, label in ((0, "other", "undisturbed"), (first, "measured", "with the faults named")):
        rows = [row for row in result.rows if row["what"] == "token" and row["generation"] == generation]
        places, seconds = [row["token"] for row in rows], [row["seconds"] for row in rows]
        ax.plot(places, seconds, "-", marker=LOOKS[name].marker, color=COLOURS[name], label=label)
    for row in struck:
        if row["generation"] == first:
            at = (row["position"], row["step_s"])
            ax.annotate(FAULTS[row["fault"]], at, (6, 4), textcoords="offset points", fontsize=9)
    ax.set(yscale="log", xlabel="token", ylabel="its step, s")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
    ax.margins(x=0.03, y=0.18)
    fig.legend(loc="outside lower center", ncols=2, fontsize=9)
    return fig


def survival_rows(result: Result) -> Rows:
    """By fault: answers that are the local model's, and the recovery beside the most that it may take."""
    rows: Rows = []
    for fault in result.parameters["survival"]["faults"]:
        here = [row for row in _alone(result) if row["fault"] == fault]
        rows.append(
            {
                "a server is": FAULTS[fault],
                "same answers": f"{sum(row['equal'] for row in here)} of {len(here)}",
                "recovery, s": interval(result.summary.of("recovery_s", case=fault), 3),
                "may take, s": interval(result.summary.of("bound_s", case=fault), 3),
                "round trips beside time-out and prefill": interval(result.summary.of("round_trips", case=fault), 1),
            }
        )
    several = {r["generation"]: r["equal"] for r in result.rows if r["what"] == "fault" and r["faults_in_it"] > 1}
    if several:
        together = ", ".join(FAULTS[fault] for fault in result.parameters["survival"]["together"])
        rows.append(
            {"a server is": f"in one answer: {together}", "same answers": f"{sum(several.values())} of {len(several)}"}
        )
    return rows


def transport_rows(result: Result) -> Rows:
    """Tokens a second through chains of servers and of the same blocks in one process, and what the transport takes."""
    summary = result.summary
    rows: Rows = [{"blocks": "in one process", "tokens/s": interval(summary.of("tokens_per_s", servers=LOCAL), 1)}]
    for servers in result.parameters["transport"]["chains"]:
        place = {"servers": servers, "than": "one process"}
        rows.append(
            {
                "blocks": f"on {servers} server{'s'[: servers > 1]}",
                "tokens/s": interval(summary.of("tokens_per_s", servers=servers), 1),
                "of one process": interval(summary.of("tokens_per_s_x", **place), 2),
                "transport, ms a step": interval(summary.of("transport_ms", **place), 2),
            }
        )
    return rows


def _alone(result: Result) -> Rows:
    return [row for row in result.rows if row["what"] == "fault" and row["faults_in_it"] == 1]
