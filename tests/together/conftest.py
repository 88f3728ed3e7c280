"""A tiny model staged with its ends first, what it says, and neighbours that lend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from swarms import DEPTH, Asked, Here, asking, copied, varied
from transformers import PreTrainedModel

from firsttoken.progressive.checkpoint.sources import ModelSource, Origin
from firsttoken.progressive.checkpoint.writer import write_staged
from firsttoken.together.borrowed.ends import ends_first


@pytest.fixture(scope="session")
def lent() -> PreTrainedModel:
    return varied()


@pytest.fixture(scope="session")
def ends_folder(lent: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The staged checkpoint, from which replica and neighbour load."""
    folder = tmp_path_factory.mktemp("borrowed") / "tiny"
    source = ModelSource(lent, None, Origin("random", None, "random"))
    write_staged(source, ends_first(source.names, DEPTH), folder)
    return folder


@pytest.fixture(scope="session")
def asked(lent: PreTrainedModel) -> Callable[[int, int], Asked]:
    return asking(lent)


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
