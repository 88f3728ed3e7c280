"""Folders of a tiny model, and both kinds of tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from services import LIMITS, byte_fallback, byte_level, serving, write_plain, write_tiny
from tokenizers import Tokenizer

TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


@pytest.fixture
def tokenizers() -> dict[str, Tokenizer]:
    """Both kinds of tokenizer, by name."""
    return TOKENIZERS


@pytest.fixture(params=TOKENIZERS)
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind of tokenizer."""
    return TOKENIZERS[request.param]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A staged checkpoint that never ends an answer by itself."""
    folder = tmp_path_factory.mktemp("service") / "tiny"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain Hugging Face folder whose answers end at "t"."""
    folder = tmp_path_factory.mktemp("service") / "plain"
    write_plain(folder)
    return folder


@pytest.fixture(scope="module")
def client(tiny: Path) -> Iterator[httpx.Client]:
    """Of a service whose stages have all arrived."""
    with serving(tiny, **LIMITS) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client
