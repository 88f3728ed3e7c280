"""A folder whose blocks rest in 8 bits: servers of it say what a local model of the same stored weights says."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from edited import set_tensors
from plain_tokens import check_greedy
from safetensors.torch import load_file
from swarms import DEPTH, Here, asking
from torch import Tensor, nn
from transformers import PreTrainedModel

from firsttoken.__main__ import main
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import load_model
from firsttoken.engine.linear8 import UNROUNDED, Linear8, to_8_bits
from firsttoken.engine.request import Sampling
from firsttoken.petals.checkpoint_blocks import load_span, model_sha256, write_8_bits
from firsttoken.petals.tuning.frozen import FrozenBlocks
from firsttoken.petals.tuning.passes import Pass
from firsttoken.study.errors import ModelError


@pytest.fixture(scope="module")
def resting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in several shards, in 8 bits."""
    target = tmp_path_factory.mktemp("int8") / "tiny"
    write_8_bits(folder, target)
    return target


@pytest.fixture(scope="module")
def stored(tiny: PreTrainedModel) -> PreTrainedModel:
    """The weights that the codes stand for, in stock layers."""
    model = copy.deepcopy(tiny)
    for layer in layers_of(model):
        for linear in (one for one in layer.modules() if type(one) is nn.Linear):
            linear.weight.copy_(Linear8.of(linear, UNROUNDED).dequantized())
    return model


@pytest.fixture
def there(resting: Path) -> Iterator[Here]:
    here = Here(resting)
    yield here
    here.close()


@pytest.fixture
def broken(resting: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], None]], Path]:
    """Copies of ``resting`` in whose first shard something was changed."""

    def make(change: Callable[[dict[str, Tensor]], None]) -> Path:
        target = shutil.copytree(resting, tmp_path / "broken")
        index = json.loads((target / "model.safetensors.index.json").read_text())
        shard = target / index["weight_map"][f"{NAME}.codes"]
        set_tensors(shard, change)
        return target

    return make


NAME = "model.layers.0.mlp.down_proj"


def test_a_copy_has_the_blocks_in_8_bits_and_the_rest_as_it_was(folder, resting) -> None:
    def sizes(where: Path) -> dict[str, int]:
        tensors = {name: one for file in where.glob("*.safetensors") for name, one in load_file(file).items()}
        return {name: one.numel() * one.element_size() for name, one in tensors.items()}

    before, after = sizes(folder), sizes(resting)
    names = {name for name in before if name.startswith("model.layers.") and "norm" not in name}
    assert {name for name in before if name not in names} == {n for n in after if not n.endswith(("codes", "scales"))}
    assert len(names) == 7 * DEPTH
    assert all(4 * after[name.replace(".weight", ".codes")] == before[name] for name in names), "the model is float32"
    assert model_sha256(folder) != model_sha256(resting), "who asks servers of one asks none of the other"


def test_servers_of_it_say_what_the_stored_weights_say(there, client, stored) -> None:
    ups = there.serve((0, 2), (2, 6), (2, 5), (5, 6))
    model, ask = client(ups[0].record.address, folder=there.folder), asking(stored)
    known = [ask(length, 8) for length in (1, 17, 40)]
    requests = [model.engine.submit(one.prompt, Sampling(8)) for one in known]
    model.engine.run()
    for request, one in zip(requests, known, strict=True):
        assert check_greedy(request.output, one.plain) == 8


def test_it_trains_as_the_stored_weights_do(resting, stored) -> None:
    frozen, hidden = FrozenBlocks(resting, range(DEPTH), torch.float32), torch.randn(1, 5, 32)
    gradient = torch.randn(1, 5, 32)
    got = frozen.run(range(DEPTH), Pass(hidden, {}, gradient=gradient)).hidden
    entered = hidden.clone().requires_grad_()
    positions = torch.arange(5)[None]
    out = entered
    for layer in layers_of(stored):
        rotary = stored.model.rotary_emb(out, positions)
        out = layer(out, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    (expected,) = torch.autograd.grad(out, entered, gradient)
    frozen.close()
    assert (got - expected).abs().max() < 1e-3 * expected.abs().max()


def test_a_span_holds_no_16_bit_weight(resting) -> None:
    layers = load_span(resting, range(1, 3), torch.bfloat16).model.layers
    assert sum(isinstance(one, Linear8) for one in layers.modules()) == 14
    with pytest.raises(ModelError, match=r"hold no nn\.Linear"):
        to_8_bits(layers)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop(f"{NAME}.scales"), "scales' is in .*, by the headers in none"),
        (lambda t: t.update({f"{NAME}.codes": t[f"{NAME}.codes"][:-1]}), r"has the shape \[31, 64\], by config"),
        (lambda t: t.update({f"{NAME}.codes": t[f"{NAME}.codes"].float()}), "is torch.float32 .*, no int8"),
        (lambda t: t.update({f"{NAME}.scales": t[f"{NAME}.scales"][:3]}), r"is torch.float32 \[3\], no float32"),
        (lambda t: t[f"{NAME}.scales"].fill_(float("nan")), "holds a number that is no scale"),
        (lambda t: t[f"{NAME}.scales"].fill_(0.0), "holds a number that is no scale"),
        (lambda t: t.update({"model.layers.0.mlp.sideways.codes": torch.ones(2)}), "sideways.codes' is in no file"),
    ],
)
def test_codes_that_do_not_fit_are_refused(broken, change, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_span(broken(change), range(2), torch.float32)


def test_what_cannot_be_written(folder, resting, tmp_path, monkeypatch, capsys) -> None:
    for source, target, said in (
        (folder, resting, "is there already"),
        (resting, tmp_path / "again", "is in 8 bits, which"),
        (tmp_path, tmp_path / "none", "has no config.json"),
    ):
        assert main(["swarm", "int8", "--model", str(source), "--out", str(target)]) != 0
        assert said in capsys.readouterr().err.strip().splitlines()[-1]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("firsttoken.petals.checkpoint_blocks.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_8_bits(folder, tmp_path / "half")
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_who_computes_in_16_bits_does_not_take_it(resting, folder, tmp_path, capsys) -> None:
    assert main(["swarm", "int8", "--model", str(folder), "--out", str(tmp_path / "small")]) == 0
    assert "blocks in 8 bits" in capsys.readouterr().out
    for small in (resting, tmp_path / "small"):
        with pytest.raises(ModelError, match="is in 8 bits, which only `firsttoken swarm` serves"):
            load_model(str(small), with_tokenizer=False)
    assert main(["serve", str(resting)]) != 0
    assert "is in 8 bits" in capsys.readouterr().err.strip().splitlines()[-1]
