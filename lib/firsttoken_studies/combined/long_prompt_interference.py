"""A long prompt arrives at a server whose streams all run: what they notice of it, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.async_engine import AsyncEngine, Stream, TokenEvent
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of
from firsttoken_studies.record.show import interval

FIXED, STRETCHED = "fixed", "stretched"
BLOCK_TOKENS = 16
STREAM_PROMPT = 16


@dataclass(frozen=True)
class UnderChunksConfig:
    """A prompt of ``prompt_tokens`` joins ``streams`` that have said ``plain_tokens`` each, ``rounds`` times: with
    ``budget`` tokens a step, and with steps that may take ``stretch`` times what their decodes alone would.
    ProfileError for what is none."""

    streams: int
    prompt_tokens: int
    plain_tokens: int
    budget: int
    stretch: float
    rounds: int

    def __post_init__(self) -> None:
        if min(self.streams, self.prompt_tokens, self.rounds) < 1 or self.plain_tokens < 2:
            raise ProfileError("under_chunks: every number must be at least 1, plain_tokens at least 2")
        if not self.streams + BLOCK_TOKENS <= self.budget < self.prompt_tokens or self.stretch < 1:
            raise ProfileError(
                "under_chunks: budget must hold the streams and a block, not the whole prompt; stretch is at least 1"
            )

    def needs(self) -> list[Need]:
        """Require a context for the prompt."""
        return [Need("under_chunks.prompt_tokens", self.prompt_tokens + 1, CONTEXT)]


def under_chunks(profile: Profile) -> Outcome:
    """Rows {steps: fixed | stretched, ...} as ``prompt_under_streams`` gives them."""
    config = profile.section("under_chunks", UnderChunksConfig)
    check(config.needs(), ModelFacts(profile.model))
    loaded = load_model(profile.model, dtype=profile.torch_dtype(), device=profile.torch_device(), with_tokenizer=False)
    shared = {"requests": config.streams + 1, "watermark": 0.0}
    ways = {
        FIXED: EngineConfig(scheduler="sarathi", token_budget=config.budget, **shared),
        STRETCHED: EngineConfig(
            scheduler="adaptive_budget",
            token_budget=config.streams + 2 * BLOCK_TOKENS,
            stretch=config.stretch,
            **shared,
        ),
    }
    model, rows = fuse(loaded.model), []
    for way, engine in track(ways.items(), desc="under chunks"):
        rows += [{"steps": way} | row for row in prompt_under_streams(model, engine, config)]
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def under_chunks_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By kind of steps: P99 of the time between tokens without the prompt and beside it, one over the other in the
    same round, the prompt's first token, and tokens that came wrong."""
    summary, frame = Summary(), frame_of(rows)
    frame["over"] = frame.beside_tbt_s / frame.plain_tbt_s
    for way, rows_of_way in frame.groupby("steps", sort=False):
        for case in ("plain", "beside"):
            summary.by(rows_of_way, {}, {"tbt_p99_ms": (f"{case}_tbt_s", "median", "ms", 1000)}, variant=way, case=case)
        summary.by(rows_of_way, {}, {"tbt_p99_x": ("over", "median", "x")}, variant=way, case="beside", than="plain")
        summary.by(rows_of_way, {}, {"ttft_p50_s": ("ttft_s", "median", "s")}, variant=way)
        summary.add("tokens_wrong", {"value": rows_of_way.wrong.sum(), "n": len(rows_of_way)}, variant=way)
    return summary


