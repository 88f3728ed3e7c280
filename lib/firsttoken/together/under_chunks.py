"""A long prompt arrives at a server whose streams all run: what they notice of it, token by token.

``python -m firsttoken.together.under_chunks`` measures it with a fixed budget and with steps that are stretched so far
and no further; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedModel

from firsttoken.assets.models import load_model
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.engine import Engine
from firsttoken.engine.fused import fuse
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.engine.serving import Server
from firsttoken.engine.streams import Stream, TokenEvent
from firsttoken.study.dtypes import AUTO, name_of, resolve
from firsttoken.study.machine import machine_slug
from firsttoken.study.record import Rows
from firsttoken.study.stats import bootstrap

BLOCK_TOKENS = 16
STREAM_PROMPT = 16


def prompt_under_streams(
    model: PreTrainedModel, config: EngineConfig, *, streams: int, prompt_tokens: int, plain_tokens: int, rounds: int
) -> Rows:
    """Rows {round, plain_tbt_s, beside_tbt_s, ttft_s, wrong} of ``streams`` that a prompt of ``prompt_tokens`` joins.

    The times between two tokens are P99s of all streams from the prompt's arrival to its first token, which takes
    ``ttft_s``: beside it, and plain, of the same tokens of the same streams where no prompt comes. (Their own contexts
    grow meanwhile; what came before its arrival would be no measure.) ``plain_tokens`` of each stream pass before.
    ``wrong`` counts tokens that came to a client other than the engine has made them: lost, doubled, or out of turn.
    """
    most = model.config.max_position_embeddings - STREAM_PROMPT
    longest = min(
        most, 2 * plain_tokens + prompt_tokens // BLOCK_TOKENS
    )  # the prompt goes on by a block a step at least
    blocks = streams * -(-(STREAM_PROMPT + longest) // BLOCK_TOKENS) + -(-prompt_tokens // BLOCK_TOKENS) + 1
    asked = [_prompt(STREAM_PROMPT, stream, model.config.vocab_size) for stream in range(streams)]
    rows: Rows = []
    with closing(LiveExecutor(model, blocks, block_tokens=BLOCK_TOKENS)) as executor:
        for number in range(rounds):
            with Server(Engine(executor, config)) as server:
                running = [server.submit(ids, Sampling(longest)) for ids in asked]
                seen = [list(islice(stream.events(), plain_tokens)) for stream in running]
                long = server.submit(_prompt(prompt_tokens, streams, model.config.vocab_size), Sampling(1))
                (first,) = long.events()
                for stream in running:
                    stream.close()
                for events, stream in zip(seen, running, strict=True):
                    events += stream.events()
            arrived_s = first.at_s - long.request.ttft_s
            places = [_between(events, arrived_s, first.at_s) for events in seen]
            with Server(Engine(executor, config)) as server:
                alone = [
                    server.submit(ids, Sampling(max(place.stop, 1))) for ids, place in zip(asked, places, strict=True)
                ]
                plain = [list(stream.events()) for stream in alone]
            rows.append(
                {
                    "round": number,
                    "plain_tbt_s": _p99(plain, places),
                    "beside_tbt_s": _p99(seen, places),
                    "ttft_s": long.request.ttft_s,
                    "wrong": sum(_wrong(events, stream) for events, stream in zip(seen, running, strict=True)),
                }
            )
    return rows


def _prompt(tokens: int, number: int, vocabulary: int) -> list[int]:
    return [(7 * place + 31 * number) % (vocabulary - 1) + 1 for place in range(tokens)]


def _between(events: Sequence[TokenEvent], after_s: float, until_s: float) -> range:
    """The places of those that came between the two."""
    places = [place for place, event in enumerate(events) if place and after_s < event.at_s <= until_s]
    return range(places[0], places[-1] + 1) if places else range(0)


def _p99(streams: Sequence[Sequence[TokenEvent]], places: Sequence[range]) -> float:
    """Of the seconds between the tokens of ``streams`` at ``places`` and those before them."""
    gaps = [
        events[place].at_s - events[place - 1].at_s for events, at in zip(streams, places, strict=True) for place in at
    ]
    return float(np.percentile(gaps, 99))


def _wrong(events: Sequence[TokenEvent], stream: Stream) -> int:
    said, made = [event.token_id for event in events], stream.request.output
    return abs(len(said) - len(made)) + sum(one != other for one, other in zip(said, made, strict=False))


def main() -> None:
    """Measure and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--plain-tokens", type=int, default=30, help="of each stream before the prompt arrives")
    parser.add_argument("--budget", type=int, default=512, help="tokens a step, where it is fixed")
    parser.add_argument("--stretch", type=float, default=1.2, help="0: only the fixed budget")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = fuse(load_model(options.model, dtype=resolve(AUTO, "cpu"), with_tokenizer=False).model)
    print(f"{options.model}, {name_of(model.dtype)}, {machine_slug()}, {torch.get_num_threads()} threads: a prompt of")
    print(f"{options.prompt_tokens} tokens under {options.streams} streams")
    shared = {"requests": options.streams + 1, "watermark": 0.0}
    budgets = {
        f"{options.budget} tokens a step": EngineConfig(scheduler="sarathi", token_budget=options.budget, **shared)
    }
    if options.stretch:
        budgets[f"steps stretched {options.stretch:g} times"] = EngineConfig(
            scheduler="adaptive_budget", token_budget=options.streams + 32, stretch=options.stretch, **shared
        )
    for named, config in budgets.items():
        rows = prompt_under_streams(
            model,
            config,
            streams=options.streams,
            prompt_tokens=options.prompt_tokens,
            plain_tokens=options.plain_tokens,
            rounds=options.rounds,
        )
        print(f"{named}:")
        _tell("TBT P99 without the prompt, ms", [1e3 * row["plain_tbt_s"] for row in rows])
        _tell("and beside it, to its first token, ms", [1e3 * row["beside_tbt_s"] for row in rows])
        _tell("the second over the first (goal 1.3)", [row["beside_tbt_s"] / row["plain_tbt_s"] for row in rows])
        _tell("the prompt's first token, s", [row["ttft_s"] for row in rows])
        _tell("tokens lost or doubled", [row["wrong"] for row in rows])


def _tell(what: str, values: Sequence[float]) -> None:
    found = bootstrap(values, "median")
    print(f"  {what:<40} {found.estimate:>8.2f} [{found.low:.2f}, {found.high:.2f}], n={found.n}", flush=True)


if __name__ == "__main__":
    main()
