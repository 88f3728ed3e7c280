"""The tokenizer of a model folder as transformers makes it, which is not always as its tokenizer.json says.

Of many classes transformers 5 takes the vocabulary of the file and puts the pieces of the class in place of the file's
own. What it does for the classes in ``CLASS_TOKENS`` is done here with the tokenizers' own library, for a start without
its import, which takes seconds; any other folder is read by transformers itself. So one folder has one tokenization.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from firsttoken.assets.tokenizer_files import (
    BACKEND,
    SETTINGS,
    TOKENIZER,
    SideToken,
    TokenizerFiles,
    read_tokenizer_files,
)
from firsttoken.study.errors import ModelError, first_line
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, read_bytes, shown

_MOST_BYTES = 1 << 28  # the largest published vocabularies take 35 MB
_CLEANED = "clean_up_tokenization_spaces"
_CLEANED_TOO = f"{_CLEANED}_for_bpe_even_though_it_will_corrupt_output"
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TRIALS = (  # what classes differ in: blanks before, behind and doubled, line ends, digits, accents, turns
    "the inn",
    " the  inn ",
    '\n\nThe inn\'s 2026 guests:\t"e\u0301t\u00e9" \u65e5\u672c \U0001f600\r\n',
    "{0}the inn{0} at{0}",
    "{0}user\nthe inn{0}\n{0}assistant\n",
)


class TextTokenizer(NamedTuple):
    """A ``tokenizer`` with all of its tokens, and the ``files`` beside it."""

    tokenizer: Tokenizer
    files: TokenizerFiles


def read_text_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of the model in ``folder``; a line on the terminal says where only transformers can read it.

    Raises ModelError where a file is missing, damaged or no tokenizer, and for what decodes as no stream of text can.
    """
    if not (folder / TOKENIZER).is_file():
        raise ModelError(f"{folder} has no {TOKENIZER}, which reads its text; copy the model's own")
    read, why = _read_here(folder)
    if not read.files.made_as:
        if why:
            print(f"firsttoken: {folder.name} starts with transformers' own tokenizer: {why}", file=sys.stderr)
        read = _by_transformers(folder, read.files)
    settings, tokenizer = read.files.settings, read.tokenizer
    if settings.get(_CLEANED) and (type(tokenizer.model).__name__ != "BPE" or settings.get(_CLEANED_TOO)):
        raise ModelError(
            f"{folder / SETTINGS}: {_CLEANED} takes spaces out of text that has been sent; set it to false"
        )
    tokenizer.no_truncation()  # a file may ask for either, and a prompt is neither cut nor filled up
    tokenizer.no_padding()
    return read


def check_same_ids(folder: Path, theirs: Any) -> None:
    """Raise ModelError unless ``theirs``, which transformers has made of ``folder``, reads texts with blanks, special
    tokens and turns as the service does, and has the same names for special tokens."""
    if not (folder / TOKENIZER).is_file():
        return
    read, _ = _read_here(folder)
    if read.files.made_as:  # else it is theirs
        read.tokenizer.no_truncation()
        read.tokenizer.no_padding()
        _check(folder, read.tokenizer, theirs)
        if read.files.special != theirs.special_tokens_map:
            served, expected = shown(read.files.special, 200), shown(theirs.special_tokens_map, 200)
            raise ModelError(
                f"{folder}: special tokens are {served} to `firsttoken serve` and {expected} to transformers; name "
                f"them in {SETTINGS}"
            )


def _read_here(folder: Path) -> tuple[TextTokenizer, str]:
    """Read the tokenizer of ``folder`` with the tokenizers' own library alone.

    Where only transformers can make its class, it is made as no class; the reason is returned with it, if there is one.
    """
    with errors_as(folder / TOKENIZER, ModelError, "copy the model's own"):
        text = read_bytes(folder / TOKENIZER, _MOST_BYTES).decode("utf-8")
        try:
            raw = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise ParseError(f"it is truncated or no tokenizer ({error})") from error
    files = read_tokenizer_files(folder)
    why = files.why or (_unusual(raw, files) if files.made_as else "")
    if why or not files.made_as:
        return TextTokenizer(raw, replace(files, made_as="")), why
    return TextTokenizer(_made(raw, files), files), ""


def _check(folder: Path, tokenizer: Tokenizer, theirs: Any) -> None:
    for text in (trial.format(theirs.eos_token or "") for trial in _TRIALS):
        try:
            ids, expected = tokenizer.encode(text).ids, theirs(text)["input_ids"]
        except Exception as error:  # the library raises nothing narrower: a vocabulary without a token for the rest
            raise ModelError(f"{folder}: its tokenizer cannot read {text!r} ({first_line(error)})") from error
        ways = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)]
        if ids != expected or ways != [theirs.decode(ids, skip_special_tokens=skip) for skip in (True, False)]:
            raise ModelError(
                f"{folder}: {text!r} is {shown(ids)} to `firsttoken serve` and {shown(expected)} to transformers' "
                f"{type(theirs).__name__}; set tokenizer_class in {SETTINGS} to {BACKEND}"
            )


