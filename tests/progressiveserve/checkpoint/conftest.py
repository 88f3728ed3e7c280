"""Models in folders and in memory, tied and not, and what a staged folder must still be to stock transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from firsttoken.progressiveserve.checkpoint.manifest import Manifest
from firsttoken.progressiveserve.checkpoint.plan import by_layers
from firsttoken.progressiveserve.checkpoint.sources import FolderSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged

GROUPS = [(0, 3), (1,), (2,)]


@pytest.fixture
def saved(tmp_path: Path, make_model, tokenizer) -> Callable[..., tuple[PreTrainedModel, Path]]:
    """Makes a model of four layers and its Hugging Face folder, in one file or in shards."""

    def make(kind: str = "llama", tied: bool = True, sharded: bool = False, dtype: torch.dtype = torch.float32):
        model = make_model(kind).to(dtype)
        if not tied:
            model.config.tie_word_embeddings = False
            with torch.random.fork_rng():
                torch.manual_seed(1)
                model = AutoModelForCausalLM.from_config(model.config).to(dtype).eval().requires_grad_(False)
        folder = tmp_path / f"{kind}-source"
        model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
        tokenizer.save_pretrained(folder)
        assert len(list(folder.glob("*.safetensors"))) == 1 or sharded
        if dtype != torch.float32:  # .to() rounds the rotary frequencies too, which stock transformers keeps in fp32
            model = AutoModelForCausalLM.from_pretrained(folder)
        return model, folder

    return make


@pytest.fixture
def source(saved) -> FolderSource:
    """A tied Llama of four layers in one file."""
    return FolderSource(saved()[1])


@pytest.fixture
def staged_folder(source, tmp_path) -> tuple[Path, Manifest]:
    """That model with layers 0 and 3 in stage A, 1 in B, 2 in C."""
    return tmp_path / "staged", write_staged(source, by_layers(source.names, GROUPS), tmp_path / "staged")


@pytest.fixture
def assert_same(ids: torch.Tensor) -> Callable[[PreTrainedModel, Path], None]:
    """Holds what stock transformers loads from a folder against a model, bit for bit."""

    @torch.inference_mode()
    def check(model: PreTrainedModel, folder: Path) -> None:
        loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        expected, found = model.state_dict(), loaded.state_dict()
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)

    return check
