"""Servers that take other blocks while they serve: one for each gap, none leaves a block bare, answers go on."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tokens import check_greedy
from swarms import Here
from waiting import until

from firsttoken.__main__ import main
from firsttoken.engine.request import Sampling
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.placement import Rebalancing
from firsttoken.petals.records import Record
from firsttoken.petals.server import move_target
from firsttoken.petals.tuning.frozen import FrozenBlocks
from firsttoken.petals.tuning.passes import Pass
from firsttoken.study.errors import SwarmError
from firsttoken_extras.min_move_rebalancing.rule import MinMoveRebalancing
from firsttoken_studies.record import kernel_forkserver

DEPTH, RULE = 8, Rebalancing()
RULES = st.sampled_from([RULE, MinMoveRebalancing()])


def announced(number: int, first: int, last: int, rate: float = 1.0) -> Record:
    """Server ``number``, which may move, with ``rate`` tokens/s through its blocks."""
    name = f"{number:064x}"
    return Record(name, f"h:{number}", (first, last), "a" * 64, rate * (last - first), 0, 0, 1, moves=True)


class Members:
    """Servers as they decide, one step of one of them at a time: what each knows, says, and has yet to ask."""

    def __init__(
        self, records: Sequence[Record], skews: Sequence[int], asks: bool = True, rule: Rebalancing = RULE
    ) -> None:
        self.views = [{one.server: one for one in records} for _ in records]
        self.names = [one.server for one in records]
        self.skews, self.asks, self.rule = skews, asks, rule
        self.todo: list[list[int] | None] = [None] * len(records)  # of who wishes: the members it has not asked yet
        self.moves, self.now = [0] * len(records), 0

    def own(self, at: int) -> Record:
        return self.views[at][self.names[at]]

    def say(self, at: int, **said) -> None:
        self.now += 1
        self.views[at][self.names[at]] = replace(self.own(at), issued=self.now, **said)

    def served(self) -> set[int]:
        return {block for at in range(len(self.names)) for block in self.own(at).span}

    def step(self, at: int) -> None:
        """The next thing that server ``at`` does: end loading, look and wish, ask a member, or decide."""
        mine, todo = self.own(at), self.todo[at]
        if not mine.span:
            self.say(at, blocks=mine.target, target=(0, 0))
        elif todo is None:
            if (target := move_target(self.rule, mine, self.views[at].values(), DEPTH)) is not None:
                self.say(at, target=(target.start, target.stop), wishes=100 + self.now + self.skews[at])
                self.todo[at] = [one for one in range(len(self.names)) if one != at and self.asks]
        elif todo:
            self.exchange(at, todo.pop())
        else:
            target, self.todo[at] = move_target(self.rule, mine, self.views[at].values(), DEPTH, self.names), None
            if target != range(*mine.target):
                self.say(at, target=(0, 0), wishes=0.0)
                return
            before, self.moves[at] = self.served(), self.moves[at] + 1
            whole = before | {block for one in range(len(self.names)) for block in self._loaded(one)}
            self.say(at, blocks=(0, 0), wishes=0.0)
            assert self.served() == before or len(whole) < DEPTH, "a block is left bare"

    def _loaded(self, at: int) -> range:
        return range(0) if self.own(at).span else range(*self.own(at).target)

    def exchange(self, one: int, other: int) -> None:
        for name in self.names:
            latest = max((self.views[one][name], self.views[other][name]), key=lambda record: record.issued)
            self.views[one][name] = self.views[other][name] = latest


@st.composite
def spans(draw: st.DrawFn) -> list[Record]:
    found = draw(st.lists(st.tuples(st.integers(0, DEPTH - 1), st.integers(2, 5)), min_size=2, max_size=5))
    rates = st.sampled_from([1.0, 4.0])
    return [announced(n, min(a, DEPTH - k), min(a, DEPTH - k) + k, draw(rates)) for n, (a, k) in enumerate(found)]


turns = st.lists(st.integers(0, 4), max_size=120)
skews = st.lists(st.integers(-9, 9), min_size=5, max_size=5)


@settings(max_examples=120, deadline=None)
@given(records=spans(), turns=turns, skews=skews, rule=RULES)
def test_whoever_is_heard_when_no_block_is_left_bare(records, turns, skews, rule) -> None:
    """Messages in any order between servers whose clocks differ; what is asserted is in ``Members.step``."""
    members = Members(records, skews, rule=rule)
    for at in turns:
        members.step(at % len(records))


@settings(max_examples=60, deadline=None)
@given(count=st.integers(2, 3), turns=turns, skews=skews, rule=RULES)
def test_one_server_moves_for_a_gap(count, turns, skews, rule) -> None:
    """All of them could fill it."""
    members = Members([announced(n, 0, 4) for n in range(count)], skews, rule=rule)
    for at in [*turns, *range(5)] * 4:
        members.step(at % count)
    assert sum(members.moves) <= 1
    for _ in range(40):
        for at in range(count):
            members.step(at)
    assert sum(members.moves) == 1 and members.served() == set(range(DEPTH))


def test_without_asking_first_they_would() -> None:
    """The control of both: who does not ask the others leaves them all behind."""
    fast = [announced(0, 0, 4, 4.0), announced(1, 0, 4, 4.0), announced(2, 4, 8)]
    members = Members(fast, [0] * 3, asks=False)
    with pytest.raises(AssertionError, match="left bare"):
        for at in (0, 1, 0, 1):
            members.step(at)
    members = Members([announced(n, 0, 4) for n in range(3)], [0] * 3, asks=False)
    for at in (0, 1, 0, 1):
        members.step(at)
    assert members.moves == [1, 1, 0]


def test_who_does_not_answer_covers_nothing() -> None:
    fast = [announced(0, 0, 4, 4.0), announced(1, 0, 4, 4.0), announced(2, 4, 8)]
    assert move_target(RULE, fast[0], fast, DEPTH) == range(4, 8)
    assert move_target(RULE, fast[0], fast, DEPTH, {fast[2].server}) is None, "the other one may be dead"
    assert move_target(RULE, fast[0], [*fast[:2], replace(fast[2], blocks=(4, 40))], DEPTH) == range(4, 8), (
        "no such blocks"
    )
    fixed = [replace(one, moves=False) for one in fast[1:]]
    assert move_target(RULE, fast[0], fixed, DEPTH) == range(4, 8), "what those that stay would do is not counted on"


class Even(BlockBackend):
    """Blocks that are as fast as all others: what is wanted of them is no matter of luck."""

    def measured_throughput(self) -> float:
        return 1000.0


@pytest.fixture
def leaving(folder) -> Iterator[Here]:
    """Servers that end in the middle of a test."""
    here = Here(folder)
    yield here
    here.close()


def test_an_answer_goes_on_while_servers_move(here, leaving, client, asked):
    """One leaves, two could take its blocks, and both look at one moment: one goes, and what it held is asked of the
    other. It refuses sessions as long as it loads, and ends those that do not end by themselves."""
    limits = {"rebalance_s": 1000.0, "drain_s": 0.05}
    ups = here.serve((0, 3), (0, 3), limits=limits, rebalancing=RULE, make_backend=Even)
    doors = [one.record.address for one in ups]
    leaving.serve((3, 6), peers=doors, make_backend=Even)
    model, one = client(*doors), asked(12, 9)
    request = model.engine.submit(one.prompt, Sampling(9))

    async def look() -> list[bool]:
        return await asyncio.gather(*(up.rebalancer.rebalance() for up in ups))

    while not request.finished:
        if len(request.output) == 4:
            before = model.chain.sessions[0][1].server
            assert wait_for(look()) == [False, False]
            leaving.close()
            assert sorted(wait_for(look())) == [False, True]
        model.engine.step()
    assert check_greedy(request.output, one.plain) == 9
    assert sorted(up.record.blocks for up in ups) == [(0, 3), (3, 6)]
    moved = next(up for up in ups if up.record.blocks == (3, 6))
    why = [said for server, said in model.chain.faults if server == moved.record.server]
    assert all("moves to other blocks" in said for said in why) and len(why) == (before == moved.record.server)
    assert wait_for(look()) == [False, False]


@pytest.mark.parametrize("rule", ["paper", "fewest-moves"])
def test_processes_cover_for_one_that_is_killed(folder, imported, client, asked, rule):
    """Real ones, by the command: they find out by the expiry of its record, at their next look."""
    serve = ["swarm", "serve", "--model", str(folder), "--count", "3", "--dtype", "float32"]
    serve += ["--rebalance-s", "0.2", "--expiry-s", "1", "--rebalance-by", rule]
    with ExitStack() as ended:
        ups: list[subprocess.Popen] = []
        said: list[str] = []
        doors: list[str] = []
        for spans in (("auto", "auto"), ("3:6",)):  # the first two do not know of each other
            known = [word for door in doors for word in ("--registry", door)]
            for blocks in spans:
                command = kernel_forkserver.command("firsttoken", [*serve, "--blocks", blocks, *known])
                ups.append(ended.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
                ended.callback(ups[-1].terminate)
            said += [up.stdout.readline() for up in ups[len(doors) :]]
            doors = [line.split(" at ")[1].split()[0] for line in said]
        pids = [int(re.search(r"by process (\d+)", line)[1]) for line in said]
        model, one = client(*doors, timeouts={"step_s": 2.0, "find_s": 60.0}), asked(12, 9)

        async def known(door: str) -> int:
            swarm = model.swarm
            return len((await swarm.contacts.ask(swarm.channel(door), door, 10.0))[0].records)

        for door in doors[:2]:  # each has heard of the other by the third, without which it never will
            until(lambda door=door: wait_for(known(door)) == 3, "it has heard of the other")
        request = model.engine.submit(one.prompt, Sampling(9))
        while not request.finished:
            if len(request.output) == 4:
                (last,) = [record for _, record in model.chain.sessions if record.blocks == (3, 6)]
                os.kill(pids[doors.index(last.address)], signal.SIGKILL)
            model.engine.step()
        assert check_greedy(request.output, one.plain) == 9

        def covered() -> bool:
            wait_for(model.swarm.refresh())
            return {record.blocks for record in model.swarm.servers()} == {(0, 3), (3, 6)}

        until(covered, "somebody has taken the blocks")


def test_what_is_trained_through_moves_too(folder):
    frozen = FrozenBlocks(folder, range(3), torch.float32)
    rows = Pass(torch.ones(1, 2, 32), {})
    first = frozen.run(range(3), rows).hidden
    wait_for(frozen.move(range(3, 6)))
    assert not torch.equal(frozen.run(range(3, 6), rows).hidden, first)
    with pytest.raises(SwarmError, match=r"this server has blocks \[3, 6\) by now"):
        frozen.run(range(3), rows)
    frozen.close()


@pytest.mark.parametrize("period", ["0", "-3", "nan"])
def test_a_period_that_is_none(folder, capsys, period):
    with pytest.raises(SystemExit):
        main(["swarm", "serve", "--model", str(folder), "--blocks", "auto", f"--rebalance-s={period}"])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.endswith(f"argument --rebalance-s: '{period}' is out of range; give a number above 0 and at most 86400")
