"""Angular distances: where the stream is tapped, the formula, and blocks that are planted to be found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.progressiveserve.distance import (
    Distances,
    angular_distances,
    check_size,
    choose_block,
    compute_layer_inputs,
    resampled_starts,
)
from firsttoken.study.errors import StageError


@pytest.fixture
def windows() -> torch.Tensor:
    """Six passages of 16 tokens."""
    return torch.randint(1, 256, (6, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def planted(make_model):
    """Makes a model of eight layers in which the given ones add nothing to the residual stream."""

    def make(layers):
        model = make_model(layers=8)
        for i in layers:
            layers_of(model)[i].self_attn.o_proj.weight.zero_()
            layers_of(model)[i].mlp.down_proj.weight.zero_()
        return model

    return make


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_stream_is_every_layer_input_and_the_output_before_the_final_norm(make_model, windows, kind):
    model = make_model(kind)
    stream = compute_layer_inputs(model, windows)
    states = model(windows, output_hidden_states=True, use_cache=False).hidden_states
    assert stream.shape == (5, 6, 16, 32)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(stream[:-1], states[:-1], strict=True))
    assert not torch.allclose(stream[-1], states[-1], atol=0.1)
    torch.testing.assert_close(model.model.norm(stream[-1]), states[-1])


def test_no_hook_stays_behind_even_after_an_error(make_model, windows):
    model = make_model()
    compute_layer_inputs(model, windows)
    with pytest.raises(IndexError):
        compute_layer_inputs(model, windows + 1000)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_values_are_the_formula(make_model, windows):
    model = make_model()
    distances = angular_distances(model, windows, batch=4)
    stream = compute_layer_inputs(model, windows).double().numpy()

    def angle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.arccos((x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)) / np.pi

    assert distances.depth == 4
    for size in (1, 2, 3, 4):
        direct = np.stack([angle(stream[i], stream[i + size]) for i in range(5 - size)])  # [starts, passages, tokens]
        np.testing.assert_allclose(distances.block(size), direct[:, :, -1].T, atol=1e-5)
        np.testing.assert_allclose(distances.block(size, "all"), direct.mean(2).T, atol=1e-5)


@pytest.mark.parametrize("block", [[3, 4, 5], [0, 1, 2], [5, 6, 7], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("tokens", ["last", "all"])
def test_a_planted_block_is_found(planted, windows, block, tokens):
    distances = angular_distances(planted(block), windows)
    for size in range(1, len(block) + 1):
        chosen = choose_block(distances, size, tokens)
        assert chosen == list(range(chosen[0], chosen[0] + size))
        assert set(chosen) <= set(block)
    assert choose_block(distances, len(block), tokens) == block


def test_of_equal_starts_the_first_wins():
    level = torch.full((2, 6, 6), 0.25)
    assert choose_block(Distances(level, level), 2) == [0, 1]


@pytest.mark.parametrize("size", [0, -1, 4, 5])
def test_blocks_that_do_not_fit(make_model, windows, size):
    distances = angular_distances(make_model(), windows[:1])
    says = f"a block of {size} layers does not fit a model of 4: choose 1 to 3"
    for ask in (lambda: choose_block(distances, size), lambda: check_size(4, size)):
        with pytest.raises(StageError, match=f"^{says}$"):
            ask()


def test_resampling_follows_the_seed_and_the_data():
    unsure = np.random.default_rng(0).normal(size=(12, 5)).tolist()
    starts = resampled_starts(unsure, 200, seed=1)
    assert starts == resampled_starts(unsure, 200, seed=1)
    assert starts != resampled_starts(unsure, 200, seed=2)
    assert len(starts) == 200 and set(starts) <= set(range(5))
    assert max(set(starts), key=starts.count) == int(np.mean(unsure, 0).argmin())
    sure = [[0.4, 0.2, 0.3]] * 5
    assert resampled_starts(sure, 20, seed=0) == [1] * 20
