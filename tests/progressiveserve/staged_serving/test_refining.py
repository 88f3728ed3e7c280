"""A server whose weights become exact while it talks: in place, between two steps, under every policy."""

from __future__ import annotations

import pytest
import torch
from growing import PROMPT, TIMEOUT_S, events_of, part_path
from plain_tokens import check_greedy, generated, judged
from waiting import until, wait_stage

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
