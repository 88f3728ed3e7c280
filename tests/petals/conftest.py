"""Fixtures of swarms: a tiny model in a folder, what it says, servers in this process and clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from swarms import Asked, Here, asking, servers_imported
from transformers import PreTrainedModel

from firsttoken.petals.local_swarm import varied_model
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.petals.timeouts import Timeouts


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    return varied_model()


@pytest.fixture(scope="session")
def folder(tiny: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in several shards."""
    folder = tmp_path_factory.mktemp("swarm") / "tiny"
    tiny.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="session")
def asked(tiny: PreTrainedModel) -> Callable[[int, int], Asked]:
    return asking(tiny)


@pytest.fixture
def here(folder: Path) -> Iterator[Here]:
    here = Here(folder)
    yield here
    here.close()


@pytest.fixture
def client(folder: Path) -> Iterator[Callable[..., RemoteModel]]:
    """Clients of a swarm, closed after the test."""
    made: list[RemoteModel] = []

    def make(*peers: str, **options: Any) -> RemoteModel:
        timeouts = Timeouts(**{"refresh_s": 30.0, "find_s": 10.0, "late_s": 60.0} | options.pop("timeouts", {}))
        made.append(RemoteModel(options.pop("folder", folder), peers, timeouts=timeouts, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session", autouse=True)
def imported() -> Iterator[None]:
    with servers_imported():
        yield
