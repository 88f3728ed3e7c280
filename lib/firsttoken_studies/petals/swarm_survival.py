"""Servers that are killed, stopped or cut off at each token of a generation: is the answer the same, and how soon."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import exchange, tell
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.petals.server_session import Line
from firsttoken.petals.timeouts import Patience
from firsttoken.petals.wire import MOST_TOKENS, Stretch
from firsttoken.study.errors import ProfileError
from firsttoken.study.overlay import name_results, over
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.profile import Profile, unknown
from firsttoken.study.record import Outcome, Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken.study.timing import Stopwatch
from firsttoken_studies.petals.fleet import FAULTS, Fleet, SwarmMember
from firsttoken_studies.petals.spans import local_engine, prompt_of, running, split_evenly, stored, timed_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        if any(not 0 <= place < self.tokens for place in self.positions) or len(self.together) + 2 > self.tokens:
            raise ProfileError(f"survival.positions and together must lie within the {self.tokens} tokens")
        if len(self.together) > self.servers:
            raise ProfileError(
                f"survival.together: {len(self.together)} faults for {self.servers} servers, one spare each"
            )

    def needs(self) -> list[Need]:
        """The model has a block for each server, and the context."""
        return [
            Need("survival.servers", self.servers, LAYERS),
            Need("survival.tokens", self.tokens + self.prompt_tokens, CONTEXT),
        ]


def swarm_survival(profile: Profile) -> Outcome:
    """Rows {what: fault, fault, position, generation, equal, recovery_s, prefill_s, round_trip_s, timeout_s} of each
    fault, {what: token, generation, token, seconds} of all generations, one of them undisturbed before each fault's."""
    config = profile.section("survival", SurvivalConfig)
    check(config.needs(), ModelFacts(profile.model))
    with stored(profile) as (folder, loaded):
        prompt = prompt_of(loaded, config.prompt_tokens, profile.seed)
        with local_engine(loaded.model, config.prompt_tokens + config.tokens) as engine:
            said, _ = timed_steps(engine, prompt, config.tokens)
        depth = len(layers_of(loaded.model))
        rows = _broken(folder, split_evenly(depth, config.servers), config, prompt, said)
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def _broken(folder: Path, spans: Sequence[str], config: SurvivalConfig, prompt: list[int], said: list[int]) -> Rows:
    fleet = Fleet(folder, spans, config.delay_ms / 1000)
    try:
        patience = Patience(step_s=config.step_s, token_s=0.01, refresh_s=0.5, answer_s=1.0, ban_s=1.0, find_s=60.0)
        with RemoteModel(folder, [fleet.door], patience=patience) as model:
            study = _Study(fleet, model, config, prompt, said)
            study.generate({})  # everything is loaded and connected by then
            study.rows.clear()
            study.generation = 0
            places = config.positions or range(config.tokens)
            asked = []
            for fault in config.faults:
                asked += [{}, *({place: fault} for place in places)]
            every = config.tokens // (len(config.together) + 1)
            asked += [{every * (at + 1): one for at, one in enumerate(config.together)}] * config.together_times
            for faults in tqdm(asked, desc="faults", disable=None):
                study.generate(faults)
            for row, recovery_s in recoveries(study.rows):
                row["recovery_s"] = recovery_s
            return study.rows
    finally:
        fleet.close()


