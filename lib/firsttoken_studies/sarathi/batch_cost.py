"""What a batch costs (Figures 2, 3 and 14, and the tile of 4.3): by the cost table, and live on this machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from tqdm import tqdm

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine
from firsttoken.engine.engine_config import EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.engine.fused import fuse
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling, Work
from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.engine.trace import Step, Trace
from firsttoken.sarathi.hardware import Hardware
from firsttoken.study.errors import ProfileError
from firsttoken.study.overlay import Drawn, counted, legend, over
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import Interval, bootstrap
from firsttoken.study.summary import Entry, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Batches of a shape that is asked for, run on the live executor and timed: a chunk of a prompt beside decodes.

BLOCK = 16


class Pieces(Sarathi):
    """Every decode, and ``piece`` tokens of a prompt beside them."""

    name: ClassVar[str] = "pieces"
    piece = 1

    def budget(self, decodes: Sequence[Work]) -> int:
        return len(decodes) + self.piece


class LiveBatches:
    """``running`` requests that decode over ``context`` tokens, beside which prompts come in pieces.

    ``executor`` must have ``blocks_for`` as many blocks. Random tokens of a vocabulary of ``vocabulary``: what is timed
    does not depend on them.
    """

    def __init__(self, executor: Executor, vocabulary: int, running: int, context: int, steps: int) -> None:
        self._draw, self._vocabulary = np.random.default_rng(0), vocabulary
        self._trace = Trace()
        self._engine = Engine(executor, EngineConfig(scheduler=Pieces, requests=running + 1), trace=self._trace)
        self._running = [self._submit(context, steps + 1) for _ in range(running)]
        self._engine.scheduler.piece = max(context, 1)
        while not all(request.times_s for request in self._running):
            self._engine.step()

    @staticmethod
    def blocks_for(running: int, context: int, steps: int, prompt: int) -> int:
        """KV blocks that hold all of them, and what admission leaves free."""
        tokens = running * (context + steps + BLOCK) + prompt + BLOCK
        return -(-tokens // BLOCK) * 101 // 100 + 4

    def decode(self, steps: int) -> list[Step]:
        """``steps`` steps that only decode."""
        return self._stepped(lambda taken: len(taken) < steps)

    def prompt(self, tokens: int, piece: int) -> list[Step]:
        """The steps in which a prompt of ``tokens`` tokens goes through in pieces of ``piece``."""
        self._engine.scheduler.piece = piece
        request = self._submit(tokens, 1)
        return self._stepped(lambda taken: not request.finished)

    def close(self) -> None:
        """Nobody runs any more; the executor is as it was."""
        for request in self._running:
            self._engine.cancel(request)

    def _submit(self, tokens: int, new_tokens: int) -> Request:
        ids = self._draw.integers(self._vocabulary, size=tokens).tolist()
        return self._engine.submit(ids, Sampling(new_tokens))

    def _stepped(self, going: Callable[[Sequence[Step]], bool]) -> list[Step]:
        before = len(self._trace.steps)
        while going(self._trace.steps[before:]):
            self._engine.step()
        return self._trace.steps[before:]


PLAIN = 4  # steps that only decode, timed before each prompt
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = tuple(2**power for power in range(4, 14))
TILE = 256  # tokens; one more begins another tile (4.3)
PAST_TILE = {"case": "a token past a tile", "than": "tile"}


@dataclass(frozen=True)
class BatchCostConfig:
    """Live, prompts of ``prompt`` tokens go through whole and in each of ``pieces``: alone, and beside ``running``
    requests that decode over each of ``contexts``; then prompts of ``tile`` tokens and of one more. All of it
    ``repeats`` times, after a whole prompt that warms up. By the table, ``table_prompts`` go in ``table_pieces``.
    """

    prompt: int
    pieces: tuple[int, ...]
    running: int
    contexts: tuple[int, ...]
    tile: int
    repeats: int
    table_prompts: tuple[int, ...]
    table_pieces: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.prompt, *self.pieces, *self.contexts, self.running, self.tile, self.repeats) < 1:
            raise ProfileError("batch cost: tokens, running and repeats must be at least 1")
        if max(self.pieces) >= self.prompt or max(self.table_pieces) > min(self.table_prompts):
            raise ProfileError("batch cost: pieces must be shorter than the prompt that they are of")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The pieces, and the whole prompt."""
        return *self.pieces, self.prompt

    @property
    def steps(self) -> int:
        """The number of steps that a running request decodes while every size goes through once."""
        return sum(-(-self.prompt // size) + PLAIN for size in self.sizes) + self.running

    def needs(self) -> list[Need]:
        """The context holds the prompt, and what runs beside it to its end."""
        longest = max(self.prompt, max(self.contexts) + self.steps + 1, self.tile + 1)
        return [Need("batch_cost.prompt", longest + 1, CONTEXT)]


def batch_cost(profile: Profile) -> Outcome:
    """Rows of the table {what: table, of: prefill | decode | mixed | pieces | tile, ..., ms}, and live ones
    {what: live, repeat, context (0: alone), piece, cached, new, ms}, {what: decode, repeat, context, piece, ms} and
    {what: tile, repeat, tokens, ms}."""
    config, hardware = profile.section("batch_cost", BatchCostConfig), profile.section("hardware", Hardware)
    check(config.needs(), ModelFacts(profile.model))
    loaded = load_model(profile.model, dtype=profile.torch_dtype(), device=profile.torch_device())
    fuse(loaded.model)
    costs = hardware.read()
    rows = _by_table(config, hardware, costs)
    longest = max(config.contexts), config.steps, max(config.prompt, config.tile + 1)
    with closing(LiveExecutor(loaded.model, LiveBatches.blocks_for(config.running, *longest))) as executor:
        draw = random.Random(profile.seed)
        with closing(LiveBatches(executor, loaded.model.config.vocab_size, 0, 0, 0)) as warming:
            warming.prompt(config.prompt, config.prompt)
        for repeat in tqdm(range(config.repeats), desc="batches", disable=None):
            found = _live(config, executor, loaded.model.config.vocab_size, draw)
            rows += [row | {"repeat": repeat} for row in found]
    return Outcome(rows, provenance=loaded.provenance.as_dict() | {"table": hardware.provenance(costs)})


def _by_table(config: BatchCostConfig, hardware: Hardware, costs: Costs) -> Rows:
    rows: Rows = [{"of": "prefill", "tokens": n, "ms": _ms(costs, [(0, n)])} for n in PROMPTS]
    beside = [hardware.context] * hardware.decodes
    for context in sorted({hardware.context, 8 * hardware.context}):
        decodes = ((n, _ms(costs, [], [context] * n)) for n in BATCHES if n * context <= hardware.tokens)
        rows += [{"of": "decode", "requests": n, "context": context, "ms": ms} for n, ms in decodes]
    for piece in config.table_pieces:
        for name, contexts in (("alone", []), ("beside", beside)):
            rows.append({"of": "mixed", "chunk": piece, "run": name, "ms": _ms(costs, [(0, piece)], contexts)})
    rows.append({"of": "mixed", "chunk": 0, "run": "beside", "ms": _ms(costs, [], beside)})
    for prompt in config.table_prompts:
        for piece in (*config.table_pieces, prompt):
            cuts = ((start, min(piece, prompt - start)) for start in range(0, prompt, piece))
            rows.append(
                {"of": "pieces", "prompt": prompt, "piece": piece, "ms": sum(_ms(costs, [cut]) for cut in cuts)}
            )
    rows += [{"of": "tile", "tokens": n, "ms": _ms(costs, [(0, n)])} for n in (TILE, TILE + 1)]
    return [{"what": "table"} | row for row in rows]


def _ms(costs: Costs, prefills: list[tuple[int, int]], contexts: list[int] | None = None) -> float:
    return 1e3 * costs.step_s(prefills, contexts or [])


def _live(config: BatchCostConfig, executor: LiveExecutor, vocabulary: int, draw: random.Random) -> Rows:
    """Every case once, in an order that is drawn."""
    rows: Rows = []
    for context in draw.sample((0, *config.contexts), 1 + len(config.contexts)):
        running = config.running if context else 0
        with closing(LiveBatches(executor, vocabulary, running, context, config.steps)) as batches:
            for piece in draw.sample(config.sizes, len(config.sizes)):
                case = {"context": context, "piece": piece}
                plain = batches.decode(PLAIN) if running else []
                rows += [{"what": "decode"} | case | {"ms": 1e3 * step.seconds} for step in plain]
                rows += [{"what": "live"} | case | _prefilled(step) for step in batches.prompt(config.prompt, piece)]
            if not running:
                for tokens in draw.sample((config.tile, config.tile + 1), 2):
                    (step,) = batches.prompt(tokens, tokens)
                    rows.append({"what": "tile", "tokens": tokens, "ms": 1e3 * step.seconds})
    return rows


def _prefilled(step: Step) -> dict[str, float]:
    ((cached, new),) = step.prefills
    return {"cached": cached, "new": new, "ms": 1e3 * step.seconds}


def batch_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """What pieces cost over the whole prompt, by the table and live; steps that prefill and decode over one of each;
    a token more than a tile."""
    config = parameters["batch_cost"]
    table = [row for row in rows if row["what"] == "table"]
    of = {(row["prompt"], row["piece"]): row["ms"] for row in table if row["of"] == "pieces"}
    summary = Summary()
    for piece in config["table_pieces"]:
        over = [of[prompt, piece] / of[prompt, prompt] for prompt in config["table_prompts"]]
        worst = {"value": max(over), "n": len(over), "unit": "x"}
        summary.add("prefill_x", worst, source="table", budget_tokens=piece, than="whole", across="worst")
    mixed = {(row["chunk"], row["run"]): row["ms"] for row in table if row["of"] == "mixed"}
    for piece in config["table_pieces"]:
        apart = mixed[piece, "alone"] + mixed[0, "beside"]
        together = {"value": mixed[piece, "beside"] / apart, "n": 1, "unit": "x"}
        summary.add("mixed_x", together, source="table", budget_tokens=piece, than="apart")
    one, more = (row["ms"] for row in table if row["of"] == "tile")
    summary.add("prefill_x", {"value": more / one, "n": 1, "unit": "x"}, source="table", **PAST_TILE)
    _add_live(summary, rows, config)
    return summary


def _add_live(summary: Summary, rows: Rows, config: Mapping[str, Any]) -> None:
    repeats = sorted({row["repeat"] for row in rows if "repeat" in row})

    def ms(what: str, repeat: int, **asked: int) -> np.ndarray:
        mine = (row for row in rows if row["what"] == what and row["repeat"] == repeat)
        return np.array([row["ms"] for row in mine if all(row[name] == value for name, value in asked.items())])

    whole = [ms("live", repeat, context=0, piece=config["prompt"]).sum() for repeat in repeats]
    for piece in config["pieces"]:
        alone = {repeat: ms("live", repeat, context=0, piece=piece) for repeat in repeats}
        over = _over([each.sum() for each in alone.values()], whole).summary("x")
        summary.add("prefill_x", over, source="live", budget_tokens=piece, than="whole")
        together, apart = np.zeros(len(repeats)), np.zeros(len(repeats))
        for context in config["contexts"]:
            decode = [ms("decode", repeat, context=context).mean() for repeat in repeats]
            together += [ms("live", repeat, context=context, piece=piece).sum() for repeat in repeats]
            apart += [each.sum() + len(each) * one for each, one in zip(alone.values(), decode, strict=True)]
        over = _over(together, apart).summary("x")
        summary.add("mixed_x", over, source="live", budget_tokens=piece, than="apart")
    tiles = ([ms("tile", repeat, tokens=config["tile"] + more).sum() for repeat in repeats] for more in (1, 0))
    summary.add("prefill_x", _over(*tiles).summary("x"), source="live", **PAST_TILE)


def _over(these: Any, those: Any) -> Interval:
    """The ratio of means; repeats are resampled, each with both."""
    return bootstrap(np.column_stack([these, those]), lambda sample: float(np.divide(*sample.mean(0))))


# The figures and tables of notebook 43: what a batch costs.

PAPER = {  # prefill in pieces over whole, by prompt and piece: artifact of the paper, chunking-overhead.csv (Yi-34B)
    2047: {512: 1.152, 1024: 1.175, 2048: 0.999},
    4095: {512: 1.189, 1024: 1.202, 2048: 1.024},
    8191: {512: 1.117, 1024: 1.109, 2048: 0.937},
    16383: {512: 0.995, 1024: 0.961, 2048: 0.805},
}
DASHES = ("-", "--", ":")
TABLE_LINE = f"{LOOKS['chunks alone'].marker}-"


def table_costs(recorded: Result | None, now: Result) -> Figure:
    """Draw from the cost table what a token costs in a prompt by itself and in a batch that decodes."""
    import matplotlib.pyplot as plt

    drawn = over(recorded, now)
    fig, ax = plt.subplots(figsize=(7.5, 3.8))
    contexts = sorted({row["context"] for one in drawn for row in _table_rows(one.result, "decode")})
    for one in drawn:
        prompts = {row["tokens"]: _each(row, "tokens") for row in _table_rows(one.result, "prefill")}
        one.line(ax, list(prompts), list(prompts.values()), "chunks alone")
        for context, dashes in zip(contexts, DASHES, strict=False):
            rows = [row for row in _table_rows(one.result, "decode") if row["context"] == context]
            places = [row["requests"] for row in rows]
            one.line(ax, places, [_each(row, "requests") for row in rows], "measured", linestyle=dashes, marker="s")
    ax.plot([], [], TABLE_LINE, color=COLOURS["chunks alone"], label="prompt alone, by its tokens")
    for context, dashes in zip(contexts, DASHES, strict=False):
        label = f"decodes over {context:,} tokens each, by requests"
        ax.plot([], [], "s", ls=dashes, color=COLOURS["measured"], label=label)
    ax.set(yscale="log", xlabel="tokens of the step", ylabel="ms a token")
    ax.set_xscale("log", base=2)
    _plain(ax)
    ax.set_title(_tables(drawn), fontsize=10.5)
    alone, least = (
        min(_each(row, of)["value"] for row in _table_rows(drawn[0].result, what) if row[of] == 1 or what == "prefill")
        for what, of in (("decode", "requests"), ("prefill", "tokens"))
    )
    fig.suptitle(f"A decode alone costs {alone / least:.0f} times a token of a large prompt", fontsize=12)
    legend(fig, ax, drawn, columns=2)
    return fig


def live_costs(recorded: Result | None, now: Result) -> Figure:
    """Live: a step by the size of its chunk, alone and beside decodes; and what pieces cost over the whole prompt."""
    import matplotlib.pyplot as plt

    drawn = over(recorded, now)
    fig, (steps, pieces) = plt.subplots(1, 2, figsize=(9, 4.6))
    configs = [one.result.parameters["batch_cost"] for one in drawn]
    contexts = sorted({context for config in configs for context in config["contexts"]})
    cases = [(0, "measured", "-"), *((c, "sarathi", d) for c, d in zip(contexts, DASHES, strict=False))]
    for one, config in zip(drawn, configs, strict=True):
        sizes = [*config["pieces"], config["prompt"]]
        for context, name, dashes in cases:
            each = [_step(_steps_ms(one.result, context, size)) for size in sizes]
            one.line(steps, sizes, each, name, linestyle=dashes, markersize=5)
        decode = np.median([row["ms"] for row in one.result.rows if row["what"] == "decode"])
        steps.axhline(decode, color=COLOURS["floor"], linestyle=":", **one.style)
        for prompt in config["table_prompts"]:
            ratios = [{"value": _table_pieces(one.result, prompt, piece)} for piece in config["table_pieces"]]
            one.line(pieces, config["table_pieces"], ratios, "chunks alone", markersize=4)
        live = [_live_pieces(one.result, piece) for piece in config["pieces"]]
        one.line(pieces, config["pieces"], live, "measured")
    for at in PAPER.values():
        pieces.plot(list(at), list(at.values()), "|-", color=COLOURS["paper"], zorder=3)
    pieces.axhline(1, color=COLOURS["floor"], linestyle=":")
    steps.plot([], [], "o-", color=COLOURS["measured"], label="live: a chunk alone, pieces of a prompt")
    for context, name, dashes in cases[1:]:
        label = f"live: beside {configs[0]['running']} decodes over {context:,} tokens"
        steps.plot([], [], "o", ls=dashes, color=COLOURS[name], label=label)
    steps.plot([], [], ":", color=COLOURS["floor"], label="decodes alone; the whole prompt")
    steps.plot([], [], "|-", color=COLOURS["paper"], label="paper: Yi-34B, 2,047 to 16,383 tokens")
    steps.plot([], [], TABLE_LINE, color=COLOURS["chunks alone"], label=_tables(drawn))
    repeats = counted(drawn, "prefill_x", source="live", **PAST_TILE)
    steps.set_title(f"median step ({repeats} repeats)", fontsize=10.5)
    steps.set(yscale="log", xlabel="tokens of the chunk", ylabel="ms a step")
    pieces.set_title("a prompt in pieces over the whole one, 95 %", fontsize=10.5)
    pieces.set(yscale="log", xlabel="tokens of a piece", ylabel="time / that of the whole prompt")
    for ax in (steps, pieces):
        ax.set_xscale("log", base=2)
        _plain(ax)
    low, high = pieces.get_ylim()
    pieces.set_yticks([tick for tick in (0.8, 1, 1.2, 1.5, 2, 2.5, 4, 6) if low < tick < high])
    ends = [(piece, _live_pieces(drawn[0].result, piece)["value"]) for piece in sorted(configs[0]["pieces"])]
    (small, slow), (large, quick) = ends[0], ends[-1]
    told = f"{large} tokens take {quick:.2f} of a whole prompt's time, pieces of {small} take {slow:.2f}"
    fig.suptitle(f"Live, pieces of {told}", fontsize=12)
    legend(fig, steps, drawn, columns=2)
    return fig


def piece_rows(result: Result) -> Rows:
    """Live, by the size of a piece: over the whole prompt, and together with decodes over one of each."""
    return [
        {
            "tokens of a piece": piece,
            "time / whole prompt": interval(_live_pieces(result, piece), 2),
            "with decodes / apart": interval(
                result.summary.of("mixed_x", source="live", budget_tokens=piece, than="apart"), 2
            ),
        }
        for piece in result.parameters["batch_cost"]["pieces"]
    ]


def table_rows(result: Result) -> Rows:
    """The same by the cost table, the worst of its prompts."""
    value = result.summary.value
    return [
        {
            "tokens of a piece": piece,
            "time / whole prompt, at most": f"{value('prefill_x', **where, than='whole', across='worst'):.2f}",
            "with decodes / apart": f"{value('mixed_x', **where, than='apart'):.2f}",
        }
        for piece in result.parameters["batch_cost"]["table_pieces"]
        for where in ({"source": "table", "budget_tokens": piece},)
    ]


def tile_rows(result: Result) -> Rows:
    """A token more than a tile, beside the paper's."""
    here, table = (result.summary.of("prefill_x", source=source, **PAST_TILE) for source in ("live", "table"))
    return [
        {"what": "257 tokens / 256", "paper (A100)": 1.32, "live": interval(here, 2), "table": f"{table['value']:.2f}"}
    ]


def _live_pieces(result: Result, piece: int) -> Entry:
    return result.summary.of("prefill_x", source="live", budget_tokens=piece, than="whole")


def _steps_ms(result: Result, context: int, size: int) -> list[float]:
    """Return the times of the steps that took a whole piece; of a prompt's last piece less may be left."""
    rows = (row for row in result.rows if row["what"] == "live" and row["context"] == context and row["new"] == size)
    return [row["ms"] for row in rows]


def _step(ms: Sequence[float]) -> Entry | None:
    """The median of steps; None where there is none."""
    return {"value": float(np.median(ms))} if ms else None


def _table_rows(result: Result, of: str) -> Rows:
    return [row for row in result.rows if row["what"] == "table" and row["of"] == of]


def _each(row: dict[str, Any], of: str) -> Entry:
    """Milliseconds for each of the row's tokens, or requests."""
    return {"value": row["ms"] / row[of]}


def _table_pieces(result: Result, prompt: int, piece: int) -> float:
    ms = {(row["prompt"], row["piece"]): row["ms"] for row in _table_rows(result, "pieces")}
    return ms[prompt, piece] / ms[prompt, prompt]


def _tables(drawn: Sequence[Drawn]) -> str:
    """The cost tables of the results, those of the record first."""
    costs = [one.result.parameters["hardware"]["costs"] for one in drawn]
    return f"by the table of {', yours of '.join(dict.fromkeys(costs))}"


def _plain(ax: Axes) -> None:
    from matplotlib.ticker import LogLocator

    if ax.get_yscale() == "log":
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_formatter("")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_formatter("{x:g}")
