"""Servers that are killed, stopped or cut off at each token of a generation: is the answer the same, and how soon."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check
from firsttoken.petals.chain import Chain
from firsttoken.petals.contacts import encode_exchange, exchange
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import MOST_TOKENS, SequenceChunk
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.petals.server_session import ServerSession
from firsttoken.petals.timeouts import Timeouts
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken.study.timing import Stopwatch
from firsttoken_studies.petals.cell_clients import CellChain
from firsttoken_studies.petals.fleet import FAULTS, Fleet, ProxiedServer
from firsttoken_studies.petals.spans import local_engine, prompt_of, running, split_evenly, stored, timed_steps
from firsttoken_studies.record.results import Outcome, Rows, frame_of, rows_where

WAITED = ("stop", "hold")  # nothing tells the client but the time that it waits
ROUND_TRIPS = 2  # that a recovery may take beside the prefill and the time-out
_PROBES = 3
_PROBE_S = 60.0  # that one is waited for: what times a healthy server is not the client, which replaces a slow one


@dataclass(frozen=True)
class SurvivalConfig:
    """Generations of ``tokens`` after a prompt of ``prompt_tokens`` through ``servers`` servers, each with a spare,
    over links of ``delay_ms`` each way. At each of ``positions`` (a token's place; none: at all) each of ``faults``
    befalls a server of the chain, the next one each time; then all of ``together``, a fault each few tokens, in
    ``together_times`` generations. A server has ``step_s`` to answer. ProfileError for what is none."""

    tokens: int
    prompt_tokens: int
    servers: int
    delay_ms: float
    step_s: float
    positions: tuple[int, ...]
    faults: tuple[str, ...]
    together: tuple[str, ...]
    together_times: int

    def __post_init__(self) -> None:
        for fault in (*self.faults, *self.together):
            if fault not in FAULTS:
                raise ProfileError(f"survival.faults: no fault {fault!r}; {unknown(fault, FAULTS)}")
        if min(self.tokens, self.servers, self.together_times) < 1 or not 1 <= self.prompt_tokens <= MOST_TOKENS // 2:
            raise ProfileError(f"survival: every number must be at least 1, and a prompt at most {MOST_TOKENS // 2}")
        if any(not 0 <= position < self.tokens for position in self.positions) or len(self.together) + 2 > self.tokens:
            raise ProfileError(f"survival.positions and together must lie within the {self.tokens} tokens")
        if len(self.together) > self.servers:
            raise ProfileError(
                f"survival.together: {len(self.together)} faults are too many for {self.servers} servers"
            )

    def needs(self) -> list[Need]:
        """Require a model with a block for each server, and the context."""
        return [
            Need("survival.servers", self.servers, LAYERS),
            Need("survival.tokens", self.tokens + self.prompt_tokens, CONTEXT),
        ]


def swarm_survival(profile: Profile, *, chain: Callable[..., Any] = Chain) -> Outcome:
    """Rows {what: fault, fault, position, generation, equal, recovery_s, prefill_s, round_trip_s, timeout_s} of each
    fault, {what: token, generation, token, seconds} of all generations, one of them undisturbed before each fault's.

    ``chain`` asks the servers and replaces them: the library's, or a class as ``CellChain`` takes it. It runs in the
    client, which is this process; the servers are others, and as they are.
    """
    config = profile.section("survival", SurvivalConfig)
    check(config.needs(), ModelFacts(profile.model))
    with stored(profile) as (folder, loaded):
        prompt = prompt_of(loaded, config.prompt_tokens, profile.seed)
        with local_engine(loaded.model, config.prompt_tokens + config.tokens) as engine:
            output, _ = timed_steps(engine, prompt, config.tokens)
        depth = len(layers_of(loaded.model))
        rows = _broken(folder, split_evenly(depth, config.servers), config, prompt, output, chain)
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def _broken(
    folder: Path,
    spans: Sequence[str],
    config: SurvivalConfig,
    prompt: list[int],
    output: list[int],
    chain: Callable[..., Any],
) -> Rows:
    fleet = Fleet(folder, spans, config.delay_ms / 1000)
    try:
        timeouts = Timeouts(step_s=config.step_s, token_s=0.01, refresh_s=0.5, answer_s=1.0, ban_s=1.0, find_s=60.0)
        with RemoteModel(folder, [fleet.door], timeouts=timeouts) as model:
            if chain is not Chain:
                model.chain = model.segments[""].chain = CellChain(chain, model, spans)
            study = _Study(fleet, model, config, prompt, output)
            study.generate({})  # everything is loaded and connected by then
            study.rows.clear()
            study.generation = 0
            places = config.positions or range(config.tokens)
            schedules = []
            for fault in config.faults:
                schedules += [{}, *({position: fault} for position in places)]
            every = config.tokens // (len(config.together) + 1)
            schedules += [
                {every * (number + 1): fault_kind for number, fault_kind in enumerate(config.together)}
            ] * config.together_times
            for faults in track(schedules, desc="faults"):
                study.generate(faults)
            for row, recovery_s in recoveries(study.rows):
                row["recovery_s"] = recovery_s
            return study.rows
    finally:
        fleet.close()


class _Study:
    """The generations over one fleet, and their rows."""

    def __init__(
        self, fleet: Fleet, model: RemoteModel, config: SurvivalConfig, prompt: list[int], output: list[int]
    ) -> None:
        self.fleet, self.model, self.config = fleet, model, config
        self.prompt, self.said = prompt, output
        self.rows: Rows = []
        self.generation = 0
        self._turn = 0  # whose server of the chain is hit next

    def generate(self, faults: Mapping[int, str]) -> None:
        """One generation with ``faults`` by the token before whose step each comes."""
        fleet, model = self.fleet, self.model
        fleet.settle()
        fleet.known_to(model.swarm)
        if isinstance(model.chain, CellChain):
            wait_for(model.chain.renew())
        hit: list[tuple[int, str, ProxiedServer, float]] = []

        def strike(position: int) -> None:
            if fault := faults.get(position):
                sessions = model.chain.sessions or wait_for(model.swarm.route(model.chain.layers))
                self._turn += 1
                record = sessions[self._turn % len(sessions)][1]
                hit.append((position, fault, fleet.members[record.address], self._round_trip(record.address)))
                getattr(hit[-1][2], fault)()

        before = len(model.chain.faults)
        try:
            output, seconds = timed_steps(model.engine, self.prompt, self.config.tokens, strike)
        finally:
            for _, fault, member, _ in hit:
                fleet.replace(member) if fault == "kill" else member.heal()
        shared = {"generation": self.generation, "equal": output == self.said, "faults_in_it": len(faults)}
        shared["replaced"] = len(model.chain.faults) - before
        for position, fault, member, round_trip_s in hit:
            tokens = len(self.prompt) if position == 0 else 1
            row = {"what": "fault", "fault": fault, "position": position, "blocks": member.blocks, **shared}
            row |= {"step_s": seconds[position], "round_trip_s": round_trip_s}
            row["timeout_s"] = model.swarm.timeouts.limit_s(tokens) if fault in WAITED else 0.0
            row["prefill_s"] = self._prefill(member.blocks, len(self.prompt) + position, round_trip_s)
            self.rows.append(row)
        self.rows += [
            {"what": "token", "generation": self.generation, "token": token, "seconds": token_s}
            for token, token_s in enumerate(seconds)
        ]
        self.generation += 1

    def _round_trip(self, address: str) -> float:
        """Seconds of a message there and back, the median of a few."""
        swarm, seconds = self.model.swarm, []

        async def probe() -> None:
            with Stopwatch() as watch:
                await exchange(swarm.channel(address), swarm.access, encode_exchange([]), _PROBE_S)
            seconds.append(watch.seconds)

        for _ in range(_PROBES):
            wait_for(probe())
        return statistics.median(seconds)

    def _prefill(self, blocks: str, tokens: int, round_trip_s: float) -> float:
        """Seconds in which the server that took ``blocks`` over computes ``tokens`` anew, the median of a few."""
        swarm, chain = self.model.swarm, self.model.chain
        span = range(*map(int, blocks.split(":")))
        record = next(record for session, record in chain.sessions if session.layers == span)
        hidden, seconds = torch.randn(tokens, self.model.model.config.hidden_size), []
        timeouts = replace(swarm.timeouts, step_s=_PROBE_S)

        async def probe() -> None:
            channel = swarm.channel(record.address)
            session = ServerSession(record.name, channel, span, swarm.model, chain.coding, timeouts)
            with Stopwatch() as watch:
                await session.run([SequenceChunk(0, 0, tokens)], hidden)
            seconds.append(watch.seconds)
            session.close()

        for _ in range(_PROBES):
            wait_for(probe())
        return max(0.0, statistics.median(seconds) - round_trip_s)


def recoveries(rows: Rows) -> list[tuple[dict[str, Any], float]]:
    """Return each row of a fault, with the seconds that its step took beyond the median undisturbed one.

    For a first token that is the median first step, else the median step of later tokens. Undisturbed are the steps
    before a generation's first fault, of all generations but the first measured one, which in a recorded run was not
    warm.
    """
    if not (struck := rows_where(rows, what="fault")):
        return []
    tokens, until = frame_of(rows, what="token"), frame_of(struck).groupby("generation").position.min()
    calm = tokens[(tokens.generation > 0) & ~(tokens.token >= tokens.generation.map(until))]
    usual = calm.groupby(calm.token == 0).seconds.median().to_dict()  # by whether it is a first token
    return [(row, row["step_s"] - usual[row["position"] == 0]) for row in struck]


def bound_s(row: Any) -> Any:
    """Return the most seconds that the recovery of ``row``, or of each row of a frame, may take: time-out, prefill, two
    round trips."""
    return row["timeout_s"] + row["prefill_s"] + ROUND_TRIPS * row["round_trip_s"]


def survival_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Generations with the local model's tokens, recoveries within their bound, and by fault the seconds of one, and of
    what it takes beyond time-out and prefill, in round trips."""
    struck, tokens = frame_of(rows, what="fault"), frame_of(rows, what="token")
    struck["bound_s"] = bound_s(struck)
    struck["within"] = struck.recovery_s <= struck.bound_s
    struck["trips"] = (struck.recovery_s - struck.timeout_s - struck.prefill_s) / struck.round_trip_s
    alone, several = struck[struck.faults_in_it == 1], struck[struck.faults_in_it > 1]
    usual = tokens[(tokens.token > 0) & ~tokens.generation.isin(struck.generation)]
    summary, equal = Summary(), {"equal_pct": ("equal", "mean", "%", 100)}
    summary.by(alone, {}, equal, case="one fault")
    summary.by(several.drop_duplicates("generation", keep="last"), {}, equal, case="several faults")
    summary.by(alone, {}, {"within_bound_pct": ("within", "mean", "%", 100)}, case="one fault")
    by_fault = {
        "recovery_s": ("recovery_s", "median", "s"),
        "bound_s": ("bound_s", "median", "s"),
        "round_trips": ("trips", "median", "round trips"),
    }
    summary.by(alone, {"case": "fault"}, by_fault)
    summary.by(usual, {}, {"step_s": ("seconds", "median", "s")}, case="undisturbed")
    summary.by(struck, {}, {"round_trip_s": ("round_trip_s", "median", "s")})
    return summary


# What the way through servers of this machine takes: a chain's steps beside those of its blocks in one process.

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
        """Require a model with a block for each server, and the context."""
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
            model = stack.enter_context(RemoteModel(folder, [ups[0].address], timeouts=Timeouts(refresh_s=30.0)))
            engines[count] = model.engine
        for number in range(-1, config.rounds):  # the first only warms up
            for servers, engine in engines.items():
                _, seconds = timed_steps(engine, prompt, config.tokens)
                if number >= 0:
                    labels = {"servers": servers, "round": number}
                    rows += [
                        {**labels, "token": token, "seconds": token_s}
                        for token, token_s in enumerate(seconds)
                        if token > 1
                    ]
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def transport_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Tokens a second by chain, of one process's in the same round, and the milliseconds that a step takes longer."""
    steps = frame_of(rows).groupby(["servers", "round"], sort=False).seconds.median().reset_index()
    steps["rate"] = 1 / steps.seconds
    chains = steps[steps.servers != LOCAL].merge(steps[steps.servers == LOCAL], on="round", suffixes=("", "_local"))
    chains["share"], chains["longer"] = chains.seconds_local / chains.seconds, chains.seconds - chains.seconds_local
    summary, rate, keys = Summary(), {"tokens_per_s": ("rate", "median", "tokens/s")}, {"servers": "servers"}
    beside = {"tokens_per_s_x": ("share", "median", ""), "transport_ms": ("longer", "median", "ms", 1000)}
    summary.by(steps[steps.servers == LOCAL], keys, rate)
    for _, chain in chains.groupby("servers", sort=False):
        summary.by(chain, keys, rate)
        summary.by(chain, keys, beside, than="one process")
    return summary
