"""The figures and tables of notebook 54, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
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
            entry = result.summary[f"{lie}_{100 * rate:g}_pct_caught_pct"]
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
    attacks = (("linear", "measured", "linear map, learnt"), ("nearest", "other", "nearest embedding"))
    for attack, look, label in attacks:
        entries = [summary[f"{attack}_{depth}_pct"] for depth in depths]
        values = [entry["value"] for entry in entries]
        around = [[one["value"] - one["low"] for one in entries], [one["high"] - one["value"] for one in entries]]
        ax.errorbar(depths, values, around, color=COLOURS[look], marker=LOOKS[look].marker, label=label, capsize=2)
    ax.axhline(summary["guess_pct"]["value"], color=COLOURS["floor"], linewidth=1, label="always the commonest token")
    ax.set(xlabel="local layers", ylabel="tokens recovered, %", ylim=(-3, 105))
    ax.xaxis.get_major_locator().set_params(integer=True)
    fig.legend(loc="outside lower center", ncols=3, fontsize=9)
    return fig


def caught_rows(result: Result) -> Rows:
    """By lie and rate, how many liars were convicted within an answer, and how many the draws foresee."""
    asked, rows = result.parameters["validation"], []
    for lie in asked["lies"]:
        for rate in asked["rates"]:
            name = f"{lie}_{100 * rate:g}_pct"
            rows.append(
                {
                    "a server's lie": LIES[lie],
                    "answers audited, %": f"{100 * rate:g}",
                    "convicted, %": interval(result.summary[f"{name}_caught_pct"], 0),
                    "foreseen, %": f"{result.summary[f'{name}_foreseen_pct']['value']:.0f}",
                    "servers": result.summary[f"{name}_caught_pct"]["n"],
                }
            )
    return rows


def honest_rows(result: Result) -> Rows:
    """What is found of honest servers."""
    summary = result.summary
    audits = summary["honest_alarms_pct"]["n"]
    return [
        {"of honest servers": "audits", "found": str(audits)},
        {"of honest servers": "found to differ, %", "found": interval(summary["honest_alarms_pct"], 1)},
        {"of honest servers": "convicted, those beside liars included", "found": summary["honest_convicted"]["value"]},
        {"of honest servers": "largest difference in an audit", "found": f"{summary['largest_audited']['value']:.1e}"},
        {
            "of honest servers": "difference from float64 and from transformers, median",
            "found": f"{summary['rounding']['value']:.1e}",
        },
        {
            "of honest servers": "largest of all, in parts of the tolerance",
            "found": f"{summary['largest_honest_of_tolerance']['value']:.3f}",
        },
        {
            "of honest servers": "computed again when all is audited, of the answer's own",
            "found": interval(summary["audit_all_computes_x"], 1),
        },
    ]


def privacy_rows(result: Result) -> Rows:
    """By local layers, what they weigh, and the tokens that each attack recovers."""
    return [
        {
            "local layers": depth,
            "their weights, MB": f"{result.summary[f'local_{depth}_mb']['value']:.0f}",
            "nearest embedding, %": interval(result.summary[f"nearest_{depth}_pct"], 1),
            "linear map, %": interval(result.summary[f"linear_{depth}_pct"], 1),
        }
        for depth in result.parameters["privacy"]["depths"]
    ]
