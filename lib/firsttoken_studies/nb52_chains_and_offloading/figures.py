"""The figures and tables of notebook 52, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken_studies.nb52_chains_and_offloading.swarm_chains import BLOOM, BOUNDS_GBIT_PER_S, DISK, OFFLOADING, RAM
from firsttoken_studies.nb52_chains_and_offloading.swarm_churn import RULES, SHARE
from firsttoken_studies.petals.chain_costs import (
    BLOOM_BYTES,
    BLOOM_HIDDEN,
    NETWORKS,
    OFFLOADING_GBIT_PER_S,
    PUBLISHED_SERVERS,
    PUBLISHED_STEPS_PER_S,
    offload_s,
)
from firsttoken_studies.record.overlay import over
from firsttoken_studies.record.plot import COLOURS, panels
from firsttoken_studies.record.results import Result, Table, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULE_NAMES = {"paper": "the paper's rule, 0.75", "fewest": "fewest moves, at once"}
_NEVER = 10.0  # periods: beyond what is drawn
RULE_LOOKS = {"paper": "other", "fewest": "measured"}


def schematic() -> Schematic:
    """Draw offloading, a chain of servers, and the blocks that a new server takes."""
    alt = (
        "With offloading all weights come to one card again for every token. In a chain the weights stay on three "
        "servers, and the state of the token goes from one to the next. A new server takes the blocks that are served "
        "by the fewest."
    )
    sketch = Schematic(20, 10, alt)
    sketch.text(0.2, 0.5, "Offloading: all weights come over a link, for every token", heading=True)
    for block in range(12):
        sketch.box(0.2 + 0.65 * block, 1, "", "paper", width=0.6)
    sketch.arrow((8.2, 1.5), (13.4, 1.5), "all weights")
    sketch.box(13.6, 1, "one card", "single", width=3)
    sketch.text(0.2, 3, "A chain of servers: the weights stay, the token's state travels", heading=True)
    sketch.box(0.2, 3.5, "client", "other", width=2.2)
    for server, span in enumerate(("blocks 0 to 5", "blocks 6 to 9", "blocks 10, 11")):
        sketch.arrow((2.6 + 5.8 * server, 4), (4.5 + 5.8 * server, 4), "a state")
        sketch.box(4.7 + 5.8 * server, 3.5, span, "measured", width=3.5)
    sketch.text(0.2, 5.5, "A new server takes the blocks that are slowest", heading=True)
    for row, (name, first, stop, look) in enumerate(
        (("A", 0, 6, "measured"), ("B", 6, 10, "measured"), ("C", 0, 4, "measured"), ("new", 8, 12, "mark"))
    ):
        sketch.text(3.3, 6.4 + 0.9 * row, f"server {name}" if name != "new" else "new server", align="right")
        for block in range(first, stop):
            sketch.box(3.6 + 1.3 * block, 6 + 0.9 * row, str(block), look, width=1.2, height=0.8)
    return sketch


def speed_notes(recorded: Result | None, now: Result) -> list[str]:
    """Say where the own run is so slow that its figures are about the machine's other work, and not about chains."""
    notes, rates = [], {}
    for storage in (RAM, DISK):
        rates[storage] = now.summary.value("bringing_gb_per_s", variant=OFFLOADING, machine=storage)
    if rates[RAM] < rates[DISK]:
        notes.append(
            f"NOT PLAUSIBLE: weights came from memory at {rates[RAM]:.2f} GB/s and from the disk at {rates[DISK]:.2f}; "
            "something else used the machine: run it again"
        )
    if recorded is not None and recorded.slug == now.slug:
        seconds = [result.summary.value("block_s", model=BLOOM, bits=8) for result in (now, recorded)]
        times = max(seconds) / min(seconds)
        if times > 1.5:
            slower = "your run" if seconds[0] > seconds[1] else "the record"
            notes.append(
                f"UNLIKE the record on a machine of this name: a block took {slower} {times:.1f} times as long as the "
                "other; the ratios of chain and offloading differ by as much"
            )
    return notes


