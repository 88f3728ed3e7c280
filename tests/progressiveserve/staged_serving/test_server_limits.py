"""What may be asked of a growing server, by how many, and whom it concerns when it may not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from growing import PROMPT, TIMEOUT_S, events_of, first_event, greedy, tokens_of
from waiting import until, wait_stage

from firsttoken.engine.request_limits import RequestLimits
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken.study.errors import BusyError, RequestError


def test_what_is_asked_for_has_limits(stage):
    limits = RequestLimits(max_prompt_tokens=4, max_new_tokens=9, max_sessions=2)
    server = StagedServer(stage().folder, [Link()], limits)
    for prompt, count, words in [
        ([], 3, "the prompt has 0 tokens; 1 to 4 are taken"),
        (PROMPT, 3, "the prompt has 5 tokens; 1 to 4 are taken"),
        ([1], 0, "max_tokens is 0; 1 to 9 can be asked for"),
        ([1], -1, "max_tokens is -1"),
        ([1], 10, "max_tokens is 10; 1 to 9"),
    ]:
        with pytest.raises(RequestError, match=words):
            server.submit(prompt, count)
    sessions = [server.submit([1, 2, 3, 4], 9), server.submit([1], 1)]
    with pytest.raises(BusyError, match="2 requests are open, which is all that is served; try again later"):
        server.submit([1], 1)
    server.start()
    assert [len(tokens_of(session)) for session in sessions] == [9, 1]
    until(lambda: server.status()["sessions"] == 0, "both places are free")
    assert len(tokens_of(server.submit([1], 1))) == 1
    server.close()


def test_a_cancelled_session_gives_its_place_back(stage, serve):
    server = serve(stage(), max_sessions=1)
    session = server.submit(PROMPT, 1000)
    assert first_event(session)
    with pytest.raises(BusyError):
        server.submit(PROMPT, 1)
    session.cancel()
    assert len(events_of(session)) < 999, "the iterator ends early, and without an error"
    until(lambda: server.status()["sessions"] == 0, "the place is free")
    assert len(tokens_of(server.submit(PROMPT, 2))) == 2


def test_one_bad_request_is_its_own_affair(stage, serve):
    server = serve(stage())
    good, bad = server.submit(PROMPT, 30), server.submit([10_000_000], 5)
    long = server.submit(PROMPT * 700, 900)
    with pytest.raises(RequestError, match="a token outside the vocabulary of 260"):
        events_of(bad)
    with pytest.raises(RequestError, match="exceed the model's context of 4096 tokens"):
        events_of(long)
    assert len(events_of(good)) == 30
    assert wait_stage(server, 3, TIMEOUT_S) and len(tokens_of(server.submit(PROMPT, 3))) == 3


def test_eight_clients_at_once(stage, serve):
    staged = stage()
    server = serve(staged, max_sessions=8)
    assert wait_stage(server, 3, TIMEOUT_S)

    def client(number: int) -> list[list[int]]:
        return [tokens_of(server.submit([number + 1, *PROMPT], 5 + number + again)) for again in range(2)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(client, range(8)))
    for number, (once, again) in enumerate(answers):
        expected = greedy(staged.folder, [number + 1, *PROMPT], 6 + number).exact()
        assert once == expected[:-1] and again == expected
    assert server.status()["sessions"] == 0
