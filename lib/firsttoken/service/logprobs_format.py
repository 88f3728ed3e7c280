"""How likely each token was, in the two forms that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from firsttoken.service.spelling import Spelling

if TYPE_CHECKING:
    from firsttoken.engine.request import Chance


Json = dict[str, Any]
LEAST = -9999.0  # how OpenAI says that a token was as good as impossible: no logarithm of 0 is a number of JSON


class Spelt(NamedTuple):
    """A token: its name, which no other of its list has, the bytes that it adds to a text, and its logarithm."""

    name: str
    spelt: bytes
    logprob: float | None


class Said(NamedTuple):
    """A token that begins ``offset`` characters into what was said, with the likeliest in its place; its logarithm is
    None where nothing comes before it."""

    token: Spelt
    offset: int
    likeliest: tuple[Spelt, ...]


def said(spelling: Spelling, token_id: int, offset: int, chance: Chance | None) -> Said:
    """A token that was said, or read in a prompt."""
    token = _named(spelling, token_id, spelling.name(token_id), chance.logprob if chance else None)
    likeliest = chance.likeliest if chance else ()
    names = spelling.names([other for other, _ in likeliest])
    named = (_named(spelling, other, name, log) for name, (other, log) in zip(names, likeliest, strict=True))
    return Said(token, offset, tuple(named))


def as_completion(tokens: Sequence[Said]) -> Json:
    """Return the logprobs of /v1/completions: four lists of one length.

    Where a token has no likeliest ones, the token itself is named.
    """
    return {
        "tokens": [one.token.name for one in tokens],
        "token_logprobs": [one.token.logprob for one in tokens],
        "top_logprobs": [
            None
            if one.token.logprob is None
            else {other.name: other.logprob for other in one.likeliest or (one.token,)}
            for one in tokens
        ],
        "text_offset": [one.offset for one in tokens],
    }


def as_chat(tokens: Sequence[Said]) -> Json:
    """Return the logprobs of /v1/chat/completions: one entry a token; their bytes, joined, are what was said."""
    return {
        "content": [_entry(one.token) | {"top_logprobs": [*map(_entry, one.likeliest)]} for one in tokens],
        "refusal": None,
    }


def _named(spelling: Spelling, token_id: int, name: str, logprob: float | None) -> Spelt:
    shown = b"" if spelling.special(token_id) else spelling.spelt(token_id)
    return Spelt(name, shown, None if logprob is None else max(logprob, LEAST))


def _entry(one: Spelt) -> Json:
    return {"token": one.name, "logprob": one.logprob, "bytes": list(one.spelt)}
