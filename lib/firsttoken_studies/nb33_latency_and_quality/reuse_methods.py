"""Every method on every run: what it answers, decoded and scored, and how long it takes (Figure 14).

The profile of a run gives the candidates: its Pareto frontier by token accuracy (``profiling``). All of them answer the
items of the profile, and the smallest one that keeps to the bound by the score of decoded answers is chosen. It and the
other methods answer other items. What takes how long is measured apart (``latency``).
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from firsttoken.assets.needs import LAYERS, Need
from firsttoken.droidspeak.blend import blended_cache, tokens_per_layer
from firsttoken.droidspeak.forward import cache_of
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.prefill import PartialPrefill, partial_prefill
from firsttoken.droidspeak.profile.pareto import Profiled, frontier
from firsttoken.study.errors import ProfileError, RequestError
from firsttoken.study.profile import Profile
from firsttoken.study.stats import Interval, bootstrap, paired_bootstrap
from firsttoken.study.summary import Scalar, Summary
from firsttoken_studies.droidspeak.constructed_tasks import task_of
from firsttoken_studies.droidspeak.decoding import (
    CHOOSE,
    DROIDSPEAK,
    JUDGE,
    OWN,
    REUSE,
    GroupChoice,
    Method,
    choices_of_samples,
    choose_and_judge,
    decoded_groups,
    decoded_scores,
    own,
    own_cache,
    sampled_choices,
)
from firsttoken_studies.droidspeak.decoding import partial as partial_method
from firsttoken_studies.droidspeak.pairs import HALF, PairedModel
from firsttoken_studies.droidspeak.reuse_items import Encoded
from firsttoken_studies.droidspeak.setting import Run, Setting, rows_by_run, run_of
from firsttoken_studies.droidspeak.tables import relative_loss
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import BOUND, profiled_groups, run_profile
from firsttoken_studies.record.results import Outcome, Result, Rows, load_result, rows_where

_AS_FULL = ("full prefill", "sender")  # the sender prefills all its layers, too
_GRID = 2001  # shares of a prefill that are looked at for a time


class TimeShares:
    """Time to the first token as a share of full prefill's, at one length: straight lines between what was measured.

    A line begins at full reuse, which computes nothing of the prefix, and goes on beyond its last point, where more
    work takes at least as long as there.
    """

    def __init__(self, latency: Result, tokens: int) -> None:
        """``latency`` is a result of prefill_latency. Raises RequestError for a length that it does not have."""
        rows = rows_where(latency.rows, tokens=tokens)
        if not rows:
            lengths = sorted({row["tokens"] for row in latency.rows})
            raise RequestError(f"no prefill of {tokens} tokens was timed; there are {', '.join(map(str, lengths))}")
        self.tokens, self._taken = tokens, {}
        for row in sorted(rows, key=lambda row: row["round"]):
            self._taken.setdefault((row["method"], row["compute"]), []).append(row["first_token_s"])
        self._full = np.array(self._taken["full prefill", 1.0])
        provenance = {name: getattr(latency, name) for name in ("experiment", "profile", "started")}
        self.provenance: dict[str, Any] = provenance | {"machine": latency.slug, "tokens": tokens}

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
        upper = min(max(int(np.searchsorted(shares, compute)), 1), len(shares) - 1)
        low, high = shares[upper - 1], shares[upper]
        interpolated = line[low] + (line[high] - line[low]) * (compute - low) / (high - low)
        # a round in which something else delayed the second last point has a line that falls, below zero in the end
        return np.maximum(interpolated, line[high]) if compute > high else interpolated

    def median(self, method: str, compute: float) -> float:
        """The median over rounds of ``of``."""
        return float(np.median(self.of(method, compute)))

    def compute_of(self, method: str, share: float) -> float:
        """The most that ``method`` computes (0..1) in ``share`` of a full prefill's time; 0 where nothing is in time.

        Raises RequestError for a method that was not timed.
        """
        return float(
            max(
                (candidate for candidate in np.linspace(0, 1, _GRID) if self.median(method, candidate) <= share),
                default=0.0,
            )
        )


def times_here() -> TimeShares:
    """The times of this machine at the longest prefix. Raises RequestError where prefill_latency has no result."""
    latency = load_result("prefill_latency")
    if latency is None:
        raise RequestError("no times of this machine are known; first run `firsttoken measure prefill_latency`")
    return TimeShares(latency, max(row["tokens"] for row in latency.rows))


SENDER, SMALLER = "sender", "smaller model"
BLEND, COMPUTE, LATENCY = "CacheBlend", "equal compute", "equal latency"


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
        full_layers = [_blend(text, {COMPUTE: 0, LATENCY: 0}, sys.maxsize)[2] for text in self.blends]
        return [Need("methods.blends (and a layer that is blended)", max(full_layers, default=0) + 1, LAYERS)]


def reuse_methods(
    profile: Profile, *, partial: PartialPrefill = partial_prefill, choose: GroupChoice = choose_and_judge
) -> Outcome:
    """One row a run, method and set of ``items``: score, each item's ``item_score``, and ``time_share`` by round.

    ``time_share`` is the time to the first token over full prefill's, from the result of prefill_latency for this
    machine, at its longest prefix. A candidate has ``accuracy_lost_pct`` as well, what it loses of the own token
    accuracy on the same items. ``partial`` makes the cache of a group, and ``choose`` chooses one on the items of
    the profile; a reader's on samples of them, too (``draws``). Raises RequestError where there are no times.
    """
    config, times = profile.section("methods", MethodsConfig), times_here()
    setting = Setting(profile, config.needs())
    rows: Rows = []

    def answers(run: Run, methods: Sequence[Method], purpose: str, items: Sequence[Encoded]) -> Rows:
        receiver, sender = setting.pair(run)
        scores = decoded_scores(run, receiver, sender, methods, items, setting.config.batch)
        alike = {"items": purpose, "metric": task_of(items[0].item).metric}
        alike |= {"depth": receiver.model.config.num_hidden_layers}
        return [run.row() | alike | _row(method, scores[method.name], times) for method in methods]

    for run in setting.runs[: config.runs]:
        receiver, sender = setting.pair(run)
        to_choose, to_judge = setting.items(run, receiver.tokenizer)
        profiled = profiled_groups(run_profile(setting, run, receiver, sender, to_choose, partial))
        candidates = list(_candidates(receiver, profiled, partial))
        lost = {profile_of_group.group: 100 * profile_of_group.relative_loss for profile_of_group in profiled}
        lost[candidates[0].group] = 0.0
        answered = [
            row | {"accuracy_lost_pct": lost[Group(row["lo"], row["hi"])]}
            for row in answers(run, candidates, CHOOSE, to_choose)
        ]
        items = range(len(to_choose))
        chosen = partial_method(DROIDSPEAK, receiver, choose(decoded_groups(answered), BOUND, items, items)[0], partial)
        methods = list(_methods(setting, config, run, receiver, sender, chosen, times))
        judged = answers(run, methods, JUDGE, to_judge)
        if choose is not choose_and_judge:
            (row,) = rows_where(judged, method=DROIDSPEAK)
            row["draws"] = [(d.group.lo, d.group.hi, d.relative_loss) for d in sampled_choices(answered, choose)]
        rows += [*answered, *judged]
    return Outcome(rows, provenance={"models": setting.models.provenance, "times": times.provenance})


def _candidates(receiver: PairedModel, groups: Sequence[Profiled], prefill: PartialPrefill) -> Iterator[Method]:
    """Full prefill, full reuse, and every group of the profile's frontier between them."""
    depth = receiver.model.config.num_hidden_layers
    yield own(receiver)
    yield partial_method(REUSE, receiver, NOTHING)
    for group in (profiled.group for profiled in frontier(groups)):
        if 0 < len(group) < depth:
            yield partial_method(f"{DROIDSPEAK} {group}", receiver, group, prefill)


