"""The server answers while the model grows: at each stage, before the first byte, across every stage change."""

from __future__ import annotations

import json
import time

import pytest
from coarse_plans import coarse_first
from dying_link import DyingLink
from growing import (
    MOVING,
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
from loads import Held
from plain_tokens import Plain, check_greedy, judged
from torch import nn
from waiting import until, wait_stage

from firsttoken.engine.async_engine import TokenEvent
from firsttoken.progressiveserve.base_model import at_stage
from firsttoken.progressiveserve.checkpoint.plan import single_stage
from firsttoken.progressiveserve.loading import stage_loader
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken.progressiveserve.staged_serving.transitions import FromBoundary, Naive, PrefillAgain, Transition
from firsttoken_cpu.fused import FusedLayer
from firsttoken_cpu.lean.layers import LeanLayer
from firsttoken_cpu.native.library import kernels


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)])
def test_the_whole_model_answers_as_stock_transformers_does(stage, serve, kind, tied):
    staged = stage(kind, tied, adapters=(1, 2))
    server = serve(staged)
    assert wait_stage(server, 3, TIMEOUT_S)
    status = server.status()
    assert (status["stage"], status["stages"], status["state"], status["error"]) == (3, 3, "complete", None)
    assert status["bytes_loaded"] == status["bytes_total"] == bytes_until(staged, 3)
    session = server.submit(PROMPT, 24)
    events = events_of(session)
    check_greedy([event.token_id for event in events], greedy(staged.folder, PROMPT, 24))
    assert {event.stage for event in events} == {3}
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert server.status()["sessions"] == 0


def present(server: StagedServer) -> list[nn.Module]:
    """The layers that the newest stage computes with now."""
    (segment,) = server._last.decoder.segments
    return [layer for layer in segment.modules if not isinstance(layer, PassLayer)]


@pytest.mark.skipif(kernels() is None, reason="no compiler builds the kernels here")
@pytest.mark.parametrize("adapters", [(), (1, 2)])
def test_the_layers_of_an_early_stage_are_fused_beside_the_plain_ones(stage, serve, adapters):
    """With the stage's adapter; those that it shares with the next stage are packed once, and then only adapted."""
    staged = stage(adapters=adapters)
    spoilt, last = Spoilt(part_path(staged, 2)), Spoilt(part_path(staged, 3))
    server = serve(staged, retry_s=0.02)
    until(lambda: wait_stage(server, 1, 0) and all(type(layer) is FusedLayer for layer in present(server)), "all fused")
    first = {layer.attention.layer_idx: layer.joint for layer in present(server)}
    check_stage(staged, 1, PROMPT, tokens_of(server.submit(PROMPT, 16)), 16)
    plain = [layer for layer in server._last.modules.base if not isinstance(layer, PassLayer)]
    assert all(type(layer) is LeanLayer for layer in plain)
    spoilt.mend()
    assert wait_stage(server, 2, TIMEOUT_S)
    for layer in present(server):
        if type(layer) is FusedLayer and (old := first.get(layer.attention.layer_idx)):
            assert layer.joint.panels.data_ptr() == old.panels.data_ptr()
            assert (layer.joint.struct.adapter.a != old.struct.adapter.a) == bool(adapters)
    last.mend()
    assert wait_stage(server, 3, TIMEOUT_S)
    check_greedy(tokens_of(server.submit(PROMPT, 24)), greedy(staged.folder, PROMPT, 24))
    until(lambda: not server._fused, "the plain layers are let go")


@pytest.mark.skipif(kernels() is None, reason="no compiler builds the kernels here")
def test_without_room_for_them_twice_layers_are_not_fused_beside_the_plain_ones(stage, serve, monkeypatch):
    monkeypatch.setattr(stage_loader, "free_memory_bytes", lambda: 1)
    staged = stage(adapters=(1,))
    server = serve(staged, recover=False)
    check_stage(staged, 1, PROMPT, tokens_of(server.submit(PROMPT, 16)), 16)
    assert wait_stage(server, 1, TIMEOUT_S) and not server._fused
    assert not any(type(layer) is FusedLayer for layer in present(server))


def test_a_request_that_comes_before_the_first_byte(stage, serve):
    """It computes behind the layers as they arrive, from an embedding that is not there yet."""
    staged = stage(adapters=(1,))
    link = Held(0)
    server = serve(staged, link, recover=False)
    sessions = [server.submit(PROMPT, 12), server.submit(PROMPT[:2], 3, upgrade=True)]
    assert server.status()["state"] in ("starting", "loading") and server.status()["stage"] == 0
    link.go.set()
    check_stage(staged, 1, PROMPT, tokens_of(sessions[0]), 12)
    check_stage(staged, 1, PROMPT[:2], tokens_of(sessions[1]), 3)
    assert wait_stage(server, 1, TIMEOUT_S)
    assert not wait_stage(server, 2, 0.05)
    assert server.status()["state"] == "complete", "it was asked to stay there"
    assert link.bytes_moved == bytes_until(staged, 1)


