"""Every method on every run: what it answers, decoded and scored, and how long it takes (Figure 14).

The profile of a run gives the candidates: its Pareto frontier by token accuracy (``profiling``). All of them answer the
items of the profile, and the smallest one that keeps to the bound by the score of decoded answers is chosen. It and the
other methods answer other items. What takes how long is measured apart (``latency``).
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import DynamicCache

from firsttoken.assets.needs import LAYERS, Need
from firsttoken.droidspeak.blend import blended_cache, tokens_per_layer
from firsttoken.droidspeak.forward import cache_of
from firsttoken.droidspeak.prefill import NOTHING, Group
from firsttoken.droidspeak.prefix import Prefix, PrefixCache
from firsttoken.droidspeak.profile.pareto import Profiled, frontier, smallest_within
from firsttoken.droidspeak.profile.profile_transfer import resampled, taken
from firsttoken.droidspeak.reuse_items import Encoded
from firsttoken.study.errors import ProfileError, RequestError
from firsttoken.study.overlay import Drawn, legend, over
from firsttoken.study.plot import COLOURS
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Result, Rows, load_result
from firsttoken.study.show import interval
from firsttoken.study.stats import Interval, bootstrap, paired_bootstrap
from firsttoken.study.summary import Entry, Scalar, Summary
from firsttoken_studies.droidspeak.constructed_tasks import task_of
from firsttoken_studies.droidspeak.decoding import (
    DROIDSPEAK,
    OWN,
    REUSE,
    Method,
    decoded_scores,
    own,
    own_cache,
    partial,
)
from firsttoken_studies.droidspeak.pairs import HALF, PairedModel
from firsttoken_studies.droidspeak.profiling import BOUND, profiled_groups, run_profile
from firsttoken_studies.droidspeak.setting import Run, Setting, rows_by_run, run_of
from firsttoken_studies.droidspeak.styles import METHODS, in_words, style_of
from firsttoken_studies.droidspeak.tables import by_run, relative_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The time to the first token by the share of a prefill that a method computes, between what was measured.

_AS_FULL = ("full prefill", "sender")  # the sender prefills all its layers, too
_GRID = 2001  # shares of a prefill that are looked at for a time


class TimeShares:
    """Time to the first token as a share of full prefill's, at one length: straight lines between what was measured.

    A line begins at full reuse, which computes nothing of the prefix, and goes on beyond its last point, where more
    work takes at least as long as there.
    """

    def __init__(self, latency: Result, tokens: int) -> None:
        """``latency`` is a result of prefill_latency. Raises RequestError for a length that it does not have."""
        rows = [row for row in latency.rows if row["tokens"] == tokens]
        if not rows:
            lengths = sorted({row["tokens"] for row in latency.rows})
            raise RequestError(f"no prefill of {tokens} tokens was timed; there are {', '.join(map(str, lengths))}")
        self.tokens, self._taken = tokens, {}
        for row in sorted(rows, key=lambda row: row["round"]):
            self._taken.setdefault((row["method"], row["compute"]), []).append(row["first_token_s"])
        self._full = np.array(self._taken["full prefill", 1.0])
        self.provenance: dict[str, Any] = {
            "experiment": latency.experiment,
            "machine": latency.slug,
            "profile": latency.profile,
            "started": latency.started,
            "tokens": tokens,
        }

    def of(self, method: str, compute: float) -> np.ndarray:
        """[rounds]: the time of ``method`` where it computes ``compute`` of a prefill (0..1), over full prefill's.

        Raises RequestError for a method that was not timed.
        """
        if method in _AS_FULL:
            return np.ones_like(self._full)
        line = {share: np.array(times) / self._full for (name, share), times in self._taken.items() if name == method}
        if not line:
            raise RequestError(f"{method!r} was not timed; there are {', '.join(sorted({m for m, _ in self._taken}))}")
        if method == "DroidSpeak":
            line.setdefault(1.0, np.ones_like(self._full))
        line.setdefault(0.0, np.array(self._taken["DroidSpeak", 0.0]) / self._full)
        shares = sorted(line)
        at = min(max(int(np.searchsorted(shares, compute)), 1), len(shares) - 1)
        low, high = shares[at - 1], shares[at]
        found = line[low] + (line[high] - line[low]) * (compute - low) / (high - low)
        # a round in which something else delayed the second last point has a line that falls, below zero in the end
        return np.maximum(found, line[high]) if compute > high else found

    def median(self, method: str, compute: float) -> float:
        """The median over rounds of ``of``."""
        return float(np.median(self.of(method, compute)))

    def compute_of(self, method: str, share: float) -> float:
        """The most that ``method`` computes (0..1) in ``share`` of a full prefill's time; 0 where nothing is in time.

        Raises RequestError for a method that was not timed.
        """
        return float(max((at for at in np.linspace(0, 1, _GRID) if self.median(method, at) <= share), default=0.0))


def times_here() -> TimeShares:
    """The times of this machine at the longest prefix. Raises RequestError where prefill_latency has no result."""
    latency = load_result("prefill_latency")
    if latency is None:
        raise RequestError("no times of this machine are known; first run `firsttoken measure prefill_latency`")
    return TimeShares(latency, max(row["tokens"] for row in latency.rows))


SENDER, SMALLER = "sender", "smaller model"
BLEND, COMPUTE, LATENCY = "CacheBlend", "equal compute", "equal latency"
CHOOSE, JUDGE = "choose", "judge"  # what a row's items are for


@dataclass(frozen=True)
class MethodsConfig:
    """``blends`` are (share, gradual, whole) as text: "0.15", "0.15 gradual", "0.15 from 2".

    "equal compute" takes the share that computes as much as the chosen group, "equal latency" the one that takes as
    long. ``smaller`` is the adapter of the smaller model ("": none), for its own tasks. The first ``runs`` runs of the
    profile are asked.
    """

    blends: tuple[str, ...]
    smaller: str
    runs: int

    def needs(self) -> list[Need]:
        """Every blend is one, and leaves layers to choose tokens for."""
        whole = [_blend(text, {COMPUTE: 0, LATENCY: 0}, sys.maxsize)[2] for text in self.blends]
        return [Need("methods.blends (and a layer that is blended)", max(whole, default=0) + 1, LAYERS)]


def reuse_methods(profile: Profile) -> Outcome:
    """One row a run, method and set of ``items``: score, each item's ``item_score``, and ``time_share`` by round.

    ``time_share`` is the time to the first token over full prefill's, from the result of prefill_latency for this
    machine, at its longest prefix. A candidate has ``accuracy_lost_pct`` as well, what it loses of the own token
    accuracy on the same items. Raises RequestError where there are no times.
    """
    config, times = profile.section("methods", MethodsConfig), times_here()
    setting = Setting(profile, config.needs())
    rows = []
    for run in setting.runs[: config.runs]:
        receiver, sender = setting.pair(run)
        to_choose, to_judge = setting.items(run, receiver.tokenizer)
        profiled = profiled_groups(run_profile(setting, run, receiver, sender, to_choose))
        candidates = list(_candidates(receiver, profiled))
        lost = {one.group: 100 * one.relative_loss for one in profiled} | {candidates[0].group: 0.0}
        answered = [
            row | {"accuracy_lost_pct": lost[Group(row["lo"], row["hi"])]}
            for row in _rows(setting, run, receiver, sender, candidates, times, CHOOSE, to_choose)
        ]
        chosen = smallest_within(decoded_groups(answered), BOUND).group
        methods = list(_methods(setting, config, run, receiver, sender, chosen, times))
        rows += [*answered, *_rows(setting, run, receiver, sender, methods, times, JUDGE, to_judge)]
    return Outcome(rows, provenance={"models": setting.models.provenance, "times": times.provenance})


def decoded_groups(rows: Rows) -> list[Profiled]:
    """The groups of a run with the scores of decoded answers that choose among them."""
    rows = [row for row in rows if row["items"] == CHOOSE]
    own = next(row for row in rows if row["method"] == OWN)["item_score"]
    return [Profiled(Group(row["lo"], row["hi"]), tuple(own), tuple(row["item_score"])) for row in rows]


def _candidates(receiver: PairedModel, groups: Sequence[Profiled]) -> Iterator[Method]:
    """Full prefill, full reuse, and every group of the profile's frontier between them."""
    depth = receiver.model.config.num_hidden_layers
    yield own(receiver)
    yield partial(REUSE, receiver, NOTHING)
    for group in (one.group for one in frontier(groups)):
        if 0 < len(group) < depth:
            yield partial(f"{DROIDSPEAK} {group}", receiver, group)


