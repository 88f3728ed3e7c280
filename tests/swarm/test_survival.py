"""Any server killed, hung or cut off at any token, and the answer is the same: real processes, tiny random weights."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

import pytest
from plain_tokens import check_greedy
from swarms import Member

from firsttoken.engine.request import Sampling
from firsttoken.swarm.background import wait_for
from firsttoken.swarm.remote import RemoteModel

SPANS = ("0:2", "2:4", "4:6")
TOKENS = 9  # a prompt, and a fault before each of them
PATIENCE = {"step_s": 0.4, "token_s": 0.001, "refresh_s": 0.2, "answer_s": 0.4, "ban_s": 0.5, "find_s": 20.0}


class Fleet:
    """Two servers or more of each span; the dead are replaced by new ones."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.members: dict[str, Member] = {}  # by the address that others know
        first = self.start(SPANS[0])
        self.door = first.ready().relay.address
        for blocks in (*SPANS[1:], *SPANS):
            self.start(blocks)
        self.settle()

    def start(self, blocks: str) -> Member:
        member = Member(self.folder, blocks, list(self.members))
        self.members[member.relay.address] = member
        return member

    def settle(self) -> None:
        for member in self.members.values():
            member.ready()

    def replace(self, member: Member) -> None:
        del self.members[member.relay.address]
        if member.relay.address == self.door:
            self.door = next(iter(self.members))
        member.close()
        self.start(member.blocks)

    def close(self) -> None:
        for member in self.members.values():
            member.close()


@pytest.fixture(scope="module")
def fleet(folder, parent) -> Iterator[Fleet]:
    fleet = Fleet(folder)
    yield fleet
    fleet.close()


def ready(model: RemoteModel, fleet: Fleet) -> None:
    """Wait until the client knows two servers of each span that answer."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        counts = defaultdict(int)
        for one in model.swarm.servers():
            counts[one.blocks] += one.address in fleet.members
        if len(counts) == len(SPANS) and min(counts.values()) >= 2:
            return
        time.sleep(0.02)
    raise AssertionError(f"the swarm did not come together: {dict(counts)}")


def generate(model: RemoteModel, fleet: Fleet, prompt: list[int], faults: dict[int, str]) -> list[int]:
    """The answer; before the step of a token its fault befalls one of the chain's servers, the next one each time."""
    fleet.settle()
    ready(model, fleet)
    request, hit, before = model.engine.submit(prompt, Sampling(TOKENS)), [], len(model.chain.faults)
    try:
        while not request.finished:
            if fault := faults.get(len(request.output)):
                lines = model.chain.lines or wait_for(model.swarm.route(model.chain.layers))
                hit.append(fleet.members[lines[len(request.output) % len(lines)][1].address])
                getattr(hit[-1], fault)()
            model.engine.step()
    finally:
        for member, fault in zip(hit, faults.values(), strict=False):
            fleet.replace(member) if fault == "kill" else member.heal()
    assert len(hit) == len(faults) <= len(model.chain.faults) - before
    return request.output


@pytest.mark.parametrize("fault", ["kill", "stop", "cut", "hold"])
def test_a_fault_at_any_token(fleet, client, asked, fault):
    """kill -9, SIGSTOP, a link that is reset, one that falls silent: of each of the chain's three servers in turn, and
    before each token, that of the prompt among them."""
    one, model = asked(21, TOKENS), client(fleet.door, patience=PATIENCE)
    for token in range(TOKENS):
        said = generate(model, fleet, one.prompt, {token: fault})
        assert check_greedy(said, one.plain) == TOKENS


def test_three_faults_in_one_generation(fleet, client, asked):
    one, model = asked(30, TOKENS), client(fleet.door, patience=PATIENCE)
    said = generate(model, fleet, one.prompt, {2: "kill", 4: "stop", 6: "cut"})
    assert check_greedy(said, one.plain) == TOKENS
