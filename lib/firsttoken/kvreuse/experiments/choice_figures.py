"""The figures and tables of notebook 35 about a group for this link, from results alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.kvreuse.choose import Conditions, GroupCosts, Scored, choose_group
from firsttoken.kvreuse.experiments.profiling import BOUND, profiled_groups
from firsttoken.kvreuse.experiments.styles import METHODS
from firsttoken.kvreuse.experiments.tables import by_run
from firsttoken.kvreuse.pipeline.schedule import Schedule
from firsttoken.kvreuse.prefill import Group
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = 1.05  # of the best fixed group
_PAPER_KV_BYTES_PER_S = 40e3 * 2 * 32 * 8 * 128 * 2 / 4  # keys and values of 40K tokens in 4 s of prefill (section 3)
_PAPER_GBIT = (50.0, 400.0)  # the report's "next steps"
_PAPER_PREFILL_S, _PAPER_RTT_S = 4.0, (1e-4, 2e-3)
_GRID = (48, 32)  # links, and loads or latencies: a few seconds


@dataclass(frozen=True)
class Map:
    """The costs that were measured, and the groups that may be chosen, for prefixes of ``tokens`` tokens."""

    costs: GroupCosts
    candidates: tuple[Scored, ...]
    tokens: int

    @classmethod
    def of(cls, adaptive: Result, profile: Result) -> Map:
        """Costs of ``adaptive`` (adaptive_group), groups of the first run of ``profile`` (layer_profile)."""
        rows = next(iter(by_run(profile).values()))
        scored = tuple(Scored(p.group, p.relative_loss) for p in profiled_groups(rows) if p.relative_loss <= BOUND)
        return cls(GroupCosts(**adaptive.provenance["costs"]), scored, adaptive.rows[0]["tokens"])

    def choice(self, bytes_per_s: float, latency_s: float = 0.0, load: float = 1.0) -> tuple[Group, float]:
        """The group, and the TTFT expected of it over full prefill's under the same load."""
        now = Conditions(self.tokens, bytes_per_s, latency_s, load)
        chosen = choose_group(self.candidates, self.costs, now, BOUND)
        return chosen.group, chosen.ttft_s / self.costs.ttft_s(self.costs.full, now, Schedule.RECOMPUTE)

    @property
    def kv_bytes_per_s(self) -> float:
        """How fast a full prefill makes keys and values here: a link of that rate is as fast as computing."""
        now = Conditions(self.tokens, 0.0)
        return self.costs.depth * self.costs.kv_token_bytes * self.tokens / self.costs.compute_s(self.costs.full, now)

    def here(self, gbit_per_s: float) -> float:
        """Gbit/s here that are to computing here what ``gbit_per_s`` are to the paper's A100 with 8B parameters."""
        return gbit_per_s * self.kv_bytes_per_s / _PAPER_KV_BYTES_PER_S