def _methods(
    setting: Setting,
    config: MethodsConfig,
    run: Run,
    receiver: PairedModel,
    sender: PairedModel,
    chosen: Group,
    times: TimeShares,
) -> Iterator[Method]:
    model, depth = receiver.model, receiver.model.config.num_hidden_layers
    yield own(receiver)
    yield Method(SENDER, "sender", 1.0, lambda prefix, sent: cache_of(sent.kv), sender)
    yield partial(REUSE, receiver, NOTHING)
    yield partial(DROIDSPEAK, receiver, chosen)
    compute = len(chosen) / depth
    equal = {COMPUTE: compute, LATENCY: times.compute_of(BLEND, times.median(DROIDSPEAK, compute))}
    for text in config.blends:
        share, gradual, whole = _blend(text, equal, depth)

        def blended(
            prefix: Prefix, sent: PrefixCache, share: float = share, gradual: bool = gradual, whole: int = whole
        ) -> DynamicCache:
            return blended_cache(model, prefix, sent, share, gradual, whole=whole)

        compute = sum(tokens_per_layer(1000, depth, share, gradual, whole)) / (1000 * depth)
        yield Method(f"{BLEND} {text}", f"blend {share:.4f} {gradual} {whole}", compute, blended, receiver)
    if config.smaller and run.row()["task"] in config.smaller.removeprefix(f"{HALF}-").split("-"):
        half = setting.models.load(config.smaller)
        recipe, compute = f"{half.weights} {half.adapter}", half.model.config.num_hidden_layers / depth
        yield Method(SMALLER, recipe, compute, lambda prefix, sent: own_cache(half, prefix), half)


