"""Fixtures of swarms: a tiny model in a folder, what it says, servers in this process and clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_tokens import TOLERANCE, generated
from swarms import DEPTH, Asked, Here, copied
from transformers import AutoModelForCausalLM, PreTrainedModel

from firsttoken.assets.shapes import shape_config
from firsttoken.swarm.patience import Patience
from firsttoken.swarm.remote import RemoteModel


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    """Six layers whose tokens vary: with the usual weights it would repeat itself for ever."""
    config = shape_config(f"tiny-{DEPTH}")
    config.update({"initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def folder(tiny: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in several shards."""
    folder = tmp_path_factory.mktemp("swarm") / "tiny"
    tiny.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="session")
def asked(tiny: PreTrainedModel) -> Callable[[int, int], Asked]:
    """A prompt of so many tokens and the greedy answer to it of so many, none of them a near tie."""
    draw = torch.Generator().manual_seed(4)

    def ask(length: int, answer: int) -> Asked:
        while True:
            prompt = torch.randint(256, (length,), generator=draw).tolist()
            plain = generated(tiny, prompt, answer)
            if plain.margin > TOLERANCE and len(set(plain.tokens)) > answer // 2:
                return Asked(prompt, plain)

    return ask


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
        patience = Patience(**{"step_s": 5.0, "refresh_s": 30.0, "find_s": 10.0} | options.pop("patience", {}))
        made.append(RemoteModel(options.pop("folder", folder), peers, patience=patience, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session", autouse=True)
def parent(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Made when a model has been, for its imports."""
    with copied(tmp_path_factory.mktemp("warm") / "socket"):
        yield
