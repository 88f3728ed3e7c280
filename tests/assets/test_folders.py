"""Other people's folders: the same tokens as transformers in every way in, or one line that says what disagrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edited import set_keys, set_tensors
from folders import SMALL, WAYS, DrawnResult, draw, examine, write
from safetensors.torch import load_file

from firsttoken.__main__ import main
from firsttoken.assets.checkpoint import EMBEDDING, HEAD, INDEX, SINGLE, combined_sha256, model_files, stored_dtype
from firsttoken.assets.models import load_model
from firsttoken.assets.weight_files import WeightFile
from firsttoken.petals.checkpoint_blocks import load_ends, model_sha256, write_8_bits
from firsttoken.progressiveserve.checkpoint.plan import by_layers
from firsttoken.progressiveserve.checkpoint.sources import FolderSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.study.errors import ModelError

DRAWN = draw(seed=4, number=12)
CHOSEN = [
    DrawnResult(beside="another model"),
    DrawnResult(shards="shards", beside="another model"),
    DrawnResult(beside="an adapter"),
    DrawnResult(beside="links", shards="shards"),
    DrawnResult(beside="another file named"),
    DrawnResult(shards="shards", beside="another shard"),
    DrawnResult(shards="shards", beside="a tensor twice"),
    DrawnResult(tying="head only"),
    DrawnResult(family="mistral", tying="head only", shards="shards"),
    DrawnResult(tying="two that differ"),
    DrawnResult(family="qwen2", tying="head only", dtype="BF16"),
    DrawnResult(family="mistral with a window"),
]


@pytest.mark.parametrize("drawn", CHOSEN + DRAWN, ids=str)
def test_a_folder_is_answered_as_transformers_does_or_refused_in_one_line(drawn, tmp_path):
    outcomes = dict(examine(drawn, write(drawn, tmp_path / "m")))
    assert {way: outcome.wrong for way, outcome in outcomes.items() if outcome.wrong} == {}
    if drawn.served:
        assert all(outcomes[way].equal for way in WAYS if way != "stage" or drawn.staged)


def test_a_folder_of_two_models_is_refused_by_the_names_of_both(tmp_path):
    folder = write(DrawnResult(shards="shards", beside="another model"), tmp_path / "m")
    for way in (load_model, model_sha256, FolderSource):
        with pytest.raises(ModelError) as caught:
            way(str(folder) if way is load_model else folder)
        assert SINGLE in str(caught.value) and INDEX in str(caught.value) and "remove the older" in str(caught.value)


def test_the_hash_of_a_model_is_that_of_the_files_that_were_loaded(tmp_path, monkeypatch):
    """Shards that nobody reads lie beside, and transformers is asked for no file."""
    folder = write(DrawnResult(beside="other shards"), tmp_path / "m")
    opened: list[Path] = []
    before = load_file(folder / SINGLE)
    monkeypatch.setattr("firsttoken.assets.weights.WeightFile", lambda file: opened.append(file) or WeightFile(file))
    loaded = load_model(str(folder), with_tokenizer=False)
    assert opened == [folder / SINGLE]
    assert loaded.provenance.sha256 == combined_sha256(opened) == model_files(folder).sha256
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.model.named_parameters())


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_of_tied_tensors_the_head_alone_is_enough_where_it_is_rewritten(dtype, tmp_path):
    """In planes, in stages and in 8 bits."""
    folder = write(DrawnResult(tying="head only", dtype=dtype), tmp_path / "m")
    head = load_file(folder / SINGLE)[HEAD]
    assert set(load_file(folder / SINGLE)) & {EMBEDDING, HEAD} == {HEAD}
    source = FolderSource(folder)
    assert HEAD not in source.names and torch.equal(source.get(EMBEDDING), head)
    write_staged(source, by_layers(source.names, [[0], [1, 2]]), tmp_path / "staged")
    assert torch.equal(load_ends(tmp_path / "staged", torch.float32).lm_head.weight, head.float())
    write_8_bits(folder, tmp_path / "rest8")
    ends = load_ends(tmp_path / "rest8", torch.float32)
    assert (
        torch.equal(ends.model.embed_tokens.weight, head.float())
        and ends.lm_head.weight is ends.model.embed_tokens.weight
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_staged(value, tmp_path):
    folder = write(DrawnResult(), tmp_path / "m")
    set_tensors(folder / SINGLE, lambda held: held["model.layers.2.mlp.down_proj.weight"][3].fill_(value))
    source = FolderSource(folder)
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.down_proj\.weight holds numbers that are not finite; copy"):
        write_staged(source, by_layers(source.names, [[0, 1, 2]]), tmp_path / "staged")
    assert not (tmp_path / "staged").exists()


@pytest.mark.parametrize("family", ["mistral with a window", "qwen2 with a window"])
def test_nothing_is_staged_of_a_model_that_is_not_served(family, tmp_path, capsys):
    folder = write(DrawnResult(family=family), tmp_path / "m")
    chosen = ["--set", f"model={folder}", "--set", "served.block_start=1", "--set", "served.block_size=1"]
    assert main(["stage", str(tmp_path / "out"), *chosen, "--set", "served.task_adapter="]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert "has layers of sliding_attention, and only models of full_attention are served" in said[-1]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("stored", ["auto", None, "float32"])
def test_a_dtype_that_is_left_to_the_weights(stored, tmp_path):
    folder = write(DrawnResult(), tmp_path / "m")
    set_keys(folder / "config.json", dtype=None, torch_dtype=stored)
    assert stored_dtype(folder) == "float32"
    assert load_model(str(folder), with_tokenizer=False).model.config.hidden_size == SMALL["hidden_size"]


def test_a_model_that_is_a_gguf_file_is_named_as_one(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"x\.gguf is a file; give a folder with config\.json and \*\.safetensors"):
        load_model(str(tmp_path / "x.gguf"))
