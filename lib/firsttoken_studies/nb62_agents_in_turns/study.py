"""Agents that hand a growing text to each other (DroidSpeak, 5.5, Figure 16): fine-tunes of one base in one engine.

One writes and one reviews, in turns. Whoever's turn it is reads all that was said so far. How long it reads depends on
what is kept: nothing, its own cache of its last turn, or the other's of the turn before, as it is or with a group of
layers computed again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from firsttoken.assets.adapter_files import CONFIG, WEIGHTS
from firsttoken.assets.checkpoint import combined_sha256
from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check
from firsttoken.droidspeak.identity import ModelIdentity, identify
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.prefix import LayerKV, PrefixCache
from firsttoken.droidspeak.source import StoredPrefix, served_prefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.lora import parse_adapter
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.shared_base import SharedBase
from firsttoken.scoring import token_f1
from firsttoken.study import paths
from firsttoken.study.errors import CorpusError, ProfileError
from firsttoken.study.parsing.parse_errors import read_bytes
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import Interval, bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.droidspeak.decoding import DROIDSPEAK, OWN_CACHE, REUSE, Method, decoded_scores, own, partial
from firsttoken_studies.droidspeak.decoding import OWN as FULL
from firsttoken_studies.droidspeak.pairs import Models, Pair
from firsttoken_studies.droidspeak.reuse_items import Encoded, encode
from firsttoken_studies.droidspeak.setting import Run, held_out_items
from firsttoken_studies.record.results import Outcome, Rows, frame_of, rows_where

if TYPE_CHECKING:
    import pandas

WAYS = (FULL, OWN_CACHE, REUSE, DROIDSPEAK)
LATER = "from turn 3 on"
BLOCK_TOKENS = 16
_ADAPTER_BYTES = 1 << 30  # of a file of an adapter, at most
_STORE_BYTES = 1 << 30  # of one conversation: a turn's cache is 23 kB a token


@dataclass(frozen=True)
class AgentsConfig:
    """``writer`` and ``reviewer`` are adapters in the folder ``adapters``, and speak in ``turns``, the writer first.

    A conversation begins with the prefix of a held-out item of ``task``, of up to ``context_tokens`` tokens, and each
    turn adds ``said_tokens``. ``conversations`` are timed in every way, one after another, and then ``rounds`` times
    ``at_once`` of them in one engine. Layers [``group_start``, ``group_end``) are computed again; they were chosen by
    the first ``chosen_items`` items with prefixes of ``chosen_tokens``. Answers of the reviewer to the questions of
    ``items`` others are scored behind such a prefix, ``batch`` at a time.
    """

    writer: str
    reviewer: str
    adapters: str
    task: str
    context_tokens: int
    said_tokens: int
    turns: int
    conversations: int
    rounds: int
    at_once: int
    group_start: int
    group_end: int
    chosen_items: int
    chosen_tokens: int
    items: int
    batch: int

    def __post_init__(self) -> None:
        if self.turns < 3 or self.said_tokens < 2 or self.conversations < 1:
            raise ProfileError("agents: turns must be at least 3, said_tokens at least 2, conversations at least 1")
        if not 1 <= self.at_once <= self.conversations:
            raise ProfileError("agents: at_once must be from 1 to conversations")

    def needs(self) -> list[Need]:
        """Require a model with the layers of the group, and a context for the last turn."""
        longest = self.context_tokens + self.turns * self.said_tokens
        return [
            Need("agents.group_end", self.group_end, LAYERS),
            Need("agents.context_tokens + turns * said_tokens", longest, CONTEXT),
        ]


class Agent(NamedTuple):
    """An agent has a ``version`` that its requests compute with; its caches are stored under its ``identity``."""

    version: ModelVersion
    identity: ModelIdentity


FromPool: TypeAlias = Callable[[Tensor, Sequence[int], int], Tensor]
"""Blocks of a pool [blocks, layers, 2, block tokens, heads, width], which of them, tokens -> their keys and values
[layers, 2, heads, tokens, width]."""
Spoken = tuple[list[int], list[list[int]]]  # how a conversation begins, and what is said in each of its turns


class AgentTurn(NamedTuple):
    """One turn: seconds to the first token, to keep the cache, and to the last token; ``taken`` are the tokens whose
    cache was taken, ``said`` the answer."""

    ttft_s: float
    kept_s: float
    ended_s: float
    taken: int
    said: list[int]


def agents(profile: Profile, *, from_pool: FromPool | None = None) -> Outcome:
    """Rows {what: "turn", conversation, way, turn, tokens, taken, ttft_s, kept_s, ended_s, f1}, where f1 is that of
    the turn's words to those behind a full prefill; {what: "at once", round, way, turns, took_s}; and {what: "score",
    way, item, score}.

    All ways of a conversation have the same texts: those that are said behind full prefills. They take turns in random
    order. ``from_pool`` makes the caches that agents take out of the engine's pool, in place of the engine's own copy.
    """
    config = profile.section("agents", AgentsConfig)
    check(config.needs(), ModelFacts(profile.model))
    loaded = load_model(profile.model, dtype=profile.torch_dtype(), device=profile.torch_device())
    tokenizer, group, rng = loaded.tokenizer, Group(config.group_start, config.group_end), random.Random(profile.seed)
    timed, scored = items_of(config, tokenizer)
    blocks = -(-(config.context_tokens + config.turns * config.said_tokens) // BLOCK_TOKENS) + 1
    blocks *= config.at_once
    rows: Rows = []
    spoken: list[Spoken] = []
    with closing(LiveExecutor(loaded.model, blocks, block_tokens=BLOCK_TOKENS)) as executor:
        hosted = host(executor, config, identify(loaded.model, tokenizer, str(loaded.provenance.sha256)))
        serving = Serving(executor, hosted, group, config.said_tokens, from_pool)
        for way in WAYS:  # which warms up
            serving.conversation(way, timed[0].prefix, config.turns)
        for number, item in enumerate(track(timed, desc="conversations")):
            first = serving.conversation(FULL, item.prefix, config.turns)  # for its words alone
            texts = [turn.said for turn in first]
            spoken.append((item.prefix, texts))
            for way in rng.sample(WAYS, len(WAYS)):
                for position, turn in enumerate(serving.conversation(way, item.prefix, config.turns, texts)):
                    f1 = token_f1(tokenizer.decode(turn.said), [tokenizer.decode(texts[position])])
                    row = {"what": "turn", "conversation": number, "way": way, "turn": position, "f1": round(f1, 4)}
                    tokens = len(item.prefix) + position * config.said_tokens
                    seconds = {name: getattr(turn, name) for name in ("ttft_s", "kept_s", "ended_s")}
                    rows.append(row | {"tokens": tokens, "taken": turn.taken} | seconds)
        for number in track(range(config.rounds), desc="conversations at once"):
            for way in rng.sample(WAYS, len(WAYS)):
                seconds = serving.at_once(way, rng.sample(spoken, config.at_once))
                row = {"what": "at once", "round": number, "way": way, "turns": config.at_once * config.turns}
                rows.append(row | {"took_s": seconds})
    rows += scores(profile, config, scored, group)
    return Outcome(rows, provenance=loaded.provenance.as_dict() | {"adapters": [config.writer, config.reviewer]})


def items_of(config: AgentsConfig, tokenizer: Any) -> tuple[list[Encoded], list[Encoded]]:
    """Items whose conversations are timed, and others, whose answers are scored: none of these has chosen the group.

    Raises CorpusError for too few.
    """
    chose = {item.id for item in held_out_items(config.task, tokenizer, config.chosen_tokens)[: config.chosen_items]}
    items = held_out_items(config.task, tokenizer, config.context_tokens)
    timed = sorted(items, key=lambda item: item.id not in chose)[: config.conversations]
    others = [item for item in items if item not in timed and item.id not in chose][: config.items]
    if len(timed) < config.conversations or len(others) < config.items:
        raise CorpusError(
            f"{config.task} has {len(timed)} held-out items to time and {len(others)} others that have not chosen the "
            f"group, with prefixes of {config.context_tokens} tokens; lower agents.items or agents.conversations"
        )
    return [encode(item, tokenizer) for item in timed], [encode(item, tokenizer) for item in others]


def host(executor: LiveExecutor, config: AgentsConfig, base: ModelIdentity) -> list[Agent]:
    """Make ``executor`` host writer and reviewer, whose hidden states at the group's lower edge are kept, all fused."""
    edges = [config.group_start] if Group(config.group_start, config.group_end).needs_e_cache else []
    executor.version = shared = SharedBase(executor.version.decoder, HiddenStateCache(edges))
    hosted = []
    for name in (config.writer, config.reviewer):
        folder = paths.ADAPTERS / config.adapters / name
        adapters = combined_sha256([folder / CONFIG, folder / WEIGHTS])
        config_json, weights = (read_bytes(folder / file, _ADAPTER_BYTES) for file in (CONFIG, WEIGHTS))
        version = shared.variant(executor.model, parse_adapter(name, config_json, weights, "cpu"))
        hosted.append(Agent(version, replace(base, adapters=adapters)))
    for _ in shared.fuse():
        pass
    return hosted


