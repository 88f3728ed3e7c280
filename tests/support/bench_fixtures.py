"""An executor driven by hand, step by step, beside the plain model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from firsttoken.engine.attention import Attend
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import GREEDY, Request
from firsttoken.engine.step_plan import StepPlan

VOCABULARY = 256


class Bench:
    """An executor driven by hand, beside the plain model; blocks are given out in no order."""

    def __init__(
        self,
        model: nn.Module,
        blocks: int = 200,
        block_tokens: int = 4,
        seed: int = 0,
        attend: type[Attend] | None = None,
        **options: Any,
    ) -> None:
        self.plain = copy.deepcopy(model)
        self.executor = LiveExecutor(model, blocks, block_tokens=block_tokens, attend=attend, **options)
        self.rng = random.Random(seed)
        self.free = self.rng.sample(range(blocks), blocks)
        self.logits = torch.empty(0)
        decoder = self.executor.version.decoder
        self._logits, decoder.logits = decoder.logits, self._keep
        self._requests = 0

    def _keep(self, step: StepPlan) -> torch.Tensor:
        logits = self._logits(step)
        self.logits = logits.float().cpu()
        return logits

    def request(self, length: int) -> Request:
        self._requests += 1
        return Request(self._requests, [self.rng.randrange(VOCABULARY) for _ in range(length)], GREEDY, 0.0)

    def execute(self, chunks: Sequence[tuple[Request, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step; the logits after each work [works, vocabulary], and the plain ones. Checks the tokens' order."""
        for request, tokens in chunks:
            while len(request.blocks) * self.executor.block_tokens < request.cached + tokens:
                request.blocks.append(self.free.pop())
        chosen = self.executor.execute([request.chunk(tokens) for request, tokens in chunks])
        first = sorted(range(len(chunks)), key=lambda i: chunks[i][1])  # the shorter works lead the step
        rows = torch.empty_like(self.logits)
        rows[first] = self.logits
        assert chosen == rows.argmax(-1).tolist(), "the tokens are not in the order of the works"
        wanted = []
        for request, tokens in chunks:
            request.advance(request.cached + tokens)
            wanted.append(self.expected(request))
        return rows, torch.stack(wanted)

    @torch.inference_mode()
    def expected(self, request: Request) -> torch.Tensor:
        """Plain logits after all that is cached."""
        return self.plain(torch.tensor([request.tokens[: request.cached]])).logits[0, -1].float()

    def grow(self, request: Request) -> None:
        """Another token, any: what the model would have said does not matter here."""
        request.tokens.append(self.rng.randrange(VOCABULARY))

    def some(self, open_: Sequence[Request]) -> list[tuple[Request, int]]:
        """Works of some of the requests in any order: all that is to do, or a part of it."""
        chunks = []
        for asked in self.rng.sample(open_, self.rng.randint(1, len(open_))):
            if not asked.remaining:
                self.grow(asked)
            chunks.append((asked, self.rng.choice((asked.remaining, self.rng.randint(1, asked.remaining)))))
        return chunks

    def ragged_steps(self) -> float:
        """Prefills, continued prefills and decodes over a few steps; the largest difference of a logit."""
        asked = [self.request(length) for length in (1, 7, 16, 33)]
        worst = 0.0
        for step in range(6):
            chunks = [(request, max(1, request.remaining // 2) if step < 2 else request.remaining) for request in asked]
            got, wanted = self.execute(chunks)
            worst = max(worst, self.apart(got, wanted))
            for request in asked:
                if not request.remaining:
                    self.grow(request)
        return worst

    def far_from(self, exact: nn.Module) -> tuple[float, float]:
        """How far the logits of a few steps are from those of ``exact`` in sum: this engine's, and the plain ones."""
        asked = [self.request(length) for length in (1, 8, 21, 40)]
        paged = alone = 0.0
        for _ in range(6):
            got, plain = self.execute([(request, request.remaining) for request in asked])
            for row, request in enumerate(asked):
                truth = exact(torch.tensor([request.tokens])).logits[0, -1]
                paged += float((got[row] - truth).norm())
                alone += float((plain[row] - truth).norm())
                self.grow(request)
        return paged, alone

    @staticmethod
    def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
        """The largest difference; infinite where one is not a number."""
        return float((got - wanted).abs().nan_to_num(torch.inf).max())

    def close(self) -> None:
        self.executor.close()


@pytest.fixture
def bench() -> Iterable[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(model: nn.Module, **options: Any) -> Bench:
        made.append(Bench(model, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
