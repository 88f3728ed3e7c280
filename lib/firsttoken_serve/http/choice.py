"""One answer of a request: the engine's tokens as pieces of text, up to a stop."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from tokenizers import Tokenizer

from firsttoken_serve.chat.spelling import INCOMPLETE, LAST, Spelling
from firsttoken_serve.chat.text import StopFilter, TextStream, Vocabulary
from firsttoken_serve.http.logprobs_format import AnswerToken, answer_token

if TYPE_CHECKING:
    from firsttoken.engine.request import Request
    from firsttoken.engine.stream import Stream, TokenEvent


# Where in a text its tokens begin, when some of them are parts of a character.

_HALF = 0xD800  # the first of 2,048 halves of characters


class Offsets:
    """Counts the characters of a text that comes in bytes, from ``begin`` on; it follows the bytes ``before``.

    Bytes that are no UTF-8 count as the U+FFFD that they are shown as, cut as Unicode's standard cuts them. Those at
    the end of ``before`` are shown with the text, as a :class:`TextStream` has it: more may have been on its way.
    """

    def __init__(self, begin: int = 0, before: bytes = b"") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        read = self._decoder.decode(before)
        self._decoded_characters = begin + len(read) - len(read.rstrip(INCOMPLETE))  # characters

    def advance(self, spelt: bytes) -> int:
        """The place of the character that the first of these bytes belongs to."""
        offset = self._decoded_characters
        for number in range(len(spelt)):
            self._decoded_characters += len(self._decoder.decode(spelt[number : number + 1]))
            if number == 0:
                within = bool(self._decoder.getstate()[0])
                offset = self._decoded_characters if within else self._decoded_characters - 1
        return offset


def offsets_after(spelling: Spelling, prompt_ids: Sequence[int], begin: int) -> Offsets:
    """Return the counter of the text behind a prompt, from ``begin`` on: the prompt may end within a character."""
    tail = [i for i in prompt_ids[spelling.settled(prompt_ids) :][-LAST:] if not spelling.special(i)]
    return Offsets(begin, b"".join(map(spelling.spelt, tail)))


def stop_filter(spelling: Spelling, stops: Sequence[str]) -> tuple[StopFilter, dict[int, str]]:
    """The filter of ``stops``, and by id what it is given for a special token that stands in one of them, which no text
    shows: half of a character that no bytes decode to."""
    marks = {name: chr(_HALF + number) for number, name in enumerate(spelling.specials_in("\n".join(stops)))}
    marked = list(stops)
    for name, mark in marks.items():  # the longest name first
        marked = [stop.replace(name, mark) for stop in marked]
    filtered = StopFilter(list(dict.fromkeys([*stops, *marked])), "".join(marks.values()))
    return filtered, {spelling.specials_in(name)[name]: mark for name, mark in marks.items()}


def prompt_offsets(tokenizer: Tokenizer, spelling: Spelling, prompt_ids: Sequence[int], text: str) -> list[int]:
    """Return where each token of the prompt begins in ``text``, which the prompt was read from or reads as.

    The tokens' bytes are the text's, but for special tokens that are not written in it. Where the tokenizer has changed
    the text (by a normal form), its own record says where each token came from; bytes that are no text are counted.
    """
    spelt = [spelling.spelt(token_id) for token_id in prompt_ids]
    raw, offset, places = text.encode(), 0, []
    character = _characters(raw)
    for token_id, token_bytes in zip(prompt_ids, spelt, strict=True):
        if offset == 0 and not raw.startswith(token_bytes):
            token_bytes = token_bytes.removeprefix(b" ")  # which such tokenizers add to a text, and take away again
        if not raw.startswith(token_bytes, offset):
            if not spelling.special(token_id):
                break
            token_bytes = b""
        places.append(character[offset])
        offset += len(token_bytes)
    if len(places) == len(prompt_ids) and offset == len(raw):
        return places
    read = tokenizer.encode(text)
    if read.ids == list(prompt_ids):
        begins = [begin for begin, _ in read.offsets]
    else:
        counted = Offsets()
        begins = [counted.advance(token_bytes) for token_bytes in spelt]
    return [min(max(begins[: number + 1]), len(text)) for number in range(len(begins))]


def _characters(raw: bytes) -> list[int]:
    """Return for each byte, and for the end, the number of the character that it belongs to."""
    count, numbers = -1, []
    for byte in raw:
        count += byte & 0xC0 != 0x80
        numbers.append(count)
    return [*numbers, count + 1]


def _cut_within(tokens: Sequence[AnswerToken], text: str) -> list[AnswerToken]:
    """The last tokens of an answer, which may end within a character: their bytes, joined, are ``text``, which shows
    U+FFFD for it."""
    raw, spelt = text.encode(), [answer.token.spelt for answer in tokens]
    for number, letters in enumerate(spelt):
        fits = raw.startswith(letters)
        spelt[number], raw = (letters, raw[len(letters) :]) if fits else (raw, b"")
    pairs = zip(tokens, [*spelt[:-1], *(last + raw for last in spelt[-1:])], strict=True)
    return [answer._replace(token=answer.token._replace(spelt=letters)) for answer, letters in pairs]


@dataclass(frozen=True)
class TextDelta:
    """The addition of one token to ``choice``: ``text``, perhaps "", and the ``stage`` that computed it.

    The last piece stands for no token: it brings the text that was held back, and ``finish_reason``. ``logprobs`` are
    the likelihoods of tokens whose text has begun by now, None where there are none. ``draft`` is provisional text, and
    ``retract`` how many of its last characters are not to come: both before ``text``.
    """

    choice: int
    text: str
    stage: int
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: Sequence[AnswerToken] | None = None
    draft: str = ""
    retract: int = 0


class AnswerChoice:
    """The answer of ``index`` to ``prompt_ids``; ``session`` is the engine's stream of it.

    A token of ``stop_ids`` or a text of ``stops`` behind its first ``min_tokens`` tokens ends it. With ``echo`` that
    text comes first. With ``logprobs`` the likelihood of each token comes along, once some of its text has been said.
    Where the ``prompt_only`` is scored, the choice ends at the first token, which the engine cannot do without.
    ``provisional`` text comes of drafts up to a stop, less what of it the answer has said since.
    """

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        prompt_ids: Sequence[int],
        session: Stream,
        *,
        stop_ids: Collection[int],
        stops: Sequence[str],
        min_tokens: int = 0,
        echo: str = "",
        logprobs: bool = False,
        prompt_only: bool = False,
        provisional: bool = False,
    ) -> None:
        self.index, self.session = index, session
        self.tokens, self.finished, self.prompt_only = 0, False, prompt_only
        self._vocabulary, self._prompt_ids, self._echo, self._logprobs = vocabulary, prompt_ids, echo, logprobs
        self._stop_ids, self._min_tokens, self._begun = stop_ids, min_tokens, False
        self._text = TextStream(vocabulary.tokenizer, prompt_ids)
        self._stops, self._marks = stop_filter(vocabulary.spelling, stops)
        self._offsets = offsets_after(vocabulary.spelling, prompt_ids, len(echo))
        self._waiting: list[AnswerToken] = []  # whose text has not been said yet
        self._stage, self._shown = 0, 0  # characters
        self._drafts = TextStream(vocabulary.tokenizer, prompt_ids) if provisional else None
        self._draft_stops, self._provisional = stop_filter(vocabulary.spelling, stops)[0], ""

    def push(self, event: TokenEvent) -> list[TextDelta]:
        """The pieces that a token adds: its own, what comes before the first, and the last where it ends the answer."""
        deltas = []
        self._stage = event.stage
        if event.draft:
            return self._drafted(event.token_id)
        if not self._begun and self._echo:
            self._waiting += self._prompt_logprobs() if self._logprobs else ()
            deltas.append(self._delta(self._echo))
        self._begun = True
        if self.prompt_only:
            return [*deltas, self._last("length")]
        self.tokens += 1
        if event.token_id in self._stop_ids:
            return [*deltas, self._last("stop")]
        if self._logprobs:
            spelling = self._vocabulary.spelling
            shown = b"" if spelling.special(event.token_id) else spelling.spelt(event.token_id)
            offset = self._offsets.advance(shown)
            self._waiting.append(answer_token(spelling, event.token_id, offset, event.token_logprob))
        text = self._text.push(event.token_id)
        if mark := self._marks.get(event.token_id, ""):
            text += self._text.finish() + mark
        deltas.append(self._delta(self._stops.push(text, self.tokens > self._min_tokens)))
        if self._stops.stopped:
            deltas.append(self._last("stop"))
        return deltas

    def _drafted(self, token_id: int) -> list[TextDelta]:
        text = "" if self._drafts is None else self._draft_stops.push(self._drafts.push(token_id))
        self._provisional += text
        return [TextDelta(self.index, "", self._stage, draft=text)] if text else []

    def _retracted(self, text: str, ended: bool) -> int:
        """Return how many characters of what is provisional do not come now that the answer goes on with ``text``."""
        pairs = zip(self._provisional, text, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        stays = common == len(text) and not ended
        retract = 0 if stays else len(self._provisional) - common
        self._provisional = self._provisional[common:] if stays else ""
        return retract

    def end(self) -> list[TextDelta]:
        """End the choice, as the engine has no more tokens; return its last piece, if it is not out yet."""
        return [] if self.finished else [self._last("length")]

    def _last(self, reason: Literal["stop", "length"]) -> TextDelta:
        self.finished = True
        rest = self._stops.push(self._text.finish(), self.tokens > self._min_tokens) + self._stops.finish()
        return self._delta(rest, "stop" if self._stops.stopped else reason)

    def _delta(self, text: str, reason: Literal["stop", "length"] | None = None) -> TextDelta:
        """Return ``text`` with the likelihoods of the tokens whose text has begun, and at the end of all but those
        behind a stop."""
        self._shown += len(text)
        if reason is not None and not self._stops.stopped:
            ready, self._waiting = (
                [token._replace(offset=min(token.offset, self._shown)) for token in self._waiting],
                [],
            )
            if text.endswith(INCOMPLETE):
                ready = _cut_within(ready, text)
        else:
            count = next(
                (n for n, token in enumerate(self._waiting) if token.offset >= self._shown), len(self._waiting)
            )
            ready, self._waiting = self._waiting[:count], self._waiting[count:]
        retract = self._retracted(text, reason is not None) if self._provisional else 0
        return TextDelta(self.index, text, self._stage, reason, ready if ready else None, retract=retract)

    def _prompt_logprobs(self) -> list[AnswerToken]:
        request: Request = self.session.request
        token_logprobs = [None, *request.prompt_logprobs]
        tokenizer, spelling = self._vocabulary.tokenizer, self._vocabulary.spelling
        begins = prompt_offsets(tokenizer, spelling, self._prompt_ids, self._echo)
        read = zip(self._prompt_ids, begins, token_logprobs, strict=True)
        return [answer_token(spelling, token_id, begin, token_logprob) for token_id, begin, token_logprob in read]
