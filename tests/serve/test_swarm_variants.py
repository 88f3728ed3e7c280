"""Variants of a model over a swarm: servers have adapters on their own blocks, announce them, and are chosen by them.

A tiny random model in float32: tokens are those of PEFT's own ``generate``, alone and in steps with others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_tunes import greedy, tuned, written
from torch import nn

pytest.importorskip("grpc")
pytest.importorskip("peft")

from swarms import Here, servers_imported

from firsttoken.__main__ import main
from firsttoken.assets.checkpoint import combined_sha256, model_files, weight_files
from firsttoken.engine.request import Sampling
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.kv_slots import KVSlots
from firsttoken.petals.local_swarm import varied_model
from firsttoken.petals.messages import SequenceChunk
from firsttoken.petals.records import Record, read_record
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.petals.timeouts import Timeouts
from firsttoken.study.errors import StageError, SwarmError
from firsttoken_serve.service_config import ServiceConfig
from firsttoken_serve.swarm.over_swarm import SwarmServer
from firsttoken_serve.swarm.swarm_variants import AdapterFolders, adapter_names, with_variants

PROMPT = [5, 7, 9, 11]


@pytest.fixture(scope="module")
def base() -> nn.Module:
    return varied_model()


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base.save_pretrained(folder := tmp_path_factory.mktemp("variants") / "tiny")
    return folder


@pytest.fixture(scope="module")
def tunes(base) -> dict[str, nn.Module]:
    """What PEFT makes of the model."""
    return {"qa": tuned(base, 1), "chat": tuned(base, 2, ["q_proj", "up_proj"], rank=2)}


@pytest.fixture(scope="module")
def adapters(tunes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {name: written(peft, place / name) for name, peft in tunes.items()}


@pytest.fixture(scope="module")
def right(base, tunes) -> dict[str, list[int]]:
    said = {name: greedy(model, PROMPT, 10) for name, model in {"": base, **tunes}.items()}
    assert len({tuple(tokens) for tokens in said.values()}) == 3
    return said


@pytest.fixture
def here(folder) -> Iterator[Here]:
    with servers_imported():
        here = Here(folder)
        yield here
        here.close()


@pytest.fixture
def client(folder, adapters) -> Iterator[Callable[..., RemoteModel]]:
    made: list[RemoteModel] = []

    def make(*peers: str, named: tuple[str, ...] = ("qa", "chat"), **options: Any) -> RemoteModel:
        names = adapter_names({name: adapters[name] for name in named}, model_files(folder))
        timeouts = Timeouts(step_s=5.0, refresh_s=30.0, find_s=3.0)
        made.append(RemoteModel(folder, peers, variants=names, timeouts=timeouts, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def said(model: RemoteModel, variant: str = "", tokens: int = 10) -> list[int]:
    return model.generate(torch.tensor([PROMPT]), tokens, variant=variant)[0, len(PROMPT) :].tolist()


def test_each_variant_answers_as_peft_does(here, client, folder, adapters, right) -> None:
    """Over two servers, each with the adapters of its own blocks; also beside the model itself in one engine."""
    make = with_variants(list(adapters.items()), folder)
    ups = here.serve((0, 2), (2, 6), make_backend=make)
    assert ups[0].record.adapters == ups[1].record.adapters != ()
    model = client(ups[0].record.address)
    assert {name: said(model, name) for name in right} == right
    versions = {name: model.versions.get(name) for name in right}
    asked = {name: model.engine.submit(PROMPT, Sampling(10), version=versions[name]) for name in right}
    model.engine.run()
    assert {name: request.output for name, request in asked.items()} == right
    assert [len(up.sessions.batcher.backend._adapted) for up in ups] == [2, 2]


def test_a_batch_of_several_variants_is_right(folder, adapters) -> None:
    """Each row is what it would be alone: together where the kernels run them so, and apart where they cannot."""
    blocks = with_variants(list(adapters.items()), folder)(folder, range(1, 5), torch.float32, 256)
    whose = ["", blocks.adapters[0], blocks.adapters[1], blocks.adapters[0]]
    torch.manual_seed(3)
    hidden = [torch.randn(tokens, blocks.width) for tokens in (4, 1, 7, 2)]

    def chunks() -> list:
        slots = KVSlots(blocks.pool.blocks, blocks.pool.shape.block_tokens, 8, blocks.context)
        return list(slots.place({}, [SequenceChunk(number, 0, len(rows)) for number, rows in enumerate(hidden)]))

    together = blocks.run(blocks.blocks, chunks(), hidden, whose)
    alone = []
    for place in range(len(hidden)):
        alone += blocks.run(blocks.blocks, chunks()[place : place + 1], hidden[place : place + 1], [whose[place]])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    apart = blocks._apart(blocks.blocks, chunks(), hidden, whose)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    plain = blocks.run(blocks.blocks, chunks(), hidden)
    assert torch.equal(plain[0], alone[0]) and all(not torch.allclose(plain[i], alone[i]) for i in (1, 2, 3))


def test_clients_with_several_variants_share_steps(here, client, folder, adapters, right) -> None:
    up = here.serve((0, 6), make_backend=with_variants(list(adapters.items()), folder))[0]
    models = {name: client(up.record.address) for name in right}
    with ThreadPoolExecutor(len(models)) as clients:
        for _ in range(3):
            told = list(clients.map(lambda one: said(one[1], one[0]), models.items()))
            assert told == [right[name] for name in models]


def test_a_server_without_the_adapter_is_not_chosen(here, client, folder, adapters, right) -> None:
    """One that has it takes over where another is lost, and nobody else."""
    both = with_variants(list(adapters.items()), folder)
    only = with_variants([("chat", adapters["chat"])], folder)
    none, chat, all_ = (here.serve((0, 6), make_backend=make)[0] for make in (BlockBackend, only, both))
    peers = [up.record.address for up in (none, chat, all_)]
    model = client(*peers)
    assert said(model, "qa") == right["qa"]
    assert [record.server for _, record in model._chains["qa"].sessions] == [all_.record.server]
    alone = client(*peers[:2])
    with pytest.raises(SwarmError, match=r"has blocks 0 to 5: .*\(with the adapter qa@\w{64}\)"):
        said(alone, "qa", 2)
    assert said(alone, "chat") == right["chat"] and said(alone) == right[""]


def test_a_service_routes_by_name_and_hash(here, folder, adapters, tunes, right, tmp_path) -> None:
    shutil.copytree(adapters["chat"], tmp_path / "qa")
    wrong = here.serve((0, 6), make_backend=with_variants([("qa", tmp_path / "qa")], folder))[0]
    config = partial(ServiceConfig, folder, swarm_step_s=2.0)
    variants = (("qa", adapters["qa"]),)
    with pytest.raises(SwarmError) as raised:
        SwarmServer(config(swarm=(wrong.record.address,), variants=variants), RequestLimits(), False)
    assert "--variant qa: the adapter is " in str(raised.value) and "on the server" in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(SwarmError, match="with the adapter other@"):
        other = (("other", adapters["qa"]),)
        SwarmServer(config(swarm=(wrong.record.address,), variants=other), RequestLimits(), False)
    true = here.serve((0, 6), make_backend=with_variants(list(variants), folder))[0]
    swarm = (wrong.record.address, true.record.address)
    server = SwarmServer(config(swarm=swarm, variants=variants, swarm_audit_rate=0.0), RequestLimits(), False)
    try:
        assert list(server.submit(PROMPT, 10, variant="qa")) == right["qa"]
        assert list(server.submit(PROMPT, 10)) == right[""]
        assert server.status()["audits"].endswith("and none of a variant")
    finally:
        server.close()


@pytest.mark.parametrize("who", ["server", "service"])
def test_an_adapter_of_another_base_is_refused_in_one_line(folder, adapters, tmp_path, who: str) -> None:
    shutil.copytree(adapters["qa"], place := tmp_path / "qa")
    (place / "recipe.json").write_text(json.dumps({"base_sha256": "5e12" * 16, "tasks": ["qa"]}))
    with pytest.raises(StageError) as raised:
        if who == "server":
            AdapterFolders([("qa", place)], folder)
        else:
            config = ServiceConfig(folder, swarm=("127.0.0.1:1",), variants=(("qa", place),))
            SwarmServer(config, RequestLimits(), False)
    known = combined_sha256(weight_files(folder))[:12]
    assert f"was trained on the base 5e125e125e12, and tiny is {known}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_a_server_is_told_wrongly(folder, adapters, base, tmp_path, capsys) -> None:
    """Each is one line, before the server listens."""
    many = [(f"a{number}", adapters["qa"]) for number in range(17)]
    for folders, fault in (
        (many, "at most 16 adapters"),
        ([("qa", adapters["qa"])] * 2, "each a name of its own"),
        ([("q a", adapters["qa"])], "up to 64 letters"),
        ([("qa", tmp_path)], "name a folder with adapter_config.json"),
    ):
        with pytest.raises(StageError, match=fault) as raised:
            with_variants(folders, folder)
        assert "\n" not in str(raised.value)
    words = ["swarm", "serve", "--model", str(folder), "--blocks", "0:6", "--variant", f"q a={adapters['qa']}"]
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    shutil.copytree(adapters["qa"], changing := tmp_path / "qa")
    held = AdapterFolders([("qa", changing)], folder)
    (changing / "adapter_config.json").write_text((changing / "adapter_config.json").read_text() + "\n")
    with pytest.raises(StageError, match="has changed since this server announced it"):
        held.adapted(range(6), [], [])


def test_a_session_for_an_adapter_that_is_not_here_is_refused(here, client) -> None:
    up = here.serve((0, 6))[0]
    model = client(up.record.address)

    async def ask() -> Any:
        session = model.swarm.open_session(up.record, range(6), "float32", "qa@" + "0" * 64)
        try:
            return await session.run([SequenceChunk(0, 0, 1)], torch.zeros(1, 32))
        finally:
            session.close()

    with pytest.raises(SwarmError, match="this server has no adapter"):
        wait_for(ask())


def test_records_name_adapters_and_older_members_are_understood() -> None:
    record = Record("0" * 64, "127.0.0.1:1", (0, 6), "1" * 64, 1.0, started=1.0, issued=1.0, expires=2.0)
    assert "adapters" not in record.as_dict() and read_record(json.loads(record.text)) == record
    named = read_record(json.loads(record.text) | {"adapters": ["qa@" + "a" * 64]})
    assert named.adapters == ("qa@" + "a" * 64,) and "adapters" in named.as_dict()
    for wrong in (["qa"], ["qa@" + "a" * 63], ["q a@" + "a" * 64], ["qa@" + "a" * 64] * 17, "qa"):
        with pytest.raises(SwarmError, match="is no record of a server"):
            read_record(json.loads(record.text) | {"adapters": wrong})


def test_a_server_that_moves_takes_the_adapters_of_its_new_blocks(folder, adapters) -> None:
    make = with_variants(list(adapters.items()), folder)
    moved = make(folder, range(0, 3), torch.float32, 64)
    moved.move(range(3, 6))
    there = make(folder, range(3, 6), torch.float32, 64)
    slots = KVSlots(4, there.pool.shape.block_tokens, 8, there.context)
    hidden = [torch.randn(4, there.width)]
    name = [there.adapters[0]]
    one, other = (
        blocks.run(range(3, 6), slots.place({}, [SequenceChunk(0, 0, 4)]), hidden, name)[0] for blocks in (moved, there)
    )
    assert torch.equal(one, other)
