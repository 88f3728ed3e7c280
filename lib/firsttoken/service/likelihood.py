"""How likely each token was, in the two forms that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from firsttoken.engine.chances import Chance

Json = dict[str, Any]


class Said(NamedTuple):
    """A token as text, at ``offset`` characters of what was said; no ``chance`` where nothing comes before it."""

    token: str
    offset: int
    logprob: float | None
    likeliest: tuple[tuple[str, float], ...]


def said(tokenizer: Tokenizer, token_id: int, offset: int, chance: Chance | None) -> Said:
    """A token that was said, or read in a prompt. One that is a part of a character reads as U+FFFD."""
    likeliest = chance.likeliest if chance else ()
    named = tuple((_text(tokenizer, other), logprob) for other, logprob in likeliest)
    return Said(_text(tokenizer, token_id), offset, chance.logprob if chance else None, named)


def as_completion(tokens: Sequence[Said]) -> Json:
    """Of /v1/completions: four lists of one length. Of tokens that read alike the likeliest is named."""
    return {
        "tokens": [one.token for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [
            None if one.logprob is None else dict(reversed(one.likeliest)) or {one.token: one.logprob} for one in tokens
        ],
        "text_offset": [one.offset for one in tokens],
    }


def as_chat(tokens: Sequence[Said]) -> Json:
    """Of /v1/chat/completions: one entry a token."""
    return {
        "content": [
            _entry(one.token, one.logprob) | {"top_logprobs": [_entry(*other) for other in one.likeliest]}
            for one in tokens
        ],
        "refusal": None,
    }


def _entry(token: str, logprob: float | None) -> Json:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)
