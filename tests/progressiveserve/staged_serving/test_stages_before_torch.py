"""A growing server whose first stage answers by numpy: its engine goes on, and faults and ends are as without."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count

import pytest
import torch
from dying_link import DyingLink
from growing import (
    OURS,
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
from plain_tokens import check_greedy, generated
from waiting import until, wait_stage

from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest, write_manifest
from firsttoken.progressiveserve.loading import read_memory, stage_loader
from firsttoken.study import dtypes
from firsttoken.study.errors import BusyError, LinkError, ModelError
from firsttoken_cpu.before_torch import numpy_weights
from firsttoken_cpu.before_torch.numpy_answers import NumpyAnswers
from firsttoken_cpu.before_torch.numpy_model import NumpyModel
from firsttoken_cpu.before_torch.stage_weights import StageWeights
from firsttoken_cpu.fused import FusedLayer, PackedLinear
from firsttoken_serve.retrying_server import StagedService

pytestmark = pytest.mark.usefixtures("compiled_once")
BITS = {"dtype": torch.bfloat16, "planes": "bits"}


@pytest.fixture
def torch_comes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Torch is imported once this is set. Numpy waits for what ends its answers after 100 steps, or it would say the
    rest, too, on a machine whose cores others have."""
    right, comes, steps, over = StagedService._import, threading.Event(), count(), threading.Event()
    goes_on, end = NumpyAnswers._goes_on, NumpyAnswers.end
    monkeypatch.setattr(StagedService, "_import", lambda server: (comes.wait(TIMEOUT_S), right(server)))
    monkeypatch.setattr(NumpyAnswers, "end", lambda answers: (over.set(), end(answers)))
    monkeypatch.setattr(
        NumpyAnswers, "_goes_on", lambda *of: (next(steps) < 100 or over.wait(TIMEOUT_S)) and goes_on(*of)
    )
    yield comes
    comes.set()


@pytest.mark.parametrize("options", [{}, {"adapters": (1, 2)}, {"adapters": (1,), "kind": "qwen2", "tied": False}])
def test_the_engine_goes_on_with_what_numpy_has_begun(wide, serve, torch_comes, options):
    staged = wide(**options)
    link = Link()
    server = serve(staged, link, early=True)
    stays, moves = server.submit(PROMPT, 400), server.submit(PROMPT, 1000, upgrade=True)
    early = [first_event(stays) for _ in range(3)]
    assert {event.stage for event in early} == {1} and server.status()["state"] == "starting"
    torch_comes.set()
    said = [event.token_id for event in [*early, *events_of(stays)]]
    assert len(said) == 400
    check_stage(staged, 1, PROMPT, said[:60], 60)
    stages = [event.stage for event in events_of(moves, stage=3)]
    assert stages == sorted(stages) and {1, 3} <= {*stages}
    assert wait_stage(server, 3, TIMEOUT_S)
    check_greedy(tokens_of(server.submit(PROMPT, 8)), greedy(staged.folder, PROMPT, 8))
    assert server.status()["bytes_loaded"] == link.bytes_moved <= bytes_until(staged, 3), "nothing is read twice"


def test_bits_go_on_and_become_exact(wide, serve, torch_comes):
    staged = wide(**BITS)
    server = serve(staged, early=True)
    moves = server.submit(PROMPT, 1000, upgrade=True)
    assert first_event(moves).stage == 1
    torch_comes.set()
    assert [event.stage for event in events_of(moves, stage=2)][-1] == 2
    assert wait_stage(server, 2, TIMEOUT_S)
    check_greedy(tokens_of(server.submit(PROMPT, 8)), generated(staged.served.model, PROMPT, 8), 0.3)


@pytest.mark.parametrize("options", [{}, BITS])
def test_the_layers_of_stage_1_are_the_packed_ones(wide, serve, torch_comes, monkeypatch, options):
    """Its tokens take no longer than before, and layers that later bits change are not taken for these."""
    taken, right = [], StagedService._take_packed
    monkeypatch.setattr(StagedService, "_take_packed", lambda server, *of: taken.append(of[0]) or right(server, *of))
    server = serve(wide(**options), early=True, recover=False)
    assert first_event(server.submit(PROMPT, 3))
    torch_comes.set()
    assert wait_stage(server, 1, TIMEOUT_S)
    (weights,), (segment,) = taken, server._last.decoder.segments
    if weights.packer.dtype == "bfloat16" or not options:
        for number, panels in weights.panels.items():
            assert type(segment.modules[number]) is FusedLayer
            assert segment.modules[number].joint.panels.data_ptr() == panels["joint"].ctypes.data
    assert bool(server._fused) is not bool(options)


def test_who_began_with_the_kernels_ends_with_them(wide, serve, torch_comes, accelerated):
    """Where oneDNN multiplies, as with AMX: with what numpy says of the first stage; later stages are oneDNN's."""
    accelerated("onednn")
    staged = wide(dtype=torch.bfloat16)
    with closing(StageWeights(staged.folder, [Link()])) as weights:  # closed where the test is skipped, too
        if dtypes.serving(dtypes.AUTO, torch.bfloat16, "cpu") != torch.bfloat16 or weights.packer.dtype != "bfloat16":
            pytest.skip("this CPU does not compute in bf16")
        model = NumpyModel(weights, context=600)
        wanted = [model.next_token(PROMPT)]
        while len(wanted) < 400:
            wanted.append(model.next_token(wanted[-1:]))
    server = serve(staged, early=True)
    stays = server.submit(PROMPT, 400)
    said = [first_event(stays).token_id for _ in range(3)]
    torch_comes.set()
    assert wait_stage(server, 3, TIMEOUT_S)
    assert said + [event.token_id for event in events_of(stays)] == wanted
    (segment,) = server._last.decoder.segments
    until(lambda: all(type(layer) is FusedLayer for layer in segment.modules), "all fused")
    assert {type(layer.down) for layer in segment.modules} == {PackedLinear}


