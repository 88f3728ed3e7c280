"""A service over a swarm whose model comes in stages: of the checkpoint its ends are read, over its link, and nothing
else."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from coarse_plans import coarse_first
from dying_link import DyingLink
from services import tiny_model, tiny_tokenizer

from firsttoken.assets.empty_model import build_on_meta
from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.petals.local_swarm import varied_model
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, staged
from firsttoken.progressiveserve.checkpoint.sources import FolderSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study.errors import LinkError, ModelError, StageError, SwarmError
from firsttoken_extras.bitplanes.plane_plan import by_planes
from firsttoken_serve.served_model import check_model
from firsttoken_serve.service_config import ServiceConfig

pytest.importorskip("grpc")

from swarms import Here, servers_imported

from firsttoken.petals.checkpoint_blocks import load_ends, model_sha256
from firsttoken_serve.swarm.over_swarm import SwarmServer, staged_ends

ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    tiny_model().to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def planned(source: FolderSource, kind: str) -> LoadPlan:
    if kind == "layers":
        return staged(source.names, StagePlan.from_block(6, range(1, 5)))
    return by_planes(source.shapes, "bits") if kind == "planes" else coarse_first(source.names, 6)


@pytest.fixture
def checkpoint(plain, tmp_path) -> tuple[Path, list[Path], int]:
    """In stages, the files of all layers gone; those of the ends, and their bytes."""
    source = FolderSource(plain)
    manifest = write_staged(source, planned(source, "layers"), folder := tmp_path / "model")
    parts = [part for stage in manifest.stages for part in stage.parts]
    for part in parts:
        if part.layer is not None:
            (folder / part.file).unlink()
    ends = [part for part in parts if part.layer is None]
    return folder, [folder / part.file for part in ends], sum(part.bytes for part in ends)


@pytest.fixture(scope="module")
def imported() -> Iterator[None]:
    with servers_imported():
        yield


def test_nothing_but_the_ends_is_read(checkpoint) -> None:
    folder, _, ends = checkpoint
    check_model(ServiceConfig(folder, swarm=("127.0.0.1:1",)))
    link = Link(LinkConfig(0.01))
    begun = time.monotonic()
    found = staged_ends(folder, link, 2, torch.float32)
    assert link.bytes_moved == ends
    assert time.monotonic() - begun > 0.9 * link.bytes_moved / link.config.bytes_per_s - 0.02
    assert all(one.is_meta for one in found.model.model.layers.parameters())


@pytest.mark.parametrize("kind", ["layers", "coarse", "planes"])
def test_the_ends_are_those_of_the_whole_model(plain, tmp_path, kind) -> None:
    """Whatever the stages bring of them, one after the other; and the swarm may have either folder."""
    source = FolderSource(plain)
    write_staged(source, planned(source, kind), folder := tmp_path / "model")
    found, whole = staged_ends(folder, Link(), 2, torch.float32), load_ends(plain, torch.float32)
    mine, right = dict(found.model.named_parameters()), dict(whole.named_parameters())
    assert all(torch.equal(mine[name], right[name]) for name in ENDS if name in right)
    assert model_sha256(plain) in found.names
    assert kind == "planes" or found.names[0] == model_sha256(folder)


@pytest.mark.parametrize("of", ["stages", "source"])
def test_it_answers_over_servers_of_either_folder(plain, checkpoint, tmp_path, imported, of) -> None:
    folder, source = checkpoint[0], FolderSource(plain)
    write_staged(source, planned(source, "layers"), whole := tmp_path / "whole" / "model")
    with closing(Here(whole if of == "stages" else plain)) as here:
        address = here.serve((0, 6))[0].record.address
        config = ServiceConfig(folder, swarm=(address,), gbit_per_s=1.0)
        server = SwarmServer(config, RequestLimits(), True)
        plainly = SwarmServer(ServiceConfig(here.folder, swarm=(address,)), RequestLimits(), False)
        said = [list(one.submit([1, 2, 3], 8)) for one in (server, plainly)]
        assert said[0] == said[1]
        assert server.status()["state"] == "complete"
        server.close()
        plainly.close()


def test_servers_of_another_model_are_not_asked(checkpoint, tmp_path, imported) -> None:
    varied_model().save_pretrained(tmp_path / "other")
    with closing(Here(tmp_path / "other")) as here:
        address = here.serve((0, 6))[0].record.address
        with pytest.raises(SwarmError, match="1 of another model"):
            SwarmServer(ServiceConfig(checkpoint[0], swarm=(address,), swarm_step_s=1.0), RequestLimits(), True)


def test_what_is_wrong_with_the_ends(checkpoint, tmp_path) -> None:
    """Each is a line; a service is refused before it starts where a file is missing or cut."""
    folder, files, _ = checkpoint
    with pytest.raises(LinkError, match=r"embedding: \S+ cannot be read: the link died after 100 bytes"):
        staged_ends(folder, DyingLink(100), 1, torch.float32)
    shutil.copytree(folder, cut := tmp_path / "cut")
    file = cut / files[0].relative_to(folder)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match="has a wrong sha256; copy it again"):
        staged_ends(cut, Link(), 1, torch.float32)
    file.write_bytes(content[:-1])
    with pytest.raises(ModelError, match="is truncated or altered"):
        check_model(ServiceConfig(cut, swarm=("127.0.0.1:1",)))
    file.unlink()
    with pytest.raises(ModelError, match="is missing in"):
        check_model(ServiceConfig(cut, swarm=("127.0.0.1:1",)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_a_device_that_is_not_here(plain) -> None:
    with pytest.raises(StageError, match="no device 'cuda' can be used here"):
        SwarmServer(ServiceConfig(plain, swarm=("127.0.0.1:1",), device="cuda"), RequestLimits(), False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("staged", [False, True])
def test_the_ends_compute_on_a_gpu(plain, checkpoint, imported, staged) -> None:
    with closing(Here(plain)) as here:
        address = here.serve((0, 6))[0].record.address
        folder = checkpoint[0] if staged else plain
        server = SwarmServer(ServiceConfig(folder, swarm=(address,), device="cuda"), RequestLimits(), staged)
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