def _blend(text: str, equal: Mapping[str, float], depth: int) -> tuple[float, bool, int]:
    """Share (of tokens, to four digits), gradual and whole layers of a blend as the profile writes it.

    ``equal`` has the compute that the words stand for. Raises ProfileError for anything else.
    """
    found = re.fullmatch(rf"({COMPUTE}|{LATENCY}|[01]|0?\.\d+)( gradual)?(?: from (\d+))?", text)
    whole = int(found[3] or 1) if found else 0
    if not found or not 1 <= whole < depth:
        raise ProfileError(
            f"blend {text!r}: write it as '0.15', '{COMPUTE}', '{LATENCY}', '0.15 gradual' or '0.15 from 2' (< {depth})"
        )
    share = (depth * equal[found[1]] - whole) / (depth - whole) if found[1] in equal else float(found[1])
    return round(min(1.0, max(0.0, share)), 4), bool(found[2]), whole


def _rows(
    setting: Setting,
    run: Run,
    receiver: PairedModel,
    sender: PairedModel,
    methods: Sequence[Method],
    times: TimeShares,
    items: str,
    encoded: Sequence[Encoded],
) -> Rows:
    """What each of ``methods`` answers to the items that are there to choose or to judge."""
    scores = decoded_scores(run, receiver, sender, methods, encoded, setting.config.batch)
    metric = task_of(encoded[0].item).metric
    return [
        run.row()
        | {
            "items": items,
            "method": method.name,
            "metric": metric,
            "compute": round(method.compute, 4),
            "lo": method.group.lo,
            "hi": method.group.hi,
            "depth": receiver.model.config.num_hidden_layers,
            "time_share": [round(float(share), 4) for share in times.of(timed(method.name), method.compute)],
            "n": len(scores[method.name]),
            "score": sum(scores[method.name]) / len(encoded),
            "item_score": scores[method.name],
        }
        for method in methods
    ]


def timed(method: str) -> str:
    """What a method is called where times are measured: by how much it computes full reuse is a partial prefill."""
    return DROIDSPEAK if method.startswith((REUSE, DROIDSPEAK)) else BLEND if method.startswith(BLEND) else method


def where_of(method: str) -> dict[str, Scalar]:
    """Return the place in a summary of a row's method.

    A blend has its ``share`` of tokens, or the ``case`` that set it.
    """
    found = re.fullmatch(rf"{BLEND} (?:({COMPUTE}|{LATENCY})|(\S+)) ?(.*)", method)
    if not found:
        return {"method": method}
    asked = {"case": found[1]} if found[1] else {"share": float(found[2])}
    return {"method": BLEND} | asked | ({"variant": found[3]} if found[3] else {})


# What the answers of all methods come to: the chosen group, its speed-up, and what each method loses.

