"""Tokenizers and the settings beside them, drawn from a seed: what a published folder may say of how text is read."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from firsttoken.assets.quiet import quiet_transformers
from firsttoken.assets.text_tokenizer import check_same_ids
from firsttoken.study.errors import FirstTokenError, RequestError
from firsttoken_serve.chat.text import TextStream, read_vocabulary

TEXTS = (
    "the inn",
    " the inn",
    "the  inn ",
    "\nthe\n\n inn",
    "a</s>b",
    "<s> a </s> the</s>\n",
    "<|im_start|>user\nthe<|im_end|>\n",
    "<|im_start|> the <pad> in <extra>it",
    "1234 it's don't , . ! e\u0301 \u00e9 \ufb01 \u65e5\u672c \U0001f600",
    "\u2581the \u2581 a",
    "",
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} "
    "{{ m['content'] }} {{ eos_token }}{{ bos_token }}{% endif %}{% endfor %}"
)
TURNS = [
    {"role": "user", "content": " the a"},
    {"role": "assistant", "content": "a b"},
    {"role": "user", "content": "x</s>"},
]
WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("1", "2"), ("12", "3"), ("\u0120", "the"), ("\u0120", "in")]
SPM_MERGES = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "a"), ("\u2581", "x"), ("i", "n")]
FIRST = ("<unk>", "<s>", "</s>")


def _byte_level(normalizer: Any, words: list[Any], regex: bool, **options: Any) -> Tokenizer:
    symbols = [*FIRST, "<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    made = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=MERGES, **options))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    made.pre_tokenizer = pre_tokenizers.Sequence([*words, letters]) if words else letters
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def _pieces(scheme: str, **options: Any) -> Tokenizer:
    """Of SentencePiece's kind; ``scheme`` is "" for a normalizer that puts the blank first, as Llama 2's file has."""
    symbols = [*FIRST, *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abhteixn", "\u65e5", "\u00e9"]
    vocab = {s: i for i, s in enumerate([*symbols, *map("".join, SPM_MERGES)])}
    made = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=SPM_MERGES,
            **({"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"} | options),
        )
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if scheme:
        made.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=scheme == "always")
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(steps)
    return made


def _words(model: Any) -> Tokenizer:
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


_SMALL = {s: i for i, s in enumerate([*FIRST, "[UNK]", "the", "inn", "a", "b", "##n", ",", "it", "1234"])}
KINDS: dict[str, Any] = {
    "gpt2": lambda: _byte_level(None, [], True),
    "smollm": lambda: _byte_level(None, [pre_tokenizers.Digits(individual_digits=True)], True),
    "llama3": lambda: _byte_level(None, [pre_tokenizers.Split(Regex(WORDS), "isolated")], False, ignore_merges=True),
    "qwen2": lambda: _byte_level(normalizers.NFC(), [pre_tokenizers.Split(Regex(QWEN), "isolated")], False),
    "nfkc": lambda: _byte_level(normalizers.NFKC(), [], True),
    "llama2": lambda: _pieces(""),
    "metaspace first": lambda: _pieces("first"),
    "metaspace always": lambda: _pieces("always"),
    "metaspace never": lambda: _pieces("never", fuse_unk=False),
    "no bytes": lambda: _pieces("first", byte_fallback=False),
    "wordpiece": lambda: _words(models.WordPiece(_SMALL, unk_token="[UNK]")),
    "wordlevel": lambda: _words(models.WordLevel(_SMALL, unk_token="<unk>")),
    "unigram": lambda: _words(models.Unigram([(s, -float(i)) for i, s in enumerate(_SMALL)], 0, False)),
}
CLEANED = "clean_up_tokenization_spaces"
CLASSES = (
    *(None, "PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer"),
    *("LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer"),
    *("GPT2TokenizerFast", "GemmaTokenizer", "CodeLlamaTokenizerFast", "CohereTokenizerFast", "GPTNeoXTokenizerFast"),
    *("BloomTokenizerFast", "SomethingFast", "T5Tokenizer", "BertTokenizerFast", "CodeGenTokenizer", "ByT5Tokenizer"),
)
TYPES = ("llama", "llama", "llama", "qwen2", "qwen2", "mistral", "gemma", "qwen3", "granite", "phi3", "olmo2")
TYPES += ("gpt_neox", "starcoder2", "cohere")
OBJECT = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": True, "rstrip": False}
RARE: tuple[dict[str, Any], ...] = (
    {"added_tokens_decoder": {}},
    {"extra_special_tokens": None, "additional_special_tokens": None},
    {"additional_special_tokens": [OBJECT | {"content": "<|im_end|>"}, "<new>"]},
    {"extra_special_tokens": ["<new>", "</s>"]},
    {"tokenizer_class": None, "unk_token": None, "bos_token": None},
    {"eos_token": "the", "pad_token": "the"},
    {"image_token": "<new>", "eot_token": "<|im_end|>"},
    {"mask_token": OBJECT | {"content": "<mask>", "lstrip": True}},
)
OTHER_KEYS: tuple[dict[str, Any], ...] = (
    {"model_max_length": 10**30},
    {"padding_side": "left", "truncation_side": "left"},
    {CLEANED: True},
    {CLEANED: False},
    {"spaces_between_special_tokens": False},
    {"split_special_tokens": True},
    {"sp_model_kwargs": {}, "use_default_system_prompt": False},
    {"errors": "replace", "vocab_size": 600, "special_tokens_map_file": "/a/special_tokens_map.json"},
    {"add_bos_token": True},
    {"add_bos_token": False, "add_eos_token": True},
    {"add_eos_token": True},
    {"do_lower_case": True},
    {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
    {"a_key_of_its_own": [1]},
    {"max_length": 3, "truncation_strategy": "longest_first", "stride": 0},
    {CLEANED: True, f"{CLEANED}_for_bpe_even_though_it_will_corrupt_output": True},
)


@dataclass(frozen=True)
class DrawnResult:
    """A tokenizer by the name of its kind, and the side files by name."""

    kind: str
    tokenizer: str
    files: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kind} {json.dumps(self.files)[:900]}"


def draw(seed: int, number: int) -> Iterator[DrawnResult]:
    """So many folders; each is the same whenever it is drawn."""
    for index in range(number):
        yield _drawn(random.Random(f"{seed}-{index}"))


def write(drawn: DrawnResult, folder: Path) -> Path:
    """A folder without weights."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(drawn.tokenizer)
    for name, content in drawn.files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _drawn(rng: random.Random) -> DrawnResult:
    kind = rng.choice(list(KINDS))
    made: Tokenizer = KINDS[kind]()
    _special(rng, made, kind)
    if rng.random() < 0.5:
        ends = rng.choice(("<s> $A", "<s> $A </s>", "$A </s>"))
        numbers = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=ends, special_tokens=numbers)
    elif rng.random() < 0.2:
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    if rng.random() < 0.1:
        made.enable_truncation(3)
        made.enable_padding(length=16)
    return DrawnResult(kind, made.to_str(), _settings(rng, made))