def _methods(
    setting: Setting,
    config: MethodsConfig,
    run: Run,
    receiver: PairedModel,
    sender: PairedModel,
    chosen: Method,
    times: TimeShares,
) -> Iterator[Method]:
    model, depth = receiver.model, receiver.model.config.num_hidden_layers
    yield own(receiver)
    yield Method(SENDER, "sender", 1.0, lambda prefix, sent: cache_of(sent.kv), sender)
    yield partial_method(REUSE, receiver, NOTHING)
    yield chosen
    equal = {COMPUTE: chosen.compute, LATENCY: times.compute_of(BLEND, times.median(DROIDSPEAK, chosen.compute))}
    for text in config.blends:
        share, gradual, full_layers = _blend(text, equal, depth)
        blended = functools.partial(blended_cache, model, share=share, gradual=gradual, full_layers=full_layers)
        compute = sum(tokens_per_layer(1000, depth, share, gradual, full_layers)) / (1000 * depth)
        yield Method(f"{BLEND} {text}", f"blend {share:.4f} {gradual} {full_layers}", compute, blended, receiver)
    if config.smaller and run.row()["task"] in config.smaller.removeprefix(f"{HALF}-").split("-"):
        half = setting.models.load(config.smaller)
        recipe, compute = f"{half.weights} {half.adapter}", half.model.config.num_hidden_layers / depth
        yield Method(SMALLER, recipe, compute, lambda prefix, sent: own_cache(half, prefix), half)


