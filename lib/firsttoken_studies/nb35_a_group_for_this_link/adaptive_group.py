"""A group chosen for the link at run time, live against every fixed one (DroidSpeak leaves it to future work, 6)."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from firsttoken.droidspeak.group_selection import Conditions, GroupCosts, GroupLoss, LinkEstimate, choose_group
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.schedule import Schedule
from firsttoken.link.shaped import LinkConfig
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Entry, Summary
from firsttoken_studies.droidspeak.setting import Setting
from firsttoken_studies.droidspeak.tables import by_run
from firsttoken_studies.droidspeak.wire import LoadingConfig, WiredPair
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import BOUND, profiled_groups, setting_profile
from firsttoken_studies.record.overlay import DrawnResult, legend, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, Axes, Figure, panels, ticks
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    import pandas


GroupRule: TypeAlias = Callable[[Sequence[GroupLoss], GroupCosts, int, float, float], Group]


def group_for_link(
    groups: Sequence[GroupLoss], costs: GroupCosts, tokens: int, bytes_per_s: float, bound: float
) -> Group:
    """Return r*(B): of ``groups`` that lose no more than ``bound``, or all layers, the soonest over a link."""
    return choose_group(groups, costs, Conditions(tokens, bytes_per_s), bound).group


def adaptive_group(profile: Profile, *, choose: GroupRule = group_for_link) -> Outcome:
    """One row a link, group and round: TTFT of every fixed group within the loss bound, and of the one that is chosen.

    The choice knows the costs, measured once before, and what it has seen of the link: its first belief is a wrong one
    (1 Gbit/s), and the first request over each link corrects it and is not counted. ``choose`` makes the choice.
    """
    config = profile.section("loading", LoadingConfig)
    setting = Setting(profile, config.needs())
    receiver, sender, profiled = setting_profile(setting, setting.runs[0])
    within = sorted((g for g in profiled if g.relative_loss <= BOUND), key=lambda g: (len(g.group), g.relative_loss))
    best_by_size = {len(g.group): g for g in reversed(within)}
    candidates = [GroupLoss(g.group, g.relative_loss) for _, g in sorted(best_by_size.items())]
    depth = receiver.model.config.num_hidden_layers
    partial = [c for c in candidates if len(c.group) < depth]
    count = config.rivals if partial else 0
    rivals = [partial[round(i * (len(partial) - 1) / max(1, count - 1))] for i in range(count)]
    rivals = list(dict.fromkeys([*rivals, GroupLoss(Group(0, depth), 0.0)]))
    rng, rows = random.Random(profile.seed), []
    with tempfile.TemporaryDirectory(prefix="firsttoken-") as folder:
        wire = WiredPair(sender, receiver, config.tokens, [c.group for c in candidates], Path(folder))
        costs = measured_costs(wire, next(c.group for c in candidates if len(c.group)))
        for rate in track(config.gbit_per_s, desc="choices", unit="link"):
            estimate, link = LinkEstimate(1e9 / 8), LinkConfig(rate)
            for step in range(-1, config.rounds):
                choice = choose(candidates, costs, config.tokens, estimate.bytes_per_s, BOUND)
                groups = [(rival.group, "fixed") for rival in rivals] if step >= 0 else []
                for group, how in rng.sample([*groups, (choice, "chosen")], len(groups) + 1):
                    full_recompute = len(group) == depth
                    marks = wire.ask(group, link, Schedule.RECOMPUTE if full_recompute else Schedule.PIPELINED).marks
                    if how == "chosen" and marks.last_byte_s:
                        estimate.observe(marks.bytes_moved, marks.last_byte_s)
                    if step >= 0:
                        rows.append(
                            {"gbit_per_s": rate, "how": how, "lo": group.lo, "hi": group.hi, "layers": len(group)}
                            | {"round": step, "tokens": config.tokens, "ttft_s": round(marks.first_token_s, 6)}
                            | {"expected_s": round(costs.ttft_s(group, _now(config.tokens, estimate)), 6)}
                        )
    return Outcome(rows, provenance={"models": setting.models.provenance, "costs": _recorded(costs)})


_RECORDED = {"e_cache_token_bytes": "edge_token_bytes"}  # a name of today, and that under which results hold it


def _recorded(costs: GroupCosts) -> dict[str, Any]:
    return {_RECORDED.get(name, name): value for name, value in vars(costs).items()}


def _read(recorded: Mapping[str, Any]) -> GroupCosts:
    today = {old: new for new, old in _RECORDED.items()}
    return GroupCosts(**{today.get(name, name): value for name, value in recorded.items()})


def measured_costs(wire: WiredPair, group: Group) -> GroupCosts:
    """Measure one recomputed layer and the pass behind the prefix in three unshaped requests; medians."""
    layer, behind = [], []
    for step in range(4):
        marks = wire.ask(group, LinkConfig(), Schedule.SEND_REUSED).marks
        if step:
            layer.append((marks.recompute_end_s - marks.recompute_start_s) / len(group))
            behind.append(marks.first_token_s - marks.recompute_end_s)
    depth = wire.model.config.num_hidden_layers
    return GroupCosts(depth, sorted(layer)[1], 0.0, sorted(behind)[1], wire.kv_token_bytes, wire.e_cache_token_bytes)


def adaptive_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by link the chosen group: its median TTFT over that of the best fixed group."""
    summary, labels = Summary(), {"variant": "chosen", "than": "best fixed"}
    for rate, rate_rows in frame_of(rows).groupby("gbit_per_s"):
        best = rate_rows[rate_rows.how == "fixed"].groupby(["lo", "hi"]).ttft_s.median().min()
        chosen = bootstrap(rate_rows[rate_rows.how == "chosen"].ttft_s / best, "median")
        summary.add("ttft_x", chosen.summary("x of the best fixed"), **labels, gbit_per_s=rate)
    summary.add("ttft_x", max(summary, key=lambda entry: entry["value"]), **labels, across="worst")
    return summary