def across_both(staged, serve, policy: Transition) -> tuple[StagedServer, list[list[TokenEvent]]]:
    """A pinned session and three that move on, open while the wire is dead after stage 1 and stage 3 has a bad shard.

    Each fault is mended when all have seen the stage before, and they go on until the last stage has been seen.
    """
    link, spoilt = DyingLink(bytes_until(staged, 1)), Spoilt(part_path(staged, 3))
    server = serve(staged, link, policy, max_new_tokens=4000)
    assert wait_stage(server, 1, TIMEOUT_S)
    sessions = [server.submit(PROMPT, 4000)] + [server.submit(prompt, 4000, upgrade=True) for prompt in MOVING]
    heads = [first_event(session) for session in sessions]
    link.restore()
    assert wait_stage(server, 2, TIMEOUT_S)
    moved = [session.request for session in sessions[1:]]  # each computes its context again, a part in every step
    until(lambda: all(one.version.stage == 2 and one.redo is None for one in moved), "they have moved")
    said = [len(one.times_s) for one in moved]
    until(lambda: all(len(one.times_s) > n for one, n in zip(moved, said, strict=True)), "stage 2 has spoken")
    spoilt.mend()
    assert wait_stage(server, 3, TIMEOUT_S)
    answers = [[head, *events_of(session, 3)] for head, session in zip(heads[1:], sessions[1:], strict=True)]
    sessions[0].cancel()
    return server, [[heads[0], *events_of(sessions[0])], *answers]


def check_moved(staged, prompt: list[int], answer: list[TokenEvent]) -> None:
    """Hold each token to the stage that said it, as if that had begun it all."""
    said = [event.token_id for event in answer]
    for number in (1, 2, 3):
        places = [i for i, event in enumerate(answer) if event.stage == number]
        with at_stage(staged.served, number, staged.adapters.get(number)) as model:
            plain = judged(model, prompt, said)
        told = Plain([said[i] for i in places], plain.logits[places])
        assert check_greedy(told.tokens, told) == len(places) > 0


@pytest.mark.parametrize("policy", [PrefillAgain(), FromBoundary()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("adapters", [(), (1, 2)], ids=["bare", "healed"])
def test_open_sessions_across_both_transitions(stage, serve, policy, adapters):
    staged = stage(adapters=adapters)
    server, (pinned, *moving) = across_both(staged, serve, policy)
    assert {event.stage for event in pinned} == {1}
    check_stage(staged, 1, PROMPT, [event.token_id for event in pinned], len(pinned))
    for prompt, answer in zip(MOVING, moving, strict=True):
        stages = [event.stage for event in answer]
        assert stages == sorted(stages) and set(stages) == {1, 2, 3}
        check_moved(staged, prompt, answer)
    moved = [event for event in server.status()["events"] if "moved over" in event["what"]]
    assert sorted(event["stage"] for event in moved) == [2, 2, 2, 3, 3, 3]
    assert all(event["took_s"] > 0 for event in moved)
    assert not any("took_s" in event for event in server.status()["events"] if event not in moved)
    assert server.status()["state"] == "complete" and server.status()["error"] is None
    check_greedy(tokens_of(server.submit(PROMPT, 12)), greedy(staged.folder, PROMPT, 12))


def test_a_transition_that_is_wrong_shows_in_the_tokens(stage, serve):
    """The control of the one above."""
    staged = stage()
    _, (_, *moving) = across_both(staged, serve, Naive())
    for prompt, answer in zip(MOVING, moving, strict=True):
        with pytest.raises(AssertionError, match="wins by"):
            check_moved(staged, prompt, answer)


def test_the_story_of_a_start(stage, serve):
    staged = stage()
    begun = time.monotonic()
    server = serve(staged)
    assert wait_stage(server, 3, TIMEOUT_S)
    lasted = time.monotonic() - begun
    events = server.status()["events"]
    told = [(event["stage"], event["what"]) for event in events]
    assert told[:4] == [(0, "started"), (1, "loading"), (1, "arrived"), (1, "serving")]
    assert set(told[4:]) <= {(k, what) for k in (2, 3) for what in ("loading", "arrived", "serving")}
    assert told[-1] == (3, "serving") and (2, "arrived") in told and (3, "arrived") in told
    times = [event["at_s"] for event in events]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= lasted
    assert json.loads(json.dumps(server.status())) == server.status()
    assert server.status()["bytes_loaded"] == server.status()["bytes_total"] == staged.manifest.bytes


def test_a_plan_of_one_stage(stage, serve):
    staged = stage(plan=lambda names: single_stage(names, 6))
    server = serve(staged)
    session = server.submit(PROMPT, 10, upgrade=True)
    check_greedy(tokens_of(session), greedy(staged.folder, PROMPT, 10))
    assert wait_stage(server, 1, TIMEOUT_S) and not wait_stage(server, 2, 0.02)
    assert (server.status()["stages"], server.status()["state"]) == (1, "complete")


def test_coarse_first(stage, serve):
    staged = stage(plan=lambda names: coarse_first(names, 6))
    link = DyingLink(bytes_until(staged, 1))
    server = serve(staged, link, max_new_tokens=4000)
    assert wait_stage(server, 1, TIMEOUT_S)
    pinned, moving = server.submit(PROMPT, 4000), server.submit(PROMPT, 4000, upgrade=True)
    assert first_event(pinned).stage == first_event(moving).stage == 1
    link.restore()
    assert wait_stage(server, 2, TIMEOUT_S)
    assert {event.stage for event in events_of(moving, 2)} == {1, 2}
    pinned.cancel()
    assert {event.stage for event in events_of(pinned)} == {1}
    check_greedy(tokens_of(server.submit(PROMPT, 12)), greedy(staged.folder, PROMPT, 12))