class Serving:
    """An engine for each conversation on ``executor``, in which ``hosted`` speak in turns, ``said_tokens`` each."""

    def __init__(
        self,
        executor: LiveExecutor,
        hosted: Sequence[Agent],
        group: Group,
        said_tokens: int,
        from_pool: FromPool | None = None,
    ) -> None:
        self._executor, self._agents, self._group, self._said = executor, hosted, group, said_tokens
        self._from_pool = from_pool

    def conversation(
        self, way: str, context: Sequence[int], turns: int, texts: Sequence[Sequence[int]] | None = None
    ) -> list[AgentTurn]:
        """Return ``turns`` turns behind ``context``. Each adds its own words for the next, or those in ``texts``."""
        engine, done = self._engine(), list[AgentTurn]()
        for _ in self._speaking(engine, way, context, texts or [None] * turns, done):
            engine.step()
        engine.run()  # raises what kept a request from its answer
        return done

    def at_once(self, way: str, conversations: Sequence[Spoken]) -> float:
        """Return the seconds of all ``conversations`` in one engine; in each an agent speaks once the other has."""
        engine, begun = self._engine(), self._executor.now()
        speaking = [self._speaking(engine, way, context, texts, []) for context, texts in conversations]
        while speaking := [speaker for speaker in speaking if next(speaker, None)]:
            engine.step()
        return self._executor.now() - begun

    def _speaking(
        self,
        engine: Engine,
        way: str,
        context: Sequence[int],
        texts: Sequence[Sequence[int] | None],
        done: list[AgentTurn],
    ) -> Iterator[Request]:
        """Take a turn for each of ``texts``, which comes behind what was said; for None the turn's own words do. The
        turns are added to ``done``. Yields the request that is awaited: whoever asks for more has taken a step."""
        prompt, store = list(context), KVStore(None, memory_bytes=_STORE_BYTES, block_tokens=BLOCK_TOKENS)
        for turn, text in enumerate(texts):
            begun = self._executor.now()
            request, source = self._asked(engine, store, way, turn, prompt)
            while not request.output:
                yield request
            answered = self._executor.now()
            self._keep(store, way, turn, prompt, request)
            now_s = self._executor.now()
            while not request.finished:
                yield request
            taken = source.tokens if source is not None and not request.fell_back else 0
            done.append(
                AgentTurn(answered - begun, now_s - answered, request.times_s[-1] - begun, taken, request.output)
            )
            prompt += request.output if text is None else text

    def _engine(self) -> Engine:
        return Engine(self._executor, EngineConfig(watermark=0.0))

    def _asked(
        self, engine: Engine, store: KVStore, way: str, turn: int, prompt: Sequence[int]
    ) -> tuple[Request, StoredPrefix | None]:
        """Submit the request of the agent whose turn it is, behind the cache that it takes."""
        me, other = self._agents[turn % 2], self._agents[1 - turn % 2]
        sender, group = (me, NOTHING) if way == OWN_CACHE else (other, NOTHING if way == REUSE else self._group)
        source = None
        if way != FULL and store.match(prompt[:-1], sender.identity):
            source = StoredPrefix(store, prompt, sender=sender.identity, receiver=me.identity, group=group)
        now = self._executor.now()
        return engine.submit(prompt, Sampling(self._said), now, source=source, version=me.version), source

    def _keep(self, store: KVStore, way: str, turn: int, prompt: Sequence[int], request: Request) -> None:
        """Store the computed cache of the prompt, for the agent that takes it."""
        if way != FULL:
            edges = [self._group.lo] if way == DROIDSPEAK and self._group.needs_e_cache else []
            cache = served_prefix(self._executor, request, edges)
            if self._from_pool is not None:
                kv = self._from_pool(self._executor.pool.rows, request.blocks, request.prompt_tokens)
                cache = PrefixCache(tuple(LayerKV(*layer) for layer in kv[:, :, None]), cache.e_cache)
            store.store(prompt, self._agents[turn % 2].identity, cache)


