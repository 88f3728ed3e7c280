"""The first answers of a service: by numpy, one after the other, until there is an engine that goes on with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace

from firsttoken.engine.async_engine import Asked, Stream, TokenEvent, step_failure
from firsttoken.engine.numpy_model import NumpyModel
from firsttoken.engine.request import KVSource, Sampling
from firsttoken.engine.torch_behind import CacheSource, beside_an_import
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.system.openmp import give_back_threads

PATIENCE_S = 1.0  # for which the import of torch waits, at most, until weights are packed and a first token is said
GREETING_S = 0.1  # for which it waits for somebody who asks: who has waited for the service to listen asks by then
PIECE = 512  # tokens of a prompt that are computed at once: between two pieces a client may leave, and an engine come
_STAGE = 1  # the whole model


class NumpyAnswers:
    """Answers what it can of the requests in ``waiting``, the first that came first, with the model that is ``coming``.

    ``waiting`` is what a server was asked, by stream, until an engine has it; ``change`` guards it, and is told of each
    that comes. What is drawn, scored or asked of a variant stays there for the engine, and so does everything where the
    model cannot come.
    """

    def __init__(self, coming: Future[NumpyModel], change: threading.Condition, waiting: dict[Stream, Asked]) -> None:
        self._coming, self._change, self._waiting = coming, change, waiting
        self._begun = self._ended = False
        self._leaving = ExitStack()  # a core to the import
        self._thread = threading.Thread(target=self._answer, name="numpy", daemon=True)

    @property
    def model(self) -> NumpyModel | None:
        """The model, once it has come; None where it cannot."""
        return self._coming.result() if self._coming.exception() is None else None

    def begin(self) -> None:
        """Answer from now on, and return when torch may be imported.

        That is when the weights are packed and, if somebody has asked by then or asks within ``GREETING_S``, behind the
        first token: until then all cores have something else to do. It is after ``PATIENCE_S`` at the latest.
        """
        until = time.monotonic() + PATIENCE_S
        self._thread.start()
        try:
            model = self._coming.result(PATIENCE_S)
        except Exception:  # it does not come, or its kernels are still being built: torch need not wait
            return
        model.wait(until - time.monotonic())
        with self._change:
            self._change.wait_for(lambda: self._waiting, GREETING_S)
            self._change.wait_for(lambda: self._begun or self._next() is None, until - time.monotonic())
        self._leaving.enter_context(beside_an_import(model))

    def end(self) -> None:
        """Say no more. Who was in the middle of an answer waits as the others do, for the rest of it, and brings what
        is cached."""
        with self._change:
            self._ended = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._leaving.close()

    def _answer(self) -> None:
        model = self.model
        while model is not None and (found := self._wait_next()) is not None:
            stream, asked = found
            try:
                self._say(model, stream, *asked)
            except Exception as error:
                stream.end(error if isinstance(error, FirstTokenError) else step_failure(error))
        give_back_threads()  # for the engine's

    def _wait_next(self) -> tuple[Stream, Asked] | None:
        with self._change:
            self._change.wait_for(lambda: self._ended or self._next() is not None)
            return None if self._ended else self._next()

    def _next(self) -> tuple[Stream, Asked] | None:
        """The first that can be answered here, and what it asks; who calls this holds the lock."""
        return next(((stream, asked) for stream, asked in self._waiting.items() if _can(asked)), None)

    def _say(
        self,
        model: NumpyModel,
        stream: Stream,
        prompt: Sequence[int],
        sampling: Sampling,
        moves: bool,
        variant: str,
        source: KVSource | None,
    ) -> None:
        """Say tokens behind ``prompt`` until the last, or until the client leaves or the engine comes."""
        said: list[int] = []
        rest, model.cached = list(prompt), 0
        while self._goes_on(stream):
            token, rest = model.next_token(rest[:PIECE]), rest[PIECE:]
            if rest:  # of the prompt
                continue
            said.append(token)
            rest = [token]
            if not self._put(stream, token):
                return
            if token in sampling.stop or len(said) == sampling.max_tokens:
                stream.end()
                return
        with self._change:
            if stream in self._waiting and model.cached:
                left = replace(sampling, max_tokens=sampling.max_tokens - len(said))
                self._waiting[stream] = [*prompt, *said], left, moves, variant, CacheSource(model)

    def _goes_on(self, stream: Stream) -> bool:
        with self._change:
            return not self._ended and stream in self._waiting

    def _put(self, stream: Stream, token: int) -> bool:
        """Hand ``token`` to the client; False when it has left, who must not get anything behind the end."""
        with self._change:
            if there := stream in self._waiting:
                stream.put(TokenEvent(token, _STAGE, time.monotonic()))
                self._begun = True
                self._change.notify_all()
            return there


def _can(asked: Asked) -> bool:
    """Whether the likeliest tokens of the model itself are asked for, and nothing else is told of them."""
    _, sampling, _, variant, _ = asked
    return not (sampling.temperature or sampling.prompt_logprobs or variant) and sampling.logprobs is None