def choices(result: Result) -> Figure:
    """Above: TTFT of every group by bandwidth, and of the choice. Below: the choice over the best fixed group."""
    import matplotlib.pyplot as plt

    fig, (above, below) = plt.subplots(2, 1, figsize=(8.5, 6.6), sharex=True, height_ratios=(2.2, 1))
    rates = sorted({row["gbit_per_s"] for row in result.rows})
    fixed = sorted({(row["layers"], row["lo"], row["hi"]) for row in result.rows if row["how"] == "fixed"})
    for index, (layers, lo, hi) in enumerate(fixed):
        of = [r for r in result.rows if (r["how"], r["lo"], r["hi"]) == ("fixed", lo, hi)]
        whole = lo == 0 and index == len(fixed) - 1
        colour = METHODS["full prefill"].colour if whole else str(0.25 + 0.5 * index / max(1, len(fixed) - 1))
        label = f"always all {layers} layers (full prefill)" if whole else f"always {Group(lo, hi)} ({layers} layers)"
        line = [float(np.median([row["ttft_s"] for row in of if row["gbit_per_s"] == rate])) for rate in rates]
        above.plot(rates, line, ("v^s<>"[index % 5]) + "-", color=colour, linewidth=1.3, label=label)
    chosen = [[r for r in result.rows if (r["how"], r["gbit_per_s"]) == ("chosen", rate)] for rate in rates]
    look = METHODS["DroidSpeak"]
    middle = [float(np.median([row["ttft_s"] for row in of])) for of in chosen]
    above.plot(rates, middle, "o-", color=look.colour, linewidth=2.4, markersize=8, label="chosen for this link")
    expected = [float(np.median([row["expected_s"] for row in of])) for of in chosen]
    above.plot(rates, expected, "_", color=COLOURS["floor"], markersize=16, label="expected of the choice (computed)")
    for rate, of, low in zip(rates, chosen, map(min, middle, expected), strict=True):
        groups = [f"{Group(row['lo'], row['hi'])}" for row in of]
        usual = max(sorted(set(groups)), key=groups.count)
        above.annotate(usual, (rate, low), (0, -16), textcoords="offset points", ha="center", fontsize=9)
    above.set(ylabel="time to first token, s", xscale="log", yscale="log")
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_formatter("{x:g}")
    above.tick_params(axis="y", which="minor", labelsize=8)
    bottom, top = above.get_ylim()
    above.set_ylim(bottom / 1.15, top)
    above.legend(fontsize=8.5, loc="upper right")
    for rate in rates:
        entry = result.summary[f"chosen_over_best_{rate:g}".replace(".", "p")]
        below.plot([rate, rate], [entry["low"], entry["high"]], color=look.colour, linewidth=2)
        below.plot(rate, entry["value"], "o", color=look.colour, markersize=8)
    below.axhline(1, color=COLOURS["floor"], linestyle=":", linewidth=1.2, label="best fixed group")
    below.axhline(TARGET, color=COLOURS["report"], linestyle="--", label=f"target: at most {TARGET}")
    below.set_xticks(rates, [f"{rate:g}" for rate in rates])
    below.xaxis.set_minor_formatter("")
    below.set(xlabel="link, Gbit/s (shaped)", ylabel="choice / best fixed")
    below.legend(fontsize=8.5)
    return fig


def maps(plan: Map, result: Result) -> Figure:
    """The chosen share of layers (colour) and the TTFT over full prefill's (lines), computed from measured costs."""
    import matplotlib.pyplot as plt
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground="white")]
    live = sorted({row["gbit_per_s"] for row in result.rows})
    rates = np.geomspace(min(live) / 2, max(2 * plan.here(_PAPER_GBIT[1]), 2 * max(live)), _GRID[0])
    loads = np.geomspace(1, 8, _GRID[1])
    prefill_s = plan.costs.compute_s(plan.costs.full, Conditions(plan.tokens, 0.0))
    shares = np.geomspace(1e-5, 1, _GRID[1])  # of a full prefill
    fig, (left, right) = plt.subplots(1, 2, figsize=(11.5, 5.2), sharex=True)
    by_load = [[plan.choice(rate * 1e9 / 8, load=load) for rate in rates] for load in loads]
    by_latency = [[plan.choice(rate * 1e9 / 8, latency_s=share * prefill_s) for rate in rates] for share in shares]
    for ax, y, found in ((left, loads, by_load), (right, shares, by_latency)):
        layers = np.array([[100 * len(group) / plan.costs.depth for group, _ in line] for line in found])
        colours = ax.pcolormesh(rates, y, layers, cmap="YlGnBu", vmin=0, vmax=100, shading="nearest", rasterized=True)
        over = np.array([[ratio for _, ratio in line] for line in found])
        lines = ax.contour(rates, y, over, levels=[0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99], colors="black")
        lines.set_path_effects(halo)
        for text in ax.clabel(lines, fmt="%.2g", fontsize=9):
            text.set_path_effects(halo)
        ax.set(xscale="log", yscale="log", xlabel="link, Gbit/s here")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.grid(visible=False)
        for edge in _PAPER_GBIT:
            ax.axvline(plan.here(edge), color=COLOURS["paper"], linestyle="--", linewidth=1.8, path_effects=halo)
            there = {"xycoords": ("data", "axes fraction"), "ha": "center", "fontsize": 9}
            ax.annotate(f"{edge:g} Gbit/s\nthere", (plan.here(edge), 1.01), **there)
    left.plot(live, [1.03] * len(live), "^", color=COLOURS["S1"], markersize=8, clip_on=False, label="measured links")
    left.legend(loc="upper right", frameon=True)
    left.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    left.yaxis.set_minor_formatter("")
    left.set_ylabel("load: times longer a computation takes")
    right.set_ylabel("latency of the link / full prefill")
    for rtt in _PAPER_RTT_S:
        share = rtt / _PAPER_PREFILL_S
        right.axhline(share, color=COLOURS["paper"], linestyle=":", linewidth=2, path_effects=halo)
        right.annotate(f"{1e3 * rtt:g} ms there", (rates[-2], 1.15 * share), ha="right", fontsize=9, path_effects=halo)
    fig.colorbar(colours, ax=right, label="layers recomputed by the choice, %")
    fig.suptitle(
        f"computed from measured costs, {plan.tokens:,} tokens; lines: TTFT / full prefill's under the same load",
        fontsize=11,
    )
    return fig