def _by_transformers(folder: Path, files: TokenizerFiles) -> TextTokenizer:
    from transformers import AutoTokenizer

    from firsttoken.assets.quiet import quiet_transformers

    try:
        with quiet_transformers():
            made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds: the files name classes, and their values may be anything
        raise ModelError(
            f"transformers cannot read the tokenizer in {folder}: {first_line(error)}; copy the model's own files"
        ) from error
    backend = getattr(made, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelError(f"{folder}: {type(made).__name__} has no form in the tokenizers library; use another model")
    backend.no_truncation()
    backend.no_padding()
    if not made.clean_up_tokenization_spaces:
        _check(folder, backend, made)
    settings = files.settings | {_CLEANED: made.clean_up_tokenization_spaces}
    return TextTokenizer(backend, replace(files, special=dict(made.special_tokens_map), settings=settings))


# What a class of transformers makes of a vocabulary with merges.


class _TextPieces(NamedTuple):
    normalizer: Any
    pre_tokenizer: Any
    decoder: Any


def _unusual(raw: Tokenizer, files: TokenizerFiles) -> str:
    """Return what this module may do otherwise than transformers, as the reason; "" where there is nothing."""
    model = raw.model
    if files.made_as != BACKEND and (
        type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix
    ):
        return f"its {files.made_as} is no BPE without affixes"
    if raw.padding is not None and "pad_token" not in files.settings:
        return "its padding names a token that nothing else does"
    listed = {token.content: token for token in raw.get_added_tokens_decoder().values()}
    for token in files.numbered:
        other = listed.get(token.content)
        if files.made_as == BACKEND and other is not None and _flags(token) != _flags(other):
            return f"its files disagree on {shown(token.content)}"
    if files.made_as == BACKEND or "added_tokens_decoder" not in files.settings:
        listed |= {token.content: token for token in files.numbered if token.content not in listed}
    else:
        listed = {token.content: token for token in files.numbered}
    for token in files.named:
        entry = listed.get(token.content, token)
        flagged = entry.lstrip or entry.rstrip or entry.single_word
        if not entry.special or (flagged and (entry is token or files.made_as == "Qwen2Tokenizer")):
            return f"its special token {shown(token.content)} has flags of its own"
    return ""


def _flags(token: SideToken | AddedToken) -> tuple[bool, ...]:
    normalized = not token.special if token.normalized is None else token.normalized
    return token.special, token.lstrip, token.rstrip, token.single_word, normalized


def _made(raw: Tokenizer, files: TokenizerFiles) -> Tokenizer:
    """The tokens of ``files`` added to ``raw``; or the vocabulary, merges and post-processor of ``raw`` under the
    pieces of the class."""
    if files.made_as == BACKEND:
        files.complete(raw)
        return raw
    made, model, is_llama = Tokenizer(raw.model), raw.model, files.made_as == "LlamaTokenizer"
    model.dropout, model.unk_token, model.ignore_merges = None, None, False
    model.fuse_unk = model.byte_fallback = is_llama
    made.normalizer, made.pre_tokenizer, made.decoder = _PIECES[files.made_as](files.settings)
    if raw.post_processor is not None:
        made.post_processor = raw.post_processor
    if "added_tokens_decoder" not in files.settings:
        for _, token in sorted(raw.get_added_tokens_decoder().items()):
            token.special = token.special or token.content in files.special.values()
            made.add_tokens([token])
    files.complete(made)
    return made


def _llama(settings: Mapping[str, Any]) -> _TextPieces:
    prefixed = settings.get("add_prefix_space") is None or bool(settings["add_prefix_space"])
    legacy = settings.get("legacy", False)
    scheme = "never" if not prefixed else "always" if legacy else "first"
    steps: Sequence[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps = [*steps, *([decoders.Strip(content=" ", left=1)] if prefixed else [])]
    metaspace = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    return _TextPieces(None, metaspace, decoders.Sequence(steps))


def _qwen2(settings: Mapping[str, Any]) -> _TextPieces:
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")), use_regex=False)
    return _TextPieces(normalizers.NFC(), pre_tokenizers.Sequence([words, letters]), decoders.ByteLevel())


def _gpt2(settings: Mapping[str, Any]) -> _TextPieces:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    return _TextPieces(None, letters, decoders.ByteLevel())


_PIECES: dict[str, Callable[[Mapping[str, Any]], _TextPieces]] = {
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": _qwen2,
    "GPT2Tokenizer": _gpt2,
}
