"""Notebook 01: where the time of one request goes, how prefill and decode grow with length, and the roofline."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.study.progress import track
from firsttoken.study.timing import Stopwatch
from firsttoken_studies.record.plot import LOOKS, Figure, panels
from firsttoken_studies.record.results import Result

IDEAS = {
    "ProgressiveServe": ("load", "fewer layers are loaded before the first token", "S1"),
    "PETALS": ("load", "layers that are not here are computed elsewhere", "sender"),
    "DroidSpeak": ("prefill", "the prompt's cache comes from another model", "droidspeak"),
    "Sarathi-Serve": ("decode", "others' prompts are cut, so that decodes do not wait", "sarathi"),
    "CPS": ("resume", "a lost cache is copied back or computed again, whichever is faster", "cross-point"),
}
"""By report: the phase of a request in which its idea acts, what it does there, and its look."""

_STARTED = "import time, sys; print(time.time()); import torch, transformers; print(time.time())"


@dataclass(frozen=True)
class Lengths:
    """Medians in seconds: ``prefill`` and ``decode`` by the number of tokens in the prompt."""

    prefill: Mapping[int, float]
    decode: Mapping[int, float]


def process_phases() -> dict[str, float]:
    """Seconds until a fresh interpreter runs, and until it has imported torch and transformers."""
    asked_s = time.time()
    output = subprocess.run([sys.executable, "-c", _STARTED], capture_output=True, text=True, check=True).stdout.split()
    running, imported = (float(moment) for moment in output)
    return {"process": running - asked_s, "imports": imported - running}


@torch.inference_mode()
def by_length(model: PreTrainedModel, lengths: Sequence[int], repeats: int) -> Lengths:
    """Time a prefill of each number of tokens, and one decode step behind it.

    The lengths take turns, so that a busy spell of the machine meets all of them, and the least of the repeats counts,
    as other work can only lengthen a pass. The first turn warms up and does not count.
    """
    prefill = {length: float("inf") for length in lengths}
    decode = dict(prefill)
    for turn in track(range(repeats + 1), desc="prefill and decode"):
        for length in lengths:
            ids = torch.randint(
                1, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length)
            )
            with Stopwatch(model.device) as first:
                out = model(ids.to(model.device), use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            with Stopwatch(model.device) as further:
                model(token, past_key_values=out.past_key_values, use_cache=True)
            if turn:
                prefill[length] = min(prefill[length], first.seconds)
                decode[length] = min(decode[length], further.seconds)
    return Lengths(prefill, decode)


def timeline(phases: Mapping[str, float]) -> Figure:
    """One request as bars in the order of its ``phases`` (seconds by name), and the place where each idea acts."""
    fig, ax = panels(figsize=(9, 4.2), layout="constrained")
    start, middle = 0.0, {}
    for name, seconds in phases.items():
        label = "resume, if\npreempted" if name == "resume" else name
        ax.barh(0, seconds, left=start, height=0.5, color=LOOKS["other"].colour, edgecolor="black")
        middle[name] = start + seconds / 2
        ax.annotate(f"{label}\n{seconds:.2f} s", (middle[name], 0.3), ha="center", va="bottom", fontsize=9)
        start += seconds
    for row, (report, (phase, does, look)) in enumerate(IDEAS.items(), 1):
        # they stand side by side
        alike = [other for other, (phase_of_idea, *_) in IDEAS.items() if phase_of_idea == phase]
        at_s = middle[phase] + phases[phase] * ((alike.index(report) + 0.5) / len(alike) - 0.5)
        ax.plot([at_s] * 2, [-0.25, -0.45 * row - 0.2], color=LOOKS[look].colour, linewidth=1.2)
        ax.plot(at_s, -0.25, "^", color=LOOKS[look].colour, markersize=9)
        side = {"xytext": (-6, 0), "ha": "right"} if at_s > 0.5 * start else {"xytext": (6, 0), "ha": "left"}
        anchor = at_s, -0.45 * row - 0.2
        ax.annotate(f"{report}: {does}", anchor, textcoords="offset points", va="center", fontsize=9.5, **side)
    first = sum(seconds for name, seconds in phases.items() if name in ("process", "imports", "load", "prefill"))
    ax.axvline(first, color=LOOKS["mark"].colour, linestyle="--", linewidth=1.2)
    ax.annotate("first token", (first, 0.95), (4, 0), textcoords="offset points", fontsize=9, va="center")
    ax.set(xlabel="seconds since the request came, when no process ran")
    ax.set(ylim=(-0.45 * len(IDEAS) - 0.5, 1.1), xlim=(0, start), yticks=[])
    ax.grid(visible=False)
    longest = max(("process", "imports", "load", "prefill"), key=lambda name: phases[name])
    fig.suptitle(
        f"The parts add up to {first:.1f} s until the first token, {phases[longest]:.1f} s of them '{longest}'"
    )
    return fig


@dataclass(frozen=True)
class Work:
    """The load that a model puts on a machine: ``layer_weights`` that every token is multiplied with, ``weight_bytes``
    that every pass reads, and ``token_bytes`` of keys and values that a decode reads for each token before it. The
    rates are the best that the machine showed, in operations and bytes a second."""

    layer_weights: int
    weight_bytes: int
    token_bytes: int
    operations_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, model: PreTrainedModel, machine: Result) -> Work:
        """Return that of ``model`` on ``machine`` (a result of the experiment "machine"); a copy reads and writes."""
        best = machine.frame().groupby("what").value.max()
        weights, config = list(model.parameters()), model.config
        width = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
        return cls(
            sum(weight.numel() for weight in layers_of(model).parameters()),
            sum(weight.numel() * weight.element_size() for weight in weights),
            2 * config.num_hidden_layers * width * weights[0].element_size(),
            1e9 * max(rate for measure, rate in best.items() if measure.startswith("matmul")),
            2e9 * best["memcpy"],
        )

    def prefill_floor_s(self, tokens: int) -> float:
        """No prefill of so many tokens is faster: two operations for each weight of the layers and token."""
        return 2 * self.layer_weights * tokens / self.operations_per_s

    def decode_floor_s(self, tokens: int) -> float:
        """No decode behind so many tokens is faster: every weight is read once, and their keys and values."""
        return (self.weight_bytes + self.token_bytes * tokens) / self.bytes_per_s


def by_length_figure(measured: Lengths, work: Work) -> Figure:
    """Prefill and decode against the number of tokens, with the floors that this machine's rates give them."""
    lengths, look = list(measured.prefill), LOOKS["measured"]
    fig, axes = panels(1, 2, figsize=(9, 3.9), layout="constrained")
    floors = [[work.prefill_floor_s(n) for n in lengths], [work.decode_floor_s(n) for n in lengths]]
    titles = ("prefill grows with the prompt", "a decode step hardly does")
    for ax, times, floor, title in zip(axes, (measured.prefill, measured.decode), floors, titles, strict=True):
        ax.plot(
            lengths,
            list(times.values()),
            look.marker,
            color=look.colour,
            linestyle="-",
            label="measured, least of all",
        )
        ax.plot(lengths, floor, color=LOOKS["floor"].colour, linestyle="--", label="floor of this machine")
        ax.set(xlabel="tokens in the prompt", ylabel="seconds", ylim=(0, None), title=title)
    axes[0].legend()
    return fig


