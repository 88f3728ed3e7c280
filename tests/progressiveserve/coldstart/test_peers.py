"""Every way to load gives the same model, and stops with one line where it cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from edited import set_keys
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from firsttoken.study.errors import ModelError, StageError
from firsttoken_studies.progressiveserve.coldstart import rival_loaders
from firsttoken_studies.progressiveserve.coldstart.rival_loaders import PEERS, load_with, read_whole

PACKAGES = {"runai": "runai_model_streamer", "fastsafetensors": "fastsafetensors"}
FOLDERS = {
    "tied": ("llama", True, "5GB"),
    "qwen2": ("qwen2", True, "5GB"),
    "sharded": ("llama", False, "40KB"),
}


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture
def folder(request: pytest.FixtureRequest, make_model: Callable[..., PreTrainedModel], tmp_path: Path) -> Path:
    """A stock checkpoint folder; without a parameter, that of a tied Llama in one file."""
    kind, tied, shard = FOLDERS[getattr(request, "param", "tied")]
    model = make_model(kind)
    if not tied:
        model.config.tie_word_embeddings = False
        draw = torch.Generator().manual_seed(7)
        model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(model.lm_head.weight.shape, generator=draw))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "whole", max_shard_size=shard)
    return tmp_path / "whole"


@pytest.fixture(params=PEERS)
def peer(request: pytest.FixtureRequest) -> str:
    if request.param in PACKAGES:
        pytest.importorskip(PACKAGES[request.param])
    return request.param


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_answers_are_those_of_from_pretrained(peer: str, folder: Path, dtype: torch.dtype, ids: torch.Tensor) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model = load_with(peer, folder, dtype)
    assert torch.equal(logits(model, ids), logits(stock, ids))
    assert {name: value.dtype for name, value in model.named_parameters()} == dict.fromkeys(
        (name for name, _ in stock.named_parameters()), dtype
    )
    tied = stock.config.tie_word_embeddings
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
    assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])
    assert not model.training and not any(value.requires_grad for value in model.parameters())


def test_weights_stay_when_the_loader_is_gone(peer: str, folder: Path, ids: torch.Tensor) -> None:
    """Other loads and fresh allocations in between do not write into the first model's weights."""
    model = load_with(peer, folder, torch.bfloat16)
    before = logits(model, ids)
    (folder / "model.safetensors").rename(folder / "old")
    save_file(
        {name: value + 1 for name, value in load_file(folder / "old").items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    others = [load_with(peer, folder, torch.bfloat16) for _ in range(3)]
    noise = [torch.full((size,), 3.0) for size in (10, 1000, 100_000)]
    assert noise and torch.equal(logits(model, ids), before)
    assert not torch.equal(logits(others[0], ids), before)


def test_runai_hands_its_buffers_over(folder: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of several times the memory that its ring of buffers may take: a reused buffer would show."""
    pytest.importorskip(PACKAGES["runai"])
    before = logits(load_with("safetensors", folder), ids)
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", "20000")
    assert (folder / "model.safetensors").stat().st_size > 3 * 20000
    assert torch.equal(logits(load_with("runai", folder), ids), before)


@pytest.mark.parametrize("folder", ["sharded"], indirect=True)
def test_chunks_smaller_than_a_tensor_meet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rival_loaders, "CHUNK_BYTES", 4096)
    files = sorted(folder.glob("*.safetensors"))
    expected = {name: value for file in files for name, value in load_file(file).items()}
    found = read_whole(files, torch.device("cpu"), threads=3)
    assert len(files) > 1 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_chunked_reads_past_the_page_cache_or_through_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/shm, or a system without the flag or such reads: the same bytes either way."""
    file = folder / "model.safetensors"
    direct = read_whole([file], torch.device("cpu"))
    for name in ("O_DIRECT", "preadv"):
        monkeypatch.delattr(os, name, raising=False)
    through = read_whole([file], torch.device("cpu"))
    assert all(torch.equal(direct[name], through[name]) for name in load_file(file))


def test_chunked_takes_a_header_of_odd_length(folder: Path) -> None:
    file = folder / "model.safetensors"
    expected = load_file(file)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    odd = (length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :]
    (folder / "odd.safetensors").write_bytes(odd)
    found = read_whole([folder / "odd.safetensors"], torch.device("cpu"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_chunked_names_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"the shard weights\.safetensors is missing"):
        read_whole([tmp_path / "weights.safetensors"], torch.device("cpu"))


def test_a_folder_that_is_not_whole_is_refused(peer: str, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: it is truncated"):
        load_with(peer, folder, torch.bfloat16)
    file.unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load_with(peer, folder, torch.bfloat16)


def test_the_dtype_is_that_of_the_folder_unless_one_is_given(folder: Path) -> None:
    assert load_with("chunked", folder).dtype == torch.bfloat16
    set_keys(folder / "config.json", dtype=None, torch_dtype="float16")
    assert load_with("chunked", folder).dtype == torch.float16
    set_keys(folder / "config.json", torch_dtype=...)
    assert load_with("chunked", folder).dtype == torch.bfloat16


def test_an_unknown_peer_is_named(folder: Path) -> None:
    with pytest.raises(StageError, match="no peer is called 'tensorizer'; known: from_pretrained, safetensors, runai"):
        load_with("tensorizer", folder, torch.bfloat16)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [found for found in sys.modules if found.partition(".")[0] == PACKAGES[name]]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [])  # nothing can be imported that is not imported already
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(
        StageError, match=f"peer {name} needs the package {PACKAGES[name].replace('_', '-')}: pip install"
    ):
        load_with(name, folder, torch.bfloat16)
