"""Answers of a service before torch is imported: numpy computes one request after the other, and the engine goes on
with them as soon as it is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace

from firsttoken.engine.draws import choose
from firsttoken.engine.request import GREEDY, Sampling
from firsttoken.engine.scheduler_state import KVSource
from firsttoken.engine.stream import Stream, Submission, TokenEvent, step_failure
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.system.openmp import give_back_threads
from firsttoken_cpu.before_torch.numpy_model import CacheSource, NumpyModel, beside_an_import

PATIENCE_S = 1.0  # the import of torch waits for packed weights and a first token no longer than this
GREETING_S = 0.1  # and for a first request: a client that waited for the port to open has sent it by then
PIECE = 512  # tokens of a prompt that are computed at once: between two pieces a client may leave, and an engine come
_STAGE = 1  # the whole model


class NumpyAnswers:
    """Answers the requests in ``waiting``, first come, first served, with the model that is ``coming``.

    ``waiting`` holds the requests of a server by stream until its engine takes them; ``change`` guards it and is
    notified of each new one. Requests that ask for logprobs or name a variant stay there for the engine, and all of
    them do when the model cannot be loaded without torch.
    """

    def __init__(
        self, coming: Future[NumpyModel], change: threading.Condition, waiting: dict[Stream, Submission]
    ) -> None:
        self._coming, self._change, self._waiting = coming, change, waiting
        self._begun = self._ended = False
        self._leaving = ExitStack()  # a core to the import
        self._thread = threading.Thread(target=self._answer, name="numpy", daemon=True)

    @property
    def model(self) -> NumpyModel | None:
        """The model, once it has come; None where it cannot."""
        return self._coming.result() if self._coming.exception() is None else None

    def begin(self) -> bool:
        """Answer from now on, and return when torch may be imported: True, but False where no model comes.

        That is when the weights are packed, and after the first token of a request that has come by then or comes
        within ``GREETING_S``: until then the import would take a core from them. It is after ``PATIENCE_S`` at the
        latest.
        """
        until = time.monotonic() + PATIENCE_S
        self._thread.start()
        try:
            model = self._coming.result(PATIENCE_S)
        except TimeoutError:  # its kernels are still being built: torch need not wait
            comes = True
        except Exception:
            comes = False
        else:
            comes = True
            model.weights.wait(until - time.monotonic())
            with self._change:
                self._change.wait_for(lambda: self._waiting, GREETING_S)
                self._change.wait_for(lambda: self._begun or self._next() is None, until - time.monotonic())
            self._leaving.enter_context(beside_an_import(model))
        GREEDY.numbers()  # imports numpy.random, which is not to be imported beside torch
        return comes

    def end(self) -> None:
        """Generate no more tokens. A request in the middle of its answer goes back to those that wait, with its tokens
        so far and its keys and values."""
        with self._change:
            self._ended = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._leaving.close()

    def close(self) -> None:
        """Stop answering, and let nobody wait for weights that have not come."""
        with self._change:
            self._ended = True
        if self._coming.done() and (model := self.model) is not None:
            model.weights.close()
        self.end()

    def _answer(self) -> None:
        model = self.model
        while model is not None and (waiting := self._wait_for_request()) is not None:
            stream, submission = waiting
            try:
                self._generate(model, stream, *submission)
            except Exception as error:
                if self._ended or model.weights.fault is not None:
                    break  # the server tells whoever is open, once its status says so
                stream.end(error if isinstance(error, FirstTokenError) else step_failure(error))
        give_back_threads()  # for the engine's

    def _wait_for_request(self) -> tuple[Stream, Submission] | None:
        with self._change:
            self._change.wait_for(lambda: self._ended or self._next() is not None)
            return None if self._ended else self._next()

    def _next(self) -> tuple[Stream, Submission] | None:
        """The first request of the model itself without logprobs and drafts, and its stream; the caller holds the
        lock."""
        for stream, submission in self._waiting.items():
            _, sampling, _, variant, _ = submission
            plain = sampling.logprobs is None and sampling.verify is None
            if plain and not (sampling.prompt_logprobs or variant):
                return stream, submission
        return None

    def _generate(
        self,
        model: NumpyModel,
        stream: Stream,
        prompt: Sequence[int],
        sampling: Sampling,
        moves: bool,
        variant: str,
        source: KVSource | None,
    ) -> None:
        """Generate tokens after ``prompt`` until the last one, until the client leaves or until :meth:`end`."""
        tokens = list(prompt)
        rest, model.cached = tokens, 0
        numbers, stream.begun_s = sampling.numbers(), time.monotonic()
        while self._goes_on(stream):
            logits, rest = model.logits(rest[:PIECE]), rest[PIECE:]
            if rest:  # of the prompt
                continue
            generated = len(tokens) - len(prompt)
            token = choose(logits, sampling, tokens, sampling.drawn + generated, numbers)
            tokens.append(token)
            rest = [token]
            if not self._put(stream, token):
                return
            if token in sampling.stop or generated + 1 == sampling.max_tokens:
                stream.end()
                return
        with self._change:
            if stream in self._waiting and model.cached:
                generated = len(tokens) - len(prompt)
                remaining = replace(
                    sampling, max_tokens=sampling.max_tokens - generated, drawn=sampling.drawn + generated
                )
                self._waiting[stream] = tokens, remaining, moves, variant, CacheSource(model)

    def _goes_on(self, stream: Stream) -> bool:
        with self._change:
            return not self._ended and stream in self._waiting

    def _put(self, stream: Stream, token: int) -> bool:
        """Send ``token`` to the client; return False when the client has left, whose stream takes nothing more."""
        with self._change:
            if waits := stream in self._waiting:
                stream.put(TokenEvent(token, _STAGE, time.monotonic()))
                self._begun = True
                self._change.notify_all()
            return waits