def _now(tokens: int, estimate: LinkEstimate) -> Conditions:
    return Conditions(tokens, estimate.bytes_per_s)


# What the choice of a group would do on links and under loads that were not run: computed from measured costs.

_PAPER_GBIT = (4, 16, 50, 64, 100, 200, 300, 400)  # Figure 20's links, and the report's "next steps"
_PAPER_PREFILL_S, _PAPER_RTT_S = 4.0, 2e-3  # of 40K tokens (section 3); the longer latency of the "next steps"
_PAPER_KV_BYTES_PER_S = 40e3 * 2 * 32 * 8 * 128 * 2 / _PAPER_PREFILL_S
_BUSY = 4.0  # times longer a computation takes


@dataclass(frozen=True)
class Plan:
    """The costs that were measured, and the groups that may be chosen, for prefixes of ``tokens`` tokens."""

    costs: GroupCosts
    candidates: tuple[GroupLoss, ...]
    tokens: int

    @classmethod
    def of(cls, adaptive: Result, profile: Result) -> Plan:
        """Costs of ``adaptive`` (adaptive_group), groups of the first run of ``profile`` (layer_profile)."""
        rows = next(iter(by_run(profile).values()))
        scored = tuple(GroupLoss(p.group, p.relative_loss) for p in profiled_groups(rows) if p.relative_loss <= BOUND)
        return cls(_read(adaptive.provenance["costs"]), scored, adaptive.rows[0]["tokens"])

    def choice(self, bytes_per_s: float, latency_s: float = 0.0, load: float = 1.0) -> tuple[Group, float]:
        """The group, and the TTFT expected of it over full prefill's under the same load."""
        now = Conditions(self.tokens, bytes_per_s, latency_s, load)
        chosen = choose_group(self.candidates, self.costs, now, BOUND)
        return chosen.group, chosen.ttft_s / self.costs.ttft_s(self.costs.full, now, Schedule.RECOMPUTE)

    @property
    def prefill_s(self) -> float:
        """Return the time that a full prefill computes here, in s."""
        return self.costs.compute_s(self.costs.full, Conditions(self.tokens, 0.0))

    def here(self, gbit_per_s: float) -> float:
        """Return the rate in Gbit/s that is to computing here what ``gbit_per_s`` is to the paper's A100 with 8B
        parameters."""
        kv_bytes_per_s = self.costs.depth * self.costs.kv_token_bytes * self.tokens / self.prefill_s
        return gbit_per_s * kv_bytes_per_s / _PAPER_KV_BYTES_PER_S


