"""A tiny model staged with its ends first, what it says, and neighbours that lend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from plain_tokens import TOLERANCE, generated
from swarms import DEPTH, Asked, Here, copied
from transformers import AutoModelForCausalLM, PreTrainedModel

from firsttoken.assets.shapes import shape_config
from firsttoken.progressive.checkpoint.sources import ModelSource, Origin
from firsttoken.progressive.checkpoint.writer import write_staged
from firsttoken.together.borrowed.ends import ends_first


@pytest.fixture(scope="session")
def lent() -> PreTrainedModel:
    """Layers whose tokens vary: with the usual weights it would repeat itself for ever."""
    config = shape_config(f"tiny-{DEPTH}")
    config.update({"initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def ends_folder(lent: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The staged checkpoint, from which replica and neighbour load."""
    folder = tmp_path_factory.mktemp("borrowed") / "tiny"
    source = ModelSource(lent, None, Origin("random", None, "random"))
    write_staged(source, ends_first(source.names, DEPTH), folder)
    return folder


@pytest.fixture(scope="session")
def asked(lent: PreTrainedModel) -> Callable[[int, int], Asked]:
    """A prompt of so many tokens and the greedy answer to it of so many, none of them a near tie."""
    draw = torch.Generator().manual_seed(4)

    def ask(length: int, answer: int) -> Asked:
        while True:
            prompt = torch.randint(256, (length,), generator=draw).tolist()
            plain = generated(lent, prompt, answer)
            if plain.margin > TOLERANCE and len(set(plain.tokens)) > answer // 2:
                return Asked(prompt, plain)

    return ask


@pytest.fixture
def here(ends_folder: Path) -> Iterator[Here]:
    with ExitStack() as stack:
        here = Here(ends_folder)
        stack.callback(here.close)
        yield here


@pytest.fixture(scope="session", autouse=True)
def parent(lent: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Made when a model has been, for its imports."""
    with copied(tmp_path_factory.mktemp("warm") / "socket"):
        yield
