"""The figures and tables of notebook 53, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.swarm.experiments.swarm_tuning import ALONE, AT_ONCE, HELD_TO, KILLED, LOCAL, STOCK
from firsttoken.swarm.experiments.tuning_tasks import HEAD, LORA, PROMPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND_NAMES = {LORA: "LoRA, on passages", PROMPT: "a soft prompt, on questions", HEAD: "a head of the client's own"}
RUN_NAMES = {
    STOCK: "stock PEFT, one process",
    ALONE: "through servers, alone",
    AT_ONCE: "through servers, both at once",
    KILLED: "through servers, one killed",
}
_LOOKS = {STOCK: "other", ALONE: "measured", AT_ONCE: "single", KILLED: "mark"}


def curves(result: Result) -> Figure:
    """The loss of each task by step, in each run; where a server was killed."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    styles = {
        STOCK: {"linewidth": 7, "marker": ""},
        ALONE: {"linewidth": 2, "marker": ""},
        AT_ONCE: {"linestyle": "", "marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 2},
        KILLED: {"linestyle": "", "marker": "x", "markersize": 6, "markeredgewidth": 1.5},
    }
    for ax, kind in zip(axes, (LORA, PROMPT), strict=True):
        for run, style in styles.items():
            found = [row for row in result.rows if row["what"] == "loss" and (row["run"], row["kind"]) == (run, kind)]
            steps, losses = [row["step"] + 1 for row in found], [row["loss"] for row in found]
            label = RUN_NAMES[run] if kind == LORA else None
            ax.plot(steps, losses, color=COLOURS[_LOOKS[run]], label=label, **style)
        ax.set_title(KIND_NAMES[kind], fontsize=10)
        ax.set(xlabel="step", ylabel="loss, nats a token")
        ax.xaxis.get_major_locator().set_params(integer=True)
    place = next(row["step"] for row in result.rows if row["what"] == "fault") + 1
    axes[0].axvline(place, color=COLOURS["mark"], linewidth=0.8, linestyle=(0, (1, 3)))
    axes[0].annotate(
        "a server is killed", (place, 1), (4, -4), xycoords=("data", "axes fraction"), textcoords="offset points",
        fontsize=9, va="top",
    )  # fmt: skip
    fig.legend(loc="outside lower center", ncols=4, fontsize=9)
    return fig


def step_times(result: Result) -> Figure:
    """Seconds of a step of LoRA by chain, every one and their median, beside what its arithmetic takes."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(9, 3.4))
    chains = _chains(result)
    share = next(row["block_share"] for row in result.rows if row["what"] == "chain")
    twice_s = (1 + share / 2) * result.summary.value("step_s", servers=LOCAL)
    for place, servers in enumerate(chains):
        seconds = [row["seconds"] for row in result.rows if row["what"] == "chain" and row["servers"] == servers]
        entry = result.summary.of("step_s", servers=servers)
        ax.plot(seconds, [place] * len(seconds), LOOKS["single"].marker, color=COLOURS["single"], markersize=5)
        ax.plot([entry["low"], entry["high"]], [place, place], color=COLOURS["measured"], linewidth=2)
        ax.plot(entry["value"], place, LOOKS["measured"].marker, color=COLOURS["measured"], markersize=8)
        if servers:
            ax.plot([twice_s, twice_s], [place - 0.35, place + 0.35], color=COLOURS["floor"], linewidth=2)
    handles = [
        plt.Line2D([], [], color=COLOURS["measured"], marker=LOOKS["measured"].marker, label="median, its interval"),
        plt.Line2D([], [], color=COLOURS["single"], marker=LOOKS["single"].marker, linestyle="", label="a step"),
        plt.Line2D([], [], color=COLOURS["floor"], linewidth=2, label="the local step, forward through blocks twice"),
    ]
    ax.set_yticks(range(len(chains)), [_name(servers) for servers in chains])
    ax.set(ylim=(len(chains) - 0.5, -0.5), xlim=(0, None), xlabel="a step of LoRA, s")
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return fig


def gradient_rows(result: Result) -> Rows:
    """The largest difference from local gradients, by what is trained."""
    return [
        {
            "what is trained": name,
            "gradients": (entry := result.summary.of("gradient_difference", variant=kind, than="one process"))["n"],
            "largest difference": f"{entry['value']:.1e}",
        }
        for kind, name in KIND_NAMES.items()
    ]


def chain_rows(result: Result) -> Rows:
    """Seconds and megabytes of a step of LoRA, by chain."""
    summary = result.summary
    return [
        {
            "blocks": _name(servers),
            "a step, s": interval(summary.of("step_s", servers=servers), 2),
            "over one process": interval(summary.of("step_x", servers=servers, than="one process"), 2),
            "over the wire, MB a step": f"{summary.value('step_mb', servers=servers):.2f}",
        }
        for servers in _chains(result)
    ]


def run_rows(result: Result) -> Rows:
    """Steps a second of each task in each run, and the largest difference of a loss from the run it is held to."""
    summary, rows = result.summary, []
    for run, name in RUN_NAMES.items():
        rates = {
            f"{KIND_NAMES[kind]}, steps/s": interval(summary.get("steps_per_s", variant=kind, case=run), 2)
            for kind in (LORA, PROMPT)
        }
        apart = summary.get("loss_difference", case=run, than=HELD_TO.get(run, ""))
        told = f"{apart['value']:.1e}" if apart else ""
        rows.append({"run": name, **rates, "largest difference of a loss": told})
    return rows


def _chains(result: Result) -> list[int]:
    return [LOCAL, *result.parameters["swarm_tuning"]["chains"]]


def _name(servers: int) -> str:
    return f"on {servers} server{'s'[: servers > 1]}" if servers else "in one process"
