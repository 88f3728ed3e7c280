"""A growing server goes on whatever happens to files, links and transitions, and says what has happened."""

from __future__ import annotations

import time

import pytest
from dying_link import DyingLink
from growing import (
    PROMPT,
    TIMEOUT_S,
    Spoilt,
    bytes_until,
    check_stage,
    events_of,
    first_event,
    greedy,
    part_path,
    tokens_of,
)
from plain_tokens import check_greedy
from waiting import until, wait_stage

from firsttoken.progressiveserve.checkpoint.manifest import MANIFEST
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.staged_serving.transitions import Naive
from firsttoken.study.errors import ModelError


def test_a_bad_shard_of_stage_2(stage, serve):
    staged = stage(adapters=(1, 2))
    spoilt = Spoilt(part_path(staged, 2, 0))
    server = serve(staged)
    until(lambda: server.status()["state"] == "degraded", "the failure is told")
    status = server.status()
    assert status["stage"] == 1 and status["error"].startswith("stage 2: layer 02: 000-layer-02.safetensors")
    assert "\n" not in status["error"]
    until(lambda: sum("failed" in e["what"] for e in server.status()["events"]) > 1, "it is tried again")
    check_stage(staged, 1, PROMPT, tokens_of(server.submit(PROMPT, 8)), 8)
    spoilt.mend()
    assert wait_stage(server, 3, TIMEOUT_S)
    assert server.status()["state"] == "complete" and server.status()["error"] is None
    check_greedy(tokens_of(server.submit(PROMPT, 8)), greedy(staged.folder, PROMPT, 8))


def test_a_torn_shard_while_eight_sessions_run(stage, serve):
    """They hear nothing of it: those that move go on as they began until the file is mended, and all end whole."""
    staged = stage(adapters=(1, 2))
    torn = Spoilt(part_path(staged, 2))
    server = serve(staged, max_sessions=8, max_new_tokens=4000)
    prompts = [[number + 1, *PROMPT] for number in range(8)]
    sessions = [server.submit(prompt, 4000, number < 4) for number, prompt in enumerate(prompts)]
    for session in sessions:
        assert first_event(session).stage == 1
    until(lambda: server.status()["state"] == "degraded", "the failure is told")
    error = server.status()["error"]
    assert error.startswith("stage 2: layer ") and "has a wrong sha256; copy it again" in error and "\n" not in error
    for number in (4, 5, 6, 7):
        sessions[number].cancel()
        said = [event.token_id for event in events_of(sessions[number])]
        assert len(said) < 3999
    torn.mend()
    for session in sessions[:4]:
        stages = [event.stage for event in events_of(session, stage=3)]
        assert stages == sorted(stages) and stages[-1] == 3
    until(lambda: server.status()["sessions"] == 0, "all places are free")
    check_greedy(tokens_of(server.submit(PROMPT, 8)), greedy(staged.folder, PROMPT, 8))


def test_a_link_that_dies_in_the_middle_of_stage_2(stage, serve):
    staged = stage(adapters=(1, 2))
    middle = (bytes_until(staged, 1) + bytes_until(staged, 2)) // 2
    link = DyingLink(middle)
    server = serve(staged, link)
    until(lambda: server.status()["state"] == "degraded", "the failure is told")
    assert server.status()["stage"] == 1 and f"the link died after {middle} bytes" in server.status()["error"]
    error = server.status()["error"]
    assert error.startswith("stage 2: ") and " cannot be read: the link died" in error
    check_stage(staged, 1, PROMPT, tokens_of(server.submit(PROMPT, 8)), 8)
    link.restore()
    assert wait_stage(server, 3, TIMEOUT_S)
    check_greedy(tokens_of(server.submit(PROMPT, 8)), greedy(staged.folder, PROMPT, 8))


