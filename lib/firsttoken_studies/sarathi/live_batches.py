"""Batches of a shape that is asked for, run on the live executor and timed: a chunk of a prompt beside decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from firsttoken.engine.config import EngineConfig
from firsttoken.engine.engine import Engine
from firsttoken.engine.executor import Executor
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.engine.trace import Step, Trace
from firsttoken.engine.work import Work

BLOCK = 16


class Pieces(Sarathi):
    """Every decode, and ``piece`` tokens of a prompt beside them."""

    name: ClassVar[str] = "pieces"
    piece = 1

    def budget(self, decodes: Sequence[Work]) -> int:
        return len(decodes) + self.piece


class LiveBatches:
    """``running`` requests that decode over ``context`` tokens, beside which prompts come in pieces.

    ``executor`` must have ``blocks_for`` as many blocks. Random tokens of a vocabulary of ``vocabulary``: what is timed
    does not depend on them.
    """

    def __init__(self, executor: Executor, vocabulary: int, running: int, context: int, steps: int) -> None:
        self._draw, self._vocabulary = np.random.default_rng(0), vocabulary
        self._trace = Trace()
        self._engine = Engine(executor, EngineConfig(scheduler=Pieces, requests=running + 1), trace=self._trace)
        self._running = [self._submit(context, steps + 1) for _ in range(running)]
        self._engine.scheduler.piece = max(context, 1)
        while not all(request.times_s for request in self._running):
            self._engine.step()

    @staticmethod
    def blocks_for(running: int, context: int, steps: int, prompt: int) -> int:
        """KV blocks that hold all of them, and what admission leaves free."""
        tokens = running * (context + steps + BLOCK) + prompt + BLOCK
        return -(-tokens // BLOCK) * 101 // 100 + 4

    def decode(self, steps: int) -> list[Step]:
        """``steps`` steps that only decode."""
        return self._stepped(lambda taken: len(taken) < steps)

    def prompt(self, tokens: int, piece: int) -> list[Step]:
        """The steps in which a prompt of ``tokens`` tokens goes through in pieces of ``piece``."""
        self._engine.scheduler.piece = piece
        request = self._submit(tokens, 1)
        return self._stepped(lambda taken: not request.finished)

    def close(self) -> None:
        """Nobody runs any more; the executor is as it was."""
        for request in self._running:
            self._engine.cancel(request)

    def _submit(self, tokens: int, new_tokens: int) -> Request:
        ids = self._draw.integers(self._vocabulary, size=tokens).tolist()
        return self._engine.submit(ids, Sampling(new_tokens))

    def _stepped(self, going: Callable[[Sequence[Step]], bool]) -> list[Step]:
        before = len(self._trace.steps)
        while going(self._trace.steps[before:]):
            self._engine.step()
        return self._trace.steps[before:]
