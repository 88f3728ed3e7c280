"""What may be asked of a growing server, by how many, and whom it concerns when it may not."""

from __future__ import annotations

import pytest
from growing import PROMPT, TIMEOUT_S, events_of, tokens_of
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