# where the measures of the chosen group hold, and those of the group that token accuracy would choose
DECODED, ACCURACY = ({"method": DROIDSPEAK, "chosen_by": by} for by in ("decoded answers", "token accuracy"))
ABOVE_BLEND = {"method": DROIDSPEAK, "than": BLEND}
_CHOICES, _MEANS = 200, 2000  # samples of the items that choose, and of those that judge


def methods_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """What each method scores and loses in each run, and over the runs the chosen group and the lead over CacheBlend.

    Means over runs keep the runs and draw the items again, those that choose and those that judge. Layers and speed-up
    are of the runs in which something must be recomputed; of all, where that is none.
    """
    summary, runs = Summary(), list(rows_by_run(rows).values())
    choices = [choice_of(of) for of in runs]
    for of, choice in zip(runs, choices, strict=True):
        _add_scores(summary, of)
        _add_choice(summary, choice, run_of(of[0]))
        _add_by_accuracy(summary, of)
    for method in (REUSE, DROIDSPEAK):
        lost = [summary.of("relative_loss_pct", method=method, **run_of(of[0])) for of in runs]
        worst = max(lost, key=lambda entry: entry["value"])
        summary.add("relative_loss_pct", worst, method=method, across="worst")
    mended = [choice for choice in choices if len(choice.group)] or choices
    layers = _over(mended, "shares", np.mean).summary("% of layers", 100)
    summary.add("group_layers_pct", layers, **DECODED, across="mean")
    by_accuracy = zip(summary.all("speedup_x", **ACCURACY), choices, strict=True)
    gains = [entry["value"] for entry, choice in by_accuracy if len(choice.group)]
    summary.add("speedup_x", _over(mended, "gains", np.mean).summary("x"), **DECODED, across="mean")
    summary.add("speedup_x", _over(mended, "gains", np.min).summary("x"), **DECODED, across="least")
    if gains:
        summary.add("speedup_x", bootstrap(gains).summary("x"), **ACCURACY, across="mean")
    for equal in (COMPUTE, LATENCY):
        leads = [lead for of in runs if (lead := _leads(of, equal)) is not None]
        if leads:
            mean = _mean_of(leads).summary("points", 100)
            summary.add("score_above_points", mean, **ABOVE_BLEND, case=equal, across="mean")
    return summary


@dataclass(frozen=True)
class ChosenGroup:
    """The group that a run's items choose by decoded answers, and those that they would choose if drawn again.

    ``shares`` and ``gains`` [1 + draws] are shares of the layers, and how many times earlier the first token comes: of
    the choice first, its gain a median over rounds, then of every other choice, each timed in a round drawn at random.
    """

    group: Group
    items: int
    shares: np.ndarray
    gains: np.ndarray


def choice_of(rows: Rows) -> ChosenGroup:
    """The choice of one run, from its rows."""

    def choose(drawn: Sequence[Profiled]) -> Profiled:
        return smallest_within(drawn, BOUND)

    groups, depth, rng = decoded_groups(rows), rows[0]["depth"], np.random.default_rng(0)
    times = {(r["lo"], r["hi"]): np.array(r["time_share"]) for r in rows if r["items"] == CHOOSE}
    chosen, items = choose(groups).group, len(groups[0].own)
    again = [draw.group for draw in resampled(groups, items, choose, draws=_CHOICES)]
    gains = [float(np.median(1 / times[chosen.lo, chosen.hi])), *(1 / rng.choice(times[g.lo, g.hi]) for g in again)]
    return ChosenGroup(chosen, items, np.array([len(group) / depth for group in (chosen, *again)]), np.array(gains))


def _over(choices: Sequence[ChosenGroup], what: str, stat: Callable[..., np.ndarray]) -> Interval:
    """``stat`` over runs of a field of what was chosen, with its interval over what might have been, draw by draw."""
    estimate, *again = stat([getattr(choice, what) for choice in choices], axis=0)
    low, high = np.percentile(again, [2.5, 97.5])
    return Interval(float(estimate), float(low), float(high), min(choice.items for choice in choices))


def _add_choice(summary: Summary, choice: ChosenGroup, run: dict[str, str]) -> None:
    layers, gain = (_over([choice], what, np.mean) for what in ("shares", "gains"))
    group = {"value": str(choice.group), "n": choice.items, "unit": "layers"}
    summary.add("group", group, **DECODED, **run)
    summary.add("group_layers_pct", layers.summary("% of layers", 100), **DECODED, **run)
    summary.add("speedup_x", gain.summary("x"), **DECODED, **run)


