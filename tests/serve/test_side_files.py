"""Files beside the weights that say what no model has: the file and the key are named in one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from edited import set_keys
from transformers import AutoConfig

from firsttoken.assets.checkpoint import stored_dtype
from firsttoken.assets.model_config import read_config
from firsttoken.assets.positions import context_of
from firsttoken.study.errors import ModelError
from firsttoken_serve.chat.text import read_vocabulary

CONFIG, GENERATION, SETTINGS = "config.json", "generation_config.json", "tokenizer_config.json"


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """A copy of the plain folder, to be changed."""
    return Path(shutil.copytree(plain, tmp_path / "model"))


@pytest.mark.parametrize(
    "end",
    [2.0, "2", True, -1, 260, 10**9, [[1]], [1, "2"], [1, None], [-1], [260], {"id": 1}, [True], 1.5, "<end>"],
    ids=str,
)
@pytest.mark.parametrize("name", [GENERATION, CONFIG])
def test_an_end_that_is_no_token_of_the_model_is_refused(name: str, end: Any, folder: Path) -> None:
    """Wherever it stands."""
    if name == CONFIG:
        (folder / GENERATION).unlink()
    set_keys(folder / name, eos_token_id=end)
    with pytest.raises(ModelError, match=rf"{name}: eos_token_id") as told:
        read_vocabulary(folder, 64)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("content", ["[]", '"text"', "7", "null", "true", "[{}]", "", "{", "\x00", '{"a": 1, "a": 2}'])
@pytest.mark.parametrize("name", [GENERATION, CONFIG, SETTINGS, "special_tokens_map.json"])
def test_a_side_file_that_holds_something_else_is_refused(name: str, content: str, folder: Path) -> None:
    """No traceback, whatever it holds."""
    set_keys(folder / SETTINGS, added_tokens_decoder=...)
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=name) as told:
        read_vocabulary(folder, 64)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (CONFIG, {"vocab_size": "260"}, "vocab_size"),
        (CONFIG, {"vocab_size": 0}, "vocab_size"),
        (CONFIG, {"max_position_embeddings": "many"}, "max_position_embeddings"),
        (CONFIG, {"max_position_embeddings": -1}, "max_position_embeddings"),
        (CONFIG, {"dtype": 16}, "dtype"),
        (CONFIG, {"dtype": "float12"}, "dtype: 'float12' is none of weights"),
        (SETTINGS, {"bos_token": 1}, "bos_token"),
        (SETTINGS, {"eos_token": {"lstrip": True}}, "eos_token: missing key 'content'"),
        (SETTINGS, {"eos_token": ["</s>"]}, "eos_token"),
        (SETTINGS, {"chat_template": 5}, "chat_template"),
        (SETTINGS, {"chat_template": [{"name": "default"}]}, r"chat_template\[0\]: missing key 'template'"),
        (SETTINGS, {"chat_template": {"default": None}}, "chat_template"),
        (SETTINGS, {"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder: 'x' is no token id"),
        (SETTINGS, {"added_tokens_decoder": []}, "added_tokens_decoder"),
        (SETTINGS, {"extra_special_tokens": 3}, "extra_special_tokens"),
    ],
)
def test_a_key_that_holds_something_else_is_named(name: str, values: dict, message: str, folder: Path) -> None:
    """With its file."""
    (folder / "chat_template.jinja").unlink()  # which is read before tokenizer_config.json
    set_keys(folder / name, **values)
    with pytest.raises(ModelError, match=rf"{name}.*{message}"):
        read_vocabulary(folder, 64)
        stored_dtype(folder)


@pytest.mark.parametrize(("end", "expected"), [([], ()), ([0, 1], (0, 1)), (259, (259,)), (0, (0,)), (None, ())])
def test_ends_may_be_one_or_several_or_none(end: Any, expected: tuple[int, ...], folder: Path) -> None:
    """As generation_config.json has them."""
    set_keys(folder / GENERATION, eos_token_id=end)
    assert read_vocabulary(folder, 64).stop_ids == expected


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral"])
def test_a_length_that_is_not_said_is_that_of_the_class(kind: str, folder: Path) -> None:
    """As transformers has it; of a class that is not known the key is asked for."""
    names = {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}
    for value in (..., None):
        set_keys(folder / CONFIG, max_position_embeddings=value, **names)
        assert context_of(read_config(folder)) == AutoConfig.for_model(kind.lower()).max_position_embeddings
    set_keys(folder / CONFIG, model_type="odd", architectures=["OddForCausalLM"])
    with pytest.raises(ModelError, match="the odd model has max_position_embeddings: expected int"):
        read_vocabulary(folder, 64)


@pytest.mark.parametrize("said", [..., None, "auto"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_is_left_open_is_that_of_the_weights(key: str, said: Any, folder: Path) -> None:
    """Which are float32 here, whatever the other key says."""
    set_keys(folder / CONFIG, dtype=..., torch_dtype=...)
    set_keys(folder / CONFIG, **{key: said})
    assert stored_dtype(folder) == "float32"
