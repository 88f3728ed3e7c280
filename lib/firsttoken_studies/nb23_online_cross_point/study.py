"""A threshold that learns while serving (CPS section 5, future work): its regret where links, models and load change.

Replayed: one fixed sequence of preemptions a seed, the same for every policy, on the published costs and changes of
them. So totals differ by the choices alone, and the oracle is the least that any choice could pay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.cps.policies import make_policy
from firsttoken.cps.policies.online import CostCurve
from firsttoken.cps.policies.replay import draw_noise, replay
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.simulation.costs.published import PAPER_SHAPE, PublishedCosts, decomposed
from firsttoken.simulation.workload.conversations import conversations
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import Interval, bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.cps.assumed_costs import CopyCosts, Drift, ScaledCosts
from firsttoken_studies.cps.styles import POLICIES as LOOKS
from firsttoken_studies.nb21_swap_or_recompute.study import LONG, PCIE_4_X16
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, Figure, panels, ticks
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    import pandas

STATIC = ("swap", "recompute", "cross_point")
POLICIES = (*STATIC, "online", "oracle")
EVERY_S = 0.1  # between two preemptions, on average
POINTS = 100  # of a curve that is kept for the figure


@dataclass(frozen=True)
class OnlineConfig:
    """``preemptions`` of ShareGPT lengths in each of ``seeds`` sequences, and as many ordinary prefills among them.

    ``noise`` is the standard deviation of the logarithm of a cost around its expectation.
    """

    seeds: int
    preemptions: int
    noise: float

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.preemptions < 10 or self.noise < 0:
            raise ProfileError("online: seeds must be at least 1, preemptions 10, and noise 0 or more")


def settings(seconds: float) -> dict[str, Callable[[float], Costs]]:
    """Return the courses of costs over ``seconds``, by name: each gives the costs that hold at a time in s."""
    published = PublishedCosts(decode_s=0.0)
    per_copy_s = decomposed(LONG, PCIE_4_X16).out_us_per_copy / 1e6
    coalesced = CopyCosts(published, PAPER_SHAPE, per_copy_s, PCIE_4_X16, coalesced=True)
    half, turn = seconds / 2, seconds / 6
    loaded = [(turn * number, ScaledCosts(published, compute=1 + number % 2)) for number in range(6)]
    changes: dict[str, list[tuple[float, Costs]]] = {
        "as published": [(0, published)],
        "coalesced copies": [(0, coalesced)],
        "link 4 times slower": [(0, ScaledCosts(published, swap=4))],
        "link slows 4 times at half": [(0, published), (half, ScaledCosts(published, swap=4))],
        "link 8 times faster from half": [(0, published), (half, ScaledCosts(published, swap=1 / 8))],
        "model 3 times larger from half": [(0, published), (half, ScaledCosts(published, compute=3))],
        "compute busy every other sixth": loaded,
    }
    return {name: Drift(tuple(steps)).at for name, steps in changes.items()}


def around(core: type) -> type[CostCurve]:
    """Return the library's curve with the update and the prediction of ``core``, the class of notebook 23's cell: what
    the library adds for surprises stays."""
    if issubclass(core, CostCurve):
        return core

    class Around(CostCurve):
        def __init__(self, memory: float) -> None:
            super().__init__(memory)
            self.core = core(memory)

        def predict(self, tokens: int) -> float:
            return self.core.predict(tokens)

        def _add(self, tokens: int, seconds: float, scale: float) -> None:
            super()._add(tokens, seconds, scale)  # by its leverage the library tells a surprise from a guess
            self.core.learn(tokens, seconds, scale)
            self._products, self._targets, self._prices = self.core.products, self.core.targets, self.core.prices

    return Around


def online_crosspoint(profile: Profile, *, curve: type = CostCurve) -> Outcome:
    """Rows {what: "total", setting, seed, policy, seconds, swapped} and, of the first seed, {what: "course", ...}.

    ``curve`` is what the online policy learns costs with: the library's class, or the one of a reader's cell.
    """
    config = profile.section("online", OnlineConfig)
    pool = conversations(None)
    totals = pool.prompt_tokens + pool.output_tokens
    lengths = totals[(totals >= 128) & (totals <= 2048)]
    seconds = EVERY_S * config.preemptions
    rows: Rows = []
    for seed in track(range(profile.seed, profile.seed + config.seeds), desc="online"):
        sequence = _sequence(lengths, seconds, config, seed)
        for setting, costs_at in settings(seconds).items():
            for name in POLICIES:
                settings_of_policy = {"oracle": {"costs_at": costs_at}, "online": {"curve": around(curve)}}
                policy = make_policy(name, **settings_of_policy.get(name, {}))
                paid = replay(policy, costs_at=costs_at, **sequence)
                case = {"setting": setting, "seed": seed, "policy": name}
                swapped = sum(row["action"] == "swap" for row in paid)
                spent = sum(row["seconds"] for row in paid)
                rows.append({"what": "total", **case, "seconds": spent, "swapped": swapped})
                if seed == profile.seed:
                    rows += [{"what": "course", **case, **point} for point in _course(paid)]
    source = "ShareGPT lengths on the costs of CPS Table 2 and changes of them; no model runs"
    return Outcome(rows, provenance={"source": source, "kind": "replayed"})


def _sequence(lengths: np.ndarray, seconds: float, config: OnlineConfig, seed: int) -> dict[str, Any]:
    """Draw the lengths that are preempted with their times, the noise on their costs, and the ordinary prefills in
    between.

    A victim is somewhere in its answer: it holds between half and all of its conversation.
    """
    rng, count = np.random.default_rng(seed), config.preemptions
    held = (rng.choice(lengths, count) * rng.uniform(0.5, 1, count)).astype(int)
    prompts = (rng.choice(lengths, count) * rng.uniform(0.1, 0.6, count)).astype(int).clip(1)
    times, between = np.sort(rng.uniform(0, seconds, (2, count)))
    factors = rng.lognormal(-(config.noise**2) / 2, config.noise, count)
    return {
        "lengths": held.tolist(),
        "times_s": times.tolist(),
        "noise": draw_noise(count, config.noise, seed),
        "ordinary_prefills": list(zip(between.tolist(), prompts.tolist(), factors.tolist(), strict=True)),
    }


def _course(paid: Rows) -> Rows:
    """Regret so far at some of the preemptions: the expected cost of the choices less the least possible."""
    lost = np.cumsum([row[f"{row['action']}_s"] - min(row["swap_s"], row["recompute_s"]) for row in paid])
    chosen = np.unique(np.linspace(0, len(paid) - 1, POINTS).astype(int))
    return [{"at_s": paid[index]["at_s"], "regret_s": float(lost[index])} for index in chosen]


def online_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The learning policy over the best static one, the oracle, and the fixed threshold, by setting and at worst."""
    summary, paid = Summary(), by_setting(rows)
    worst: dict[str, list[Interval]] = {"best_static": [], "oracle": []}
    beaten = wrong = 0
    for setting, by_policy in paid.items():
        best = min(STATIC, key=lambda name: by_policy[name].sum())
        ratios = {"best_static": ratio_over(by_policy["online"], by_policy[best])}
        ratios |= {name: ratio_over(by_policy["online"], by_policy[name]) for name in ("oracle", "cross_point")}
        for name, ratio in ratios.items():
            summary.add("recovery_x", ratio.summary("x"), policy="online", than=name, case=setting)
        summary.add("best_static", {"value": best}, case=setting)
        for name in worst:
            worst[name].append(ratios[name])
        if by_policy["cross_point"].sum() > 1.02 * by_policy["oracle"].sum():
            wrong += 1
            beaten += ratios["cross_point"].estimate < 1
    for name, intervals in worst.items():
        largest = max(intervals, key=lambda interval: interval.estimate)
        summary.add("recovery_x", largest.summary("x"), policy="online", than=name, across="worst")
    summary.add("wrong_settings", {"value": wrong, "n": len(paid)}, policy="cross_point")
    summary.add("beaten_settings", {"value": beaten, "n": wrong}, policy="cross_point")
    return summary