def _add_by_accuracy(summary: Summary, rows: Rows) -> None:
    """The smallest group that keeps to the bound by token accuracy: its speed-up, and what its decoded answers lose."""
    candidates = [row for row in rows if row["items"] == CHOOSE]
    own = next(row for row in candidates if row["method"] == OWN)["item_score"]
    within = [row for row in candidates if row["accuracy_lost_pct"] <= 100 * BOUND]
    row = min(within, key=lambda row: (row["hi"] - row["lo"], row["accuracy_lost_pct"]))
    lost = bootstrap(np.column_stack([own, row["item_score"]]), _relative_loss)
    gain = bootstrap(1 / np.array(row["time_share"]), "median")
    group = {"value": str(Group(row["lo"], row["hi"])), "n": row["n"], "unit": "layers"}
    summary.add("group", group, **ACCURACY, **run_of(row))
    summary.add("relative_loss_pct", lost.summary("% of own", 100), **ACCURACY, **run_of(row))
    summary.add("speedup_x", gain.summary("x"), **ACCURACY, **run_of(row))


def _mean_of(runs: Sequence[np.ndarray]) -> Interval:
    """The mean over runs of the means of their items, with its interval over items, the runs as they are."""
    rng = np.random.default_rng(0)
    drawn = [values[rng.integers(0, len(values), (_MEANS, len(values)))].mean(1) for values in runs]
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    return Interval(float(np.mean([v.mean() for v in runs])), float(low), float(high), min(map(len, runs)))


def _leads(rows: Rows, equal: str) -> np.ndarray | None:
    """[items]: score of the chosen group above CacheBlend's, the better of its ways where they are ``equal``.

    None where no CacheBlend was asked so.
    """
    judged = {row["method"]: row for row in rows if row["items"] == JUDGE}
    blends = [row for name, row in judged.items() if where_of(name).get("case") == equal]
    if not blends:
        return None
    best = max(blends, key=lambda row: row["score"])
    return np.array(judged[DROIDSPEAK]["item_score"]) - np.array(best["item_score"])


def _add_scores(summary: Summary, rows: Rows) -> None:
    """The scores of a run, what each method loses against the receiver's own prefill, and the leads over CacheBlend."""
    run, judged = run_of(rows[0]), {row["method"]: row for row in rows if row["items"] == JUDGE}
    own = judged[OWN]["item_score"]
    for name, row in judged.items():
        where = where_of(name) | run
        summary.add("score_pct", bootstrap(row["item_score"]).summary("%", 100), **where)
        if name != OWN:
            summary.add("loss_points", paired_bootstrap(own, row["item_score"]).summary("points", 100), **where)
            relative = bootstrap(np.column_stack([own, row["item_score"]]), _relative_loss)
            summary.add("relative_loss_pct", relative.summary("% of own", 100), **where)
    for equal in (COMPUTE, LATENCY):
        if (lead := _leads(rows, equal)) is not None:
            entry = bootstrap(lead).summary("points", 100)
            summary.add("score_above_points", entry, **ABOVE_BLEND, case=equal, **run)


def _relative_loss(scores: np.ndarray) -> float:
    """Return the share of the own score that is lost, from [items, 2]: own and other score."""
    own, other = scores.mean(0)
    return float(1 - other / own) if own else 0.0


# Figure 14 and the gains that follow from it, in notebook 33.

PAPER_GAIN, PAPER_MEAN_GAIN = (1.7, 3.1), 2.1  # 5.2, 8 pairs with 3 data sets each
PAPER_LEAD, PAPER_MEAN_LEAD = (5, 33), 16  # over CacheBlend at equal latency, 5.2
_BLENDS = {  # by how CacheBlend's share was found: what a legend says, and how much of the mark is filled
    LATENCY: ("CacheBlend at equal latency", "full"),
    COMPUTE: ("CacheBlend at equal computation", "left"),
    "": ("CacheBlend, its own share of tokens", "none"),
}


