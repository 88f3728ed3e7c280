"""The figures and tables of notebook 52, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.swarm.chain_costs import (
    BLOOM_BYTES,
    BLOOM_HIDDEN,
    NETWORKS,
    OFFLOADING_GBIT_PER_S,
    PUBLISHED_SERVERS,
    PUBLISHED_STEPS_PER_S,
    offload_s,
)
from firsttoken.swarm.experiments.swarm_chains import BLOOM, BOUNDS_GBIT_PER_S, DISK, OFFLOADING, RAM
from firsttoken.swarm.experiments.swarm_churn import RULES, SHARE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULE_NAMES = {"paper": "the paper's rule, 0.75", "fewest": "fewest moves, at once"}
_NEVER = 10.0  # periods: beyond what is drawn
RULE_LOOKS = {"paper": "other", "fewest": "measured"}


def crossover(result: Result) -> Figure:
    """Seconds of a step by the bytes of the weights: over a link for each token, and through a chain of three; without
    computing, which both do."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(9, 5.2))
    sizes = np.geomspace(0.1, 400, 50)
    shape = next(row for row in result.rows if row["what"] == "shape")
    bytes_here = next(row["bytes"] for row in result.rows if row["what"] == "offload")
    rates = {link: gbit / 8 for link, gbit in OFFLOADING_GBIT_PER_S.items()}
    for link, style in zip(rates, ("-", "--", ":"), strict=True):
        ax.plot(sizes, sizes / rates[link], style, color=COLOURS["paper"], label=f"offloading, {link} (paper's bound)")
    for place, style in ((RAM, "-"), (DISK, "--")):
        rate = result.summary.value("bringing_gb_per_s", variant=OFFLOADING, machine=place)
        label = f"offloading from {place}, measured here"
        ax.plot(sizes, sizes / rate, style, color=COLOURS["single"], label=label)
        ax.plot(bytes_here / 1e9, bytes_here / 1e9 / rate, "o", color=COLOURS["single"])
    for network, style in zip(NETWORKS, ("-", "--", ":"), strict=True):
        hidden = np.interp(
            np.log(sizes), np.log([bytes_here / 1e9, BLOOM_BYTES / 1e9]), [shape["hidden"], BLOOM_HIDDEN]
        )
        seconds = [PUBLISHED_SERVERS * NETWORKS[network].hop_s(round(width)) for width in hidden]
        ax.plot(sizes, seconds, style, color=COLOURS["measured"], label=f"three servers, {network}")
    for edge, name in ((bytes_here / 1e9, "this model"), (BLOOM_BYTES / 1e9, "BLOOM, 8 bits")):
        ax.axvline(edge, color=COLOURS["mark"], linewidth=0.8, linestyle=(0, (1, 3)))
        ax.annotate(
            name,
            (edge, 1),
            (4, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=9,
        )
    ax.set(xscale="log", yscale="log", xlabel="weights, GB", ylabel="a token's way, s (no computing)")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:g}")
    fig.legend(loc="outside lower center", ncols=2, fontsize=8)
    return fig


def table_3_rows(result: Result) -> Rows:
    """Table 3's steps a second of BLOOM, foreseen from its first row, and over the bounds of offloading."""
    rows: Rows = []
    for network, published in PUBLISHED_STEPS_PER_S.items():
        rate = result.summary.value("steps_per_s", model=BLOOM, link=network, source="foreseen")
        entries = result.summary.all("steps_per_s_x", link=network, source="foreseen")
        over = {entry["where"]["gbit_per_s"]: entry["value"] for entry in entries}
        rows.append(
            {
                "network": network,
                "paper, steps/s": published,
                "foreseen, steps/s": round(rate, 2),
                "foreseen over offloading, 256 Gbit/s": f"{over[256]:.1f}",
                "and 128 Gbit/s": f"{over[128]:.1f}",
            }
        )
    return rows


def block_rows(result: Result) -> Rows:
    """How often as fast as offloading a chain of three is when its servers take for a block what this machine takes."""
    rows: Rows = []
    for network, steps_per_s in PUBLISHED_STEPS_PER_S.items():
        published = {gbit: offload_s(BLOOM_BYTES, gbit) * steps_per_s for gbit in BOUNDS_GBIT_PER_S}
        row = {"network": network} | {f"paper, over {gbit} Gbit/s": f"{times:.1f}" for gbit, times in published.items()}
        for entry in result.summary.all("steps_per_s_x", link=network, source="measured"):
            bits, gbit = entry["where"]["bits"], entry["where"]["gbit_per_s"]
            row[f"measured, {bits} bits, over {gbit}"] = interval(entry, 2)
        rows.append(row)
    return rows


