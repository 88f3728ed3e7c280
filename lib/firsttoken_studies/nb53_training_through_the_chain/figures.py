"""The figures and tables of notebook 53, drawn from results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from firsttoken.petals.tuning.frozen import MOST_KEPT
from firsttoken_studies.nb53_training_through_the_chain.study import (
    ALONE,
    AT_ONCE,
    HEAD,
    HELD_TO,
    KILLED,
    LOCAL,
    LORA,
    PROMPT,
    SAME,
    STOCK,
)
from firsttoken_studies.petals.spans import split_evenly
from firsttoken_studies.record.overlay import PALE, DrawnResult, name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, handle, panels
from firsttoken_studies.record.results import Result, Table
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

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


def schematic() -> Schematic:
    """Draw a step of training through servers: forward, where the client keeps what entered each, and back."""
    alt = (
        "A client trains a soft prompt, a few vectors before its text. Forward, the states go through three frozen "
        "servers to the loss, and the client keeps what entered each server. Back, each server is sent what entered it "
        "and the gradient of what it gave out, computes forward again, and returns the gradient of what entered. The "
        "prompt alone changes."
    )
    sketch = Schematic(20, 8.6, alt)
    sketch.text(0.2, 0.5, "Forward: the client keeps what entered each server", heading=True)
    sketch.text(0.2, 5.0, "Back: each server computes forward again, and keeps nothing", heading=True)
    sketch.box(0.2, 1.1, "prompt", "mark", width=2.2)
    sketch.box(0.2, 5.6, "prompt", "mark", width=2.2)
    for server in range(3):
        x = 4.2 + 4.4 * server
        sketch.arrow((x - 1.7, 1.6), (x - 0.1, 1.6))
        sketch.box(x, 1.1, f"server {server + 1}", "measured", width=2.6)
        sketch.arrow((x - 0.9, 1.7), (x - 0.9, 2.75))
        sketch.box(x - 1.9, 2.8, "kept", "single", width=2.0)
        sketch.box(x, 5.6, f"server {server + 1}", "recompute", width=2.6)
        sketch.arrow((x - 0.1, 6.1), (x - 1.7, 6.1), look="recompute")
        sketch.arrow((x + 1.3, 7.25), (x + 1.3, 6.7))
        sketch.box(x + 0.3, 7.3, "kept", "single", width=2.0)
    for y, look in ((1.1, "measured"), (5.6, "recompute")):
        sketch.box(17.4, y, "loss", "other", width=2.2)
        points = ((15.7, 1.6), (17.3, 1.6)) if look == "measured" else ((17.3, 6.1), (15.7, 6.1))
        sketch.arrow(*points, look="mark" if look == "measured" else look)
    sketch.text(0.2, 7.0, "learns")
    sketch.text(15.7, 7.8, "gradients go back")
    return sketch


def curves(recorded: Result | None, now: Result) -> Figure:
    """The loss of each task by step, in each run; where a server was killed."""
    results = over(recorded, now)
    fig, axes = panels(len(results), 2, figsize=(9, 1 + 2.6 * len(results)), squeeze=False)
    styles = {
        STOCK: {"linewidth": 7, "marker": ""},
        ALONE: {"linewidth": 2, "marker": ""},
        AT_ONCE: {"linestyle": "", "marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 2},
        KILLED: {"linestyle": "", "marker": "x", "markersize": 6, "markeredgewidth": 1.5},
    }
    for shown, row_of_axes in zip(results, axes, strict=True):
        losses = shown.result.frame(what="loss")
        of_library = losses if shown.library is None else shown.library.frame(what="loss")
        for ax, kind in zip(row_of_axes, (LORA, PROMPT), strict=True):
            for run, style in styles.items():
                run_losses = losses[(losses.run == run) & (losses.kind == kind)]
                usual = of_library[(of_library.run == run) & (of_library.kind == kind)]
                label = RUN_NAMES[run] if shown.own and shown.library is None and kind == LORA else None
                ring = {} if list(run_losses.loss) == list(usual.loss) else shown.style
                ax.plot(run_losses.step + 1, run_losses.loss, color=COLOURS[_LOOKS[run]], label=label, **style, **ring)
            ax.set_title(f"{KIND_NAMES[kind]}\n{shown.who()}", fontsize=10)
            ax.set(xlabel="step", ylabel="loss, nats a token")
            ax.xaxis.get_major_locator().set_params(integer=True)
        fault_step = next(row["step"] for row in shown.result.rows if row["what"] == "fault") + 1
        row_of_axes[0].axvline(fault_step, color=COLOURS["mark"], linewidth=0.8, linestyle=(0, (1, 3)))
        text_style = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        row_of_axes[0].annotate("a server is killed", (fault_step, 1), (4, -4), fontsize=9, va="top", **text_style)
    fig.suptitle(_curves_title([shown.result for shown in results]))
    fig.legend(loc="outside lower center", ncols=4, fontsize=9)
    return fig


def _curves_title(results: Sequence[Result]) -> str:
    """Say how far the losses of any run are from those that they should be."""
    apart = max(
        result.summary.value("loss_difference", case=run, than=than)
        for result in results
        for run, than in HELD_TO.items()
    )
    if apart <= SAME:
        return "Nobody is disturbed: losses through servers are those of one process"
    return f"Losses through servers are up to {100 * apart:.2g} % from those of one process"


def step_times(recorded: Result | None, now: Result) -> Figure:
    """Seconds of a step of LoRA by chain beside what its arithmetic takes, each over the local step of its run."""
    fig, ax = panels(figsize=(9, 3.8))
    results = over(recorded, now)
    chains = sorted({servers for shown in results for servers in _chains(shown.result)})
    for shown in results:
        for position, servers in enumerate(chains):
            entry = shown.result.summary.get("step_x", servers=servers, than="one process")
            shown.point(ax, position + shown.shift, entry, "measured", along="x")
            if servers and entry is not None and shown.library is None:
                passes = 2 * [_forwards_again(shown, servers)]
                edges = [position + shown.shift - 0.13, position + shown.shift + 0.13]
                ax.plot(passes, edges, color=COLOURS["floor"], linewidth=3, alpha=1 if shown.own else PALE)
    handles = [
        handle(color=COLOURS["measured"], marker=LOOKS["measured"].marker, label="median, its interval"),
        handle(color=COLOURS["floor"], linewidth=3, label="the local step, blocks forward twice or thrice"),
    ]
    ax.set_yticks(range(len(chains)), [_name(servers) for servers in chains])
    ax.set(ylim=(len(chains) - 0.5, -0.5), xlim=(0, None), xlabel="a step of LoRA, over that of one process")
    ax.legend(handles=handles, loc="lower left", fontsize=9)
    fig.suptitle("Servers forget, so backward runs blocks forward again: one long span even thrice")
    name_results(fig, results, "step_x")
    return fig


def _forwards_again(shown: DrawnResult, servers: int) -> float:
    """Return the local step with the forward passes added that servers compute again, over the local step.

    A step through frozen blocks is as much forward as backward. Each layer runs forward once more for backward. Where a
    server goes back in several stretches, the layers of all but the last run forward once more for their outputs.
    """
    rows, config = shown.result.rows, shown.result.parameters["swarm_tuning"]
    share = next(row["block_share"] for row in rows if row["what"] == "chain")
    names = [row["name"] for row in rows if row["what"] == "gradient" and row["kind"] == LORA]
    depth = len({name.split("layers.")[-1].split(".")[0] for name in names})
    several = max(1, MOST_KEPT // (config["rows"] * config["tokens"]))
    spans = [span.split(":") for span in split_evenly(depth, servers)]
    again = sum((int(b) - int(a) - 1) // several * several for a, b in spans)
    return 1 + share / 2 * (1 + again / depth)


def gradient_rows(recorded: Result | None, now: Result) -> Table:
    """The largest difference from local gradients, by what is trained."""
    for shown in over(recorded, now):
        for kind, name in KIND_NAMES.items():
            entry = shown.result.summary.of("gradient_difference", variant=kind, than="one process")
            line = {"what is trained": name, "gradients": entry["n"], "largest difference": f"{entry['value']:.1e}"}
            yield line | {"whose": shown.who()}


def chain_rows(recorded: Result | None, now: Result) -> Table:
    """Seconds and megabytes of a step of LoRA, by chain."""
    for shown in over(recorded, now):
        for servers in _chains(shown.result):
            yield {
                "blocks": _name(servers),
                "a step, s": interval(shown.result.summary.of("step_s", servers=servers), 2),
                "over one process": interval(shown.result.summary.of("step_x", servers=servers, than="one process"), 2),
                "by its forward passes": f"{_forwards_again(shown, servers):.2f}" if servers else "",
                "over the wire, MB a step": f"{shown.result.summary.value('step_mb', servers=servers):.2f}",
                "whose": shown.who(),
            }


def run_rows(recorded: Result | None, now: Result) -> Table:
    """Steps a second of each task in each run, and the largest difference of a loss from the run it is held to."""
    for shown in over(recorded, now):
        summary = shown.result.summary
        for run, name in RUN_NAMES.items():
            rates = {
                f"{KIND_NAMES[kind]}, steps/s": interval(summary.get("steps_per_s", variant=kind, case=run), 2)
                for kind in (LORA, PROMPT)
            }
            apart = summary.get("loss_difference", case=run, than=HELD_TO.get(run, ""))
            difference_text = f"{apart['value']:.1e}" if apart else ""
            yield {"run": name, **rates, "largest difference of a loss": difference_text, "whose": shown.who()}


def _chains(result: Result) -> list[int]:
    return [LOCAL, *result.parameters["swarm_tuning"]["chains"]]


def _name(servers: int) -> str:
    return f"on {servers} server{'s'[: servers > 1]}" if servers else "in one process"