def _special(rng: random.Random, made: Tokenizer, kind: str) -> None:
    if rng.random() < 0.9:
        made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in FIRST])
    if rng.random() < 0.6:
        made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if rng.random() < 0.3:
        made.add_tokens([AddedToken("<extra>", **_flags(rng))])


def _flags(rng: random.Random) -> dict[str, bool]:
    return {flag: rng.random() < 0.3 for flag in ("lstrip", "rstrip", "normalized", "single_word")}


def _settings(rng: random.Random, made: Tokenizer) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": rng.choice(TYPES), "vocab_size": 600, "max_position_embeddings": 512}
    settings: dict[str, Any] = {}
    files = {"config.json": config, "tokenizer_config.json": settings}
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    config["architectures"] = [names.get(config["model_type"], "OtherForCausalLM")]
    config |= {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    if (name := rng.choice(CLASSES)) is not None:
        (config if rng.random() < 0.1 else settings)["tokenizer_class"] = name
    if rng.random() < 0.8:
        settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if rng.random() < 0.15:
        settings["pad_token"] = rng.choice(("<pad>", None, "</s>", {"content": "<pad>", "lstrip": True}))
    if rng.random() < 0.5:
        settings["legacy"] = rng.choice((True, False, None))
    if rng.random() < 0.4:
        settings["add_prefix_space"] = rng.choice((True, False, None))
    for more in rng.sample(OTHER_KEYS, rng.choice((0, 0, 1, 2))):
        settings |= more
    if rng.random() < 0.3:
        listed = json.loads(made.to_str())["added_tokens"]
        rows = {str(row["id"]): {k: v for k, v in row.items() if k != "id"} for row in listed}
        if rows and rng.random() < 0.3:
            rows.pop(rng.choice(list(rows)))
        if rng.random() < 0.3:
            rows["590"] = {"content": "<pad>", "special": True} | _flags(rng)
        settings["added_tokens_decoder"] = rows
    elif rng.random() < 0.2:
        files["special_tokens_map.json"] = {"eos_token": "</s>", "pad_token": {"content": "<pad>", "lstrip": True}}
    elif rng.random() < 0.1:
        files["added_tokens.json"] = {"<pad>": made.get_vocab_size()}
    if rng.random() < 0.3:
        settings["extra_special_tokens"] = rng.choice((["<extra>"], {"image_token": "<extra>"}, []))
    elif rng.random() < 0.2:
        settings["additional_special_tokens"] = ["<|im_start|>", "<|im_end|>"]
    if rng.random() < 0.1:
        settings[rng.choice(("bos_token", "eos_token", "sep_token"))] = OBJECT
    if rng.random() < 0.1:
        settings |= rng.choice(RARE)
    settings["chat_template"] = rng.choice((CHATML, INST))
    if rng.random() < 0.05:
        del files["tokenizer_config.json"]
    return files


def examine(folder: Path) -> tuple[str, str]:
    """("equal", ""), ("refused", the line), or ("wrong", how text reads otherwise than by transformers)."""
    try:
        vocabulary = read_vocabulary(folder, 4096)
    except FirstTokenError as error:
        return ("wrong" if "\n" in str(error) else "refused"), str(error)
    try:
        with quiet_transformers():
            theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        return "wrong", f"transformers: {str(error)[:200]!r}, and here it is read"
    try:
        check_same_ids(folder, theirs)
    except FirstTokenError as error:
        return ("refused" if "cannot read" in str(error) else "wrong"), str(error)
    for text in TEXTS:
        try:
            expected = theirs(text)["input_ids"]
        except Exception:  # such as a vocabulary without a token for what it has not
            expected = []
        try:
            ids = vocabulary.prompt_ids(text)
        except RequestError:
            ids = []
        if ids != expected:
            return "wrong", f"{text!r}: {ids}, not {expected}"
        stream = TextStream(vocabulary.tokenizer)
        spoken = "".join([*map(stream.push, ids), stream.finish()])
        if spoken != theirs.decode(ids, skip_special_tokens=True):
            return "wrong", f"{ids} say {spoken!r}, not {theirs.decode(ids, skip_special_tokens=True)!r}"
    try:
        expected = theirs.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
    except Exception:
        return "equal", ""
    if (ids := vocabulary.chat_ids(TURNS)) != expected:
        return "wrong", f"a chat: {ids}, not {expected}"
    return "equal", ""