def prompt_under_streams(model: PreTrainedModel, engine: EngineConfig, config: UnderChunksConfig) -> Rows:
    """Rows {round, plain_tbt_s, beside_tbt_s, ttft_s, wrong} of the streams of ``config``, which its prompt joins.

    The times between two tokens are P99s of all streams' gaps that lie, in part at least, between the prompt's arrival
    and its first token, which takes ``ttft_s``: beside it, and plain, of the same tokens of the same streams where no
    prompt comes. (Their own contexts grow meanwhile; what came before its arrival would be no measure.)
    ``plain_tokens`` of each stream pass before. ``wrong`` counts tokens that came to a client other than the engine has
    made them: lost, doubled, or out of turn.
    """
    streams, prompt_tokens, vocabulary = config.streams, config.prompt_tokens, model.config.vocab_size
    # the prompt goes on by a block a step at least
    longest = 2 * config.plain_tokens + prompt_tokens // BLOCK_TOKENS
    longest = min(model.config.max_position_embeddings - STREAM_PROMPT, longest)
    blocks = streams * -(-(STREAM_PROMPT + longest) // BLOCK_TOKENS) + -(-prompt_tokens // BLOCK_TOKENS) + 1
    prompts = [_prompt(STREAM_PROMPT, stream, vocabulary) for stream in range(streams)]
    rows: Rows = []
    with closing(LiveExecutor(model, blocks, block_tokens=BLOCK_TOKENS)) as executor:
        for number in range(config.rounds):
            with AsyncEngine(Engine(executor, engine)) as server:
                running = [server.submit(ids, Sampling(longest)) for ids in prompts]
                first_events = [list(islice(stream.events(), config.plain_tokens)) for stream in running]
                long = server.submit(_prompt(prompt_tokens, streams, vocabulary), Sampling(1))
                (first,) = long.events()
                for events, stream in zip(first_events, running, strict=True):
                    events += _past(stream, first.at_s)  # a gap that the prompt made may end after its first token
                    stream.close()
                for events, stream in zip(first_events, running, strict=True):
                    events += stream.events()
            arrived_s = first.at_s - long.request.ttft_s
            places = [_between(events, arrived_s, first.at_s) for events in first_events]
            with AsyncEngine(Engine(executor, engine)) as server:
                tokens = [Sampling(max(place_range.stop, 1)) for place_range in places]
                alone = [server.submit(ids, sampling) for ids, sampling in zip(prompts, tokens, strict=True)]
                plain = [list(stream.events()) for stream in alone]
            rows.append(
                {
                    "round": number,
                    "plain_tbt_s": _p99(plain, places),
                    "beside_tbt_s": _p99(first_events, places),
                    "ttft_s": long.request.ttft_s,
                    "wrong": sum(_wrong(events, stream) for events, stream in zip(first_events, running, strict=True)),
                }
            )
    return rows


def _prompt(tokens: int, number: int, vocabulary: int) -> list[int]:
    return [(7 * position + 31 * number) % (vocabulary - 1) + 1 for position in range(tokens)]


def _past(stream: Stream, at_s: float) -> Iterator[TokenEvent]:
    """Yield the next tokens of ``stream`` up to the first that came after ``at_s``."""
    for event in stream.events():
        yield event
        if event.at_s > at_s:
            return


def _between(events: Sequence[TokenEvent], after_s: float, until_s: float) -> range:
    """The places of the tokens that end a gap of which a part lies between the two."""
    pairs = enumerate(pairwise(events), start=1)
    places = [index for index, (before, event) in pairs if after_s < event.at_s and before.at_s < until_s]
    return range(places[0], places[-1] + 1) if places else range(0)


def _p99(streams: Sequence[Sequence[TokenEvent]], places: Sequence[range]) -> float:
    """Return the P99 of the seconds between the tokens of ``streams`` at ``places`` and those before them."""
    gaps = [
        events[index].at_s - events[index - 1].at_s
        for events, indices in zip(streams, places, strict=True)
        for index in indices
    ]
    if not gaps:
        raise FirstTokenError(
            "under_chunks: no stream got a token after the prompt's arrival: there is no gap to measure"
        )
    return float(np.percentile(gaps, 99))


def _wrong(events: Sequence[TokenEvent], stream: Stream) -> int:
    streamed, made = [event.token_id for event in events], stream.request.output
    return abs(len(streamed) - len(made)) + sum(token != other for token, other in zip(streamed, made, strict=False))


# What notebook 40 shows of a server under chunks, from a result alone.


def under_chunks_rows(result: Result) -> Table:
    """Yield the times between streams' tokens without and beside a long prompt, with a fixed budget and with stretched
    steps."""
    summary, config = result.summary, result.parameters["under_chunks"]
    named = {FIXED: f"{config['budget']} tokens", STRETCHED: f"stretched {config['stretch']:g} times"}
    for way, name in named.items():
        yield {
            "steps": name,
            "P99 without the prompt, ms": interval(summary.of("tbt_p99_ms", variant=way, case="plain"), 0),
            "P99 beside it, ms": interval(summary.of("tbt_p99_ms", variant=way, case="beside"), 0),
            "times as long": interval(summary.of("tbt_p99_x", variant=way, case="beside", than="plain"), 2),
            "goal": "1.3" if way == STRETCHED else "",
            "the prompt's first token, s": interval(summary.of("ttft_p50_s", variant=way), 1),
            "tokens lost or doubled": summary.value("tokens_wrong", variant=way),
        }
