"""Tokens per second of this engine, of transformers' own two ways, and of vLLM where its environment is there."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.attention import Attend
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.engine.sdpa_attention import PaddedAttend
from firsttoken.study import paths
from firsttoken.study.dtypes import AUTO, DTYPES, name_of, resolve
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, median_ratio
from firsttoken.study.summary import Summary
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, distinct, frame_of
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Prompts = list[list[int]]


@dataclass(frozen=True)
class Generated:
    """The tokens after each prompt, none from what only reads; ``step_ms``, the median step in which every request is
    given a token, where it is known."""

    tokens: Prompts
    step_ms: float | None = None


System = Callable[[], Generated]
VLLM_PYTHON = paths.ROOT / ".venv-vllm" / "bin" / "python"
FLOOR = "weights_read"
NO_END = -1  # an end-of-text token that no model says
PAD = 0


@dataclass(frozen=True)
class ThroughputConfig:
    """``cases``, such as "auto 16", name a dtype and how many requests: prompts of ``prompt_tokens`` (fewest,
    most) random ids, ``new_tokens`` greedy ones each.

    Each of ``systems`` runs ``repeats`` times in each case, in random order, after a warm-up. ``vllm`` among them needs
    its own environment (`env/vllm/setup.sh`). ``model`` overrides the profile's ("" keeps it).
    """

    systems: tuple[str, ...]
    cases: tuple[str, ...]
    prompt_tokens: tuple[int, int]
    new_tokens: int
    repeats: int
    model: str = ""

    def __post_init__(self) -> None:
        if unknown_systems := set(self.systems) - _SYSTEMS.keys():
            raise ProfileError(
                f"throughput: no system {min(unknown_systems)!r}; {unknown(min(unknown_systems), _SYSTEMS)}"
            )
        for case in self.cases:
            dtype, _, count = case.partition(" ")
            if dtype not in (*DTYPES, AUTO) or not count.isdecimal() or int(count) < 1:
                raise ProfileError(f"throughput.cases: {case!r} is no dtype and number of requests, as in 'auto 16'")

    def needs(self) -> list[Need]:
        """Require a context that holds the longest prompt and its answer."""
        longest = max(self.prompt_tokens) + self.new_tokens
        return [Need("throughput.prompt_tokens + new_tokens", longest, CONTEXT)]


def throughput(profile: Profile) -> Outcome:
    """Rows {dtype, requests, system, repeat, tokens_per_s, same_tokens} and, of this engine and of the floor, step_ms:
    the same prompts for all, in one run."""
    config = profile.section("throughput", ThroughputConfig)
    name = config.model or profile.model
    check(config.needs(), ModelFacts(name))
    rows: Rows = []
    device = profile.torch_device()
    cases = [case.split() for case in config.cases]
    for dtype, count in dict.fromkeys((resolve(name, device), count) for name, count in cases):
        stock, fused = (load_model(name, dtype=dtype, device=device, with_tokenizer=False) for _ in range(2))
        prompts = _prompts(int(count), config.prompt_tokens, stock.model.config.vocab_size, profile.seed)
        case = _Case(stock.model, fuse(fused.model), prompts, config.new_tokens, name_of(dtype))
        systems = {name: _SYSTEMS[name](case) for name in config.systems}
        try:
            timed = _timed(systems, len(prompts) * config.new_tokens, config.repeats, profile.seed)
        finally:
            for system in systems.values():
                if isinstance(system, _Vllm):
                    system.close()
        rows += [{"dtype": case.dtype, "requests": len(prompts)} | row for row in timed]
    return Outcome(rows, provenance=stock.provenance.as_dict())


@dataclass(frozen=True)
class _Case:
    """The model as it comes and with fused modules, and what is asked of it."""

    stock: nn.Module
    fused: nn.Module
    prompts: Prompts
    new_tokens: int
    dtype: str


def _prompts(count: int, bounds: tuple[int, int], vocabulary: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [[rng.randrange(vocabulary) for _ in range(rng.randint(*bounds))] for _ in range(count)]


def _timed(systems: dict[str, System], tokens: int, repeats: int, seed: int) -> Rows:
    """Rows {system, repeat, tokens_per_s}; ``same_tokens`` is the share of outputs equal to those of the first one."""
    rng, rows = random.Random(seed), []
    warm_up = [(-1, name) for name in systems]
    cases = [(repeat, name) for repeat in range(repeats) for name in rng.sample(list(systems), len(systems))]
    reference: Prompts = []
    for repeat, name in track(warm_up + cases, desc="throughput"):
        start = time.perf_counter()
        answers = systems[name]()
        seconds = time.perf_counter() - start
        reference = reference or answers.tokens
        if repeat >= 0:
            row = {"system": name, "repeat": repeat, "tokens_per_s": tokens / seconds}
            if answers.tokens:
                pairs = zip(answers.tokens, reference, strict=True)
                row["same_tokens"] = sum(own_tokens == theirs for own_tokens, theirs in pairs) / len(reference)
            if answers.step_ms is not None:
                row["step_ms"] = answers.step_ms
            rows.append(row | getattr(systems[name], "versions", {}))
    return rows


def _weight_bytes(model: nn.Module) -> int:
    """Bytes of the parameters; one that two layers share counts once."""
    return sum({parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}.values())


def _weights_read(case: _Case) -> Generated:
    """The floor of a decode: every weight is read from memory once for each token of an answer, and nothing is done
    with it but a sum."""
    weights = torch.ones(_weight_bytes(case.stock) // 8, dtype=torch.int64, device=case.stock.device)
    steps = []
    for _ in range(case.new_tokens):
        start = time.perf_counter()
        int(weights.sum())
        steps.append(time.perf_counter() - start)
    return Generated([], 1e3 * median(steps))


def _engine(model: nn.Module, case: _Case, attend: type[Attend] | None = None) -> Generated:
    prompts, new_tokens = case.prompts, case.new_tokens
    block_tokens = 16
    blocks = sum(-(-(len(prompt) + new_tokens) // block_tokens) for prompt in prompts)
    executor = LiveExecutor(model, blocks + len(prompts), block_tokens=block_tokens, attend=attend)
    try:
        requests = Engine(executor).serve([(prompt, Sampling(new_tokens), 0.0) for prompt in prompts])
    finally:
        executor.close()
    begun = max(request.times_s[0] for request in requests)  # from here on a step gives a token to each request
    times = [moment for moment in requests[-1].times_s if moment >= begun]
    steps = [1e3 * (later - earlier) for earlier, later in pairwise(times)]
    return Generated([request.output for request in requests], median(steps) if steps else None)


def _generate(model: nn.Module, case: _Case) -> Generated:
    """One batch, padded on the left to the longest prompt."""
    prompts, new_tokens = case.prompts, case.new_tokens
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=PAD,
    )
    return Generated(out[:, width:].tolist())


def _continuous(case: _Case) -> Generated:
    """Generate by transformers' continuous batching, set up anew for each run, as ``generate_batch`` does.

    The cache is as large as the prompts need: on a CPU attention computes over all of it, and the default, sized by
    free memory, took three times as long.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    prompts, new_tokens = case.prompts, case.new_tokens
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=NO_END, pad_token_id=PAD)
    page = 32
    pages = sum(-(-(len(prompt) + new_tokens) // page) for prompt in prompts) + len(prompts)
    # transformers 5.17 calls a page a block
    tokens_a_page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    sized = ContinuousBatchingConfig(**{tokens_a_page: page}, num_blocks=pages, max_batch_tokens=max(256, len(prompts)))
    with quiet_transformers():
        outputs = case.stock.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=sized, progress_bar=False, warmup=False
        )
    return Generated([list(outputs[f"req_{number}"].generated_tokens) for number in range(len(prompts))])


class _Vllm:
    """vLLM, in a process and an environment of its own, a run at a call. Raises FirstTokenError when that fails."""

    def __init__(self, case: _Case) -> None:
        if not VLLM_PYTHON.exists():
            raise FirstTokenError("throughput: vLLM's environment is missing; run env/vllm/setup.sh")
        self._folder = tempfile.TemporaryDirectory(dir=paths.CACHE, prefix="vllm-")
        folder = Path(self._folder.name)
        (folder / "prompts.json").write_text(json.dumps(case.prompts), encoding="utf-8")
        self._log = folder / "log.txt"
        command = [str(VLLM_PYTHON), "-m", "firsttoken_studies.nb20_the_engine.vllm_throughput"]
        command += ["--model", case.stock.name_or_path, "--prompts", str(folder / "prompts.json")]
        command += ["--dtype", case.dtype, "--new-tokens", str(case.new_tokens)]
        environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

        self.versions = {"version": self._answer()["vllm"]}  # which says that it is warm

    def close(self) -> None:
        self._process.communicate()  # closes its input, which ends it
        self._folder.cleanup()

    def __call__(self) -> Generated:
        """Return the tokens after each prompt."""
        print(file=self._process.stdin, flush=True)
        return Generated(self._answer()["tokens"])

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        log_lines = self._log.read_text("utf-8").strip().splitlines() or ["no reason given"]
        raise FirstTokenError(f"throughput: vLLM failed: {log_lines[-1]}")


_SYSTEMS: dict[str, Callable[[_Case], System]] = {
    FLOOR: lambda case: partial(_weights_read, case),
    "generate": lambda case: partial(_generate, case.stock, case),
    "generate_fused": lambda case: partial(_generate, case.fused, case),
    "continuous_batching": lambda case: partial(_continuous, case),
    "vllm": _Vllm,
    "engine_stock": lambda case: partial(_engine, case.stock, case, PaddedAttend),
    "engine": lambda case: partial(_engine, case.fused, case),
}


def throughput_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Medians, and both forms of this engine over each of the others."""
    summary = Summary()
    for (dtype, count), case_rows in frame_of(rows).groupby(["dtype", "requests"], sort=False):
        case = {"dtype": dtype, "requests": count}
        rates = {
            name: system_rows.to_numpy() for name, system_rows in case_rows.groupby("system", sort=False).tokens_per_s
        }
        for name, values in rates.items():
            summary.add("tokens_per_s", bootstrap(values, "median").summary("tokens/s"), engine=name, **case)
            for engine in [
                system_name
                for system_name in ("engine_stock", "engine")
                if system_name in rates and system_name != name
            ]:
                ratio = median_ratio(rates[engine], values).summary("x")
                summary.add("tokens_per_s_x", ratio, engine=engine, than=name, **case)
        timed = case_rows.dropna(subset="step_ms") if "step_ms" in case_rows else case_rows[:0]
        summary.by(timed, {"engine": "system"}, {"step_ms": ("step_ms", "median", "ms")}, **case)
        floor, steps = (timed[timed.system == name].get("step_ms", ()) for name in (FLOOR, "engine"))
        if len(floor) and len(steps):
            share = median_ratio(floor.to_numpy(), steps.to_numpy()).summary("x")
            summary.add("step_of_floor", share, engine="engine", **case)
    return summary


# The figure and the table of the engine beside other systems: the reader's run over the record.

GOALS = {"generate": 1.1, "continuous_batching": 1.4, "vllm": 1.2}  # this project's, of the engine over each
SYSTEMS: dict[str, str] = {
    FLOOR: "the weights read, no more (floor)",
    "generate": "generate, one padded batch",
    "generate_fused": "generate, fused model",
    "continuous_batching": "transformers' continuous batching",
    "vllm": "vLLM (CPU)",
    "engine_stock": "this engine, stock modules",
    "engine": "this engine",
}


def throughput_bars(recorded: Result | None, now: Result) -> Figure:
    """Tokens per second of every system, one panel a case, and what this project asks of its engine (``GOALS``)."""
    results = over(recorded, now)
    rows = [row for result_drawn in results for row in result_drawn.result.rows]
    cases = list(dict.fromkeys((row["dtype"], row["requests"]) for row in rows))
    systems = [name for name in SYSTEMS if name in distinct(rows, "system")]
    fig, axes = panels(1, len(cases), figsize=(9, 0.45 * len(systems) + 1.7), squeeze=False, sharey=True)
    for ax, (dtype, count) in zip(axes[0], cases, strict=True):
        shown = 0.0
        for result_drawn in results:
            case = {"dtype": dtype, "requests": count}
            entries = {name: result_drawn.result.summary.get("tokens_per_s", engine=name, **case) for name in systems}
            for position, name in enumerate(systems):
                if (entry := entries[name]) is None:
                    continue
                look = "floor" if name == FLOOR else "measured" if name.startswith("engine") else "other"
                bar_position = position + result_drawn.shift
                height = 0.65 if result_drawn.alone else 0.32
                edge = {"edgecolor": "black", "linewidth": 1} if result_drawn.own else {"linewidth": 0}
                ax.barh(bar_position, entry["value"], color=COLOURS[look], height=height, **edge, **result_drawn.style)
                if name != FLOOR:
                    shown = max(shown, entry["high"])
                    ax.plot(
                        [entry["low"], entry["high"]],
                        [bar_position] * 2,
                        color=COLOURS["mark"],
                        linewidth=1.5,
                        zorder=5,
                    )
                elif result_drawn is results[0]:  # it may be far out: reading is no floor where arithmetic is the limit
                    text_style = {"color": "white", "fontsize": 9, "va": "center", "zorder": 7}
                    ax.text(
                        0.02, bar_position, f"{entry['value']:,.0f}", transform=ax.get_yaxis_transform(), **text_style
                    )
            goals = [share * entries[name]["value"] for name, share in GOALS.items() if entries.get(name)]
            if goals and entries.get("engine"):
                edges = [systems.index("engine") + result_drawn.shift + side * 0.2 for side in (-1, 1)]
                ax.plot([max(goals)] * 2, edges, color=COLOURS["target"], linewidth=3, zorder=6)
        ax.set_title(f"{dtype},\n{count} request{'s' * (count > 1)}", fontsize=11)
        ax.set(xlabel="tokens/s", xlim=(0, 1.25 * shown if shown else None))
        ax.set_yticks(range(len(systems)), [SYSTEMS[name] for name in systems])
        ax.grid(axis="y", visible=False)
    axes[0][0].invert_yaxis()
    axes[0][-1].plot([], [], color=COLOURS["target"], linewidth=3, label="goal")
    axes[0][-1].legend(loc="center right")
    fig.suptitle(_standing(results[0].result))
    name_results(fig, results, "tokens_per_s")
    return fig


def _standing(result: Result) -> str:
    """Return the title of the figure: where the engine stands beside vLLM, or else beside ``generate``."""
    for name, label in (("vllm", "vLLM's tokens a second"), ("generate", "the tokens a second of generate")):
        if ratios := [entry["value"] for entry in result.summary.all("tokens_per_s_x", engine="engine", than=name)]:
            return f"The engine makes {min(ratios):.2f} to {max(ratios):.2f} times {label}"
    return "Tokens a second of every system"


def throughput_rows(result: Result) -> Table:
    """Tokens per second of every system, and both forms of this engine over it."""
    cases = {(row["dtype"], row["requests"]): None for row in result.rows}
    for name, label in SYSTEMS.items():
        line: dict[str, Any] = {}
        for dtype, count in cases:
            case = {"dtype": dtype, "requests": count}
            rate = result.summary.get("tokens_per_s", engine=name, **case)
            line[f"{dtype}, {count} requests: tokens/s"] = interval(rate, 0)
            for engine, ours in (("engine", "engine"), ("engine_stock", "engine, stock modules")):
                ratio = result.summary.get("tokens_per_s_x", engine=engine, than=name, **case)
                line[f"{ours} / it ({dtype}, {count})"] = interval(ratio, 2)
        if any(line.values()):
            yield {"system": label} | {key: value for key, value in line.items() if value or "tokens/s" in key}
