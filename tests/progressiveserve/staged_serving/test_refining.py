"""A server whose weights become exact while it talks: in place, between two steps, under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest
import torch
from growing import PROMPT, TIMEOUT_S, events_of, part_path
from plain_tokens import check_greedy, generated, judged
from waiting import until, wait_stage

from firsttoken.engine.request import Sampling
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.staged_serving.staged_server import StagedServer
from firsttoken.progressiveserve.staged_serving.transitions import PrefillAgain, RequestBoundary
from firsttoken_extras.bitplanes.plane_plan import by_planes

IN_BF16 = 0.05  # of logits up to 3: three steps of bf16 there, as both sides round


def in_planes(stage, split: str):
    return stage(dtype=torch.bfloat16, plan=lambda shapes: by_planes(shapes, split))


@pytest.mark.parametrize("split", ["bits in three", "5 bits"])
def test_it_ends_with_the_exact_weights(stage, serve, split):
    staged = in_planes(stage, split)
    server = serve(staged)
    stages = len(staged.manifest.stages)
    assert wait_stage(server, stages, TIMEOUT_S)
    said = [event.token_id for event in events_of(server.submit(PROMPT, 16))]
    check_greedy(said, judged(staged.served.model, PROMPT, said), IN_BF16)
    status = server.status()
    assert status["state"] == "complete" and status["bytes_loaded"] == staged.manifest.bytes


@pytest.mark.parametrize("policy", [PrefillAgain(), RequestBoundary()])
def test_a_session_talks_on_while_its_weights_refine(stage, serve, policy):
    """It begins with the first bits, and ends under the last stage where it moves and under the first where it stays;
    whoever comes after it has exact answers from the first token on."""
    staged = in_planes(stage, "bits")
    path = part_path(staged, 2, 3)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    server = serve(staged, policy=policy)
    assert wait_stage(server, 1, TIMEOUT_S)
    session = server.submit(PROMPT, 400, upgrade=True)
    events = session.events()
    assert next(events).stage == 1
    until(lambda: "wrong sha256" in (server.status()["error"] or ""), "the damage is told, and stage 1 serves on")
    assert next(events).stage == 1
    path.write_bytes(content)
    assert wait_stage(server, 2, TIMEOUT_S)
    last = [event.stage for event in events][-1]
    assert last == (2 if isinstance(policy, PrefillAgain) else 1)
    check_greedy(
        [event.token_id for event in events_of(server.submit(PROMPT, 16))],
        generated(staged.served.model, PROMPT, 16),
        IN_BF16,
    )


def later_whole(parts: Sequence[str], planes: int) -> list[list[tuple[str, int]]]:
    """Both planes of one layer come in the second stage, beside the last one of the others."""
    waiting = "layer 03"
    second = [(part, plane) for part in parts for plane in range(planes) if plane or part == waiting]
    return [[(part, 0) for part in parts if part != waiting], second]


def test_planes_of_a_layer_that_come_together_come_again_after_a_failure(stage, serve, monkeypatch) -> None:
    monkeypatch.setattr(StagedServer, "_complete", lambda server, served: None)  # it lets go of the plain layers
    staged = stage(dtype=torch.bfloat16, plan=lambda shapes: by_planes(shapes, "bits", later_whole))
    path = part_path(staged, 2, -2)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    server = serve(staged)
    follower = server.submit(PROMPT, Sampling(4, verify="equal", drafts=False))
    until(lambda: "wrong sha256" in (server.status()["error"] or ""), "the damage is told, behind both planes")
    path.write_bytes(content)
    said = [event.token_id for event in events_of(follower) if not event.draft]
    check_greedy(said, judged(staged.served.model, PROMPT, said), IN_BF16)
    assert wait_stage(server, 2, TIMEOUT_S)
    exact = staged.served.model.model.layers[3].state_dict()
    layer = server._last.modules.base[3].state_dict()
    assert all(torch.equal(layer[name], weights) for name, weights in exact.items())


def test_a_server_that_begins_with_two_planes_ends_with_all(stage) -> None:
    staged = in_planes(stage, "bits in three")
    with closing(StagedServer(staged.folder, [Link()], RequestLimits(), begin=2)) as server:
        server.start()
        events = events_of(server.submit(PROMPT, Sampling(4, verify="equal", drafts=False)))
        said = [event.token_id for event in events if not event.draft]
        check_greedy(said, judged(staged.served.model, PROMPT, said), IN_BF16)