class _Study:
    """Generations over one fleet, and what became of each."""

    def __init__(
        self, fleet: Fleet, model: RemoteModel, config: SurvivalConfig, prompt: list[int], said: list[int]
    ) -> None:
        self.fleet, self.model, self.config = fleet, model, config
        self.prompt, self.said = prompt, said
        self.rows: Rows = []
        self.generation = 0
        self._turn = 0  # whose server of the chain is hit next

    def generate(self, faults: Mapping[int, str]) -> None:
        """One generation with ``faults`` by the token before whose step each comes."""
        fleet, model = self.fleet, self.model
        fleet.settle()
        fleet.known_to(model.swarm)
        hit: list[tuple[int, str, SwarmMember, float]] = []

        def strike(place: int) -> None:
            if fault := faults.get(place):
                lines = model.chain.lines or wait_for(model.swarm.route(model.chain.layers))
                self._turn += 1
                record = lines[self._turn % len(lines)][1]
                hit.append((place, fault, fleet.members[record.address], self._round_trip(record.address)))
                getattr(hit[-1][2], fault)()

        before = len(model.chain.faults)
        try:
            output, seconds = timed_steps(model.engine, self.prompt, self.config.tokens, strike)
        finally:
            for _, fault, member, _ in hit:
                fleet.replace(member) if fault == "kill" else member.heal()
        shared = {"generation": self.generation, "equal": output == self.said, "faults_in_it": len(faults)}
        shared["replaced"] = len(model.chain.faults) - before
        for place, fault, member, round_trip_s in hit:
            tokens = len(self.prompt) if place == 0 else 1
            row = {"what": "fault", "fault": fault, "position": place, "blocks": member.blocks, **shared}
            row |= {"step_s": seconds[place], "round_trip_s": round_trip_s}
            row["timeout_s"] = model.swarm.patience.limit_s(tokens) if fault in WAITED else 0.0
            row["prefill_s"] = self._prefill(member.blocks, len(self.prompt) + place, round_trip_s)
            self.rows.append(row)
        self.rows += [
            {"what": "token", "generation": self.generation, "token": token, "seconds": one}
            for token, one in enumerate(seconds)
        ]
        self.generation += 1

    def _round_trip(self, address: str) -> float:
        """Seconds of a message there and back, the median of a few."""
        swarm, seconds = self.model.swarm, []

        async def probe() -> None:
            with Stopwatch() as watch:
                await exchange(swarm.channel(address), swarm.access, tell([]), _PROBE_S)
            seconds.append(watch.seconds)

        for _ in range(_PROBES):
            wait_for(probe())
        return statistics.median(seconds)

    def _prefill(self, blocks: str, tokens: int, round_trip_s: float) -> float:
        """Seconds in which the server that took ``blocks`` over computes ``tokens`` anew, the median of a few."""
        swarm, chain = self.model.swarm, self.model.chain
        span = range(*map(int, blocks.split(":")))
        record = next(record for line, record in chain.lines if line.layers == span)
        hidden, seconds = torch.randn(tokens, self.model.model.config.hidden_size), []
        patience = replace(swarm.patience, step_s=_PROBE_S)

        async def probe() -> None:
            line = Line(record.name, swarm.channel(record.address), span, swarm.model, chain.coding, patience, ())
            with Stopwatch() as watch:
                await line.run([Stretch(0, 0, tokens)], hidden)
            seconds.append(watch.seconds)
            line.close()

        for _ in range(_PROBES):
            wait_for(probe())
        return max(0.0, statistics.median(seconds) - round_trip_s)


def recoveries(rows: Rows) -> list[tuple[dict[str, Any], float]]:
    """Each row of a fault, with the seconds that its step took beyond the median one that nothing had disturbed.

    That is, for a first token, the median first step, else that of later tokens: of all generations but the first
    measured one, of which a recorded run's was not warm, the steps before a generation's first fault.
    """
    struck = [row for row in rows if row["what"] == "fault"]
    until: dict[int, int] = {}
    for row in struck:
        until[row["generation"]] = min(row["position"], until.get(row["generation"], row["position"]))
    calm: dict[bool, list[float]] = {True: [], False: []}  # by whether it is a first token
    for row in rows:
        if row["what"] == "token" and row["generation"] and row["token"] < until.get(row["generation"], math.inf):
            calm[row["token"] == 0].append(row["seconds"])
    usual = {first: statistics.median(seconds) for first, seconds in calm.items() if seconds}
    return [(row, row["step_s"] - usual[row["position"] == 0]) for row in struck]