def _blend(text: str, equal: Mapping[str, float], depth: int) -> tuple[float, bool, int]:
    """Share (of tokens, to four digits), gradual and whole layers of a blend as the profile writes it.

    ``equal`` has the compute that the words stand for. Raises ProfileError for anything else.
    """
    match = re.fullmatch(rf"({COMPUTE}|{LATENCY}|[01]|0?\.\d+)( gradual)?(?: from (\d+))?", text)
    full_layers = int(match[3] or 1) if match else 0
    if not match or not 1 <= full_layers < depth:
        raise ProfileError(
            f"blend {text!r}: write it as '0.15', '{COMPUTE}', '{LATENCY}', '0.15 gradual' or '0.15 from 2' (< {depth})"
        )
    share = (depth * equal[match[1]] - full_layers) / (depth - full_layers) if match[1] in equal else float(match[1])
    return round(min(1.0, max(0.0, share)), 4), bool(match[2]), full_layers


def _row(method: Method, scores: Sequence[float], times: TimeShares) -> dict[str, Any]:
    """Return the row of a method: what it computes, the time that takes, and the scores of its answers."""
    return {
        "method": method.name,
        "compute": round(method.compute, 4),
        "lo": method.group.lo,
        "hi": method.group.hi,
        "time_share": [round(float(share), 4) for share in times.of(timed(method.name), method.compute)],
        "n": len(scores),
        "score": sum(scores) / len(scores),
        "item_score": scores,
    }


def timed(method: str) -> str:
    """Return the name of a method where times are measured: by what it computes, full reuse is a partial prefill."""
    return DROIDSPEAK if method.startswith((REUSE, DROIDSPEAK)) else BLEND if method.startswith(BLEND) else method


def where_of(method: str) -> dict[str, Scalar]:
    """Return the place in a summary of a row's method.

    A blend has its ``share`` of tokens, or the ``case`` that set it.
    """
    match = re.fullmatch(rf"{BLEND} (?:({COMPUTE}|{LATENCY})|(\S+)) ?(.*)", method)
    if not match:
        return {"method": method}
    labels = {"case": match[1]} if match[1] else {"share": float(match[2])}
    return {"method": BLEND} | labels | ({"variant": match[3]} if match[3] else {})


# where the measures of the chosen group hold, and those of the group that token accuracy would choose
DECODED, ACCURACY = ({"method": DROIDSPEAK, "chosen_by": by} for by in ("decoded answers", "token accuracy"))
ABOVE_BLEND = {"method": DROIDSPEAK, "than": BLEND}
_MEANS = 2000  # samples of the items that judge