def test_the_second_stage_is_read_while_torch_is_imported(wide, serve, torch_comes):
    staged, link = wide(), Link()
    server = serve(staged, link, early=True)
    until(lambda: link.bytes_moved == bytes_until(staged, 2), "both stages are read")
    assert server.status()["stage"] == 0 and tokens_of(server.submit(PROMPT, 3))
    torch_comes.set()
    assert wait_stage(server, 3, TIMEOUT_S)
    assert link.bytes_moved == bytes_until(staged, 3)


def test_what_is_merged_later_waits_for_memory(wide, serve, torch_comes, monkeypatch):
    """It is read as far as there is memory for it, and all the same ends with its server."""
    monkeypatch.setattr(stage_loader, "BEFORE_TORCH", 20_000)
    staged, link = wide(**BITS), Link()
    server = serve(staged, link, early=True)
    first = bytes_until(staged, 1)
    until(lambda: link.bytes_moved > first, "the second stage is being read")
    assert link.bytes_moved < bytes_until(staged, 2)
    torch_comes.set()
    assert wait_stage(server, 2, TIMEOUT_S) and link.bytes_moved == bytes_until(staged, 2)
    assert read_memory.AHEAD > 20_000


def test_a_bad_shard_of_stage_1(wide, serve):
    """Whoever is open hears of it once the status says so, and the next ones are served when it is mended."""
    staged = wide()
    spoilt = Spoilt(part_path(staged, 1, 2))
    server = serve(staged, early=True)
    session = server.submit(PROMPT, 4)
    with pytest.raises(ModelError, match=r"layer 01: 002-layer-01\.safetensors"):
        events_of(session)
    status = server.status()
    assert (status["stage"], status["state"]) == (0, "degraded") and "layer 01" in status["error"]
    spoilt.mend()
    assert wait_stage(server, 3, TIMEOUT_S)
    check_greedy(tokens_of(server.submit(PROMPT, 8)), greedy(staged.folder, PROMPT, 8))


def test_a_folder_that_is_staged_anew_meanwhile(wide, serve, torch_comes):
    """What numpy has read is of another model then: its answers end, and the next ones are the new model's."""
    staged = wide()
    server = serve(staged, early=True, recover=False)
    session = server.submit(PROMPT, 1000)
    assert first_event(session)
    manifest = read_manifest(staged.folder)
    write_manifest(staged.folder, replace(manifest, plan_sha256="ab" * 32))
    torch_comes.set()
    with pytest.raises(ModelError, match="was staged anew while it was read; it is read again"):
        events_of(session)
    assert wait_stage(server, 1, TIMEOUT_S) and len(tokens_of(server.submit(PROMPT, 4))) == 4


def test_a_link_that_dies_in_the_middle_of_stage_1(wide, serve):
    staged = wide(adapters=(1,))
    link = DyingLink(bytes_until(staged, 1) // 2)
    server = serve(staged, link, early=True, threads=1)
    session = server.submit(PROMPT, 4)
    with pytest.raises(LinkError, match="the link died after"):
        events_of(session)
    assert server.status()["state"] == "degraded"
    link.restore()
    assert wait_stage(server, 3, TIMEOUT_S)
    check_greedy(tokens_of(server.submit(PROMPT, 8)), greedy(staged.folder, PROMPT, 8))


@pytest.mark.parametrize("asked", [True, False])
def test_closing_while_stage_1_is_on_its_way(wide, serve, asked):
    staged, link = wide(), Held(1)
    server = serve(staged, link, early=True, threads=1)
    session = server.submit(PROMPT, 1000) if asked else None
    until(lambda: link.bytes_moved > 0, "it reads")
    closing = threading.Thread(target=server.close)
    closing.start()
    until(server._closing.is_set, "it is being closed")
    link.go.set()
    closing.join(TIMEOUT_S)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(OURS)]
    if session is not None:
        with pytest.raises(BusyError, match="the server was closed"):
            events_of(session)


def test_closing_before_torch(wide, serve, torch_comes):
    """In the middle of an answer of numpy, while the second stage waits for memory."""
    staged = wide(**BITS)
    server = serve(staged, early=True)
    session = server.submit(PROMPT, 1000)
    assert first_event(session)
    closing = threading.Thread(target=server.close)
    closing.start()
    until(server._closing.is_set, "it is being closed")
    torch_comes.set()
    closing.join(TIMEOUT_S)
    with pytest.raises(BusyError, match="the server was closed"):
        events_of(session)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(OURS)]


def test_an_adapter_that_the_kernels_do_not_add(wide, serve, monkeypatch, capfd):
    """Whoever has asked by then is answered by torch, and hears of nothing."""
    monkeypatch.setattr(numpy_weights, "packed_adapter", lambda *told: None)
    staged = wide(adapters=(1,))
    server = serve(staged, early=True, recover=False)
    check_stage(staged, 1, PROMPT, tokens_of(server.submit(PROMPT, 8)), 8)
    assert not any("failed" in event["what"] for event in server.status()["events"])
    assert "starts with torch: its adapter's halves do not fit the panels of the kernels\n" in capfd.readouterr().err


def test_a_stage_that_needs_torch_waits_for_it(wide, serve):
    staged = wide(dtype=torch.bfloat16, planes="8 bits")
    server = serve(staged, early=True)
    assert len(tokens_of(server.submit(PROMPT, 4))) == 4 and wait_stage(server, 2, TIMEOUT_S)
    check_greedy(tokens_of(server.submit(PROMPT, 8)), generated(staged.served.model, PROMPT, 8), 0.3)
