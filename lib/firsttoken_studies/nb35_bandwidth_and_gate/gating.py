"""Does a probe see a spoiled answer coming? Calibrated on one set of items, judged on another.

The answers are those that ``methods`` decodes for the same caches: what is kept of them is not decoded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from firsttoken.assets.needs import Need, check
from firsttoken.droidspeak import gate
from firsttoken.droidspeak.forward import cache_of, layer_kv
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.prefill import full_prefill, partial_prefill, suffix_logits
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.droidspeak.profile.pareto import frontier, smallest_within
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.droidspeak.decoding import OWN, decoded_scores, own, partial
from firsttoken_studies.droidspeak.pairs import PairedModel
from firsttoken_studies.droidspeak.reuse_items import Encoded
from firsttoken_studies.droidspeak.setting import Run, Setting, batches
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import BOUND, profiled_groups, run_profile
from firsttoken_studies.nb35_bandwidth_and_gate.probes import (
    TOKENS,
    answer_doubt,
    answer_entropy,
    head_deviation,
    tail_divergence,
)
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, Figure, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, rows_where
from firsttoken_studies.record.show import interval

PREFIX = "tokens of prefix"
SIGNALS = ("entropy", "doubt", "head", "tail")
_FAILED = 0.5  # an answer that scores this much less than the receiver's own counts as spoiled


@dataclass(frozen=True)
class GateConfig:
    """Gates are calibrated to miss at most ``miss_budget`` of the spoiled answers of the profile's first run."""

    miss_budget: float


def quality_gate(profile: Profile) -> Outcome:
    """One row an item and cache: the score over it and over the receiver's own, and every signal.

    The caches in their order: all layers reused, a group of half as many layers as the chosen one recomputed, and the
    chosen one; those of them that are one have one row.
    """
    setting = Setting(profile)
    profile.section("gate", GateConfig)  # the summary calibrates by it
    run = setting.runs[0]
    check([Need("the gate's probes", TOKENS, PREFIX, "let it have longer ones")], {PREFIX: run.tokens}, run.name)
    receiver, sender = setting.pair(run)
    sets = dict(zip(("calibrate", "judge"), setting.items(run, receiver.tokenizer), strict=True))
    groups = profiled_groups(run_profile(setting, run, receiver, sender, sets["calibrate"]))
    chosen = smallest_within(groups, BOUND).group
    half = max((g.group for g in frontier(groups) if 2 * len(g.group) <= len(chosen)), key=len)
    caches, rows = list(dict.fromkeys([NOTHING, half, chosen])), []
    for name, items in sets.items():
        methods = [own(receiver), *(partial(str(group), receiver, group) for group in caches)]
        scores = decoded_scores(run, receiver, sender, methods, items, setting.config.batch)
        signals = _signals(receiver, sender, list(batches(items, setting.config.batch)), caches, name)
        for index, row in signals:
            columns = {"score": scores[row["group"]][index], "own": scores[OWN][index]}
            rows.append(run.row() | {"set": name} | row | columns)
    return Outcome(rows, provenance={"models": setting.models.provenance})