def quality_by_latency(recorded: Result | None, now: Result) -> Figure:
    """Figure 14: what is kept of the own score against the time to the first token, one panel a run.

    The line is the frontier, answered by the items that choose; marks are answered by the items that judge. Bars are
    95 % over items. Of CacheBlend's ways to choose tokens the better one is shown.
    """
    import matplotlib.pyplot as plt

    drawn = over(recorded, now)
    runs = by_run(drawn[0].result)
    fig, axes = plt.subplots(1, len(runs), figsize=(9, 5.2), squeeze=False, sharey=True)
    for ax, run in zip(axes[0], runs, strict=True):
        ax.axhline(100 * (1 - BOUND), color=COLOURS["paper"], linestyle="--", linewidth=1.4)
        for one in drawn:
            if of := by_run(one.result).get(run):
                _panel(ax, of, one)
        ax.set_title(in_words(run), fontsize=8.5)
        ax.set_xlabel("time to first token / full prefill's")
    first = axes[0][0]
    first.set_ylabel(f"{now.rows[0]['metric']} kept, % of the own")
    first.plot([], [], color=COLOURS["paper"], linestyle="--", label="paper: 5 % may be lost")
    first.plot(
        [], [], "o-", color=METHODS[DROIDSPEAK].colour, fillstyle="none", label="partial prefill, choosing items"
    )
    for row, label, fill in _shown([row for row in next(iter(runs.values())) if row["items"] == JUDGE]):
        style = style_of(row["method"])
        first.plot([], [], style.marker, color=style.colour, linestyle="none", fillstyle=fill, label=label)
    legend(fig, first, drawn, "score_pct")
    fig.suptitle("A group keeps nearly all of the score in half of the time; CacheBlend does not", fontsize=12)
    return fig


def _panel(ax: Axes, rows: Rows, one: Drawn) -> None:
    look, edge = METHODS[DROIDSPEAK], {"markeredgecolor": "black"} if one.own and not one.alone else {}
    line = sorted((row for row in rows if row["items"] == CHOOSE), key=lambda row: row["hi"] - row["lo"])
    points = [(_time(row), 100 - relative_loss(line[-1]["item_score"], row["item_score"]).estimate) for row in line]
    shade = one.style | {"alpha": 0.6 * one.style["alpha"]}
    ax.plot(*zip(*points, strict=True), f"{look.marker}-", color=look.colour, linewidth=1, fillstyle="none", **shade)
    judged = [row for row in rows if row["items"] == JUDGE]
    own = next(row for row in judged if row["method"] == OWN)["item_score"]
    for row, _, fill in _shown(judged):
        style, lost = style_of(row["method"]), relative_loss(own, row["item_score"])
        bars = [[lost.high - lost.estimate], [lost.estimate - lost.low]]
        size = 9.5 if row["method"] == DROIDSPEAK else 7.5
        ax.errorbar(_time(row), 100 - lost.estimate, bars, marker=style.marker, color=style.colour, fillstyle=fill,
                    markersize=size, linestyle="none", linewidth=1.2, **edge, **one.style)  # fmt: skip
    ax.set_xlim(-0.04, 1.06)


def _shown(judged: Rows) -> list[tuple[dict[str, Any], str, str]]:
    """Rows with label and fill: every method, and of CacheBlend's that were asked alike the one that scores best."""
    found: dict[str, tuple[dict[str, Any], str, str]] = {}
    for row in judged:
        label, fill = style_of(row["method"]).label, "full"
        where = where_of(row["method"])
        if where["method"] == BLEND:
            label, fill = _BLENDS[where.get("case", "")]
        elif row["method"] == DROIDSPEAK:
            label = "DroidSpeak, the chosen group"
        if label not in found or row["score"] > found[label][0]["score"]:
            found[label] = (row, label, fill)
    return list(found.values())


def _time(row: dict[str, Any]) -> float:
    return float(np.median(row["time_share"]))


