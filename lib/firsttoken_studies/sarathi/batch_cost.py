"""What a batch costs (Figures 2, 3 and 14, and the tile of 4.3): by the cost table, and live on this machine."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.engine.costs.model import Costs
from firsttoken.engine.fused import fuse
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.trace import Step
from firsttoken.sarathi.hardware import Hardware
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import Interval, bootstrap
from firsttoken_studies.sarathi.live_batches import LiveBatches

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
        """That a running request decodes while every size goes through once."""
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
