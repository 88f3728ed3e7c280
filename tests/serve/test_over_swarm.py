"""A service over a swarm: of the folder, which may be staged, it keeps the ends alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from services import tiny_model, tiny_tokenizer

from firsttoken.assets.empty_model import build_on_meta
from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.petals.local_swarm import varied_model
from firsttoken.progressiveserve.checkpoint.plan import staged
from firsttoken.progressiveserve.checkpoint.sources import FolderSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study.errors import StageError, SwarmError
from firsttoken_serve.service_config import ServiceConfig

pytest.importorskip("grpc")

from swarms import Here, servers_imported

from firsttoken_serve.swarm.over_swarm import SwarmServer

ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    tiny_model().to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(plain, tmp_path) -> Path:
    source = FolderSource(plain)
    write_staged(source, staged(source.names, StagePlan.from_block(6, range(1, 5))), folder := tmp_path / "model")
    return folder


@pytest.fixture(scope="module")
def imported() -> Iterator[None]:
    with servers_imported():
        yield


def test_it_answers_for_a_staged_folder(checkpoint, imported) -> None:
    with closing(Here(checkpoint)) as here:
        address = here.serve((0, 6))[0].record.address
        servers = [
            SwarmServer(ServiceConfig(checkpoint, swarm=(address,)), RequestLimits(), True),
            SwarmServer(ServiceConfig(here.folder, swarm=(address,)), RequestLimits(), False),
        ]
        answers = [list(server.submit([1, 2, 3], 8)) for server in servers]
        assert answers[0] == answers[1] and servers[0].status()["state"] == "complete"
        for server in servers:
            server.close()


def test_servers_of_another_model_are_not_asked(checkpoint, tmp_path, imported) -> None:
    varied_model().save_pretrained(tmp_path / "other")
    with closing(Here(tmp_path / "other")) as here:
        address = here.serve((0, 6))[0].record.address
        with pytest.raises(SwarmError, match="1 of another model"):
            SwarmServer(ServiceConfig(checkpoint, swarm=(address,), swarm_step_s=1.0), RequestLimits(), True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_a_device_that_is_not_here(plain) -> None:
    with pytest.raises(StageError, match="no device 'cuda' can be used here"):
        SwarmServer(ServiceConfig(plain, swarm=("127.0.0.1:1",), device="cuda"), RequestLimits(), False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("in_stages", [False, True])
def test_the_ends_compute_on_a_gpu(plain, checkpoint, imported, in_stages) -> None:
    with closing(Here(plain)) as here:
        address = here.serve((0, 6))[0].record.address
        folder = checkpoint if in_stages else plain
        server = SwarmServer(ServiceConfig(folder, swarm=(address,), device="cuda"), RequestLimits(), in_stages)
        assert len(list(server.submit([1, 2, 3], 8))) == 8
        server.close()


def test_what_surrounds_the_blocks_is_on_the_device_of_the_ends(plain) -> None:
    """Here one without memory, as a GPU need not be there: ids, positions, hidden states and logits are on it."""

    class Blocks:
        layers = range(6)

        def run(self, hidden, step):
            entered.update({hidden.device.type, step.ids.device.type, step.positions.device.type})
            return hidden

    entered: set[str] = set()
    request = Request(0, [5, 6, 7], Sampling(1), 0.0)
    request.blocks = [3]
    model = build_on_meta(plain, torch.bfloat16)
    model.model.rotary_emb.to("meta")
    executor = LiveExecutor(model, 8, segments=[Blocks()], elsewhere=True)
    step = executor.plan(executor.version, [ScheduledChunk(request, 0, 3, 0)])
    with torch.inference_mode():
        assert executor.version.decoder.logits(step).device.type == "meta"
    assert entered == {"meta"}
    executor.close()


def test_a_client_keeps_no_memory_for_keys_and_values() -> None:
    pool = KVPool(KVShape(32, 8, 128, torch.float32), 1 << 30, elsewhere=True)
    assert pool.rows.is_meta and pool.blocks == 1 << 30 and pool.device.type == "cpu"
