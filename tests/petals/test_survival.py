"""Any server killed, hung or cut off at any token, and the answer is the same: real processes, tiny random weights."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from plain_tokens import check_greedy

from firsttoken.engine.request import Sampling
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.study.errors import SwarmError
from firsttoken_studies.petals.fleet import Fleet

SPANS = ("0:2", "2:4", "4:6")
TOKENS = 9  # a prompt, and a fault before each of them
TIMEOUTS = {"step_s": 0.4, "token_s": 0.001, "refresh_s": 0.2, "answer_s": 0.4, "ban_s": 0.5, "find_s": 20.0}


@pytest.fixture(scope="module")
def fleet(folder, imported) -> Iterator[Fleet]:
    fleet = Fleet(folder, SPANS)
    yield fleet
    fleet.close()


def test_a_fleet_that_does_not_start_leaves_no_process(folder, imported, monkeypatch):
    started, start = [], Fleet.start
    monkeypatch.setattr(Fleet, "start", lambda self, blocks: started.append(start(self, blocks)) or started[-1])
    with pytest.raises(SwarmError, match=r"blocks 4:9 did not start: .* not a:b"):
        Fleet(folder, ("0:2", "4:9"), spares=0)
    with pytest.raises(ProcessLookupError):
        for _ in range(1000):  # until whoever started it has reaped it
            os.kill(started[0].pid, 0)
            time.sleep(0.01)


def generate(model: RemoteModel, fleet: Fleet, prompt: list[int], faults: dict[int, str]) -> list[int]:
    """The answer; before the step of a token its fault befalls one of the chain's servers, the next one each time."""
    fleet.settle()
    fleet.known_to(model.swarm)
    request, hit, before = model.engine.submit(prompt, Sampling(TOKENS)), [], len(model.chain.faults)
    try:
        while not request.finished:
            if fault := faults.get(len(request.output)):
                sessions = model.chain.sessions or wait_for(model.swarm.route(model.chain.layers))
                hit.append(fleet.members[sessions[len(request.output) % len(sessions)][1].address])
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
    one, model = asked(21, TOKENS), client(fleet.door, timeouts=TIMEOUTS)
    for token in range(TOKENS):
        said = generate(model, fleet, one.prompt, {token: fault})
        assert check_greedy(said, one.plain) == TOKENS


def test_three_faults_in_one_generation(fleet, client, asked):
    one, model = asked(30, TOKENS), client(fleet.door, timeouts=TIMEOUTS)
    said = generate(model, fleet, one.prompt, {2: "kill", 4: "stop", 6: "cut"})
    assert check_greedy(said, one.plain) == TOKENS
