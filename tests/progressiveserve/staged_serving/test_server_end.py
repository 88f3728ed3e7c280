"""A growing server that is closed, whenever that is, leaves no thread, no reading and no client that waits."""

from __future__ import annotations

import threading

import pytest
from growing import OURS, PROMPT, TIMEOUT_S, bytes_until, events_of, first_event, part_path
from loads import held_until_closed
from waiting import until, wait_stage

from firsttoken.engine.async_engine import Stream
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken.study.errors import BusyError, ModelError


@pytest.mark.parametrize("when", ["stage 1", "stage 2", "complete"])
def test_closing_ends_everything(stage, serve, when, monkeypatch):
    staged = stage()
    marks = {"stage 1": 1, "stage 2": bytes_until(staged, 1)}
    link = held_until_closed(monkeypatch, marks[when]) if when in marks else Link()
    server = serve(staged, link, threads=1, max_new_tokens=4000)
    if when != "stage 1":
        assert wait_stage(server, 1 if when == "stage 2" else 3, TIMEOUT_S)
    sessions = [server.submit(PROMPT, 4000), server.submit(PROMPT, 4000, upgrade=True)]
    if when != "stage 1":
        assert first_event(sessions[0])
    else:
        until(lambda: link.bytes_moved > 0, "it reads")
    server.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(OURS)]
    for session in sessions:
        with pytest.raises(BusyError, match="the server was closed"):
            events_of(session)
    with pytest.raises(BusyError, match="the server is shutting down"):
        server.submit(PROMPT, 1)
    moved = link.bytes_moved
    assert moved < bytes_until(staged, int(when[-1])) if when != "complete" else moved, "nothing more is waited for"
    assert not any("failed" in event["what"] for event in server.status()["events"]), "and is no failure"
    server.close()
    assert link.bytes_moved == moved


def test_closing_during_a_pause_between_two_tries(stage, serve):
    staged = stage()
    part_path(staged, 1).unlink()
    server = serve(staged, retry_s=1000)
    until(lambda: server.status()["state"] == "degraded", "the failure is told")
    waiting = server.submit(PROMPT, 3)
    server.close()
    with pytest.raises(BusyError, match="the server was closed"):
        events_of(waiting)


def test_closing_what_never_started(stage):
    server = StagedServer(stage().folder, [Link()])
    server.close()
    with pytest.raises(BusyError):
        server.submit(PROMPT, 1)


def test_alone_it_ends_with_the_first_load_that_fails(stage):
    staged = stage()
    part_path(staged, 2).unlink()
    server = StagedServer(staged.folder, [Link()])
    session = server.submit(PROMPT, 1000)
    server.start()
    until(lambda: server.status()["state"] == "failed", "the failure is told")
    for ask in (lambda: events_of(session), lambda: server.submit(PROMPT, 1)):
        with pytest.raises(ModelError, match="is missing in"):
            ask()
    server.close()
    assert "is missing in" in server.status()["error"]


def test_clients_that_come_while_it_closes_are_not_forgotten(stage, serve):
    staged = stage()
    server = serve(staged, max_sessions=1000)
    sessions: list[Stream] = []

    def client() -> None:
        try:
            while True:
                sessions.append(server.submit(PROMPT, 1000))
        except BusyError:
            pass

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    server.close()
    for thread in threads:
        thread.join(TIMEOUT_S)
    for session in sessions:
        with pytest.raises(BusyError):
            events_of(session)
