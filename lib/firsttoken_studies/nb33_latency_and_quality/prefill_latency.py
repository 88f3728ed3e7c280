"""How long each method computes: partial prefill by the size of its group, CacheBlend, the smaller model (Figure 14).

The share of layers matters, not which: one pair of random weights of the profile's shape would do, and on a GPU does.
Which share is chosen comes from the profile of the runs all the same, whatever model is timed.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check
from firsttoken.droidspeak.blend import blended_cache, tokens_per_layer
from firsttoken.droidspeak.forward import cache_of
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefill import PartialPrefill, full_prefill, partial_prefill, suffix_logits
from firsttoken.droidspeak.prefix import Prefix, PrefixCache
from firsttoken.droidspeak.profile.pareto import Profiled, smallest_within
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import Interval, bootstrap
from firsttoken.study.summary import Summary
from firsttoken.study.timing import Stopwatch
from firsttoken_studies.droidspeak.pairs import half_the_layers
from firsttoken_studies.droidspeak.setting import ReuseConfig, Run, Setting, rows_by_run, run_of
from firsttoken_studies.droidspeak.styles import METHODS, style_of
from firsttoken_studies.droidspeak.wire import SUFFIX, random_request
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import BOUND, profiled_groups, setting_profile
from firsttoken_studies.nb33_latency_and_quality.reuse_methods import BLEND, DROIDSPEAK, OWN, SMALLER
from firsttoken_studies.record.overlay import DrawnResult, legend, over
from firsttoken_studies.record.plot import COLOURS, Axes, Figure, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, all_results, frame_of, recorded_result, rows_where

if TYPE_CHECKING:
    import pandas


_BOUNDS = {  # of token accuracy: 5 % of it as the paper has it, 5 points (errata I41)
    "relative": {"bound_pct": round(100 * BOUND)},
    "absolute": {"bound_points": round(100 * BOUND)},
}


@dataclass(frozen=True)
class LatencyConfig:
    """Prefixes of ``tokens`` tokens, groups of ``layers`` layers, CacheBlend at ``shares``; ``rounds`` of all of it.

    ``model`` is timed where it is given ("random:llama-3.1-8b"), else the profile's. ``chosen`` says whence the shares
    come that the runs choose: from their profile, made here, or from the one that is recorded, on any machine, so that
    a machine without the runs' models can time them.
    """

    model: str
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    shares: tuple[float, ...]
    rounds: int
    chosen: Literal["profiled", "recorded"] = "profiled"

    def needs(self) -> list[Need]:
        """Require a timed model whose context holds a prefix and what follows it, and whose layers hold every group."""
        return [
            Need("latency.tokens", max(self.tokens) + SUFFIX, CONTEXT, "ask for fewer, or name another latency.model"),
            Need("latency.layers", max(self.layers), LAYERS, "ask for fewer, or name another latency.model"),
        ]


def prefill_latency(profile: Profile, *, partial: PartialPrefill = partial_prefill) -> Outcome:
    """Measure one row a method, length and round: seconds to the first token, and of the pass behind the prefix alone.

    Within a round the order is random. Partial prefill is held against k / L of the full prefill of the same round plus
    the work of the first token. Its rows name the runs in which a bound chooses as many layers (``chosen_relative``,
    ``chosen_absolute``); ``depth`` counts all layers of the timed model. ``partial`` makes the cache of a group.
    """
    config, device = profile.section("latency", LatencyConfig), profile.torch_device()
    name = config.model or profile.model
    check(config.needs(), ModelFacts(name))
    shares = recorded_shares(profile) if config.chosen == "recorded" else chosen_shares(Setting(profile))
    loaded, again = (
        load_model(name, dtype=profile.torch_dtype(), device=device, with_tokenizer=False) for _ in range(2)
    )
    model, depth, half = loaded.model, loaded.model.config.num_hidden_layers, half_the_layers(again.model)
    chosen = {
        bound: {key: round(share * depth) for key, share in shares_by_run.items()}
        for bound, shares_by_run in shares.items()
    }
    rng, rows = random.Random(profile.seed), []
    draw = torch.Generator().manual_seed(profile.seed)
    for tokens in config.tokens:
        prefix, suffix = random_request(model, tokens, draw)
        sizes = {*config.layers, *(layers for shares_by_run in chosen.values() for layers in shares_by_run.values())}
        groups = [Group((depth - k) // 2, (depth - k) // 2 + k) for k in sorted(sizes)]
        sent = full_prefill(model, prefix, {group.lo for group in groups if group.needs_e_cache})
        ways = _ways(model, half, prefix, sent, groups, config.shares, partial)
        for step in track(range(-1, config.rounds), desc=f"prefill, {tokens} tokens", unit="round"):
            for name, compute in rng.sample(list(ways), len(ways)):
                row = _timed(half if name == "smaller model" else model, ways[name, compute], prefix, suffix)
                if name == "DroidSpeak":
                    layers = round(compute * depth)
                    row |= {
                        f"chosen_{bound}": [key for key in shares_by_run if shares_by_run[key] == layers]
                        for bound, shares_by_run in chosen.items()
                    }
                if step >= 0:  # the first round warms up
                    way = {"method": name, "tokens": tokens, "compute": round(compute, 4), "depth": depth}
                    rows.append(way | {"round": step} | row)
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def chosen_shares(setting: Setting) -> dict[str, dict[str, float]]:
    """Return by bound and run the share of the receiver's layers in the smallest group that keeps to the bound.

    "relative" is within 5 % of its score, "absolute" within 5 points.
    """
    shares = {}
    for run in setting.runs:
        receiver, _, profiled = setting_profile(setting, run)
        shares[run.key] = receiver.model.config.num_hidden_layers, profiled
    return _shares(shares)


def recorded_shares(profile: Profile) -> dict[str, dict[str, float]]:
    """``chosen_shares`` of the recorded layer profile of the profile's runs; runs that it lacks choose nothing.

    Raises FirstTokenError where no layer profile is recorded.
    """
    runs = rows_by_run(recorded_result(all_results(), "layer_profile", "any").rows)
    shares = {}
    for run in map(Run.parse, profile.section("reuse", ReuseConfig).runs):
        if rows := runs.get(run.name):
            shares[run.key] = sum(row["what"] == "layer" for row in rows), profiled_groups(rows)
    return _shares(shares)


def _shares(profiles: Mapping[str, tuple[int, list[Profiled]]]) -> dict[str, dict[str, float]]:
    """The chosen shares of runs by key, from the depth of each receiver and its profiled groups."""
    return {
        bound: {
            key: len(smallest_within(profiled, BOUND, absolute=bound == "absolute").group) / depth
            for key, (depth, profiled) in profiles.items()
        }
        for bound in _BOUNDS
    }


def _ways(
    model: PreTrainedModel,
    half: PreTrainedModel,
    prefix: Prefix,
    sent: PrefixCache,
    groups: Sequence[Group],
    shares: Sequence[float],
    prefill: PartialPrefill,
) -> dict[tuple[str, float], Callable[[], DynamicCache]]:
    """Return the functions that make a cache, by method and share of a prefill that it computes."""
    depth = model.config.num_hidden_layers
    ways: dict[tuple[str, float], Callable[[], DynamicCache]] = {
        ("full prefill", 1.0): lambda: cache_of(full_prefill(model, prefix).kv),
        ("smaller model", half.config.num_hidden_layers / depth): lambda: cache_of(full_prefill(half, prefix).kv),
    }
    for group in groups:
        ways["DroidSpeak", len(group) / depth] = functools.partial(prefill, model, prefix, sent, group)
    for share in shares:
        blend = functools.partial(blended_cache, model, prefix, sent, share)
        ways["CacheBlend", _blended(prefix.tokens, depth, share)] = blend
    return ways


def _blended(tokens: int, depth: int, share: float) -> float:
    """The share of a prefill that CacheBlend computes with a ``share`` of the tokens."""
    return sum(tokens_per_layer(tokens, depth, share)) / (tokens * depth)


@torch.inference_mode()
def _timed(
    model: PreTrainedModel, make: Callable[[], DynamicCache], prefix: Prefix, suffix: torch.Tensor
) -> dict[str, float]:
    with Stopwatch(prefix.ids.device) as watch:
        cache = make()
        prefilled = watch.seconds
        suffix_logits(model, prefix, suffix, cache, keep=1)
    return {"prefill_s": round(prefilled, 6), "first_token_s": round(watch.seconds, 6)}


def beside_full(rows: Rows) -> pandas.DataFrame:
    """Return each of ``rows``, which are of one length, beside the full prefill of its round, whose columns end in
    ``_full``; ``gain`` is the speed-up of the first token over that."""
    frame = frame_of(rows).merge(frame_of(rows, method=OWN), on="round", suffixes=("", "_full"))
    return frame.assign(gain=frame.first_token_s_full / frame.first_token_s)


def over_share(rows: Rows) -> dict[float, Interval]:
    """Return by share of layers partial prefill's time over (k + first token) / L of the same round's full prefill.

    ``rows`` are of one length.
    """
    frame = beside_full(rows)
    partial = frame[(frame.method == DROIDSPEAK) & (frame.compute < 1)]
    share = partial.compute * partial.prefill_s_full + partial.first_token_s_full - partial.prefill_s_full
    ratios = (partial.first_token_s / share).groupby(partial.compute)
    return {compute: bootstrap(values, "median") for compute, values in ratios}


_GAIN = {"speedup_x": ("gain", "median", "x")}


def latency_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by length the worst ratio of partial prefill to (k + first token) / L of a full one, and all speed-ups.

    By run there is the speed-up at the longest prefix with the group that is chosen. Speed-ups are left out where the
    rows lack the depth, those of runs where they lack the choice.
    """
    summary, lengths, shares = Summary(), sorted({row["tokens"] for row in rows}), parameters["latency"]["shares"]
    for tokens in lengths:
        length_rows = rows_where(rows, tokens=tokens)
        if length_shares := over_share(length_rows):
            worst = max(length_shares.values(), key=lambda interval: interval.estimate).summary(
                "x of (k + first token) / L"
            )
            labels = {"method": DROIDSPEAK, "than": "its share of a full prefill"}
            summary.add("ttft_x", worst, **labels, context_tokens=tokens, across="worst")
        if "depth" in rows[0]:
            _add_ways(summary, beside_full(length_rows), tokens, shares)
    longest = beside_full(rows_where(rows, tokens=lengths[-1]))
    blends = longest[longest.method == BLEND]
    usual = blends[blends.compute == blends.compute.min()]  # with the paper's share of tokens, its least
    summary.by(usual, {}, _GAIN, method=BLEND, share=min(shares, default=0.0))
    _add_speedups(summary, longest, [Run.parse(text) for text in parameters["reuse"]["runs"]])
    return summary


