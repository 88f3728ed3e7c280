"""Which tokens end an answer: by the model's own files, and in a chat by its tokenizer and its template too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from firsttoken.assets.chat_template import ChatTemplate, read_template
from firsttoken.assets.model_config import CONFIG, read_config
from firsttoken.assets.tokenizer_files import MEND, TokenizerFiles, read_tokenizer_files
from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import blaming
from firsttoken.study.parsing.schema import Fault, between, shaped

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERATION, _KEY = "generation_config.json", "eos_token_id"


def model_ends(folder: Path) -> tuple[int, ...]:
    """The ids that generation_config.json names, or config.json where that says nothing of them.

    Raises ModelError for a file that is damaged, and for an id that is no token of the model.
    """
    size = read_config(folder).vocab_size
    for path in (folder / GENERATION, folder / CONFIG):
        if not path.is_file():
            continue
        with blaming(path, ModelError, MEND):
            content = shaped(dict[str, Any], read_json(path, 1 << 24))
            if _KEY in content:
                return _ends(content[_KEY], between(0, size - 1))
    return ()


def _ends(value: Any, inside: Fault) -> tuple[int, ...]:
    one = Annotated[int, inside]
    if isinstance(value, list):
        return shaped(tuple[one, ...], value, _KEY)
    return () if value is None else (shaped(one, value, _KEY),)


def chat_ends(
    folder: Path, tokenizer: Tokenizer, files: TokenizerFiles | None = None, template: ChatTemplate | None = None
) -> tuple[int, ...]:
    """The ids that end an answer in a chat: the model's, the end that the tokenizer names, and the token that the
    template writes behind an answer. Chat models are often published with the base model's end alone in their files.

    ``files`` and ``template`` may have been read already. Raises ModelError as :func:`model_ends`.
    """
    files = files or read_tokenizer_files(folder)
    template = template or read_template(folder, files)
    size, ends = read_config(folder).vocab_size, list(model_ends(folder))
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    behind = template.turn_end()
    written = max((token for token in added if token and behind.startswith(token)), key=len, default="")
    for number in (tokenizer.token_to_id(files.special.get("eos_token", "")), added.get(written)):
        if number is not None and number < size and number not in ends:
            ends.append(number)
    return tuple(ends)
