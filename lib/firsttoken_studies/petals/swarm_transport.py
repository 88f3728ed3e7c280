"""What the way through servers of this machine takes: a chain's steps beside those of its blocks in one process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from firsttoken.assets.layers import layers_of
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check
from firsttoken.petals.patience import Patience
from firsttoken.petals.remote import RemoteModel
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.petals.spans import local_engine, prompt_of, running, split_evenly, stored, timed_steps

LOCAL = 0  # servers: all blocks are in the client's process


@dataclass(frozen=True)
class TransportConfig:
    """Generations of ``tokens`` after ``prompt_tokens``, ``rounds`` times in turns: in one process, and through
    ``chains`` of as many servers. ProfileError for none."""

    tokens: int
    prompt_tokens: int
    rounds: int
    chains: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.rounds, *self.chains) < 1 or self.tokens < 3:
            raise ProfileError("transport: every number must be at least 1, tokens at least 3")

    def needs(self) -> list[Need]:
        """The model has a block for each server, and the context."""
        return [
            Need("transport.chains", max(self.chains), LAYERS),
            Need("transport.tokens", self.tokens + self.prompt_tokens, CONTEXT),
        ]


def swarm_transport(profile: Profile) -> Outcome:
    """Rows {servers, round, token, seconds}, of steps of one token; float32, tensors as they are on the wire."""
    config = profile.section("transport", TransportConfig)
    check(config.needs(), ModelFacts(profile.model))
    rows: Rows = []
    with stored(profile) as (folder, loaded), ExitStack() as stack:
        prompt, depth = prompt_of(loaded, config.prompt_tokens, profile.seed), len(layers_of(loaded.model))
        engines = {LOCAL: stack.enter_context(local_engine(loaded.model, config.prompt_tokens + config.tokens))}
        for count in config.chains:
            ups = stack.enter_context(running(folder, split_evenly(depth, count)))
            model = stack.enter_context(RemoteModel(folder, [ups[0].address], patience=Patience(refresh_s=30.0)))
            engines[count] = model.engine
        for number in range(-1, config.rounds):  # the first only warms up
            for servers, engine in engines.items():
                _, seconds = timed_steps(engine, prompt, config.tokens)
                if number >= 0:
                    here = {"servers": servers, "round": number}
                    rows += [{**here, "token": at, "seconds": one} for at, one in enumerate(seconds) if at > 1]
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def transport_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Tokens a second by chain, of one process's in the same round, and the milliseconds that a step takes longer."""
    rounds = sorted({row["round"] for row in rows})
    steps = {
        (servers, number): statistics.median(
            row["seconds"] for row in rows if row["servers"] == servers and row["round"] == number
        )
        for servers in (LOCAL, *parameters["transport"]["chains"])
        for number in rounds
    }
    summary, local = Summary(), [1 / steps[LOCAL, number] for number in rounds]
    summary.add("tokens_per_s", bootstrap(local, "median").summary("tokens/s"), servers=LOCAL)
    for servers in parameters["transport"]["chains"]:
        here = [steps[servers, number] for number in rounds]
        share = [steps[LOCAL, number] / one for number, one in zip(rounds, here, strict=True)]
        longer = [one - steps[LOCAL, number] for number, one in zip(rounds, here, strict=True)]
        place = {"servers": servers, "than": "one process"}
        summary.add("tokens_per_s", bootstrap([1 / s for s in here], "median").summary("tokens/s"), servers=servers)
        summary.add("tokens_per_s_x", bootstrap(share, "median").summary(), **place)
        summary.add("transport_ms", bootstrap(longer, "median").summary("ms", 1000), **place)
    return summary