def methods_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize the score and loss of each method in each run, and over the runs the chosen group and the lead over
    CacheBlend.

    Means over runs keep the runs and draw the items again, those that choose and those that judge; their n counts the
    runs, which are what a claim on pairs of models is about. Layers and speed-up are of the runs in which something
    must be recomputed; of all, where that is none.
    """
    summary, runs = Summary(), list(rows_by_run(rows).values())
    choices = [choice_of(run_rows) for run_rows in runs]
    for run_rows, choice in zip(runs, choices, strict=True):
        _add_scores(summary, run_rows)
        _add_choice(summary, choice, run_of(run_rows[0]))
        _add_by_accuracy(summary, run_rows)
    for method in (REUSE, DROIDSPEAK):
        lost = [summary.of("relative_loss_pct", method=method, **run_of(run_rows[0])) for run_rows in runs]
        worst = max(lost, key=lambda entry: entry["value"])
        summary.add("relative_loss_pct", worst, method=method, across="worst")
    mended = [choice for choice in choices if len(choice.group)] or choices
    pairs = {"n": len(mended)}
    layers = _over(mended, "shares", np.mean).summary("% of layers", 100)
    summary.add("group_layers_pct", layers | pairs, **DECODED, across="mean")
    by_accuracy = zip(summary.all("speedup_x", **ACCURACY), choices, strict=True)
    gains = [entry["value"] for entry, choice in by_accuracy if len(choice.group)]
    summary.add("speedup_x", _over(mended, "gains", np.mean).summary("x") | pairs, **DECODED, across="mean")
    summary.add("speedup_x", _over(mended, "gains", np.min).summary("x") | pairs, **DECODED, across="least")
    if gains:
        summary.add("speedup_x", bootstrap(gains).summary("x"), **ACCURACY, across="mean")
    for equal in (COMPUTE, LATENCY):
        leads = [lead for run_rows in runs if (lead := _leads(run_rows, equal)) is not None]
        if leads:
            mean = _mean_of(leads).summary("points", 100) | {"n": len(leads)}
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
    groups, depth, rng = decoded_groups(rows), rows[0]["depth"], np.random.default_rng(0)
    times = {(row["lo"], row["hi"]): np.array(row["time_share"]) for row in rows_where(rows, items=CHOOSE)}
    (judged,), items = rows_where(rows, items=JUDGE, method=DROIDSPEAK), len(groups[0].own)
    chosen = Group(judged["lo"], judged["hi"])
    again = [draw.group for draw in choices_of_samples(rows)]
    gains = [float(np.median(1 / times[chosen.lo, chosen.hi])), *(1 / rng.choice(times[g.lo, g.hi]) for g in again)]
    return ChosenGroup(chosen, items, np.array([len(group) / depth for group in (chosen, *again)]), np.array(gains))


def _over(choices: Sequence[ChosenGroup], field: str, stat: Callable[..., np.ndarray]) -> Interval:
    """``stat`` over runs of a field of what was chosen, with its interval over what might have been, draw by draw."""
    estimate, *again = stat([getattr(choice, field) for choice in choices], axis=0)
    low, high = np.percentile(again, [2.5, 97.5])
    return Interval(float(estimate), float(low), float(high), min(choice.items for choice in choices))


def _add_choice(summary: Summary, choice: ChosenGroup, run: dict[str, str]) -> None:
    layers, gain = (_over([choice], field, np.mean) for field in ("shares", "gains"))
    group = {"value": str(choice.group), "n": choice.items, "unit": "layers"}
    summary.add("group", group, **DECODED, **run)
    summary.add("group_layers_pct", layers.summary("% of layers", 100), **DECODED, **run)
    summary.add("speedup_x", gain.summary("x"), **DECODED, **run)


def _add_by_accuracy(summary: Summary, rows: Rows) -> None:
    """The smallest group that keeps to the bound by token accuracy: its speed-up, and what its decoded answers lose."""
    (own_scores,) = (row["item_score"] for row in rows_where(rows, items=CHOOSE, method=OWN))
    within = [row for row in rows_where(rows, items=CHOOSE) if row["accuracy_lost_pct"] <= 100 * BOUND]
    row = min(within, key=lambda row: (row["hi"] - row["lo"], row["accuracy_lost_pct"]))
    gain = bootstrap(1 / np.array(row["time_share"]), "median")
    group = {"value": str(Group(row["lo"], row["hi"])), "n": row["n"], "unit": "layers"}
    summary.add("group", group, **ACCURACY, **run_of(row))
    lost = relative_loss(own_scores, row["item_score"]).summary("% of own")
    summary.add("relative_loss_pct", lost, **ACCURACY, **run_of(row))
    summary.add("speedup_x", gain.summary("x"), **ACCURACY, **run_of(row))


def _mean_of(runs: Sequence[np.ndarray]) -> Interval:
    """The mean over runs of the means of their items, with its interval over items, the runs as they are."""
    rng = np.random.default_rng(0)
    resampled = [values[rng.integers(0, len(values), (_MEANS, len(values)))].mean(1) for values in runs]
    low, high = np.percentile(np.mean(resampled, axis=0), [2.5, 97.5])
    return Interval(float(np.mean([v.mean() for v in runs])), float(low), float(high), min(map(len, runs)))


def _leads(rows: Rows, equal: str) -> np.ndarray | None:
    """[items]: score of the chosen group above CacheBlend's, the better of its ways where they are ``equal``.

    None where no CacheBlend was asked so.
    """
    judged = {row["method"]: row for row in rows_where(rows, items=JUDGE)}
    blends = [row for name, row in judged.items() if where_of(name).get("case") == equal]
    if not blends:
        return None
    best = max(blends, key=lambda row: row["score"])
    return np.array(judged[DROIDSPEAK]["item_score"]) - np.array(best["item_score"])


def _add_scores(summary: Summary, rows: Rows) -> None:
    """The scores of a run, what each method loses against the receiver's own prefill, and the leads over CacheBlend."""
    run = run_of(rows[0])
    (own_scores,) = (row["item_score"] for row in rows_where(rows, items=JUDGE, method=OWN))
    for row in rows_where(rows, items=JUDGE):
        labels, scores = where_of(row["method"]) | run, row["item_score"]
        summary.add("score_pct", bootstrap(scores).summary("%", 100), **labels)
        if row["method"] != OWN:
            summary.add("loss_points", paired_bootstrap(own_scores, scores).summary("points", 100), **labels)
            summary.add("relative_loss_pct", relative_loss(own_scores, scores).summary("% of own"), **labels)
    for equal in (COMPUTE, LATENCY):
        if (lead := _leads(rows, equal)) is not None:
            above = bootstrap(lead).summary("points", 100)
            summary.add("score_above_points", above, **ABOVE_BLEND, case=equal, **run)