def scaled_rows(plan: Plan) -> Table:
    """The paper's and the report's links, scaled to this machine: the choice, alone, far away, on a busy processor."""
    far_s = _PAPER_RTT_S / _PAPER_PREFILL_S * plan.prefill_s
    for gbit in _PAPER_GBIT:
        link_rate = plan.here(gbit)
        line: dict[str, Any] = {"Gbit/s in the paper": gbit, "as much here": round(link_rate, 3)}
        for name, load in (("", 1.0), (f" at {_BUSY:g} times the load", _BUSY)):
            group, choice_time = plan.choice(link_rate * 1e9 / 8, load=load)
            line[f"group{name}"] = f"{group} ({len(group)} of {plan.costs.depth})"
            line[f"TTFT / full prefill's{name}"] = round(choice_time, 3)
        line[f"the same {1e3 * _PAPER_RTT_S:g} ms away"] = round(plan.choice(link_rate * 1e9 / 8, far_s)[1], 3)
        yield line


# The pictures and the table of notebook 35 about a group for this link, from results of adaptive_group.

TARGET = 1.05  # of the best fixed group


def schematic() -> Schematic:
    """Draw which layers are recomputed over a fast, a slower and a slow link."""
    alt = (
        "Ten layers, over three links. Over a fast link most layers are sent and few computed again. Over a slower "
        "link more are computed again. Over a slow link nothing is sent, and all layers are computed."
    )
    sketch = Schematic(20, 4.8, alt)
    sketch.text(0.2, 0.45, "The slower the link, the more layers are computed again", heading=True)
    for row, (link, computed) in enumerate((("fast link", range(6, 10)), ("slower", range(6)), ("slow", range(10)))):
        sketch.text(0.2, 1.6 + 1.2 * row, link)
        for layer in range(10):
            sketch.box(3 + layer, 1.1 + 1.2 * row, look="recompute" if layer in computed else "full reuse")
    for row, (look, label) in enumerate((("full reuse", "keys and values sent"), ("recompute", "computed again"))):
        sketch.box(13.8, 1.1 + 1.2 * row, look=look)
        sketch.text(15, 1.6 + 1.2 * row, label)
    return sketch


