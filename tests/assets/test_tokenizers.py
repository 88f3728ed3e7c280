"""One folder has one tokenization: ids and text as transformers has them, or one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from services import tiny_model
from tokenizer_settings import INST, KINDS, draw, examine, write
from transformers import AutoTokenizer

from firsttoken.assets import text_tokenizer
from firsttoken.assets.text_tokenizer import check_same_ids, read_text_tokenizer
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin
from firsttoken.study.errors import ModelError


@pytest.mark.parametrize("seed", range(4))
def test_drawn_settings_are_read_as_transformers_reads_them_or_refused(seed: int, tmp_path: Path) -> None:
    """More of them run by hand: ``tokenizers_soak.py``."""
    for index, drawn in enumerate(draw(seed, 15)):
        outcome, line = examine(write(drawn, tmp_path / f"{index}"))
        assert outcome in ("equal", "refused"), f"{drawn}: {line}"


def folder_of(kind: str, folder: Path, model_type: str = "llama", **settings: Any) -> Path:
    """A tokenizer of ``kind`` whose special tokens are listed, with these settings beside it."""
    folder.mkdir()
    made = KINDS[kind]()
    made.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}.get(model_type, "OtherForCausalLM")
    sizes = {"vocab_size": 600, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 64, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [architecture]} | sizes))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": INST}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | settings))
    return folder


LEAN = [  # what published folders of Llama and Qwen2 name, which is read without transformers
    ("smollm", "llama", {}),
    ("llama3", "llama", {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}),
    ("llama3", "llama", {"tokenizer_class": "LlamaTokenizerFast", "legacy": False}),
    ("llama2", "llama", {"tokenizer_class": "LlamaTokenizer", "legacy": False, "sp_model_kwargs": {}}),
    ("llama2", "llama", {"tokenizer_class": "LlamaTokenizerFast"}),
    ("llama2", "llama", {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True}),
    ("metaspace first", "llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    ("smollm", "llama", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}),
    ("nfkc", "qwen2", {"tokenizer_class": "Qwen2Tokenizer", "errors": "replace", "split_special_tokens": False}),
    ("qwen2", "qwen2", {}),
]


@pytest.mark.parametrize(("kind", "model_type", "settings"), LEAN)
def test_what_lean_models_are_published_with_asks_for_no_import(
    kind: str, model_type: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(kind, tmp_path / "model", model_type, **settings)
    monkeypatch.setattr(text_tokenizer, "_by_transformers", lambda folder, files: pytest.fail(files.why))
    assert examine(folder) == ("equal", "")


REST = [
    ("smollm", "llama", {"split_special_tokens": True}, "its 'split_special_tokens' is True"),
    ("smollm", "llama", {"tokenizer_class": "CodeGenTokenizer"}, "its tokenizer_class is 'CodeGenTokenizer'"),
    ("smollm", "llama", {"a_new_key": 1}, "its 'a_new_key' is 1"),
    ("unigram", "llama", {"tokenizer_class": "PreTrainedTokenizerFast"}, ""),
    ("llama2", "gemma", {}, ""),
]


@pytest.mark.parametrize(("kind", "model_type", "settings", "why"), REST)
def test_all_else_is_read_by_transformers_which_a_line_says(
    kind: str, model_type: str, settings: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(folder_of(kind, tmp_path / "model", model_type, **settings)) == ("equal", "")
    line = f"firsttoken: model starts with transformers' own tokenizer: {why}\n"
    assert capsys.readouterr().err == (line if why else "")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("wordlevel", {"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces takes spaces out of text"),
        ("smollm", {"tokenizer_class": "ByT5Tokenizer"}, "ByT5Tokenizer has no form in the tokenizers library"),
        ("smollm", {"pad_token": {"content": "<pad>"}, "a_key": 1}, "transformers cannot read the tokenizer in"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    kind: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        read_text_tokenizer(folder_of(kind, tmp_path / "model", **settings))
    assert "\n" not in str(refused.value)


def test_a_folder_that_reads_otherwise_by_transformers_is_refused_where_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it might be in a version of transformers that changes a class."""
    folder = folder_of("llama2", tmp_path / "model", tokenizer_class="LlamaTokenizer")
    theirs = AutoTokenizer.from_pretrained(folder)
    check_same_ids(folder, theirs)
    monkeypatch.setitem(text_tokenizer._PIECES, "LlamaTokenizer", text_tokenizer._gpt2)
    with pytest.raises(ModelError, match=r"'the inn' is .* to `firsttoken serve` and .* to transformers' LlamaTok"):
        check_same_ids(folder, theirs)


def test_a_staged_folder_reads_as_the_model_that_was_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or is not written: transformers does not read all that it saves as it was."""
    theirs = AutoTokenizer.from_pretrained(folder_of("llama2", tmp_path / "model", tokenizer_class="LlamaTokenizer"))
    source = ModelSource(tiny_model(), theirs, Origin("tiny", "5e12" * 16, "real"))
    source.write_side_files(tmp_path / "staged")
    assert (
        read_text_tokenizer(tmp_path / "staged").tokenizer.encode(" the a</s>b").ids
        == theirs(" the a</s>b")["input_ids"]
    )
    monkeypatch.setattr(theirs, "_tokenizer", KINDS["smollm"]())
    with pytest.raises(ModelError, match="to `firsttoken serve` and"):
        source.write_side_files(tmp_path / "other")
