"""What lies beside tokenizer.json: special tokens by name, tokens added to the vocabulary, and chat templates.

The rules are those of transformers 5 (``PreTrainedTokenizerBase.from_pretrained``), which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.assets.model_config import CONFIG
from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.json_text import parse_json, read_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, read_bytes, shown
from firsttoken.study.parsing.schema import parse_as

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

TOKENIZER, SETTINGS, SPECIAL_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_OLD_ADDED = "added_tokens.json"
TEMPLATE, TEMPLATES, DEFAULT = "chat_template.jinja", "additional_chat_templates", "default"
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MEND = "copy the model's own"
_MOST_BYTES = 1 << 26
_MOST_TEMPLATE_BYTES = 1 << 20
_DIGITS = 31  # transformers writes 10 ** 30 for a length without limit
BACKEND = "TokenizersBackend"  # transformers' name for a tokenizer.json that is taken as it is
_EXTRA = ("extra_special_tokens", "additional_special_tokens")  # the second is the name before transformers 5
_TEXT_END = "<|endoftext|>"
CLASS_TOKENS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), _TEXT_END),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), _TEXT_END),
    BACKEND: {},
}
"""The classes of tokenizer in transformers that are read here as they are there, and the special tokens that each has
where its files name none."""
_BACKENDS = (None, BACKEND, "PreTrainedTokenizerFast", "PreTrainedTokenizer")  # config.json may not name the last
_CLASSES: dict[
    str, dict[str | None, str]
] = {  # what transformers makes of the class that a folder names, by model_type
    "llama": dict.fromkeys(_BACKENDS, BACKEND)
    | {f"{name}{fast}": name for name in CLASS_TOKENS if name != BACKEND for fast in ("", "Fast")},
    "qwen2": dict.fromkeys((None, "Qwen2Tokenizer", "Qwen2TokenizerFast"), "Qwen2Tokenizer"),
}
_KNOWN_SETTINGS = {  # keys that are read here, and those that change neither ids nor text
    *("tokenizer_class", "chat_template", "added_tokens_decoder", "legacy", "add_prefix_space", *_EXTRA, *NAMED),
    *("add_bos_token", "add_eos_token"),  # which transformers does not read beside a tokenizer.json
    *("clean_up_tokenization_spaces", "model_max_length", "max_length", "padding_side", "truncation_side", "stride"),
    *("truncation_strategy", "pad_to_multiple_of", "pad_token_type_id", "model_input_names", "sp_model_kwargs"),
    *("use_default_system_prompt", "spaces_between_special_tokens", "processor_class", "name_or_path", "backend"),
    *("is_local", "local_files_only", "errors", "use_fast", "vocab_size", "special_tokens_map_file"),
}


@dataclass(frozen=True)
class SideToken:
    """A token that a side file names; ``normalized`` None: unless it is special, as tokenizers has it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    """``special`` tokens by name ("bos_token"), ``numbered`` ones in the order of their ids, all that are ``named`` as
    special, and ``templates`` by name.

    ``made_as`` is the class in ``CLASS_TOKENS`` that transformers makes of the files, with its ``settings``; it is ""
    where only transformers can tell, and ``why`` then says so in half a sentence.
    """

    special: dict[str, str]
    numbered: tuple[SideToken, ...]
    named: tuple[SideToken, ...]
    templates: dict[str, str]
    settings: Mapping[str, Any]
    made_as: str
    why: str = ""

    def complete(self, tokenizer: Tokenizer) -> None:
        """Add to ``tokenizer`` what it does not know as a token of its own: a special token is one token."""
        present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for token in (*self.numbered, *self.named):
            if token.content and token.content not in present:
                present.add(token.content)
                tokenizer.add_tokens([_added(token, token.content in self.special.values())])


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the tokenizer's settings from the files of ``folder``; without any, those of its class in transformers.

    Raises ModelError for a file that is damaged, with its key at fault.
    """
    settings = _mapping(folder / SETTINGS)
    decoder: dict[str, Any] = {}
    path = folder / SETTINGS
    with errors_as(path, ModelError, MEND):
        if "added_tokens_decoder" in settings:
            decoder = parse_as(
                dict[str, SideToken], settings["added_tokens_decoder"], "added_tokens_decoder", others=True
            )
            if bad_key := next((key for key in decoder if not key.isdecimal()), ""):
                raise ParseError(f"added_tokens_decoder: {bad_key!r} is no token id")
    with_special = settings
    if "added_tokens_decoder" not in settings and (folder / SPECIAL_MAP).is_file():  # it says all where it is
        with_special = settings | _mapping(path := folder / SPECIAL_MAP)
    with errors_as(path, ModelError, MEND):
        special, extra = _special_tokens(settings, with_special)
    made_as, why = _class_of(folder, settings)
    by_name = {name: SideToken(text, special=True) for name, text in CLASS_TOKENS.get(made_as, {}).items()} | special
    order = sorted(by_name, key=lambda name: NAMED.index(name) if name in NAMED else len(NAMED))
    tokens = {name: token for name in order if (token := by_name[name]) is not None}
    numbered, named = tuple(decoder[key] for key in sorted(decoder, key=int)), (*tokens.values(), *extra)
    texts = {name: token.content for name, token in tokens.items()}
    return TokenizerFiles(texts, numbered, named, _templates(folder, settings), settings, made_as, why)


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with errors_as(path, ModelError, MEND):
        return parse_as(dict[str, Any], parse_json(read_bytes(path, _MOST_BYTES), digits=_DIGITS))


def _special_tokens(
    settings: Mapping[str, Any], token_settings: Mapping[str, Any]
) -> tuple[dict[str, SideToken | None], list[SideToken]]:
    """By name, in the order in which transformers adds them, and those without names. ``token_settings`` is
    ``settings`` and what the map of special tokens says."""
    special: dict[str, SideToken | None] = dict.fromkeys(name for name in NAMED if name in token_settings)
    named_tokens = [
        key
        for key in token_settings
        if key not in NAMED and key.endswith("_token") and isinstance(token_settings[key], str | dict)
    ]
    # as texts they come after those that are objects
    named_tokens.sort(key=lambda key: isinstance(settings.get(key), str))
    for key in [*special, *named_tokens]:
        special[key] = None if token_settings[key] is None else _content(key, token_settings[key])
    extra = next((token_settings[key] for key in _EXTRA if token_settings.get(key)), [])
    if isinstance(extra, dict):
        special |= {name: _content(f"{_EXTRA[0]}.{name}", value) for name, value in extra.items()}
        extra = []
    if not isinstance(extra, list):
        raise ParseError(f"{_EXTRA[0]}: expected a list of tokens")
    return special, [_content(_EXTRA[0], value) for value in extra]


def _content(key: str, value: Any) -> SideToken:
    if isinstance(value, str):
        return SideToken(value, special=True)
    return replace(parse_as(SideToken, value, key, others=True), special=True)


def _added(token: SideToken, named: bool) -> AddedToken:
    from tokenizers import AddedToken

    options = {key: getattr(token, key) for key in ("single_word", "lstrip", "rstrip")}
    options["normalized"] = not token.special if token.normalized is None else token.normalized
    return AddedToken(token.content, special=token.special or named, **options)


def _class_of(folder: Path, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The class of tokenizer that transformers makes of these files; or "", and why it is not known here."""
    with errors_as(folder / CONFIG, ModelError, MEND):
        config = parse_as(dict[str, Any], read_json(folder / CONFIG, 1 << 24))
    kind, named = config.get("model_type"), settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(kind, str) or kind not in _CLASSES:
        return "", ""
    name = _CLASSES[kind].get(named, "") if named is None or isinstance(named, str) else ""
    if not name or (named == _BACKENDS[-1] and not settings.get("tokenizer_class")):
        return "", f"its tokenizer_class is {shown(named)}"
    if "model_name" in config:  # by which transformers overrules a class
        return "", f"its model_name is {shown(config['model_name'])}"
    unknown = (key for key in settings if key not in _KNOWN_SETTINGS and not key.endswith("_token"))
    if key := next((key for key in unknown if settings[key] is not None and settings[key] is not False), ""):
        return "", f"its {shown(key)} is {shown(settings[key])}"
    if key := next((key for key in NAMED if isinstance(settings.get(key), dict) and "__type" not in settings[key]), ""):
        return "", f"its {key} is {shown(settings[key])}"
    if name == "GPT2Tokenizer" and settings.get("add_prefix_space", False) is None:
        return "", "its add_prefix_space is null"
    if "added_tokens_decoder" not in settings and (folder / _OLD_ADDED).is_file():
        return "", f"it has {_OLD_ADDED}"
    return (BACKEND if name == "LlamaTokenizer" and _is_byte_level(folder) else name), ""


def _is_byte_level(folder: Path) -> bool:
    """A tokenizer of bytes under the name of Llama's class, which is one of SentencePiece, is taken as it is."""
    with errors_as(folder / TOKENIZER, ModelError, MEND):
        return b'"ByteLevel"' in read_bytes(folder / TOKENIZER)


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The files, if there is one; else what tokenizer_config.json says: a text or one under each name."""
    files = {DEFAULT: folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    files |= {path.name.removesuffix(".jinja"): path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if files:
        templates = {}
        for name, path in files.items():
            with errors_as(path, ModelError, MEND):
                templates[name] = read_bytes(path, _MOST_TEMPLATE_BYTES).decode("utf-8")
        return templates
    template = settings.get("chat_template")
    with errors_as(folder / SETTINGS, ModelError, MEND):
        if isinstance(template, list):
            return {
                entry.name: entry.template
                for entry in parse_as(tuple[_Named, ...], template, "chat_template", others=True)
            }
        if isinstance(template, dict):
            return parse_as(dict[str, str], template, "chat_template")
        return {} if template is None else {DEFAULT: parse_as(str, template, "chat_template")}


@dataclass(frozen=True)
class _Named:
    name: str
    template: str