def bound_s(row: Mapping[str, Any]) -> float:
    """What a recovery may take: the time-out that was set, the prefix's prefill, two round trips."""
    return row["timeout_s"] + row["prefill_s"] + ROUND_TRIPS * row["round_trip_s"]


def survival_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Generations with the local model's tokens, recoveries within their bound, and by fault the seconds of one, and of
    what it takes beyond time-out and prefill, in round trips."""
    struck = [row for row in rows if row["what"] == "fault"]
    alone = [row for row in struck if row["faults_in_it"] == 1]
    several = {row["generation"]: row["equal"] for row in struck if row["faults_in_it"] > 1}
    summary = Summary()
    summary.add("equal_pct", bootstrap([row["equal"] for row in alone]).summary("%", 100), case="one fault")
    if several:
        summary.add("equal_pct", bootstrap(list(several.values())).summary("%", 100), case="several faults")
    within = [row["recovery_s"] <= bound_s(row) for row in alone]
    summary.add("within_bound_pct", bootstrap(within).summary("%", 100), case="one fault")
    for fault in parameters["survival"]["faults"]:
        here = [row for row in alone if row["fault"] == fault]
        trips = [(row["recovery_s"] - row["timeout_s"] - row["prefill_s"]) / row["round_trip_s"] for row in here]
        summary.add("recovery_s", bootstrap([row["recovery_s"] for row in here], "median").summary("s"), case=fault)
        summary.add("bound_s", bootstrap([bound_s(row) for row in here], "median").summary("s"), case=fault)
        summary.add("round_trips", bootstrap(trips, "median").summary("round trips"), case=fault)
    broken = {row["generation"] for row in struck}
    steps = (row for row in rows if row["what"] == "token" and row["token"])
    usual = [row["seconds"] for row in steps if row["generation"] not in broken]
    summary.add("step_s", bootstrap(usual, "median").summary("s"), case="undisturbed")
    summary.add("round_trip_s", bootstrap([row["round_trip_s"] for row in struck], "median").summary("s"))
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


# The figures and tables of notebook 50, drawn from results alone.


def recovery_times(recorded: Result | None, now: Result) -> Figure:
    """Seconds of each recovery by the token that it came before, and the most that it may take."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    faults = results[0].result.parameters["survival"]["faults"]
    fig, axes = plt.subplots(2, 2, figsize=(9, 5.6), sharex=True)
    for ax, fault in zip(axes.flat, faults, strict=False):
        for drawn in results:
            for row, seconds in recoveries(drawn.result.rows):
                if row["faults_in_it"] == 1 and row["fault"] == fault:
                    place, most = row["position"], bound_s(row)
                    ax.plot(
                        [place - 0.35, place + 0.35], 2 * [most], color=COLOURS["target"], linewidth=2, **drawn.style
                    )
                    drawn.point(ax, place, {"value": seconds}, "measured")
        ax.axhline(0, color=COLOURS["floor"], linewidth=0.8)
        ax.set_title(FAULTS[fault], fontsize=10)
        ax.set_ylim(top=1.15 * ax.dataLim.y1)
    for ax in axes[:, 0]:
        ax.set_ylabel("recovery, s")
    for ax in axes[1]:
        ax.set_xlabel("the token before whose step it came")
        ax.xaxis.get_major_locator().set_params(integer=True)
    handles = [
        plt.Line2D([], [], color=COLOURS["measured"], marker=LOOKS["measured"].marker, linestyle="", label="recovery"),
        plt.Line2D([], [], color=COLOURS["target"], linewidth=2, label="time-out + prefill + two round trips"),
    ]
    fig.suptitle("A lost server costs its successor's prefill, or the client's time-out of 1 s")
    axes[0, 1].legend(handles=handles, loc="center right", bbox_to_anchor=(1, 0.3), fontsize=9)
    name_results(fig, results, "recovery_s")
    return fig


