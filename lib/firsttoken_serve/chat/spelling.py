"""The bytes that a token stands for, which a text that was decoded from it alone may have lost.

A token may be a part of a character: three tokens of one byte each make one Japanese letter, and each alone reads as
U+FFFD. The vocabulary spells such bytes in one of two ways, and the tokenizer's decoder says in which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))  # bytes that GPT-2's alphabet leaves as they are
_ODD = [byte for byte in range(256) if byte not in _PLAIN]
_ALPHABET = {chr(byte): byte for byte in _PLAIN} | {chr(256 + index): byte for index, byte in enumerate(_ODD)}
_Piece = str | bytes

INCOMPLETE = "\ufffd"  # what bytes that are no character decode to, be it that the rest is yet to come
LAST = 32  # tokens of a prompt: a character is four at most, and what is no text seldom more


class Spelling:
    """Says what a decoder of ``tokenizer``'s kind makes of each token by itself, as bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        decoder_state = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        decoders = (
            []
            if decoder_state is None
            else decoder_state["decoders"]
            if decoder_state["type"] == "Sequence"
            else [decoder_state]
        )
        steps = [_step(decoder) for decoder in decoders]
        self._steps = steps if steps and None not in steps else None

    def special(self, token_id: int) -> bool:
        """Return whether a token stands for nothing in a text, such as the end of a turn."""
        return token_id in self._special

    def specials_in(self, text: str) -> dict[str, int]:
        """Return the special tokens whose names stand in ``text``, the longest first."""
        names = {str(self._tokenizer.id_to_token(i)): i for i in self._special}
        return {name: names[name] for name in sorted(names, key=len, reverse=True) if name and name in text}

    def settled(self, token_ids: Sequence[int]) -> int:
        """Return how many of the ids there are up to the last U+FFFD that is written as one, 0 where there is none near
        the end. Any other stands for bytes that may go on."""
        count, raw = 0, b""
        for number, token_id in enumerate(token_ids[-LAST:], 1 + max(0, len(token_ids) - LAST)):
            raw += b"" if self.special(token_id) else self.spelt(token_id)
            count = number if raw.endswith(INCOMPLETE.encode()) else count
        return count

    def spelt(self, token_id: int) -> bytes:
        """Return the bytes of a token, those of its name where it is special; b"" for an id that no token has."""
        token: _Piece = self._tokenizer.id_to_token(token_id) or ""
        if self.special(token_id):
            return str(token).encode()
        if self._steps is None:  # of another kind, in which tokens are whole characters
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        for step in self._steps:
            token = step(token) if isinstance(token, str) else token
        return token.encode() if isinstance(token, str) else token

    def name(self, token_id: int) -> str:
        """Return the text of a token, or as OpenAI writes the part of a character, "bytes:" and each byte as an escape
        of two hex digits."""
        spelt = self.spelt(token_id)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return names that tell the tokens apart: one that reads like an earlier one is named by its id."""
        ids: dict[str, int] = {}
        for token_id in token_ids:
            name = self.name(token_id)
            ids[f"token_id:{token_id}" if name in ids else name] = token_id
        return list(ids)


def _step(decoder: dict[str, Any]) -> Callable[[str], _Piece] | None:
    """Return what one part of a decoder does to a token, as a function; None where the part is not known."""
    if decoder["type"] == "ByteLevel":
        return _from_alphabet
    if decoder["type"] == "ByteFallback":
        return _from_name
    if decoder["type"] == "Metaspace":
        return lambda token: token.replace(decoder["replacement"], " ")
    if decoder["type"] == "Replace" and "String" in decoder["pattern"]:
        return lambda token: token.replace(decoder["pattern"]["String"], decoder["content"])
    return str if decoder["type"] in ("Fuse", "Strip") else None  # of the ends of a whole text, and not of a token's


def _from_alphabet(token: str) -> _Piece:
    """Return the bytes of the letters, like the decoder; a token with another alphabet's letter is taken as it is."""
    return bytes(_ALPHABET[letter] for letter in token) if all(map(_ALPHABET.__contains__, token)) else token


def _from_name(token: str) -> _Piece:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token
