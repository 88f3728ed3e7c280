"""Layers that are brought for each token compute what layers that stay do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import load_model
from firsttoken.study.errors import StorageError
from firsttoken_studies.petals.chain_costs import offloaded


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_answer_is_that_of_layers_at_home(on_disk: bool, tmp_path: Path) -> None:
    model, ids = load_model("random:tiny").model, torch.arange(12)[None]
    at_home, layers = model(ids).logits, layers_of(model)
    with offloaded(model, tmp_path / "layers" if on_disk else None) as resting:
        assert torch.equal(model(ids).logits, at_home)
        first = model(ids[:, :6], use_cache=True).past_key_values
        assert torch.allclose(model(ids[:, 6:], past_key_values=first).logits, at_home[:, 6:], atol=1e-5)
    assert resting.step_bytes == sum(p.numel() * 4 for p in layers.parameters())
    assert layers_of(model) is layers and torch.equal(model(ids).logits, at_home)


def test_a_file_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    model, file = load_model("random:tiny").model, tmp_path / "layers"
    with offloaded(model, file):
        with open(file, "r+b") as handle:
            handle.truncate(100)
        with pytest.raises(StorageError, match="cut short"):
            model(torch.arange(4)[None])