def ratio_over(own_s: pandas.Series, other: pandas.Series) -> Interval:
    """The ratio of totals over seeds; seeds are resampled with both their runs."""
    return bootstrap(np.column_stack([own_s, other]), lambda sample: float(np.divide(*sample.sum(0))))


def by_setting(rows: Rows) -> dict[str, pandas.DataFrame]:
    """The seconds that each policy paid [seeds, policies], by setting."""
    totals = frame_of(rows, what="total").groupby("setting", sort=False)
    return {setting: group.pivot(index="seed", columns="policy", values="seconds") for setting, group in totals}


# The figures of notebook 23: the reader's run over the record.

CHANGES = ("link slows 4 times at half", "link 8 times faster from half", "model 3 times larger from half")


def schematic() -> Schematic:
    """Draw how each recovery teaches the policy what the next one costs."""
    alt = (
        "A request is preempted. Two learned curves, one for swap and one for recompute, say what each way costs at "
        "its length. The cheaper way is taken. The seconds that it took go back and move its curve."
    )
    sketch = Schematic(22, 6.4, alt)
    sketch.text(0.2, 0.5, "Each recovery teaches the policy what the next one costs", heading=True)
    sketch.box(0.2, 2, "a request of\nn tokens is\npreempted", "measured", width=4.2, height=2)
    sketch.arrow((4.5, 3), (6.9, 3))
    sketch.box(7, 1.4, "learned: swap of n tokens", "swap", width=6.2, height=1.5)
    sketch.box(7, 3.1, "learned: recompute of n", "recompute", width=6.2, height=1.5)
    sketch.arrow((13.3, 3), (16.1, 3), "the cheaper")
    sketch.box(16.2, 2, "the request\ncomes back", "measured", width=4.4, height=2)
    sketch.arrow((18.4, 4.1), (18.4, 5.6))
    sketch.arrow((18.4, 5.6), (10.1, 5.6))
    sketch.arrow((10.1, 5.6), (10.1, 4.7))
    sketch.text(14.3, 5.2, "the seconds that it took", align="center")
    return sketch


