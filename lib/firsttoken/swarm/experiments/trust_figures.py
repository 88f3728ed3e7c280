"""The figures and tables of notebook 54, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.swarm.experiments.swarm_privacy import GUESS, LINEAR, NEAREST
from firsttoken.swarm.experiments.swarm_validation import foreseen
from firsttoken.swarm.trust.liar import LIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def caught(result: Result) -> Figure:
    """Liars that are convicted within an answer, by the share of answers audited, and what the draws foresee."""
    import matplotlib.pyplot as plt

    asked = result.parameters["validation"]
    fig, axes = plt.subplots(1, len(asked["lies"]), figsize=(11, 3.6), sharey=True, squeeze=False)
    steps = [at / 100 for at in range(101)]
    for ax, lie in zip(axes[0], asked["lies"], strict=True):
        ax.plot(
            [100 * rate for rate in steps],
            [100 * foreseen(lie, rate, asked["tokens"]) for rate in steps],
            color=COLOURS["other"],
            linewidth=2,
        )
        for rate in asked["rates"]:
            entry = result.summary.of("caught_pct", case=lie, audited=rate, source="measured")
            ax.plot([100 * rate] * 2, [entry["low"], entry["high"]], color=COLOURS["measured"], linewidth=1.5)
            ax.plot(100 * rate, entry["value"], LOOKS["measured"].marker, color=COLOURS["measured"])
        ax.set_title(LIES[lie], fontsize=10)
        ax.set(xlabel="answers audited, %", xlim=(0, 110 * max(asked["rates"])), ylim=(-3, 105))
    axes[0][0].set_ylabel(f"convicted within {asked['tokens']} tokens, %")
    handles = [
        plt.Line2D([], [], color=COLOURS["measured"], marker=LOOKS["measured"].marker, label="measured, and 95 %"),
        plt.Line2D([], [], color=COLOURS["other"], linewidth=2, label="foreseen by the draws"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    return fig


def inverted(result: Result) -> Figure:
    """Tokens read from what the first server is sent, by the layers that stay with the client."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(8, 3.8))
    depths, summary = result.parameters["privacy"]["depths"], result.summary
    attacks = ((LINEAR, "measured", "linear map, learnt"), (NEAREST, "other", "nearest embedding"))
    for attack, look, label in attacks:
        entries = [summary.of("recovered_pct", variant=attack, layers=depth) for depth in depths]
        values = [entry["value"] for entry in entries]
        around = [[one["value"] - one["low"] for one in entries], [one["high"] - one["value"] for one in entries]]
        ax.errorbar(depths, values, around, color=COLOURS[look], marker=LOOKS[look].marker, label=label, capsize=2)
    guessed = summary.value("recovered_pct", variant=GUESS)
    ax.axhline(guessed, color=COLOURS["floor"], linewidth=1, label="always the commonest token")
    ax.set(xlabel="local layers", ylabel="tokens recovered, %", ylim=(-3, 105))
    ax.xaxis.get_major_locator().set_params(integer=True)
    fig.legend(loc="outside lower center", ncols=3, fontsize=9)
    return fig


def caught_rows(result: Result) -> Rows:
    """By lie and rate, how many liars were convicted within an answer, and how many the draws foresee."""
    asked, rows = result.parameters["validation"], []
    for lie in asked["lies"]:
        for rate in asked["rates"]:
            place = {"case": lie, "audited": rate}
            measured = result.summary.of("caught_pct", source="measured", **place)
            expected = result.summary.value("caught_pct", source="foreseen", **place)
            rows.append(
                {
                    "a server's lie": LIES[lie],
                    "answers audited, %": f"{100 * rate:g}",
                    "convicted, %": interval(measured, 0),
                    "foreseen, %": f"{expected:.0f}",
                    "servers": measured["n"],
                }
            )
    return rows


def honest_rows(result: Result) -> Rows:
    """What is found of honest servers."""
    summary = result.summary
    alarms = summary.of("alarms_pct", case="honest")
    largest = summary.value("difference_x", case="honest", across="most", than="tolerance")
    again = summary.of("recomputed_x", case="honest", than="computed")
    found = {
        "audits": str(alarms["n"]),
        "found to differ, %": interval(alarms, 1),
        "convicted, those beside liars included": summary.value("convicted", case="honest"),
        "largest difference in an audit": f"{summary.value('difference', case='audit', across='most'):.1e}",
        "difference from float64 and from transformers, median": f"{summary.value('difference', case='rounding'):.1e}",
        "largest of all, in parts of the tolerance": f"{largest:.3f}",
        "computed again when all is audited, of the answer's own": interval(again, 1),
    }
    return [{"of honest servers": name, "found": one} for name, one in found.items()]


def privacy_rows(result: Result) -> Rows:
    """By local layers, what they weigh, and the tokens that each attack recovers."""
    summary = result.summary
    return [
        {
            "local layers": depth,
            "their weights, MB": f"{summary.value('weights_mb', layers=depth):.0f}",
            "nearest embedding, %": interval(summary.of("recovered_pct", variant=NEAREST, layers=depth), 1),
            "linear map, %": interval(summary.of("recovered_pct", variant=LINEAR, layers=depth), 1),
        }
        for depth in result.parameters["privacy"]["depths"]
    ]
