"""What a GPU recorded, beside the two processor cores of the other notebooks and beside the reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from firsttoken.study.errors import FirstTokenError
from firsttoken.study.summary import Entry
from firsttoken_studies.nb21_swap_or_recompute.figures import latency_by_length
from firsttoken_studies.nb21_swap_or_recompute.study import swap_ms
from firsttoken_studies.record.cell_mechanism import is_changed
from firsttoken_studies.record.claims import Claim
from firsttoken_studies.record.claims_table import told
from firsttoken_studies.record.overlay import DrawnResult
from firsttoken_studies.record.plot import LOOKS, Figure
from firsttoken_studies.record.results import Result, Table, load_result
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    import pandas

PROFILE, RECORDED_ON = "gpu", "nvidia-h200"
STUDIES = (
    *("machine", "recovery_latency", "prefill_latency", "batch_cost"),
    *("generation_stalls", "swarm_chains", "throughput", "operators_here"),
)

_BLOOM = {"model": "bloom-176b", "link": "100 Mbit/s, 100 ms", "source": "measured", "gbit_per_s": 256}
_LINES: tuple[tuple[str, str, str, str, Mapping[str, Any], int], ...] = (
    # what, the claim that has the report's number, experiment, measure, where, digits
    ("CPS: price of one small copy", "",
     "recovery_latency", "us_per_copy", {"variant": "per_block"}, 1),
    ("CPS: swap and recompute cost the same at", "cps.cross-point-live-gpu",
     "recovery_latency", "crossing_tokens", {"source": "live", "variant": "per_block"}, 0),
    ("CPS: swap in one copy over recompute, longest request", "",
     "recovery_latency", "recovery_x",
     {"policy": "swap", "than": "recompute", "variant": "coalesced", "case": "longest"}, 2),
    ("DroidSpeak: earlier first token with the chosen groups, mean", "droidspeak.prefill-x",
     "prefill_latency", "speedup_x", {"method": "DroidSpeak", "bound_pct": 5, "across": "mean"}, 2),
    ("DroidSpeak: CacheBlend with 15 % of the tokens", "droidspeak.cacheblend-speed",
     "prefill_latency", "speedup_x", {"method": "CacheBlend", "share": 0.15}, 2),
    ("Sarathi: a step that prefills 512 tokens and decodes, over one of each", "",
     "batch_cost", "mixed_x", {"source": "live", "budget_tokens": 512, "than": "apart"}, 2),
    ("Sarathi: a prompt in chunks of 512 over the whole one", "sarathi.chunk-overhead-live",
     "batch_cost", "prefill_x", {"source": "live", "budget_tokens": 512, "than": "whole"}, 2),
    ("Sarathi: 257 tokens over 256", "sarathi.tile",
     "batch_cost", "prefill_x", {"source": "live", "case": "a token past a tile", "than": "tile"}, 2),
    ("PETALS: a token through a block of BLOOM, 16 bits", "",
     "swarm_chains", "block_s", {"model": "bloom-176b", "bits": 16}, 4),
    ("PETALS: the same in 8 bits (the report has how much slower)", "petals.overhead",
     "swarm_chains", "block_s", {"model": "bloom-176b", "bits": 8}, 4),
    ("PETALS: three servers of such blocks in 8 bits over offloading", "petals.latency-measured",
     "swarm_chains", "steps_per_s_x", _BLOOM | {"bits": 8, "than": "offloading"}, 2),
    ("PETALS: three servers of such blocks in 16 bits over offloading", "petals.latency-measured",
     "swarm_chains", "steps_per_s_x", _BLOOM | {"bits": 16, "than": "offloading"}, 2),
    ("PETALS: offloaded weights come from memory at", "",
     "swarm_chains", "bringing_gb_per_s", {"variant": "offloading", "machine": "memory"}, 1),
    ("This engine: a step of 16 requests, of the floor", "",
     "throughput", "step_of_floor", {"engine": "engine", "dtype": "bfloat16", "requests": 16}, 2),
)  # fmt: skip


def on_a_gpu(experiment: str) -> tuple[Result, Result]:
    """The result of ``experiment`` that is recorded on a GPU, and what this machine measured under the profile ``gpu``,
    or the record again where it has not.

    Raises FirstTokenError for an experiment that was not recorded there.
    """
    recorded = load_result(experiment, PROFILE, machine=RECORDED_ON)
    if recorded is None:
        raise FirstTokenError(f"{experiment} was not recorded on {RECORDED_ON}; recorded there: {', '.join(STUDIES)}")
    return recorded, load_result(experiment, PROFILE) or recorded


SwapRule: TypeAlias = Callable[[int, float, float, float, float], float]
"""A function of (tokens, copies_a_block, copy_s, block_bytes, bytes_s): the seconds of a swap out and back."""


def swap_s(tokens: int, copies_a_block: float, copy_s: float, block_bytes: float, bytes_s: float) -> float:
    """Return the seconds of a swap by the library's rule, as a ``SwapRule`` does: copies and bytes, each way."""
    return 2 * -(-tokens // 16) * (copies_a_block * copy_s + block_bytes / bytes_s)


def block_by_block(cps: Result, machine: Result) -> tuple[pandas.DataFrame, tuple[float, float, float, float]]:
    """Return by tokens the measured milliseconds of a swap with a copy for each block and of a recomputation, and what
    a ``SwapRule`` takes beside the tokens, as the GPU measured it.

    Where ``machine`` lacks the rate of its link, that of PCIe 4.0 stands in for it.
    """
    swaps = cps.frame(what="swap", path="per_block")
    measured = swaps.assign(swap=swap_ms).groupby("tokens")[["swap", "copies", "bytes"]].median()
    measured["recompute"] = cps.frame(what="recompute").groupby("tokens").ms.median()
    blocks, rate = -(-measured.index[0] // 16), machine.summary.get("h2d_pinned")
    price_s = cps.summary.value("us_per_copy", variant="per_block") / 1e6
    copies, block_bytes = round(measured.copies.iloc[0] / blocks), measured.bytes.iloc[0] / blocks
    return measured, (copies, price_s, block_bytes, 1e9 * rate["value"] if rate else 25e9)


def recovery(recorded: Result, now: Result, machine: Result, rule: SwapRule) -> Figure:
    """Draw CPS's table beside the GPU, and what a rule says of a swap with a copy for each block: the library's, and
    ringed a reader's ``rule`` where that is another."""
    fig = latency_by_length(recorded, now)
    measured, prices = block_by_block(now, machine)
    shown = DrawnResult(now, own=True, library=now)
    for seconds, style in ((swap_s, {}), *([(rule, shown.style)] if is_changed(rule) else [])):
        times = [1e3 * seconds(tokens, *prices) for tokens in measured.index]
        label = f"swap, computed by {'your mechanism' if style else 'copies and bytes'}"
        fig.axes[1].plot(measured.index, times, "--", color=LOOKS["mark"].colour, label=label, **style)
    fig.axes[1].legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    return fig


def beside_rows(claims: Iterable[Claim]) -> Table:
    """A line for each number: the report's, as one of ``claims`` has it, that of two processor cores, and the
    GPU's."""
    reports = {claim.id: told(claim) for claim in claims}
    for label, claim, experiment, measure, labels, digits in _LINES:
        recorded, now = on_a_gpu(experiment)
        on_cpu = load_result(experiment, "full", machine="amd-epyc-avx512bf16-2c")
        line = {
            "what": label,
            "report": reports[claim] if claim else "",
            "two processor cores": _told(on_cpu, measure, labels, digits),
        }
        line[recorded.slug] = _told(recorded, measure, labels, digits)
        if now is not recorded:
            line["yours"] = _told(now, measure, labels, digits)
        yield line


def _told(result: Result | None, measure: str, labels: Mapping[str, Any], digits: int) -> str:
    entry: Entry | None = result.summary.get(measure, **labels) if result else None
    return f"{interval(entry, digits)} {entry.get('unit', '')}".strip() if entry else "not measured"
