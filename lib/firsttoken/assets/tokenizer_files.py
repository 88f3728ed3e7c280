"""What lies beside tokenizer.json: special tokens by name, tokens added to the vocabulary, and chat templates.

The rules are those of transformers 5 (``PreTrainedTokenizerBase.from_pretrained``), which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.assets.model_config import CONFIG
from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.json_text import parse_json, read_json
from firsttoken.study.parsing.parse_errors import Damaged, blaming, read_bytes
from firsttoken.study.parsing.schema import shaped

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

TOKENIZER, SETTINGS, SPECIAL_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, TEMPLATES, DEFAULT = "chat_template.jinja", "additional_chat_templates", "default"
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MEND = "copy the model's own"
_MOST_BYTES = 1 << 26
_MOST_TEMPLATE_BYTES = 1 << 20
_DIGITS = 31  # transformers writes 10 ** 30 for a length without limit
_EXTRA = ("extra_special_tokens", "additional_special_tokens")  # the second is the name before transformers 5
_TEXT_END = "<|endoftext|>"
CLASS_TOKENS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), _TEXT_END),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), _TEXT_END),
}
"""The special tokens that a class of tokenizer in transformers has where its files name none."""
_OWN_CLASS = {"qwen2": "Qwen2Tokenizer"}  # by model_type, where no file names a class
_OTHER_CLASS = {"llama", "qwen2"}  # model types whose files may name any class; of others transformers takes none


@dataclass(frozen=True)
class _Token:
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # None: as tokenizers decides, by whether it is special
    special: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    """``special`` tokens by name ("bos_token"), ``added`` ones in the order of their ids, and ``templates`` by name."""

    special: dict[str, str]
    added: tuple[_Token, ...]
    templates: dict[str, str]

    def complete(self, tokenizer: Tokenizer) -> None:
        """Add to ``tokenizer`` what it does not know as a token of its own: a special token is one token."""
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for token in self.added:
            if token.content and token.content not in known:
                known.add(token.content)
                tokenizer.add_tokens([_added(token, token.content in self.special.values())])


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """What the files of ``folder`` say; without any, what the tokenizer's class in transformers has.

    Raises ModelError for a file that is damaged, with its key at fault.
    """
    settings = _mapping(folder / SETTINGS)
    decoder: dict[str, Any] = {}
    path = folder / SETTINGS
    with blaming(path, ModelError, MEND):
        if "added_tokens_decoder" in settings:
            decoder = shaped(dict[str, _Token], settings["added_tokens_decoder"], "added_tokens_decoder", others=True)
            if odd := next((key for key in decoder if not key.isdecimal()), ""):
                raise Damaged(f"added_tokens_decoder: {odd!r} is no token id")
    told = settings
    if "added_tokens_decoder" not in settings and (folder / SPECIAL_MAP).is_file():  # it says all where it is
        told = settings | _mapping(path := folder / SPECIAL_MAP)
    with blaming(path, ModelError, MEND):
        special, extra = _special_tokens(settings, told)
    special = {key: value for key, value in (_class_tokens(folder, settings) | special).items() if value is not None}
    added = [decoder[key] for key in sorted(decoder, key=int)]
    added += [_Token(content, special=True) for content in special.values()] + list(extra)
    return TokenizerFiles(special, tuple(added), _templates(folder, settings))


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with blaming(path, ModelError, MEND):
        return shaped(dict[str, Any], parse_json(read_bytes(path, _MOST_BYTES), digits=_DIGITS))


def _special_tokens(settings: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[dict[str, str | None], list[_Token]]:
    """By name, in the order in which transformers adds them, and those without names. ``told`` is ``settings`` and what
    the map of special tokens says."""
    special: dict[str, str | None] = {name: told[name] for name in NAMED if name in told}
    own = [key for key in told if key not in NAMED and key.endswith("_token") and isinstance(told[key], str | dict)]
    own.sort(key=lambda key: isinstance(settings.get(key), str))  # as texts they come after those that are objects
    for key in [*special, *own]:
        special[key] = None if told[key] is None else _content(key, told[key]).content
    extra = next((told[key] for key in _EXTRA if told.get(key)), [])
    if isinstance(extra, dict):
        special |= {name: _content(f"{_EXTRA[0]}.{name}", value).content for name, value in extra.items()}
        extra = []
    if not isinstance(extra, list):
        raise Damaged(f"{_EXTRA[0]}: expected a list of tokens")
    return special, [_content(_EXTRA[0], value) for value in extra]


def _content(key: str, value: Any) -> _Token:
    if isinstance(value, str):
        return _Token(value, special=True)
    return shaped(_Token, value, key, others=True)


def _added(token: _Token, named: bool) -> AddedToken:
    from tokenizers import AddedToken

    options = {key: getattr(token, key) for key in ("single_word", "lstrip", "rstrip")}
    if token.normalized is not None:
        options["normalized"] = token.normalized
    return AddedToken(token.content, special=token.special or named, **options)


def _class_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """What the class of tokenizer that transformers takes for these files adds."""
    with blaming(folder / CONFIG, ModelError, MEND):
        config = shaped(dict[str, Any], read_json(folder / CONFIG, 1 << 24))
    kind = config.get("model_type")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if isinstance(named, str) and kind in _OTHER_CLASS:
        name = named.removesuffix("Fast")
    else:
        name = _OWN_CLASS.get(kind, "") if isinstance(kind, str) and not named else ""
    if name == "LlamaTokenizer" and _is_byte_level(folder):
        return {}
    return CLASS_TOKENS.get(name, {})


def _is_byte_level(folder: Path) -> bool:
    """A tokenizer of bytes under the name of Llama's class, which is one of SentencePiece, is taken as it is."""
    with blaming(folder / TOKENIZER, ModelError, MEND):
        return b'"ByteLevel"' in read_bytes(folder / TOKENIZER)


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The files, if there is one; else what tokenizer_config.json says: a text or one under each name."""
    files = {DEFAULT: folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    files |= {path.name.removesuffix(".jinja"): path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if files:
        found = {}
        for name, path in files.items():
            with blaming(path, ModelError, MEND):
                found[name] = read_bytes(path, _MOST_TEMPLATE_BYTES).decode("utf-8")
        return found
    told = settings.get("chat_template")
    with blaming(folder / SETTINGS, ModelError, MEND):
        if isinstance(told, list):
            return {one.name: one.template for one in shaped(tuple[_Named, ...], told, "chat_template", others=True)}
        if isinstance(told, dict):
            return shaped(dict[str, str], told, "chat_template")
        return {} if told is None else {DEFAULT: shaped(str, told, "chat_template")}


@dataclass(frozen=True)
class _Named:
    name: str
    template: str