def _add_ways(summary: Summary, frame: pandas.DataFrame, tokens: int, shares: Sequence[float]) -> None:
    """Add the speed-up of the first token by every way; ``frame`` is of one length."""
    depth = frame.depth.iloc[0]
    blended = {round(_blended(tokens, depth, share), 4): share for share in shares}
    for name in (DROIDSPEAK, BLEND, SMALLER):
        for compute, compute_rows in frame[frame.method == name].groupby("compute"):
            size = {"share": blended[compute]} if name == BLEND else {"layers": round(compute * depth)}
            summary.by(compute_rows, {}, _GAIN, method=name, **size, context_tokens=tokens)


def _add_speedups(summary: Summary, frame: pandas.DataFrame, runs: Sequence[Run]) -> None:
    """Add the speed-up of the first token with each run's chosen share of layers; computation only.

    The share is in the whole layers of the timed model that come nearest. ``frame`` is of one length. Mean and least
    are over the runs in which something must be recomputed: where full reuse keeps to the bound, there is nothing for
    the method to win.
    """
    for bound, labels in _BOUNDS.items():
        if (column := f"chosen_{bound}") not in frame:
            continue
        chosen, gains = {"method": DROIDSPEAK} | labels, []
        partial = frame.dropna(subset=column)
        for run in runs:
            chosen_rows = partial[[run.key in keys for keys in partial[column]]]
            summary.by(chosen_rows, {}, _GAIN, **chosen, **run_of(run.row()))
            if len(chosen_rows) and chosen_rows.compute.iloc[0]:
                gains.append(bootstrap(chosen_rows.gain, "median"))
        if gains:
            mean, least = bootstrap([gain.estimate for gain in gains]), min(gains, key=lambda gain: gain.estimate)
            summary.add("speedup_x", mean.summary("x"), **chosen, across="mean")
            summary.add("speedup_x", least.summary("x"), **chosen, across="least")


