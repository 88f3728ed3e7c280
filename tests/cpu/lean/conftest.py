"""Tiny random models in folders of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_models import small_model
from transformers import PreTrainedModel

Make = Callable[..., tuple[PreTrainedModel, Path]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A stock model in eval mode, its norms and biases random too, and its folder."""

    def made(family: str = "Llama", dtype: torch.dtype = torch.float32, **keys: Any) -> tuple[PreTrainedModel, Path]:
        model = small_model(family, **keys)
        model.save_pretrained(tmp_path)
        stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        return stored, tmp_path

    return made