def roofline(measured: Lengths, work: Work) -> Figure:
    """Operations a second that prefill and decode reach, over operations for each byte of weights that is read."""
    fig, ax = panels(figsize=(8, 4.2), layout="constrained")
    x = np.geomspace(0.1, 4 * max(measured.prefill), 200)
    limit = np.minimum(work.operations_per_s, x * work.bytes_per_s)
    ax.plot(x, limit / 1e9, color=LOOKS["floor"].colour, linestyle="--", label="limit of this machine")
    for name, times, many, look in (
        (f"prefill of {min(measured.prefill)} to {max(measured.prefill)} tokens", measured.prefill, True, "prefill"),
        ("decode of one token", measured.decode, False, "measured"),
    ):
        done = {n: 2 * work.layer_weights * (n if many else 1) for n in times}
        intensities = [done[n] / work.weight_bytes for n in times]
        ax.plot(intensities, [done[n] / s / 1e9 for n, s in times.items()], "o", color=LOOKS[look].colour, label=name)
    knee = work.operations_per_s / work.bytes_per_s
    ax.axvline(knee, color=LOOKS["mark"].colour, linewidth=1, linestyle=":")
    ax.annotate("memory-bound", (knee, 1.2), (-6, 0), textcoords="offset points", ha="right", fontsize=9)
    ax.annotate("compute-bound", (knee, 1.2), (6, 0), textcoords="offset points", ha="left", fontsize=9)
    ax.set(xscale="log", yscale="log", xlabel="operations for each byte of weights that is read")
    ax.set(ylabel="10⁹ operations a second", ylim=(1, 2 * work.operations_per_s / 1e9))
    ax.legend(loc="lower right")
    decode = 2 * work.layer_weights / work.weight_bytes
    fig.suptitle(f"Memory is the limit below {knee:.0f} operations a byte, and a decode has {decode:.1f}")
    return fig
