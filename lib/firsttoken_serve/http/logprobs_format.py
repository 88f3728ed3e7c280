"""How likely each token was, in the two forms that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from firsttoken_serve.chat.spelling import Spelling

if TYPE_CHECKING:
    from firsttoken.engine.request import TokenLogprob


Json = dict[str, Any]
LEAST = -9999.0  # how OpenAI says that a token was as good as impossible: no logarithm of 0 is a number of JSON


class TokenText(NamedTuple):
    """A token: its name, which no other of its list has, the bytes that it adds to a text, and its logarithm."""

    name: str
    spelt: bytes
    logprob: float | None


class AnswerToken(NamedTuple):
    """A token that begins ``offset`` characters into what was said, with the likeliest in its place; its logarithm is
    None where nothing comes before it."""

    token: TokenText
    offset: int
    top_logprobs: tuple[TokenText, ...]


def answer_token(spelling: Spelling, token_id: int, offset: int, token_logprob: TokenLogprob | None) -> AnswerToken:
    """A token that was said, or read in a prompt."""
    token = _named(spelling, token_id, spelling.name(token_id), token_logprob.logprob if token_logprob else None)
    top_logprobs = token_logprob.top_logprobs if token_logprob else ()
    names = spelling.names([other for other, _ in top_logprobs])
    named = (_named(spelling, other, name, log) for name, (other, log) in zip(names, top_logprobs, strict=True))
    return AnswerToken(token, offset, tuple(named))


def as_completion(tokens: Sequence[AnswerToken]) -> Json:
    """Return the logprobs of /v1/completions: four lists of one length.

    Where a token has no likeliest ones, the token itself is named.
    """
    return {
        "tokens": [shown.token.name for shown in tokens],
        "token_logprobs": [shown.token.logprob for shown in tokens],
        "top_logprobs": [
            None
            if shown.token.logprob is None
            else {other.name: other.logprob for other in shown.top_logprobs or (shown.token,)}
            for shown in tokens
        ],
        "text_offset": [shown.offset for shown in tokens],
    }


def as_chat(tokens: Sequence[AnswerToken]) -> Json:
    """Return the logprobs of /v1/chat/completions: one entry a token; their bytes, joined, are what was said."""
    return {
        "content": [_entry(shown.token) | {"top_logprobs": [*map(_entry, shown.top_logprobs)]} for shown in tokens],
        "refusal": None,
    }


def _named(spelling: Spelling, token_id: int, name: str, logprob: float | None) -> TokenText:
    shown = b"" if spelling.special(token_id) else spelling.spelt(token_id)
    return TokenText(name, shown, None if logprob is None else max(logprob, LEAST))


def _entry(token: TokenText) -> Json:
    return {"token": token.name, "logprob": token.logprob, "bytes": list(token.spelt)}
