"""What a batch costs (Figures 2, 3 and 14, and the tile of 4.3): by the cost table, and live on this machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.engine.trace import Step, Trace
from firsttoken.simulation.hardware import Hardware
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import ratio_of_means
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Rows, frame_of, rows_where

if TYPE_CHECKING:
    import pandas

BLOCK = 16


class Pieces(Sarathi):
    """Every decode, and ``piece`` tokens of a prompt beside them."""

    name: ClassVar[str] = "pieces"
    piece = 1

    def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
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
        """Run ``steps`` steps that only decode."""
        return self._stepped(lambda taken: len(taken) < steps)

    def prompt(self, tokens: int, piece: int) -> list[Step]:
        """The steps in which a prompt of ``tokens`` tokens goes through in pieces of ``piece``."""
        self._engine.scheduler.piece = piece
        request = self._submit(tokens, 1)
        return self._stepped(lambda taken: not request.finished)

    def close(self) -> None:
        """Cancel the running requests; the executor is then as it was."""
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
    ``model`` overrides the profile's ("" keeps it).
    """

    prompt: int
    pieces: tuple[int, ...]
    running: int
    contexts: tuple[int, ...]
    tile: int
    repeats: int
    table_prompts: tuple[int, ...]
    table_pieces: tuple[int, ...]
    model: str = ""

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
        """Require a context that holds the prompt, and what runs beside it to its end."""
        longest = max(self.prompt, max(self.contexts) + self.steps + 1, self.tile + 1)
        return [Need("batch_cost.prompt", longest + 1, CONTEXT)]


PartMs: TypeAlias = Callable[[int], float]
StepOfParts: TypeAlias = Callable[[PartMs, PartMs, Sequence[tuple[int, int]], int], float]
"""A function of (prefill_ms, decode_ms, chunks, decodes) that adds up the milliseconds of a step. ``prefill_ms`` and
``decode_ms`` say what a table has for a prompt of so many tokens, and for a step of so many decodes."""


def batch_cost(profile: Profile, *, step_ms: StepOfParts | None = None) -> Outcome:
    """Rows of the table {what: table, of: prefill | decode | mixed | pieces | tile, ..., ms}, and live ones
    {what: live, repeat, context (0: alone), piece, cached, new, ms}, {what: decode, repeat, context, piece, ms} and
    {what: tile, repeat, tokens, ms}.

    By a reader's ``step_ms`` the table's steps are added up; None takes the library's.
    """
    config, hardware = profile.section("batch_cost", BatchCostConfig), profile.section("hardware", Hardware)
    name = config.model or profile.model
    check(config.needs(), ModelFacts(name))
    loaded = load_model(name, dtype=profile.torch_dtype(), device=profile.torch_device())
    fuse(loaded.model)
    costs = hardware.read()
    rows = _by_table(config, hardware, partial(_ms, costs, step_ms))
    longest = max(config.contexts), config.steps, max(config.prompt, config.tile + 1)
    with closing(LiveExecutor(loaded.model, LiveBatches.blocks_for(config.running, *longest))) as executor:
        draw = random.Random(profile.seed)
        with closing(LiveBatches(executor, loaded.model.config.vocab_size, 0, 0, 0)) as warming:
            warming.prompt(config.prompt, config.prompt)
        for repeat in track(range(config.repeats), desc="batches"):
            live_rows = _live(config, executor, loaded.model.config.vocab_size, draw)
            rows += [row | {"repeat": repeat} for row in live_rows]
    return Outcome(rows, provenance=loaded.provenance.as_dict() | {"table": hardware.provenance(costs)})