def choices(recorded: Result | None, now: Result) -> Figure:
    """Left: TTFT of every group by bandwidth, and of the choice. Right: the choice over the best fixed group."""
    results = over(recorded, now)
    fig, (times, ratios) = panels(1, 2, figsize=(9, 4.6), width_ratios=(1.5, 1))
    for result_drawn in results:
        frame = result_drawn.result.frame()
        fixed_groups = frame[frame.how == "fixed"].groupby(["lo", "hi"])
        # a reader's rule changes the choice alone; the fixed groups differ by chance from run to run
        for (lo, hi), fixed in [] if result_drawn.library else fixed_groups:
            medians = fixed.groupby("gbit_per_s").ttft_s.median()
            name = "recompute" if hi - lo == frame.layers.max() else "other"
            entries = [{"value": seconds} for seconds in medians]
            result_drawn.line(times, medians.index, entries, name, markersize=4, linewidth=1.3)
            if name == "other":
                point = (medians.index[0], medians.iloc[0])
                _say(times, str(Group(lo, hi)), point, (-5, 0), result_drawn, ha="right", va="center")
        chosen = dict(list(frame[frame.how == "chosen"].groupby("gbit_per_s")))
        entries = [bootstrap(group_rows.ttft_s, "median").summary() for group_rows in chosen.values()]
        result_drawn.line(times, list(chosen), entries, "droidspeak", linewidth=2.4)
        for (rate, group_rows), entry in zip(chosen.items(), entries, strict=True):
            _say(times, _usual(group_rows), (rate, entry["value"]), (3, -14), result_drawn, ha="left")
            ratio, library = _over_best(result_drawn.result, rate), result_drawn.library
            if library is None or ratio != _over_best(library, rate):
                result_drawn.point(ratios, rate * 2**result_drawn.shift, ratio, "droidspeak")
    times.set(ylabel="time to first token, s", yscale="log")
    bottom, top = times.get_ylim()
    times.set_ylim(bottom / 1.15, top)
    ticks(times.yaxis, [tick for tick in (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.2, 1.5, 2, 3, 5) if bottom < tick < top])
    for name, width, label in (
        ("droidspeak", 2.4, "chosen for this link"),
        ("other", 1.3, "always the group named"),
        ("recompute", 1.3, "always all layers (full prefill)"),
    ):
        times.plot([], [], f"{LOOKS[name].marker}-", color=COLOURS[name], linewidth=width, label=label)
    for point, name, dashes, label in (
        (1, "mark", ":", "best fixed group"),
        (TARGET, "target", "--", f"goal: {TARGET}"),
    ):
        ratios.axhline(point, color=COLOURS[name], linestyle=dashes, linewidth=1.4)
        times.plot([], [], dashes, color=COLOURS[name], label=label)
    ratios.set_ylabel("TTFT / that of the best fixed group")
    shown = sorted({row["gbit_per_s"] for result_drawn in results for row in result_drawn.result.rows})
    for ax in (times, ratios):
        ax.set(xscale="log", xlabel="link, Gbit/s (shaped)")
        ticks(ax.xaxis, shown)
        ax.set_xlim(shown[0] / 1.5, shown[-1] * 1.3)
    worst = results[0].result.summary.value("ttft_x", variant="chosen", than="best fixed", across="worst")
    fig.suptitle(f"The chosen group takes at most {worst:.2f} of the best fixed one's time, on any link", fontsize=12)
    legend(fig, times, results, "ttft_x")
    return fig


def _say(
    ax: Axes, text: str, point: tuple[float, float], apart: tuple[int, int], shown: DrawnResult, **text_style: str
) -> None:
    """Name a group beside a point, in the strength of its run."""
    behind = {"color": "white", "alpha": 0.7, "pad": 0.5}
    strength = shown.style["alpha"] ** 0.5
    ax.annotate(text, point, apart, textcoords="offset points", fontsize=8.5, alpha=strength, bbox=behind, **text_style)


def choice_rows(result: Result) -> Table:
    """The choice at each link in numbers."""
    for rate, rate_rows in result.frame().groupby("gbit_per_s"):
        fixed, chosen = (
            rate_rows[rate_rows.how == "fixed"].groupby(["lo", "hi"]).ttft_s.median(),
            rate_rows[rate_rows.how == "chosen"],
        )
        yield {
            "link, Gbit/s": f"{rate:g}",
            "chosen": _usual(chosen),
            "TTFT, s": round(float(chosen.ttft_s.median()), 3),
            "expected, s": round(float(chosen.expected_s.median()), 3),
            "best fixed": str(Group(*fixed.idxmin())),
            "its TTFT, s": round(float(fixed.min()), 3),
            "worst fixed, s": round(float(fixed.max()), 3),
            f"choice / best (target {TARGET})": interval(_over_best(result, rate), 3),
        }


def _usual(chosen: pandas.DataFrame) -> str:
    """The group that is chosen most often over one link."""
    groups = [str(Group(lo, hi)) for lo, hi in zip(chosen.lo, chosen.hi, strict=True)]
    return max(sorted(set(groups)), key=groups.count)


def _over_best(result: Result, rate: float) -> Entry:
    return result.summary.of("ttft_x", variant="chosen", than="best fixed", gbit_per_s=rate)