def choice_rows(result: Result) -> Rows:
    """The choice at each link in numbers."""
    rows = []
    for rate in sorted({row["gbit_per_s"] for row in result.rows}):
        of = [row for row in result.rows if row["gbit_per_s"] == rate]
        chosen = [row for row in of if row["how"] == "chosen"]
        groups = [str(Group(row["lo"], row["hi"])) for row in chosen]
        fixed = {
            (row["lo"], row["hi"]): float(np.median([r["ttft_s"] for r in of if _fixed(r, row)]))
            for row in of
            if row["how"] == "fixed"
        }
        best = min(fixed, key=fixed.__getitem__)
        rows.append(
            {
                "link, Gbit/s": f"{rate:g}",
                "chosen": max(sorted(set(groups)), key=groups.count),
                "TTFT, s": round(float(np.median([row["ttft_s"] for row in chosen])), 3),
                "expected, s": round(float(np.median([row["expected_s"] for row in chosen])), 3),
                "best fixed": str(Group(*best)),
                "its TTFT, s": round(fixed[best], 3),
                "worst fixed, s": round(max(fixed.values()), 3),
                "choice / best (target 1.05)": interval(
                    result.summary[f"chosen_over_best_{rate:g}".replace(".", "p")], 3
                ),
            }
        )
    return rows


def scaled_rows(plan: Map) -> Rows:
    """The report's 50 to 400 Gbit/s, and the links on which something changes, computed."""
    rows = []
    for gbit in (4, 16, 64, 50, 100, 200, 300, 400):
        here = plan.here(gbit)
        line: dict[str, Any] = {"Gbit/s in the paper": gbit, "as much here, Gbit/s": round(here, 3)}
        for rtt in _PAPER_RTT_S:
            latency_s = rtt / _PAPER_PREFILL_S * plan.costs.compute_s(plan.costs.full, Conditions(plan.tokens, 0.0))
            group, over = plan.choice(here * 1e9 / 8, latency_s)
            line[f"{1e3 * rtt:g} ms: group"] = f"{group} ({len(group)} of {plan.costs.depth})"
            line[f"{1e3 * rtt:g} ms: TTFT / full prefill's"] = round(over, 3)
        rows.append(line)
    return sorted(rows, key=lambda row: row["Gbit/s in the paper"])


def _fixed(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return row["how"] == "fixed" and (row["lo"], row["hi"]) == (other["lo"], other["hi"])