def token_times(recorded: Result | None, now: Result) -> Figure:
    """Seconds of each token of the generation with several faults, beside the median of undisturbed steps."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    fig, ax = plt.subplots(figsize=(9, 4))
    results = over(recorded, now)
    for drawn in results:
        struck = [pair for pair in recoveries(drawn.result.rows) if pair[0]["faults_in_it"] > 1]
        if not struck:
            continue
        first, (usual, *_) = struck[0][0]["generation"], (row["step_s"] - more for row, more in struck)
        rows = [row for row in drawn.result.rows if row["what"] == "token" and row["generation"] == first]
        places, seconds = [row["token"] for row in rows], [row["seconds"] for row in rows]
        drawn.line(ax, places, [{"value": one} for one in seconds], "measured", label=f"three faults, {drawn.who(1)}")
        label = f"median undisturbed step, {drawn.who()}"
        ax.axhline(usual, color=COLOURS["floor"], linestyle="--", linewidth=1.2, label=label, **drawn.style)
        for row, _ in struck if drawn is results[0] else ():
            if row["generation"] == first:
                at = (row["position"], row["step_s"])
                ax.annotate(FAULTS[row["fault"]], at, (6, 4), textcoords="offset points", fontsize=9)
    ax.set(yscale="log", xlabel="token", ylabel="its step, s")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
    ax.margins(x=0.03, y=0.18)
    fig.suptitle("Three servers fail in one answer: only the struck steps are longer")
    fig.legend(loc="outside lower center", ncols=2, fontsize=9, handlelength=3.2)
    return fig


def survival_rows(recorded: Result | None, now: Result) -> Rows:
    """Return by fault how many answers are the local model's, and the recovery beside the most that it may take."""
    rows: Rows = []
    for drawn in over(recorded, now):
        summary, struck = drawn.result.summary, recoveries(drawn.result.rows)
        for fault in drawn.result.parameters["survival"]["faults"]:
            here = [(row, s) for row, s in struck if row["fault"] == fault and row["faults_in_it"] == 1]
            rows.append(
                {
                    "a server is": FAULTS[fault],
                    "whose": drawn.who(len(here)),
                    "same answers": f"{sum(row['equal'] for row, _ in here)} of {len(here)}",
                    "recovery, s": interval(bootstrap([s for _, s in here], "median").summary(), 3),
                    "may take, s": interval(summary.of("bound_s", case=fault), 3),
                    "within it": f"{sum(s <= bound_s(row) for row, s in here)} of {len(here)}",
                }
            )
        several = {row["generation"]: row["equal"] for row, _ in struck if row["faults_in_it"] > 1}
        if several:
            name = f"{len(drawn.result.parameters['survival']['together'])} faults in one answer"
            same = f"{sum(several.values())} of {len(several)}"
            rows.append({"a server is": name, "whose": drawn.who(len(several)), "same answers": same})
    return rows


def transport_rows(recorded: Result | None, now: Result) -> Rows:
    """Tokens a second through chains of servers and of the same blocks in one process, and what the transport takes."""
    rows: Rows = []
    for drawn in over(recorded, now):
        summary, whose = drawn.result.summary, {"whose": drawn.who()}
        alone = interval(summary.of("tokens_per_s", servers=LOCAL), 1)
        rows.append({"blocks": "in one process"} | whose | {"tokens/s": alone})
        for servers in drawn.result.parameters["transport"]["chains"]:
            place = {"servers": servers, "than": "one process"}
            rows.append(
                {"blocks": f"on {servers} server{'s'[: servers > 1]}"}
                | whose
                | {
                    "tokens/s": interval(summary.of("tokens_per_s", servers=servers), 1),
                    "of one process": interval(summary.of("tokens_per_s_x", **place), 2),
                    "transport, ms a step": interval(summary.of("transport_ms", **place), 2),
                }
            )
    return rows