def gains(recorded: Result | None, now: Result, profiled: Result | None, profiled_now: Result) -> Figure:
    """What the chosen group gains, what it loses on items that did not choose it, and its lead over CacheBlend.

    Both rules that choose, decoded answers and token accuracy (from the profile of the same items), are scored alike:
    by the decoded answers of the items that were left out of the draw that chose.
    """
    import matplotlib.pyplot as plt

    drawn = over(recorded, now)
    runs = by_run(drawn[0].result)
    fig, (gain, loss, lead) = plt.subplots(1, 3, figsize=(9, 0.75 * len(runs) + 2.9), sharey=True)
    for ax, span, mean in ((gain, PAPER_GAIN, PAPER_MEAN_GAIN), (lead, PAPER_LEAD, PAPER_MEAN_LEAD)):
        ax.axvspan(*span, color=COLOURS["paper"], alpha=0.25, linewidth=0)
        ax.axvline(mean, color=COLOURS["paper"], linewidth=2)
    loss.axvline(100 * BOUND, color=COLOURS["target"], linestyle="--", linewidth=1.4)
    for ax, nothing in ((gain, 1), (loss, 0), (lead, 0)):
        ax.axvline(nothing, color=COLOURS["mark"], linewidth=0.8)
        ax.grid(axis="y", visible=False)
    for one in drawn:
        summary, profiles = one.result.summary, by_run(profiled_now if one.own or profiled is None else profiled)
        for at, run in enumerate(runs):
            if (rows := by_run(one.result).get(run)) is None:
                continue
            place = run_of(rows[0])
            out = held_out(rows, profiled_groups(profiles[run]))
            for ax, mark, entry in (
                (gain, "decoded", summary.get("speedup_x", **DECODED, **place)),
                (gain, "accuracy", summary.get("speedup_x", **ACCURACY, **place)),
                (loss, "decoded", out["decoded"]),
                (loss, "accuracy", out["accuracy"]),
                (loss, "judged", summary.get("relative_loss_pct", method=DROIDSPEAK, **place)),
                (lead, "latency", summary.get("score_above_points", **ABOVE_BLEND, case=LATENCY, **place)),
                (lead, "compute", summary.get("score_above_points", **ABOVE_BLEND, case=COMPUTE, **place)),
            ):
                _dot(ax, entry, at, mark, one)
    gain.set(xlabel="first token, times earlier", xlim=(0.9, None))
    loss.set_xlabel("score lost, % of the own")
    lead.set_xlabel("points above CacheBlend")
    gain.set_yticks(range(len(runs)), [in_words(run).replace(", ", ",\n") for run in runs], fontsize=9)
    gain.set_ylim(len(runs) - 0.5, -0.5)
    for marker, _, label in MARKS.values():
        gain.plot([], [], marker, color=METHODS[DROIDSPEAK].colour, markersize=7, label=label)
    gain.plot([], [], color=COLOURS["paper"], linewidth=4, label="paper: range and mean")
    gain.plot([], [], color=COLOURS["target"], linestyle="--", label="bound: 5 %")
    legend(fig, gain, drawn, "score_above_points", columns=2)
    lost = [
        drawn[0].result.summary.value("relative_loss_pct", method=DROIDSPEAK, **run_of(of[0])) for of in runs.values()
    ]
    many = sum(value > 100 * BOUND for value in lost)
    fig.suptitle(f"Of {len(lost)} groups chosen within 5 %, {many} lose more than that on other items", fontsize=12)
    return fig


def held_out(rows: Rows, profiles: Sequence[Profiled], draws: int = 200, seed: int = 0) -> dict[str, Entry]:
    """Return by rule what decoded answers of items lose over the group that other items choose, % of the own score.

    ``rows`` are a run's answers, ``profiles`` its groups by token accuracy, of the same items in the same order. The
    items are drawn with replacement, as many as there are; those not drawn judge. Mean and 95 % of ``draws``.
    """
    decoded, rng = decoded_groups(rows), random.Random(seed)
    by_group = {one.group: one for one in decoded}
    rules = {"decoded": decoded, "accuracy": [one for one in profiles if one.group in by_group]}
    items, lost = len(decoded[0].own), {rule: [] for rule in rules}
    for _ in range(draws):
        drawn = rng.choices(range(items), k=items)
        if left := sorted(set(range(items)) - set(drawn)):
            for rule, groups in rules.items():
                group = smallest_within(taken(groups, drawn), BOUND).group
                lost[rule].append(100 * taken([by_group[group]], left)[0].relative_loss)
    return {
        rule: {"value": float(np.mean(of)), "n": items, "unit": "% of own"}
        | dict(zip(("low", "high"), map(float, np.percentile(of, [2.5, 97.5])), strict=True))
        for rule, of in lost.items()
    }


MARKS = {  # what a mark is, and where it stands beside its run
    "decoded": ("o", -0.24, "group that decoded answers choose (loss: other items, 200 draws)"),
    "accuracy": ("s", -0.04, "group that token accuracy chooses (loss: other items, 200 draws)"),
    "judged": ("*", 0.16, "group that decoded answers choose, on a second set of items"),
    "latency": ("D", -0.14, "lead at equal latency"),
    "compute": ("v", 0.14, "lead at equal computation"),
}