def _signals(
    receiver: PairedModel, sender: PairedModel, parts: Sequence[Sequence[Encoded]], groups: Sequence[Group], name: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every signal of each group's cache, with the item, counted through all ``parts``."""
    before = 0
    for part in track(parts, desc=f"gate, {name}", unit="batch"):
        for index, row in _batch(receiver, sender, part, groups):
            yield before + index, row
        before += len(part)


@torch.inference_mode()
def _batch(
    receiver: PairedModel, sender: PairedModel, part: Sequence[Encoded], groups: Sequence[Group]
) -> list[tuple[int, dict[str, Any]]]:
    model = receiver.model
    prefix = Prefix.of([item.prefix for item in part], model.device)
    sent = full_prefill(sender.model, prefix, {g.lo for g in groups if g.needs_e_cache})
    suffix = pad_sequence([torch.tensor(item.suffix) for item in part], batch_first=True).to(model.device)
    last, rows = torch.tensor([len(item.suffix) - 1 for item in part], device=model.device), []
    mask = (torch.arange(suffix.shape[1], device=model.device) <= last[:, None]).long()
    for group in groups:
        cache = partial_prefill(model, prefix, sent, group)
        deviation = head_deviation(model, prefix, cache, TOKENS)
        logits = suffix_logits(model, prefix, suffix, _copy(cache), mask)[torch.arange(len(part)), last]
        signals = {
            "entropy": answer_entropy(logits[:, None]),
            "doubt": answer_doubt(logits[:, None]),
            "head": deviation,
            "tail": tail_divergence(model, prefix, cache, suffix, logits, TOKENS, mask),
        }
        for index, batch_item in enumerate(part):
            row = {"group": str(group), "item": batch_item.item.id}
            rows.append((index, row | {name: round(values[index].item(), 6) for name, values in signals.items()}))
    return rows


def gate_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by cache how many answers are spoiled, and by signal the area under the curve and the gate's effect.

    A gate is calibrated on one set of items and judged on another.
    """
    summary = Summary()
    groups, miss_budget = list(dict.fromkeys(row["group"] for row in rows)), parameters["gate"]["miss_budget"]
    caches = {"reuse": groups[0], "half": groups[-2:][0], "chosen": groups[-1]}  # half may be none, too
    for case, group in caches.items():
        judged = rows_where(rows, set="judge", group=group)
        failed, n = spoiled(judged), len(judged)
        summary.add("group", {"value": group, "unit": "layers"}, case=case)
        summary.add("spoiled_pct", {"value": 100 * sum(failed) / n, "n": n, "unit": "%"}, case=case)
        if len(set(failed)) < 2:
            continue  # a gate is judged by answers of both kinds
        for signal, chosen in calibrated(rows_where(rows, set="calibrate", group=group), miss_budget).items():
            values = [row[signal] for row in judged]
            rates = gate.rates(chosen, values, failed)
            retained = behind(chosen, judged)
            area = gate.auc(gate.roc(values, failed))
            for name, value, unit in (
                ("auc", area, "of 1"),
                ("miss_pct", 100 * rates.miss, "% of the spoiled"),
                ("false_alarm_pct", 100 * rates.false_alarm, "% of the good"),
                ("fallback_pct", 100 * rates.fallback_share, "% of requests"),
                ("loss_points", 100 * sum(r["own"] - k for r, k in zip(judged, retained, strict=True)) / n, "points"),
            ):
                summary.add(name, {"value": value, "n": n, "unit": unit}, case=case, signal=signal)
    return summary


def spoiled(rows: Rows) -> list[bool]:
    """Return for each request whether its answer scores lower by a half or more than the receiver's own."""
    return [row["own"] - row["score"] >= _FAILED for row in rows]


def calibrated(rows: Rows, miss_budget: float) -> dict[str, gate.Gate]:
    """Return by signal the gate that misses at most ``miss_budget`` of the spoiled ``rows``.

    There is none where all rows are spoiled, or none is.
    """
    failed = spoiled(rows)
    signals = SIGNALS if len(set(failed)) == 2 else ()
    return {
        name: gate.calibrate([row[name] for row in rows], failed, signal=name, miss_budget=miss_budget)
        for name in signals
    }


def behind(chosen: gate.Gate, rows: Rows) -> list[float]:
    """Return each request's score behind the gate: the reused cache's where the gate accepts it, else the own."""
    return [row["score"] if chosen.accepts(row[chosen.signal]) else row["own"] for row in rows]


def _copy(cache: DynamicCache) -> DynamicCache:
    """Return a new cache of the same tensors, which may grow."""
    return cache_of(layer_kv(cache, layer) for layer in range(len(cache.layers)))


# The figure and the table of notebook 35 about a gate before the answer, from results alone.

TAGS = {"reuse": "all layers reused", "half": "half of the chosen group's size", "chosen": "the chosen group"}


def areas(recorded: Result | None, now: Result) -> Figure:
    """Draw how well every signal separates spoiled from good answers: the area under its ROC with its interval, by
    cache."""
    results = over(recorded, now)
    gated = [_gated(shown.result) for shown in results]
    tags = [tag for tag in TAGS if any(tag in groups for groups in gated)]
    fig, axes = panels(1, len(tags), figsize=(9, 3.2), squeeze=False, sharey=True)
    for ax, tag in zip(axes[0], tags, strict=True):
        sentences = []
        for shown, groups in zip(results, gated, strict=True):
            judged_rows = rows_where(shown.result.rows, set="judge", group=groups.get(tag))
            failed = spoiled(judged_rows)
            for position, signal in enumerate(SIGNALS) if len(set(failed)) == 2 else ():
                area = gate.auc_interval([row[signal] for row in judged_rows], failed).summary()
                shown.point(ax, position + shown.shift, area, "measured", along="x")
            if judged_rows:
                whose = "yours, " if shown.own and not shown.alone else ""
                sentences.append(f"{whose}{groups[tag]}: {sum(failed)} of {len(failed)} spoiled")
        ax.axvline(0.5, color=COLOURS["mark"], linestyle=":", linewidth=1.5)
        ax.annotate("a coin", (0.5, len(SIGNALS) - 0.55), (4, 0), textcoords="offset points", fontsize=9)
        ax.set_title("\n".join([TAGS[tag], *sentences]), fontsize=9.5)
        ax.set(xlim=(-0.03, 1.03), ylim=(len(SIGNALS) - 0.4, -0.5))
        ax.grid(axis="y", visible=False)
    axes[0][0].set_yticks(range(len(SIGNALS)), SIGNALS)
    axes[0][len(tags) // 2].set_xlabel("how often a spoiled answer has the larger signal than a good one (95 %)")
    chosen = {s: results[0].result.summary.get("auc", case="chosen", signal=s) for s in SIGNALS}
    aucs = {signal: entry["value"] for signal, entry in chosen.items() if entry}
    if aucs:
        best = max(aucs, key=aucs.__getitem__)
        message = f"{best} tells spoiled answers from good ones best, in {100 * aucs[best]:.0f} % of pairs"
        fig.suptitle(f"Over the chosen group {message}", fontsize=12)
    name_results(fig, results, "spoiled_pct")
    return fig


def gate_rows(result: Result, depth: int) -> Table:
    """The gates in numbers, on items that set no threshold, "no gate" first; computed is of a full prefill.

    A probe of tokens computes them in all layers; a request that is sent back has its group recomputed for nothing.
    """
    probe = TOKENS / Run.parse(result.parameters["reuse"]["runs"][0]).tokens
    for tag, group in _gated(result).items():
        judged = rows_where(result.rows, set="judge", group=group)
        own_scores = [row["own"] for row in judged]
        layers = (int(group.split("-")[1]) - int(group.split("-")[0]) + 1) / depth if "-" in group else 0.0
        cache = {"cache": f"{TAGS[tag]} ({group})"}
        yield cache | {"gate": "no gate"} | _cost([row["score"] for row in judged], own_scores, layers)
        calibration = rows_where(result.rows, set="calibrate", group=group)
        gates = calibrated(calibration, result.parameters["gate"]["miss_budget"])
        for signal, made in gates.items():
            rates = {name: result.summary.get(name, case=tag, signal=signal) for name in _RATES}
            sent_back = 1 - sum(made.accepts(row[signal]) for row in judged) / len(judged)
            cost = layers + sent_back + (probe if signal in ("head", "tail") else 0.0)
            cells = {_RATES[name]: "" if rate is None else f"{rate['value']:.0f}" for name, rate in rates.items()}
            yield cache | {"gate": signal} | cells | _cost(behind(made, judged), own_scores, cost)


_RATES = {
    "miss_pct": "missed, % of spoiled",
    "false_alarm_pct": "false alarms, % of good",
    "fallback_pct": "sent back, %",
}


def _cost(scores: list[float], own_scores: list[float], compute: float) -> dict[str, Any]:
    score = interval(bootstrap(scores).summary("%", 100))
    return {
        "score, %": score,
        "own, %": round(100 * sum(own_scores) / len(own_scores), 1),
        "computed, %": round(100 * compute),
    }


def _gated(result: Result) -> dict[str, str]:
    """The group of each tag of the summary; where two are one, it stands under the first."""
    group_by_run: dict[str, str] = {}
    for tag in TAGS:
        entry = result.summary.get("group", case=tag)
        if entry and entry["value"] not in group_by_run.values():
            group_by_run[tag] = entry["value"]
    return group_by_run