def _by_table(config: BatchCostConfig, hardware: Hardware, ms: Callable[..., float]) -> Rows:
    rows: Rows = [{"of": "prefill", "tokens": n, "ms": ms([(0, n)])} for n in PROMPTS]
    beside = [hardware.context] * hardware.decodes
    for context in sorted({hardware.context, 8 * hardware.context}):
        sizes = (n for n in BATCHES if n * context <= hardware.tokens)
        rows += [{"of": "decode", "requests": n, "context": context, "ms": ms([], [context] * n)} for n in sizes]
    for piece in config.table_pieces:
        for name, contexts in (("alone", []), ("beside", beside)):
            rows.append({"of": "mixed", "chunk": piece, "run": name, "ms": ms([(0, piece)], contexts)})
    rows.append({"of": "mixed", "chunk": 0, "run": "beside", "ms": ms([], beside)})
    for prompt in config.table_prompts:
        for piece in (*config.table_pieces, prompt):
            cuts = ((start, min(piece, prompt - start)) for start in range(0, prompt, piece))
            rows.append({"of": "pieces", "prompt": prompt, "piece": piece, "ms": sum(ms([cut]) for cut in cuts)})
    rows += [{"of": "tile", "tokens": n, "ms": ms([(0, n)])} for n in (TILE, TILE + 1)]
    return [{"what": "table"} | row for row in rows]


def _ms(
    costs: Costs, step_ms: StepOfParts | None, prefills: Sequence[tuple[int, int]], contexts: Sequence[int] = ()
) -> float:
    """Return the milliseconds of a step, whose requests decode over one context."""
    if step_ms is None:
        return 1e3 * costs.step_s(prefills, contexts)
    alone = partial(_ms, costs, None)
    return step_ms(lambda n: alone([(0, n)]), lambda n: alone([], contexts[:1] * n), prefills, len(contexts))


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


def table_pieces(rows: Rows, prompt: int, piece: int) -> float:
    """Return the table's time of a prompt in pieces over that of the whole prompt."""
    ms = {row["piece"]: row["ms"] for row in rows_where(rows, what="table", of="pieces", prompt=prompt)}
    return ms[piece] / ms[prompt]


def batch_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize the cost of pieces over that of the whole prompt, by the table and live; of steps that prefill and
    decode over one of each; of a token more than a tile."""
    summary, config = Summary(), parameters["batch_cost"]
    for piece in config["table_pieces"]:
        pieces = [table_pieces(rows, prompt, piece) for prompt in config["table_prompts"]]
        worst = {"value": max(pieces), "n": len(pieces), "unit": "x"}
        summary.add("prefill_x", worst, source="table", budget_tokens=piece, than="whole", across="worst")
    mixed = frame_of(rows, what="table", of="mixed").set_index(["chunk", "run"]).ms
    for piece in config["table_pieces"]:
        apart = mixed[piece, "alone"] + mixed[0, "beside"]
        together = {"value": mixed[piece, "beside"] / apart, "n": 1, "unit": "x"}
        summary.add("mixed_x", together, source="table", budget_tokens=piece, than="apart")
    single, more = (row["ms"] for row in rows_where(rows, what="table", of="tile"))
    summary.add("prefill_x", {"value": more / single, "n": 1, "unit": "x"}, source="table", **PAST_TILE)
    _add_live(summary, rows, config)
    return summary


def _add_live(summary: Summary, rows: Rows, config: Mapping[str, Any]) -> None:
    def ms(kind: str, **labels: int) -> pandas.api.typing.SeriesGroupBy:
        """The times of these steps, by repeat."""
        return frame_of(rows, what=kind, **labels).groupby("repeat").ms

    whole_ms = ms("live", context=0, piece=config["prompt"]).sum()
    for piece in config["pieces"]:
        alone, contexts = ms("live", context=0, piece=piece), config["contexts"]
        ratio = ratio_of_means(alone.sum(), whole_ms).summary("x")
        summary.add("prefill_x", ratio, source="live", budget_tokens=piece, than="whole")
        together = sum(ms("live", context=context, piece=piece).sum() for context in contexts)
        apart = sum(alone.sum() + alone.count() * ms("decode", context=context).mean() for context in contexts)
        ratio = ratio_of_means(together, apart).summary("x")
        summary.add("mixed_x", ratio, source="live", budget_tokens=piece, than="apart")
    tiles = (ms("tile", tokens=config["tile"] + more).sum() for more in (1, 0))
    summary.add("prefill_x", ratio_of_means(*tiles).summary("x"), source="live", **PAST_TILE)
