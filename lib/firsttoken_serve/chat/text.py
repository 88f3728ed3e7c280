"""Turns text into tokens, and tokens that come one by one into the text that a client sees.

:mod:`firsttoken.assets.text_tokenizer` has the same tokenizer as AutoTokenizer, for most models in 0.2 s instead of 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from firsttoken.assets.model_config import read_config
from firsttoken.assets.positions import context_of
from firsttoken.assets.text_tokenizer import read_text_tokenizer
from firsttoken.study.errors import LengthError, RequestError, first_line
from firsttoken_serve.chat.chat_template import ChatTemplate, chat_ends, model_ends, read_template
from firsttoken_serve.chat.spelling import INCOMPLETE, Spelling


class Vocabulary:
    """The tokenizer of a model folder, with the model's own idea of which ids exist and which end an answer: the
    ``stop_ids`` of a completion, and the ``chat_stop_ids`` of an answer in a chat."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        size: int,
        stop_ids: Sequence[int],
        most_tokens: int,
        *,
        chat_stop_ids: Callable[[], Sequence[int]],
        context: int,
        template: ChatTemplate,
    ) -> None:
        self.tokenizer, self.size, self.most_tokens = tokenizer, size, most_tokens
        self.stop_ids, self._chat_stop_ids = tuple(stop_ids), chat_stop_ids
        self.context, self.template = context, template
        self.spelling = Spelling(tokenizer)
        if hasattr(tokenizer.model, "_resize_cache"):  # each thread remembers words for good: 10,000 of them take 4 MB
            tokenizer.model._resize_cache(1000)

    @cached_property
    def chat_stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer in a chat, which are looked for when the first chat asks: the template is
        compiled for it."""
        return tuple(self._chat_stop_ids())

    @cached_property
    def _most_chars(self) -> int:
        """The characters of ``most_tokens`` of the longest tokens."""
        return self.most_tokens * max(len(token) for token in self.tokenizer.get_vocab())

    def chat_ids(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any] | None = None) -> list[int]:
        """The ids of a conversation under the model's template, up to where it answers. Raises RequestError as
        ``prompt_ids``, and as :meth:`ChatTemplate.prompt`."""
        return self.prompt_ids(self.chat_text(messages, variables), special=False)

    def chat_text(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any] | None = None) -> str:
        """Return the text that :meth:`chat_ids` reads. Raises RequestError as :meth:`ChatTemplate.prompt`."""
        return self.template.prompt(messages, variables)

    def prompt_ids(self, prompt: str | Sequence[int], special: bool = True) -> list[int]:
        """The ids of a prompt, which is a text or already ids; between 1 and ``most_tokens`` of them. With ``special``
        a text begins with what the tokenizer puts before texts.

        Raises LengthError for a prompt that is too long, and RequestError for an empty one and for an id that the model
        does not have.
        """
        if isinstance(prompt, str):
            if len(prompt) > self.most_tokens and len(prompt) > self._most_chars:
                raise LengthError(
                    f"prompt: {len(prompt)} characters cannot be {self.most_tokens} tokens, the limit; shorten it"
                )
            try:
                ids = self.tokenizer.encode(prompt, add_special_tokens=special).ids
            except Exception as error:  # the library raises nothing narrower: a vocabulary without a token for the rest
                raise RequestError(f"prompt: the model's tokenizer cannot read it: {first_line(error)}") from error
        else:
            ids = self.known_ids("prompt", prompt)
        if not ids:
            raise RequestError("prompt: it is empty; give at least one token")
        if len(ids) > self.most_tokens:
            raise LengthError(f"prompt: {len(ids)} tokens, and the limit is {self.most_tokens}; shorten it")
        return ids

    def known_ids(self, field: str, ids: Iterable[int]) -> list[int]:
        """The ``ids`` that ``field`` names. Raises RequestError for one that the model does not have."""
        listed = list(ids)
        if strange := [i for i in listed if not 0 <= i < self.size]:
            raise RequestError(f"{field}: the model has no token {strange[0]}, only 0 to {self.size - 1}")
        return listed


def read_vocabulary(folder: Path, most_tokens: int | None) -> Vocabulary:
    """The vocabulary of a model folder: tokenizer.json, config.json, and what may lie beside them.
    Prompts have ``most_tokens`` at most; None: as many as the model's context.

    Raises ModelError when one of the first two is missing, and for any of them that cannot be read or says what no
    model has; it names the file and the key.
    """
    config = read_config(folder)
    size, context = config.vocab_size, context_of(config)
    tokenizer, files = read_text_tokenizer(folder)
    template = read_template(folder, files)
    return Vocabulary(
        tokenizer,
        size,
        model_ends(folder),
        context if most_tokens is None else most_tokens,
        chat_stop_ids=lambda: chat_ends(folder, tokenizer, files, template),
        context=context,
        template=template,
    )


class TextStream:
    """The text that generated tokens add to a prompt. What ``push`` and ``finish`` return, joined, is all of it.

    A token may end in the middle of a character, so text that may still change waits. How a token reads can depend on
    the one before it (SentencePiece drops the space of the first), so the prompt is decoded along; where it ends within
    a character, that is sent as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids)  # since one piece of text back: enough to read the next token in its context
        self._sent = tokenizer.decode(self._ids)  # of the text of those ids
        if open_end := self._sent.endswith(INCOMPLETE):  # which the prompt may really say
            settled = Spelling(tokenizer).settled(prompt_ids)
            self._ids = self._ids[:settled]
            self._sent = tokenizer.decode(self._ids)
        self._piece = len(self._ids)  # where in them the piece begins that was not sent
        for token_id in prompt_ids[self._piece :] if open_end else ():
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The text that is certain now, "" while a character is incomplete."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        # all at the end, not the last alone: a decoder of single bytes may read a whole run anew when a byte comes
        return self._send(text, len(text.rstrip(INCOMPLETE)))

    def finish(self) -> str:
        """Return the text that was still waiting: no more tokens will come."""
        text = self._tokenizer.decode(self._ids)
        return self._send(text, len(text))

    def _send(self, text: str, end: int) -> str:
        if end and not text.startswith(self._sent):
            # A decoder of single bytes reads a run of them as a whole: one that fits no character makes U+FFFD of those
            # before it, too, which have been sent. What has not been sent is read by itself then.
            self._ids, self._piece, self._sent, cut = self._ids[self._piece :], 0, "", len(text) - end
            text = self._tokenizer.decode(self._ids)
            end = len(text) - cut
        if end <= len(self._sent):
            return ""
        new, self._sent = text[len(self._sent) : end], text[:end]
        if end == len(text):
            self._ids = self._ids[self._piece :]
            self._piece = len(self._ids)
            self._sent = self._tokenizer.decode(self._ids)
        return new


class StopFilter:
    """Cuts text before the first of ``stops`` that is completed, even when it comes in pieces. Characters of ``unseen``
    are compared and not returned."""

    def __init__(self, stops: Sequence[str], unseen: str = "") -> None:
        self._stops, self._unseen = tuple(stops), dict.fromkeys(map(ord, unseen))
        self._held = ""  # may be the beginning of a stop
        self.stopped = False

    def push(self, text: str, look: bool = True) -> str:
        """The part of the text so far that is certain to come before every stop, less what was returned already. No
        stop begins in a text that nobody is to ``look`` at, before which nothing is held back."""
        if self.stopped:
            return ""
        if not look:
            return text.translate(self._unseen)
        held = self._held + text
        # of several, the one that ends first: then it does not matter how the text was cut into pieces
        match = min(((start + len(s), start) for s in self._stops if (start := held.find(s)) >= 0), default=None)
        if match:
            self.stopped, self._held = True, ""
            return held[: match[1]].translate(self._unseen)
        keep = max((n for s in self._stops for n in range(1, len(s)) if held.endswith(s[:n])), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep].translate(self._unseen)

    def finish(self) -> str:
        """Return the text that was held back: no more text will come."""
        held, self._held = self._held, ""
        return held.translate(self._unseen)