TARGET = 1.10  # of (k + first token) / L
SHARE = COLOURS["mark"]  # the line of what is in proportion


def partial_times(recorded: Result | None, now: Result) -> Figure:
    """Left: the time by the share that is computed. Right: partial prefill over that share of a full prefill.

    The share is a measure, not a floor: a round's full prefill may be slower than its partial ones.
    """
    results = over(recorded, now)
    fig, (times_panel, right) = panels(1, 2, figsize=(9, 4.8))
    lengths = sorted({row["tokens"] for shown in results for row in shown.result.rows})
    for shown in results:
        lengths_measured = sorted({row["tokens"] for row in shown.result.rows})
        _times(times_panel, shown.result.frame(tokens=lengths_measured[-1]), shown, f"{lengths_measured[-1]:,}")
        for tokens in lengths_measured:
            over_it = over_share(rows_where(shown.result.rows, tokens=tokens))
            shares = [100 * share for share in over_it]
            low, middle, high = np.array(
                [[interval.low, interval.estimate, interval.high] for interval in over_it.values()]
            ).T
            if shown.repeats(right, f"{tokens} tokens", tuple(middle)):
                continue
            right.errorbar(shares, middle, [middle - low, high - middle], marker="os^Dv"[lengths.index(tokens)],
                           color=METHODS[DROIDSPEAK].colour, capsize=2, **shown.outlined)  # fmt: skip
    for tokens, marker in zip(lengths, "os^Dv", strict=False):
        right.plot([], [], marker, color=METHODS[DROIDSPEAK].colour, label=f"{tokens:,} tokens")
    right.axhline(TARGET, color=COLOURS["target"], linestyle="--", label=f"target: at most {TARGET:.2f}")
    right.axhline(1, color=SHARE, linewidth=1.2)
    right.set(xlabel="layers recomputed, % of all", ylabel="partial prefill / its share of a full one")
    right.set_xlim(-3, 103)
    right.legend(fontsize=9)
    times_panel.set(xlabel="computed, % of a prefill's token-layers", ylabel="time to first token, s")
    times_panel.set_ylim(bottom=0)
    legend(fig, times_panel, results, "ttft_x", columns=4)
    fig.suptitle("Partial prefill costs its share of a full one", fontsize=12)
    return fig


def _times(ax: Axes, frame: pandas.DataFrame, shown: DrawnResult, tokens: str) -> None:
    for name, method_rows in frame.groupby("method", sort=False):
        line, look = method_rows.groupby("compute").first_token_s.median(), style_of(name)
        if not shown.repeats(ax, name, tuple(line)):
            ax.plot(100 * line.index, line, f"{look.marker}-", color=look.colour, **shown.outlined)
        labels_shown = ax.get_legend_handles_labels()[1]
        if look.label not in labels_shown:
            ax.plot([], [], f"{look.marker}-", color=look.colour, label=look.label)
    if shown.library:
        return
    full = frame[frame.method == OWN]
    prefill, first = full.prefill_s.median(), (full.first_token_s - full.prefill_s).median()
    in_share = {} if "in proportion" in ax.get_legend_handles_labels()[1] else {"label": "in proportion"}
    ax.plot([0, 100], [first, prefill + first], color=SHARE, linewidth=1.2, **(shown.style | {"zorder": 1}), **in_share)
    ax.annotate(f"{tokens} tokens", (100, prefill + first), ha="right", va="bottom", fontsize=9)
