"""A cache of its own for every test, a tokenizer of bytes, and ShareGPT files made up on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import byte_level
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from firsttoken.study import paths


@pytest.fixture(autouse=True)
def _private(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("assets"):
        monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a first token before every prompt, as Llama's tokenizer has it."""
    plain = byte_level(["<start>"])
    plain.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<start>", pad_token="<start>")


@pytest.fixture
def write_sharegpt(tmp_path: Path) -> Callable[..., Path]:
    """Writes a ShareGPT file of conversations that are given as lists of (who, what)."""

    def write(*conversations: list[tuple[str, str]], name: str = "mine.json") -> Path:
        records: list[dict[str, Any]] = [
            {"id": f"c{number}_0", "conversations": [{"from": who, "value": what} for who, what in turns]}
            for number, turns in enumerate(conversations)
        ]
        path = tmp_path / name
        path.write_text(json.dumps(records, indent=2), encoding="utf-8")
        return path

    return write