def totals(recorded: Result | None, now: Result) -> Figure:
    """Draw the cost of each policy in each setting over the oracle's, with intervals over sequences."""
    results = over(recorded, now)
    named = list(by_setting(results[0].result.rows))
    fig, ax = panels(figsize=(9, 0.75 * len(named) + 1.4))
    for shown in results:
        for setting, by_policy in by_setting(shown.result.rows).items():
            for shift, name in enumerate(POLICIES[:-1]):
                position = named.index(setting) + 0.2 * (shift - 1.5) + shown.shift / 4
                paid = ratio_over(by_policy[name], by_policy["oracle"]).summary("x")
                label = LOOKS[name][0] if shown.own and not shown.library and setting == named[0] else None
                look = name.replace("cross_", "cross-")
                shown.point(ax, position, paid, look, along="x", label=label, share=1 / 4)
    ax.axvline(1, color=COLOURS["floor"], linestyle=":", label="floor: the oracle")
    ax.set(xscale="log", xlabel="total recovery cost / the oracle's")
    ticks(ax.xaxis, (1, 1.25, 1.5, 2, 3, 5, 10, 20))
    ax.set_yticks(range(len(named)), named)
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    ax.legend(loc="lower right")
    settings = by_setting(results[0].result.rows).values()
    worst = {name: max(paid[name].sum() / paid["oracle"].sum() for paid in settings) for name in POLICIES[:-1]}
    fixed = min(worst[name] for name in STATIC)
    fig.suptitle(
        f"At worst each fixed policy pays {fixed:.1f} times the least or more, the learned one {worst['online']:.2f}"
    )
    name_results(fig, results, "recovery_x")
    return fig


def courses(recorded: Result | None, now: Result) -> Figure:
    """Regret as it grows in one sequence, where something changes at half of it."""
    results = over(recorded, now)
    fig, axes = panels(1, len(CHANGES), figsize=(9, 3.9))
    for ax, setting in zip(axes, CHANGES, strict=True):
        for shown in results:
            rows = [row for row in shown.result.rows if row["what"] == "course" and row["setting"] == setting]
            count, ends_s = shown.result.parameters["online"]["preemptions"], max(row["at_s"] for row in rows)
            for name in POLICIES[:-1]:
                of_policy = [row for row in rows if row["policy"] == name]
                regret = [{"value": 1e3 * row["regret_s"] / count} for row in of_policy]
                places = [100 * row["at_s"] / ends_s for row in of_policy]
                options = {"marker": "", "linewidth": 2.6 if shown.own else 1.6}
                label = LOOKS[name][0] if shown.own and not shown.library else None
                shown.line(ax, places, regret, name.replace("cross_", "cross-"), label=label, **options)
        ax.axvline(50, color=COLOURS["mark"], linestyle=":")
        ax.set_title(setting, fontsize=10.5)
        ax.set_xlabel("of the sequence, %")
    axes[0].set_ylabel("regret against the oracle so far,\nms / preemptions in all")
    axes[1].legend(loc="upper left")
    fig.suptitle("After a change the learned policy pays for a few preemptions, then no more")
    name_results(fig, results)
    return fig


def one_change(courses: Mapping[str, np.ndarray], oracle: np.ndarray, times_s: Sequence[float], title: str) -> Figure:
    """Draw notebook 23's scene: the cost that two policies and ``oracle`` have paid by ``times_s``, s.

    Axes and their few letters, which take longest to draw, are the same for every change.
    """
    fig, ax = panels(figsize=(7.2, 2.8), layout="none")
    fig.subplots_adjust(left=0.1, right=0.79, bottom=0.18, top=0.89)
    for (name, paid), side in zip(courses.items(), ("bottom", "top"), strict=True):
        colour, regret = COLOURS[name.replace("cross_", "cross-")], 1e3 * (paid - oracle)
        ax.step(times_s, regret, where="post", color=colour)
        ax.text(times_s[-1], regret[-1], f"  {LOOKS[name][0]}", color=colour, va=side)
    ax.axvline(times_s[len(times_s) // 2], color=COLOURS["mark"], linestyle=":")
    ax.set_title(title, fontsize="medium")
    ax.set(xlim=(0, 12), xticks=range(0, 13, 3), ylim=(-90, 900), yticks=range(0, 801, 400))
    ax.set(xlabel="time, s; the link changes at 6 s", ylabel="regret so far, ms")
    return fig


def setting_rows(result: Result) -> Table:
    """Yield the ratios of costs by setting."""
    for best in result.summary.all("best_static"):
        line = {"setting": best["where"]["case"], "best static policy": LOOKS[best["value"]][0]}
        for name, label in (("best_static", "best static"), ("oracle", "oracle"), ("cross_point", "CPS")):
            entry = result.summary.of("recovery_x", policy="online", than=name, case=line["setting"])
            line[f"online / {label}"] = interval(entry, 3)
        yield line
