"""Tokenizers of the two kinds that are about, in which any text has ids: without merges, one for each of its bytes."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Merges = Sequence[tuple[str, str]]


def byte_level(first: Sequence[str] = ("<end>",), merges: Merges = (), use_regex: bool = True) -> Tokenizer:
    """As in Llama 3, Qwen and SmolLM: a token is some bytes, of which some tokens are no character."""
    symbols = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    made = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback(letters: Sequence[str], first: Sequence[str] = ("<end>",), merges: Merges = ()) -> Tokenizer:
    """As in Llama 2: a token is some characters, what has none is spelt in bytes, and the first space is dropped."""
    symbols = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, *map("".join, merges)]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def a_token_a_byte(end: str = "<end>") -> PreTrainedTokenizerFast:
    """Token 0 is the end of text."""
    backend = byte_level([end], use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, clean_up_tokenization_spaces=False)