def _dot(ax: Axes, entry: Entry | None, at: float, mark: str, one: Drawn) -> None:
    if entry is None:
        return
    marker, shift, _ = MARKS[mark]
    edge = {"markeredgecolor": "black"} if one.own and not one.alone else {}
    error = [[max(0, entry["value"] - entry["low"])], [max(0, entry["high"] - entry["value"])]]
    at += shift + 0.5 * one.shift
    ax.errorbar(entry["value"], at, xerr=error, marker=marker, color=METHODS[DROIDSPEAK].colour, linestyle="none",
                markersize=7, linewidth=1.4, **edge, **one.style)  # fmt: skip


# The tables of notebook 33.


def answer_rows(methods: Result, items: str = JUDGE) -> Rows:
    """Figure 14 in numbers, from the items that ``choose`` among groups or from those that ``judge``."""
    rows = []
    for run, of in by_run(methods).items():
        asked = [row for row in of if row["items"] == items]
        own = next(row for row in asked if row["method"] == OWN)
        for row in sorted(asked, key=lambda row: row["compute"]) if items == CHOOSE else asked:
            rows.append(
                {
                    "run": run,
                    "method": row["method"],
                    "layers": f"{row['lo']}-{row['hi'] - 1}" if row["hi"] else "",
                    "computed, %": round(100 * row["compute"], 1),
                    "time / full prefill's": round(float(np.median(row["time_share"])), 2),
                    f"{row['metric']}, % (n = {row['n']})": round(100 * row["score"], 1),
                    "lost, % of the own": ""
                    if row is own
                    else interval(relative_loss(own["item_score"], row["item_score"]).summary()),
                }
            )
    return rows


def choice_rows(methods: Result) -> Rows:
    """The group of each run that decoded answers choose, and the one that token accuracy would choose.

    The former's loss is on the items that judge, the latter's on those that choose.
    """
    shown = {
        "group": ("group", DECODED),
        "layers, %": ("group_layers_pct", DECODED),
        "earlier, times": ("speedup_x", DECODED),
        "lost on other items, %": ("relative_loss_pct", {"method": DROIDSPEAK}),
        "by token accuracy": ("group", ACCURACY),
        "its: earlier, times": ("speedup_x", ACCURACY),
        "its: lost, %": ("relative_loss_pct", ACCURACY),
    }
    rows = []
    for run, of in by_run(methods).items():
        found = {title: methods.summary.of(name, **where, **run_of(of[0])) for title, (name, where) in shown.items()}
        rows.append({"run": run} | {title: interval(entry, 2) for title, entry in found.items()})
    return rows


def paper_rows(latency: Result, methods: Result) -> Rows:
    """What the paper says beside what was measured; what is computed has no floor of its own here."""
    gain, lead = f"{PAPER_MEAN_GAIN} ({PAPER_GAIN[0]}-{PAPER_GAIN[1]})", f"{PAPER_LEAD[0]}-{PAPER_LEAD[1]}"
    lead, mean = f"{PAPER_MEAN_LEAD} ({lead})", {"across": "mean"}
    latent, computed = (ABOVE_BLEND | {"case": equal} for equal in (LATENCY, COMPUTE))
    shown = [
        ("speed-up within 5 % of the decoded score, mean", gain, "speedup_x", DECODED | mean, 2, "x"),
        ("the least of it", f"{PAPER_GAIN[0]}", "speedup_x", DECODED | {"across": "least"}, 2, "x"),
        ("speed-up within 5 % of token accuracy, mean", "", "speedup_x", ACCURACY | mean, 2, "x"),
        ("layers recomputed, mean", "34.4 (Figure 11)", "group_layers_pct", DECODED | mean, 1, "% of layers"),
        ("lead over CacheBlend at equal latency, mean", lead, "score_above_points", latent | mean, 1, "points"),
        ("the same at equal computation", "", "score_above_points", computed | mean, 1, "points"),
    ]
    rows = [
        {"what": what, "paper": paper, "measured": interval(methods.summary.get(name, **where), digits), "unit": unit}
        for what, paper, name, where, digits, unit in shown
    ]
    for entry in latency.summary.all("ttft_x", across="worst"):
        what = f"partial prefill, {entry['where']['context_tokens']:,} tokens, its worst size"
        rows.append({"what": what, "measured": interval(entry, 2), "unit": entry["unit"]})
    return rows
