"""Servers that blame the client, answer what no model does, or are late: another of the same blocks is asked."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from types import MethodType

import grpc
import pytest
import torch
from swarms import part, says, spoil

from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.swarm import ServerConduct
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.tuning.passes import Pass
from firsttoken.petals.tuning.remote_training import TrainingChain
from firsttoken.study.errors import RequestError, SwarmError

CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
TOKENS = 6


def refuse(up, code, after: int = 0) -> list[float]:
    """Every session of this server ends with ``code`` after so many steps; when it did, grows."""
    ends, sessions = [], up.sessions
    step, taken = type(sessions)._step, {}

    async def refusing(self, context, *rest):
        if taken.setdefault(id(context), 0) >= after:
            await context.read()
            ends.append(time.monotonic())
            await context.abort(code, "you are wrong")
        taken[id(context)] += 1
        return await step(self, context, *rest)

    sessions._step = MethodType(refusing, sessions)
    return ends


def first_asked(model, up) -> None:
    """The next chain begins with this server, as if it were the nearest."""
    part(model)
    for address in model.swarm._pings:
        model.swarm._pings[address] = 0.0 if address == up.record.address else 1.0


@pytest.fixture
def pair(here):
    """Two servers of all blocks."""
    return here.serve((0, 6), (0, 6))


def test_whatever_a_server_answers_another_is_asked(pair, client, asked):
    """Every code that gRPC has, at once and after a step that was answered."""
    (bad, good), one = pair, asked(8, TOKENS)
    model = client(bad.record.address)
    for number, code in enumerate(CODES):
        model.swarm.conduct = ServerConduct(model.swarm.timeouts)
        ends = refuse(bad, code, after=number % 2)
        first_asked(model, bad)
        says(model, one)
        assert 1 <= len(ends) <= 5, code
        assert bad.record.server in {server for server, _ in model.chain.faults}, code
        assert model.chain.sessions[0][1].server == good.record.server
        says(model, one)
        assert len(ends) <= 5, code  # and is not asked again


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "UNAUTHENTICATED", "ABORTED", "UNAVAILABLE"])
def test_who_has_nobody_else_is_told_the_reason_and_asks_seldom(here, client, code):
    (bad,) = here.serve((0, 6))
    ends = refuse(bad, grpc.StatusCode[code])
    model = client(bad.record.address, timeouts={"find_s": 0.3})
    for _ in range(2):
        with pytest.raises(SwarmError, match=r"you are wrong|its connection was closed"):
            model.generate(torch.tensor([[1, 2, 3]]), 2)
    assert 1 <= len(ends) <= 16  # of hundreds that would be asked without a rest


def test_passes_of_training_ask_another(here, client):
    """A trainer that refuses everything, beside one that does not."""
    bad, good = here.serve((0, 6), (0, 6), trains=True)
    model = client(bad.record.address)

    async def refusing(*_, refusal: BaseException) -> bytes:
        raise refusal

    chain, hidden = TrainingChain(model.swarm, range(6)), torch.randn(1, 4, 32)
    for refusal in (RequestError("no"), SwarmError("no"), ValueError("no"), asyncio.CancelledError()):
        model.swarm.conduct = ServerConduct(model.swarm.timeouts)
        bad.frozen.answer = partial(refusing, refusal=refusal)
        first_asked(model, bad)
        out, entered = wait_for(chain.forward(hidden, {}, 1.0))
        assert torch.equal(out, good.frozen.run(range(6), Pass(hidden, {})).hidden)
        assert [one.blocks for one in entered[0]] == [range(6)]
        with pytest.raises(SwarmError, match="each once and in order"):
            wait_for(chain.backward([entered[0][1:]], hidden, {}, 1.0))
    assert [server for server, _ in chain.faults] == [bad.record.server] * 4
    good.frozen.answer = bad.frozen.answer = partial(refusing, refusal=RequestError("no"))
    model.swarm.conduct = ServerConduct(model.swarm.timeouts)
    with pytest.raises(RequestError, match=r"refuses: no .*no other server that answers has blocks 0 to 5"):
        wait_for(chain.forward(hidden, {}, 1.0))
    assert len(chain.faults) == 6  # each was asked once


@pytest.mark.parametrize("value", [3e38, -1e30, 2.0**25, torch.nan])
def test_nonsense_is_the_servers_fault(pair, client, asked, value):
    (bad, good), one = pair, asked(8, TOKENS)
    model = client(bad.record.address)
    spoil(bad, value)
    first_asked(model, bad)
    says(model, one)
    assert "at fault" in model.chain.faults[0][1]
    assert model.chain.sessions[0][1].server == good.record.server
    spoil(good, value)
    patience = {"find_s": 0.3}
    with pytest.raises(SwarmError, match=r"at fault.* \(the servers that took over failed too, for 0.3 s\)"):
        client(bad.record.address, timeouts=patience).generate(torch.tensor([one.prompt]), 2)


def test_who_is_late_again_and_again_is_left(pair, client, asked):
    """The time that a step took is told, not waited for: on a busy machine everybody is late."""
    (late, good), one = pair, asked(8, TOKENS)
    model = client(late.record.address, timeouts={"late_s": 60.0})
    took, conduct = model.swarm.conduct.took, model.swarm.conduct
    conduct.took = lambda server, seconds, announced_s: took(
        server, announced_s + (100.0 if server == late.record.server else 0.0), announced_s
    )
    first_asked(model, late)
    says(model, one)
    assert [server for server, _ in model.chain.faults] == [late.record.server]
    assert "100.00 s later than it announced" in model.chain.faults[0][1]
    assert model.chain.sessions[0][1].server == good.record.server
    first_asked(model, late)
    says(model, one)
    assert len(model.chain.faults) == 1


def test_who_is_late_stays_where_nobody_is_faster(here, client, asked):
    """Alone, or beside one that was found to be as late: the chain does not go to and fro."""
    one = asked(8, TOKENS)
    ups = here.serve((0, 6))
    for expected in (0, 1):
        model = client(ups[0].record.address, timeouts={"late_s": 60.0})
        took = model.swarm.conduct.took
        model.swarm.conduct.took = lambda server, _, announced_s, took=took: took(
            server, announced_s + 100.0, announced_s
        )
        for _ in range(3):
            says(model, one)
        assert len(model.chain.faults) == expected
        ups += here.serve((0, 6), peers=[ups[0].record.address])


def test_one_step_that_is_late_is_anybodys():
    conduct = ServerConduct(Timeouts())
    for seconds in (0.01, 5.0, *[0.01] * 8, 5.0, 0.01):
        conduct.took("a", seconds, 0.01)
        assert conduct.late_s("a") == 0
    conduct.took("a", 5.0, 0.01)
    assert conduct.late_s("a") == pytest.approx(2 * 4.99 / 8)
    for _ in range(8):
        conduct.took("a", 0.2, 0.01)  # below late_s
        conduct.took("b", 5.0, 2.0)  # below three times
    assert conduct.late_s("a") == conduct.late_s("b") == 0


def test_who_fails_again_is_left_for_longer(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("firsttoken.petals.swarm.time.monotonic", lambda: now[0])
    conduct = ServerConduct(Timeouts(ban_s=10.0, find_s=8.0))
    for failures, (rest_s, ban_s) in enumerate([(0.05, 10), (0.1, 20), (0.2, 40), (0.4, 80), (0.8, 100), (1.6, 100)]):
        conduct.failed("a")
        begun = now[0]
        for passed, *held in ((0.9 * rest_s, 1, 1), (1.1 * rest_s, 0, 1), (ban_s - 0.1, 0, 1), (ban_s, 0, 0)):
            now[0] = begun + passed
            assert [len(conduct.resting()), len(conduct.shunned())] == held, failures
    conduct.failed("a")
    now[0] += 0.01
    assert conduct.shunned() == {"a"}
    conduct.back("a")  # after a silence
    assert conduct.shunned() == conduct.resting() == set()
    assert [conduct.lost("a") for _ in range(4)] == [False, False, False, True]


def test_a_step_that_was_broken_off_leaves_no_answer_to_the_next(pair, client, asked):
    """As at a KeyboardInterrupt in a notebook: the session ends, and the next request has one of its own."""
    (first, second), one = pair, asked(8, TOKENS)
    model = client(first.record.address)
    says(model, one)
    awake, runs = asyncio.Event(), [up.sessions.batcher.run for up in (first, second)]

    async def sleeping(*step, run):
        await awake.wait()
        return await run(*step)

    async def broken_off() -> None:
        from firsttoken.petals.messages import SequenceChunk

        step = asyncio.ensure_future(model.chain.run([SequenceChunk(999, 0, 3)], torch.randn(3, 32)))
        await asyncio.sleep(0.2)
        step.cancel()
        awake.set()
        await asyncio.gather(step, return_exceptions=True)

    for up, run in zip((first, second), runs, strict=True):
        up.sessions.batcher.run = lambda *step, run=run: sleeping(*step, run=run)
    wait_for(broken_off())
    assert model.chain.sessions == [] and model.chain.faults == []
    says(model, one)
    wait_for(model.chain.forget([999]))
    assert model.chain._hidden_cache.nbytes == 0