def crossover(recorded: Result | None, now: Result) -> Figure:
    """Seconds of a step by the bytes of the weights: over a link for each token, and through a chain of three; without
    computing, which both do."""
    fig, ax = panels(figsize=(9, 5.4))
    sizes, results = np.geomspace(0.1, 400, 50), over(recorded, now)
    gbits = OFFLOADING_GBIT_PER_S.values()
    fastest, slowest = 8 * sizes / max(gbits), 8 * sizes / min(gbits)
    label = f"offloading, the paper's bounds: {min(gbits):g} to {max(gbits):g} Gbit/s"
    ax.fill_between(sizes, fastest, slowest, color=COLOURS["paper"], alpha=0.35, linewidth=0, label=label)
    for shown in results:
        bytes_gb = _gb_of(shown.result)
        for storage, style in ((RAM, "-"), (DISK, "--")):
            entry = shown.result.summary.of("bringing_gb_per_s", variant=OFFLOADING, machine=storage)
            seconds = {
                end: bytes_gb / entry[bound] for end, bound in (("value", "value"), ("low", "high"), ("high", "low"))
            }
            if shown.library is not None:  # offloading asks for no chain
                continue
            ax.plot(sizes, sizes / entry["value"], style, color=COLOURS["single"], **shown.style)
            name = f"offloading from {storage}, {shown.who()}"
            shown.point(ax, bytes_gb, seconds, "single", label=name)
            ax.lines[-1].set(linestyle=style, markersize=9)
    (shape,), here_gb = rows_where(now.rows, what="shape"), _gb_of(now)
    for network, style in zip(NETWORKS, ("-", "--", ":"), strict=True):
        hidden = np.interp(np.log(sizes), np.log([here_gb, BLOOM_BYTES / 1e9]), [shape["hidden"], BLOOM_HIDDEN])
        seconds = [PUBLISHED_SERVERS * NETWORKS[network].hop_s(round(width)) for width in hidden]
        ax.plot(sizes, seconds, style, color=COLOURS["measured"], label=f"chain of three servers, {network}")
        for shown in results:  # a changed search, where it counts other round trips than the three
            for row in rows_where(shown.result.rows, what="search"):
                if shown.library is not None and row["round_trips"] != PUBLISHED_SERVERS:
                    label = f"your search, of {row['round_trips']:g} round trips" if style == "-" else None
                    counted = np.asarray(seconds) * row["round_trips"] / PUBLISHED_SERVERS
                    ax.plot(sizes, counted, style, color=COLOURS["measured"], label=label, **shown.style)
    for edge, name in ((here_gb, "this model"), (BLOOM_BYTES / 1e9, "BLOOM, 8 bits")):
        ax.axvline(edge, color=COLOURS["mark"], linewidth=0.8, linestyle=(0, (1, 3)))
        text_style = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        ax.annotate(name, (edge, 1), (4, -4), va="top", fontsize=9, **text_style)
    ax.set(xscale="log", yscale="log", xlabel="weights, GB", ylabel="time per token without compute, s")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:g}")
    fig.suptitle("A chain pays for round trips, offloading for bytes: large models cross first")
    fig.legend(loc="outside lower center", ncols=2, fontsize=9, handlelength=3.2)
    return fig


def _gb_of(result: Result) -> float:
    """The weights that offloading brings for a token."""
    return next(row["bytes"] for row in result.rows if row["what"] == "offload") / 1e9


def table_3_rows(result: Result) -> Table:
    """Table 3's steps a second of BLOOM, foreseen from its first row, and over the bounds of offloading."""
    for network, published in PUBLISHED_STEPS_PER_S.items():
        rate = result.summary.value("steps_per_s", model=BLOOM, link=network, source="foreseen")
        entries = result.summary.all("steps_per_s_x", link=network, source="foreseen")
        by_rate = {entry["where"]["gbit_per_s"]: entry["value"] for entry in entries}
        yield {
            "network": network,
            "paper, steps/s": published,
            "foreseen, steps/s": round(rate, 2),
            "foreseen over offloading, 256 Gbit/s": f"{by_rate[256]:.1f}",
            "and 128 Gbit/s": f"{by_rate[128]:.1f}",
        }


def block_rows(recorded: Result | None, now: Result) -> Table:
    """Yield the speed of a chain of three over that of offloading when its servers take for a block what this machine
    takes."""
    for network, steps_per_s in PUBLISHED_STEPS_PER_S.items():
        published = {gbit: offload_s(BLOOM_BYTES, gbit) * steps_per_s for gbit in BOUNDS_GBIT_PER_S}
        row = {"network": network} | {f"paper, over {gbit} Gbit/s": f"{times:.1f}" for gbit, times in published.items()}
        for shown in over(recorded, now):
            for entry in shown.result.summary.all("steps_per_s_x", link=network, source="measured", bits=8):
                row[f"8 bits, over {entry['where']['gbit_per_s']}: {shown.who()}"] = interval(entry, 2)
        yield row