@pytest.mark.parametrize("missing", ["shard", "manifest", "config", "adapter"])
def test_stage_1_is_not_there_yet(stage, serve, missing):
    staged = stage(adapters=(1,))
    adapter = staged.folder / staged.manifest.stages[0].adapter.folder / "adapter_model.safetensors"
    names = {"manifest": staged.folder / MANIFEST, "config": staged.folder / "config.json", "adapter": adapter}
    path = names.get(missing) or part_path(staged, 1, 3)
    away = path.with_name("away")
    path.rename(away)
    server = serve(staged)
    session = server.submit(PROMPT, 4)
    with pytest.raises(ModelError, match=path.name.replace(".", r"\.")):
        events_of(session)
    status = server.status()
    assert (status["stage"], status["state"]) == (0, "degraded") and path.name in status["error"]
    away.rename(path)
    assert wait_stage(server, 1, TIMEOUT_S)
    assert tokens_of(server.submit(PROMPT, 4, upgrade=False))
    assert wait_stage(server, 3, TIMEOUT_S) and server.status()["error"] is None


def test_who_is_told_of_a_failure_finds_it_in_the_status(stage, serve, monkeypatch):
    """However long the server takes to hear of it itself."""
    staged, wait = stage(), StageLoad.wait
    monkeypatch.setattr(StageLoad, "wait", lambda load: (time.sleep(0.3), wait(load))[1])
    Spoilt(part_path(staged, 1, 1))
    server = serve(staged)
    with pytest.raises(ModelError, match="has a wrong sha256"):
        events_of(server.submit(PROMPT, 4))
    assert "has a wrong sha256" in server.status()["error"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_failure_that_nobody_thought_of(stage, serve, number, monkeypatch):
    """No error of ours when a layer is put in its place, but no reason to leave clients waiting for ever either."""
    staged, to_device = stage(), StageLoad._to_device
    broken = staged.manifest.stages[number - 1].parts[1]

    def fail(self, part, made):
        if part == broken:
            raise RuntimeError("an odd byte\nand more")
        return to_device(self, part, made)

    monkeypatch.setattr(StageLoad, "_to_device", fail)
    server = serve(staged)
    until(lambda: server.status()["state"] == "degraded", "the failure is told")
    assert server.status()["stage"] == number - 1
    assert server.status()["error"].startswith(f"stage {number}: ") and "\n" not in server.status()["error"]
    if number == 1:
        monkeypatch.undo()
        assert wait_stage(server, 3, TIMEOUT_S)
    assert len(tokens_of(server.submit(PROMPT, 4))) == 4


class Failing(Naive):
    """A transition that meets what it does not expect, such as a device without memory left."""

    name = "failing"

    def redo(self, old, new) -> range:
        raise RuntimeError("out of memory")


def test_a_transition_that_fails_ends_that_session_only(stage, serve):
    staged = stage()
    link = DyingLink(bytes_until(staged, 1))
    server = serve(staged, link, Failing(), max_new_tokens=4000)
    assert wait_stage(server, 1, TIMEOUT_S)
    pinned, moving = server.submit(PROMPT, 100), server.submit(PROMPT, 4000, upgrade=True)
    assert first_event(moving)
    link.restore()
    with pytest.raises(RuntimeError, match="out of memory"):
        events_of(moving)
    assert len(events_of(pinned)) == 100
    assert wait_stage(server, 3, TIMEOUT_S)
    check_greedy(tokens_of(server.submit(PROMPT, 4)), greedy(staged.folder, PROMPT, 4))


def test_a_failure_of_stage_3_is_not_forgotten_while_stage_2_takes_over(stage, serve):
    staged = stage()
    part_path(staged, 3).unlink()
    link = DyingLink(bytes_until(staged, 1))
    server = None

    class Slow(Naive):
        """Carries on when stage 3 has failed."""

        def redo(self, old, new) -> range:
            until(lambda: "stage 3" in (server.status()["error"] or ""), "stage 3 fails")
            return super().redo(old, new)

    server = serve(staged, link, Slow(), retry_s=0.2, max_new_tokens=4000)
    assert wait_stage(server, 1, TIMEOUT_S)
    session = server.submit(PROMPT, 4000, upgrade=True)
    assert first_event(session)
    server._retry_s = TIMEOUT_S  # of stage 3: one failure, and a long time until the next
    link.restore()
    assert wait_stage(server, 2, TIMEOUT_S)
    session.cancel()
    assert server.status()["state"] == "degraded" and "stage 3" in server.status()["error"]
