"""One answer of a request: the engine's tokens as pieces of text, up to a stop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from firsttoken.service.likelihood import Said, said
from firsttoken.service.text import StopFilter, TextStream, Vocabulary

if TYPE_CHECKING:
    from firsttoken.engine.request import Request
    from firsttoken.engine.streams import Stream, TokenEvent


@dataclass(frozen=True)
class Piece:
    """What one token adds to ``choice``: ``text``, perhaps "", and the ``stage`` that computed it.

    The last piece stands for no token: it brings the text that was held back, and ``finish_reason``. ``said`` are the
    likelihoods of the tokens since the piece before, None where nobody asked.
    """

    choice: int
    text: str
    stage: int
    finish_reason: Literal["stop", "length"] | None = None
    said: Sequence[Said] | None = None


class AnswerChoice:
    """The answer of ``index`` to ``prompt_ids``; ``session`` is the engine's stream of it.

    A token of ``ends`` is its last. With ``echo`` that text comes first; with ``judged`` each token's likelihood
    comes along.
    """

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        prompt_ids: Sequence[int],
        session: Stream,
        *,
        ends: Collection[int],
        stops: Sequence[str],
        echo: str = "",
        judged: bool = False,
    ) -> None:
        self.index, self.session = index, session
        self.tokens, self.finished = 0, False
        self._vocabulary, self._prompt_ids, self._echo, self._judged = vocabulary, prompt_ids, echo, judged
        self._ends = ends
        self._text, self._stops = TextStream(vocabulary.tokenizer, prompt_ids), StopFilter(stops)
        self._stage, self._offset = 0, 0

    def take(self, event: TokenEvent) -> list[Piece]:
        """The pieces that a token adds: its own, what comes before the first, and the last where it ends the answer."""
        pieces = []
        self.tokens, self._stage = self.tokens + 1, event.stage
        if self.tokens == 1 and self._echo:
            pieces.append(self._piece(self._echo, self._prompt_said() if self._judged else None))
        if event.token_id in self._ends:
            return [*pieces, self._last("stop")]
        logs = None
        if self._judged:
            logs = [self._said(event.token_id, event.chance)]
        pieces.append(self._piece(self._stops.push(self._text.push(event.token_id)), logs))
        if self._stops.stopped:
            pieces.append(self._last("stop"))
        return pieces

    def end(self) -> list[Piece]:
        """The engine has no more tokens."""
        return [] if self.finished else [self._last("length")]

    def _last(self, reason: Literal["stop", "length"]) -> Piece:
        self.finished = True
        rest = self._stops.push(self._text.finish()) + self._stops.finish()
        return Piece(self.index, rest, self._stage, "stop" if self._stops.stopped else reason)

    def _piece(self, text: str, logs: Sequence[Said] | None) -> Piece:
        return Piece(self.index, text, self._stage, said=logs)

    def _said(self, token_id: int, chance: object) -> Said:
        one = said(self._vocabulary.tokenizer, token_id, self._offset, chance)
        self._offset += len(one.token)
        return one

    def _prompt_said(self) -> list[Said]:
        request: Request = self.session.request
        chances = [None, *request.prompt_chances]
        return [self._said(token, chance) for token, chance in zip(self._prompt_ids, chances, strict=True)]