def here_rows(result: Result) -> Rows:
    """This model: steps a second through three servers by network, from measured layers, beside measured offloading."""
    contexts, summary = result.parameters["chains"]["contexts"], result.summary
    rows: Rows = [
        {"way": f"three servers, {network}"}
        | {
            f"steps/s after {context} tokens": interval(
                summary.of("steps_per_s", context_tokens=context, link=network), 2
            )
            for context in contexts
        }
        | {
            f"forward, {count} rows, tokens/s": interval(
                summary.of("forward_tokens_per_s", batch=count, link=network), 0
            )
            for count in result.parameters["chains"]["forwards"]
        }
        for network in NETWORKS
    ]
    for place in (RAM, DISK):
        entry = summary.of("step_s", variant=OFFLOADING, machine=place)
        turned = {"value": 1 / entry["value"], "low": 1 / entry["high"], "high": 1 / entry["low"]}
        rows.append({"way": f"offloading from {place}", f"steps/s after {contexts[0]} tokens": interval(turned, 2)})
    return rows


def client_rows(result: Result) -> Rows:
    """Simulated clients on the 14 servers of two continents and on 12 equal ones."""
    paper = {("fourteen", 1): 0.83}
    return [
        {
            "simulated swarm": f"{row['swarm']} servers, {row['clients']} clients at once",
            "servers in the chain": row["hops"],
            "steps/s of each": round(1 / row["seconds"], 2),
            "paper": paper.get((row["swarm"], row["clients"]), ""),
            "slower than alone, %": round(100 * (1 - row["alone_s"] / row["seconds"]), 1),
        }
        for row in result.rows
        if row["what"] == "simulated"
    ]


def churn(result: Result) -> Figure:
    """How many events were over after how long, by rule, with the period; and the share that the swarm came to."""
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    period = result.parameters["churn"]["period_s"]
    for rule in _rules(result):
        here = [row for row in result.rows if row["rule"] == rule]
        back = sorted(_NEVER if row["back_s"] is None else row["back_s"] / period for row in here)
        colour, share = COLOURS[RULE_LOOKS[rule]], 100 * np.arange(1, len(back) + 1) / len(back)
        left.step([0, *back], [0, *share], where="post", color=colour, label=f"{RULE_NAMES[rule]}, n = {len(here)}")
        right.plot(sorted(100 * row["share_after"] for row in here), share, color=colour)
    left.axvline(1, color=COLOURS["target"], linestyle="--", linewidth=1.5)
    left.set(xlim=(0, 2), ylim=(0, 101), xlabel=f"periods until back at {SHARE:.0%} of the most", ylabel="events, %")
    right.axvline(100 * SHARE, color=COLOURS["target"], linestyle="--", linewidth=1.5)
    right.set(ylim=(0, 101), xlabel="rate two periods after the event, % of the most")
    fig.legend(loc="outside lower center", ncols=2, fontsize=9)
    return fig


def churn_rows(result: Result) -> Rows:
    """The measures of the simulated churn, by rule."""
    measures = {
        "back within a period, % of events": ("back_within_a_period_pct", 1),
        "rate after two periods, % of the most": ("share_after_pct", 1),
        "moves an event": ("moves_an_event", 2),
    }
    alone = {
        "longest gap, periods": "longest_unserved_periods",
        "moves in vain": "moves_in_vain",
    }
    summary, rules = result.summary, _rules(result)
    return [
        {"measure": name} | {RULE_NAMES[rule]: interval(summary.of(key, variant=rule), digits) for rule in rules}
        for name, (key, digits) in measures.items()
    ] + [
        {"measure": name} | {RULE_NAMES[rule]: f"{summary.value(key, variant=rule):.3g}" for rule in rules}
        for name, key in alone.items()
    ]


def _rules(result: Result) -> list[str]:
    return [rule for rule in RULES if rule in result.parameters["churn"]["rules"]]