def scores(profile: Profile, config: AgentsConfig, items: Sequence[Encoded], group: Group) -> Rows:
    """Rows of the reviewer's scores behind the writer's cache, in each way that has another quality."""
    if not items:
        return []
    models = Models(profile, config.adapters)
    run = Run(Pair(config.reviewer, config.writer), config.task, config.context_tokens)
    reviewer, writer = models.load(config.reviewer), models.load(config.writer)
    methods: list[Method] = [own(reviewer), partial(REUSE, reviewer, NOTHING), partial(DROIDSPEAK, reviewer, group)]
    decoded = decoded_scores(run, reviewer, writer, methods, items, config.batch)
    return [
        {"what": "score", "way": way, "item": number, "score": score}
        for way, values in decoded.items()
        for number, score in enumerate(values)
    ]


# What the rows say.


def agents_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Seconds to the first token by way and turn; how many times sooner than behind full prefills, over the turns from
    the second on and from the third on, when an agent has a cache of its own; the first prefix that is taken alone;
    how many times as many turns a second several conversations at once have; scores, and the share of the own score
    that is kept."""
    summary, turns = Summary(), frame_of(rows, what="turn")
    turns["case"] = [f"turn {turn + 1}" for turn in turns.turn]
    for way in WAYS:
        summary.by(turns[turns.way == way], {"case": "case"}, {"ttft_s": ("ttft_s", "mean", "s")}, method=way)
    for way in WAYS[1:]:
        labels = {"method": way, "than": FULL}
        for first, case in ((1, {}), (2, {"case": LATER})):
            sooner = [_means(turns, method, "ttft_s", first) for method in (FULL, way)]
            summary.add("ttft_x", _times(*sooner).summary("x"), **labels, **case)
        ended = [_means(turns, method, "ended_s") for method in (FULL, way)]
        summary.add("ended_x", _times(*ended).summary("x"), **labels)
        if way != OWN_CACHE:  # whose second turn is the reviewer's first, and takes nothing
            second = [turns[(turns.way == method) & (turns.turn == 1)].ttft_s for method in (way, FULL)]
            summary.add("ttft_share", _times(*second).summary(""), **labels, case="turn 2")
        summary.add("words_f1", bootstrap(_means(turns, way, "f1")).summary(""), **labels)
    took, scores = (
        {way: [row[column] for row in rows_where(rows, what=measure, way=way)] for way in WAYS}
        for measure, column in (("at once", "took_s"), ("score", "score"))
    )
    for way in WAYS[1:]:
        if took[way]:
            summary.add("throughput_x", _times(took[FULL], took[way]).summary("x"), method=way, than=FULL)
    summary.add("kept_s", bootstrap(_means(turns, DROIDSPEAK, "kept_s")).summary("s"), method=DROIDSPEAK)
    for way, values in scores.items():
        if values:
            summary.add("score", bootstrap(values).summary(""), method=way)
        if values and way != FULL and any(scores[FULL]):
            share_kept = _times(values, scores[FULL])
            summary.add("score_kept_pct", share_kept.summary("%", 100), method=way, than=FULL)
    return summary


def _means(turns: pandas.DataFrame, way: str, column: str, first: int = 1) -> list[float]:
    """The mean of ``column`` over the turns from number ``first`` on, by conversation; the second turn has number 1."""
    of_method = turns[(turns.way == way) & (turns.turn >= first)]
    return [float(np.mean(conversation_turns)) for _, conversation_turns in of_method.groupby("conversation")[column]]


def _times(above: Sequence[float], below: Sequence[float]) -> Interval:
    """The mean of ``above`` over that of ``below``, which belong to each other, with its interval."""
    pairs = np.array([above, below]).T
    return bootstrap(pairs, lambda sample: float(np.divide(*sample.mean(0))))