def here_rows(recorded: Result | None, now: Result) -> Table:
    """This model: steps a second through three servers by network, from measured layers, beside measured offloading."""
    for shown in over(recorded, now):
        context, summary = min(shown.result.parameters["chains"]["contexts"]), shown.result.summary
        most = max(shown.result.parameters["chains"]["forwards"])
        for network in NETWORKS:
            forward = summary.of("forward_tokens_per_s", batch=most, link=network)
            steps = interval(summary.of("steps_per_s", context_tokens=context, link=network), 2)
            row = {"way": f"three servers, {network}", "steps/s": steps, "forward, tokens/s": interval(forward, 0)}
            yield row | {"rows of the forward pass": most, "whose": shown.who()}
        for storage in (RAM, DISK):
            entry = summary.of("step_s", variant=OFFLOADING, machine=storage)
            turned = {"value": 1 / entry["value"], "low": 1 / entry["high"], "high": 1 / entry["low"]}
            yield {"way": f"offloading from {storage}", "steps/s": interval(turned, 2), "whose": shown.who()}


def client_rows(result: Result) -> Table:
    """Simulated clients on the 14 servers of two continents and on 12 equal ones."""
    paper = {("fourteen", 1): 0.83}
    own_rows = rows_where(result.rows, what="simulated")
    changed = [] if result.with_mechanism is None else rows_where(result.with_mechanism.rows, what="simulated")
    for row in own_rows + [row for row in changed if row not in own_rows]:
        whose = "" if row in own_rows else ", your mechanism"
        yield {
            "simulated swarm": f"{row['swarm']} servers, {row['clients']} clients at once{whose}",
            "servers in the chain": row["hops"],
            "steps/s of each": round(1 / row["seconds"], 2),
            "paper": paper.get((row["swarm"], row["clients"]), ""),
            "slower than alone, %": round(100 * (1 - row["alone_s"] / row["seconds"]), 1),
        }


def churn(recorded: Result | None, now: Result) -> Figure:
    """Draw the share of events that were over by each time, by rule, with the period; and the share that the swarm came
    to."""
    fig, (course_panel, right) = panels(1, 2, figsize=(9, 4.4))
    results = over(recorded, now)
    for shown in results:
        period = shown.result.parameters["churn"]["period_s"]
        for rule in rules_of(shown.result):
            rule_rows = rows_where(shown.result.rows, rule=rule)
            if shown.library is not None and rule_rows == rows_where(shown.library.rows, rule=rule):
                continue
            back = sorted(_NEVER if row["back_s"] is None else row["back_s"] / period for row in rule_rows)
            share, look = 100 * np.arange(1, len(back) + 1) / len(back), {"color": COLOURS[RULE_LOOKS[rule]]}
            look |= shown.style | {"linewidth": 1.6 if shown.own else 4}
            name = f"{RULE_NAMES[rule]}: {shown.who(len(rule_rows))}"
            course_panel.step([0, *back], [0, *share], where="post", label=name, **look)
            right.plot(sorted(100 * row["share_after"] for row in rule_rows), share, **look)
    course_panel.axvline(1, color=COLOURS["target"], linestyle="--", linewidth=1.5)
    course_panel.set(
        xlim=(0, 2), ylim=(0, 101), xlabel=f"periods until back at {SHARE:.0%} of the most", ylabel="events, %"
    )
    right.axvline(100 * SHARE, color=COLOURS["target"], linestyle="--", linewidth=1.5)
    right.set(ylim=(0, 101), xlabel="rate two periods after the event, % of the most")
    fig.suptitle(_churn_title(results[-1].result))
    fig.legend(loc="outside lower center", ncols=2, fontsize=9)
    return fig


def _churn_title(result: Result) -> str:
    """Say what share of the most the swarm comes to by each rule in this run."""
    shares = {rule: result.summary.value("share_after_pct", variant=rule) for rule in rules_of(result)}
    parts = [f"{share:.0f} % by {RULE_NAMES[rule].partition(',')[0]}" for rule, share in shares.items()]
    return f"The swarm comes to rest at {', '.join(parts)} (the goal: {SHARE:.0%})"


def churn_rows(recorded: Result | None, now: Result) -> Table:
    """The measures of the simulated churn, by rule."""
    measures = {
        "back within a period, % of events": ("back_within_a_period_pct", 1),
        "rate after two periods, % of the most": ("share_after_pct", 1),
        "moves an event": ("moves_an_event", 2),
        "longest gap, periods": ("longest_unserved_periods", 3),
        "moves in vain": ("moves_in_vain", 0),
    }
    for name, (key, digits) in measures.items():
        line = {"measure": name}
        for shown in over(recorded, now):
            for rule in rules_of(shown.result):
                entry = shown.result.summary.of(key, variant=rule)
                line[f"{RULE_NAMES[rule]}: {shown.who()}"] = interval(entry, digits)
        yield line


def rules_of(result: Result) -> list[str]:
    """The rules by which servers moved in a run, the paper's first."""
    return [rule for rule in RULES if rule in result.parameters["churn"]["rules"]]
