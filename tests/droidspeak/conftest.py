"""Tiny models of several kinds whose layers matter, each made once; the same in folders, with a tokenizer and items."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from byte_tokenizers import a_token_a_byte
from heavy_models import heavy_model
from transformers import PreTrainedModel

MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def tiny() -> MakeModel:
    """``tiny(seed, layers=4, kind="llama", rope="default", vocabulary=256)``, as in ``heavy_models``."""
    return heavy_model


@pytest.fixture(scope="session")
def folders(tiny: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models of 4 layers: "base" and "other" make a pair, "qwen2" and "stranger" (tokenizer) fit neither.

    Beside them "hotpotqa.jsonl", 60 rows of LongBench's form with contexts of more than 96 bytes.
    """
    root = tmp_path_factory.mktemp("models")
    for name, seed, kind, end in (
        ("base", 1, "llama", "<end>"),
        ("other", 2, "llama", "<end>"),
        ("qwen2", 1, "qwen2", "<end>"),
        ("stranger", 1, "llama", "<stop>"),
    ):
        tiny(seed, 4, kind, vocabulary=257).save_pretrained(root / name)
        a_token_a_byte(end).save_pretrained(root / name)
    draw, lines = random.Random(0), []
    for number in range(60):
        context = " ".join("".join(draw.choices("abcdefgh", k=4)) for _ in range(40))
        row = {"_id": f"r{number}", "dataset": "hotpotqa", "input": f"Which {number}?", "context": context}
        lines.append(json.dumps(row | {"answers": ["ab"]}))
    (root / "hotpotqa.jsonl").write_text("\n".join(lines))
    return root
