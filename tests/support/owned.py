"""Engines whose requests end at any moment, and a guard of what nobody owns: only an owner may write to a block.

A seed draws a schedule: who comes when, and what befalls it. Requests are cancelled in every phase, steps fail before,
within and after the pass over the layers, copies from the host land late, stored prefixes come in pieces or not at all,
and other views are published. Whoever is not ended by that says what ``generate`` says to it alone.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from firsttoken.engine.decoder import Decoder, LocalSegment
from firsttoken.engine.engine import Engine
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.preemption.victims import VICTIMS
from firsttoken.engine.request import Phase, Request, Sampling, ScheduledChunk
from firsttoken.engine.swap.block_copier import CopyTimes, start
from firsttoken.engine.swap.coalesced import OnThread, Overlapped
from firsttoken.engine.swap.host_pool import Span
from firsttoken.study.errors import CacheError, RequestError

EDGE = 1  # the layer before which hidden states are kept; the models here have two
NOTHING = float("nan")


class Guard:
    """Fills the blocks of ``engine`` that nobody has, on the device and in the host, with what is no number.

    From then on each must hold that when it is taken, and at every ``check``; one that is kept to be shared must hold
    what it held when its last owner gave it back. Who reads what was never written gets what is no number, too.
    """

    def __init__(self, engine: Engine) -> None:
        self._pool, self._rows = engine.pool, engine.executor.pool.rows
        self._kept: dict[int, Tensor] = {}
        self._rows.fill_(NOTHING)
        self._take, self._give = self._pool.allocate, self._pool.release
        self._pool.allocate, self._pool.release = self._taken, self._given
        self._arena = engine.executor.host_pool
        if self._arena is not None:
            self._arena.all_rows.fill_(NOTHING)
            self._span, self._back = self._arena.allocate, self._arena.release
            self._arena.allocate, self._arena.release = self._span_taken, self._span_given

    def check(self) -> None:
        """Assert that nobody has written to what nobody has, and that the books are right."""
        self._pool.check()
        assert self._rows[self._pool._blank].isnan().all(), "a block that nobody has was written to"
        for block in self._pool._evictable:
            assert self._kept[block].equal(self._rows[block]), "a block that is kept to be shared was written to"
        if self._arena is not None:
            self._arena.check()
            for hole in self._arena._holes:
                assert self._arena.all_rows[hole.start : hole.end].isnan().all(), "a host row of nobody was written to"

    def _taken(self, wanted: int, **options: Any) -> list[int] | None:
        blank, kept = set(self._pool._blank), set(self._pool._evictable)
        taken = self._take(wanted, **options)
        shared = set(options.get("shared", ()))
        for block in taken or ():
            if block in blank:
                assert self._rows[block].isnan().all(), "a block was written to before it was taken"
            elif block in kept:
                assert self._kept.pop(block).equal(self._rows[block]), "a block was written to while it was kept"
                if block not in shared:
                    self._rows[block] = NOTHING
        return taken

    def _given(self, blocks: Sequence[int]) -> None:
        self._give(blocks)
        for block in blocks:
            if block in self._pool._evictable:
                self._kept[block] = self._rows[block].clone()
            elif not self._pool.owners(block):
                self._rows[block] = NOTHING

    def _span_taken(self, blocks: int) -> Span | None:
        span = self._span(blocks)
        assert span is None or self._arena.all_rows[span.start : span.end].isnan().all(), "a free host row was written"
        return span

    def _span_given(self, span: Span) -> None:
        self._back(span)
        self._arena.all_rows[span.start : span.end] = NOTHING


class Late(Overlapped):
    """Copies from the host each wait in a thread until somebody waits for them, or ``land`` is called."""

    def __init__(self, *pools: Any) -> None:
        super().__init__(*pools)
        self._worker.shutdown()
        self._worker = ThreadPoolExecutor(64, thread_name_prefix="swap-in")
        self.pending: list[threading.Event] = []

    def into(self, span: Span, blocks: Sequence[int]) -> LateCopy:
        job, gate = self._job(self._plan_into, blocks, span), threading.Event()
        self.pending.append(gate)

        def move() -> None:
            gate.wait()
            job.move()

        return LateCopy(self._worker.submit(lambda: start(replace(job, move=move), self.pool.device).wait()), gate)

    def land(self) -> None:
        """Let those that are pending move now."""
        while self.pending:
            self.pending.pop().set()

    def close(self) -> None:
        self.land()
        super().close()


class LateCopy(OnThread):
    """One of them."""

    def __init__(self, future: Any, gate: threading.Event) -> None:
        super().__init__(future)
        self._gate = gate

    def wait(self) -> CopyTimes:
        self._gate.set()
        return super().wait()


class BrokenStep(Exception):
    """What befalls a step."""


class Failing(LiveExecutor):
    """Keeps edges, and fails the next step where ``fails`` says: before it, in its second layer, or after it."""

    fails = ""

    def __init__(self, model: nn.Module, blocks: int, **options: Any) -> None:
        super().__init__(model, blocks, hidden_cache=HiddenStateCache([EDGE]), **options)
        if isinstance(self.path, Overlapped):
            self.path.close()
            self.path = Late(self.pool, self.host_pool)
        layers = self.version.decoder.segments[0].modules
        self._hook = layers[EDGE].register_forward_pre_hook(lambda *_: self._fail("within"))

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        self._fail("before")
        tokens = super().execute(chunks)
        self._fail("after")
        return tokens

    def _fail(self, place: str) -> None:
        if self.fails == place:
            self.fails = ""
            raise BrokenStep(place)

    def close(self) -> None:
        self._hook.remove()
        super().close()


class Prefixes:
    """What ``model`` itself computes of prompts: keys and values by layer, and what enters ``EDGE``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = copy.deepcopy(model)
        self._model.set_attn_implementation("sdpa")
        self._known: dict[tuple[int, ...], tuple[list[Tensor], Tensor]] = {}

    @torch.inference_mode()
    def of(self, prompt: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
        if prompt not in self._known:
            cache = DynamicCache()
            said = self._model(torch.tensor([prompt]), past_key_values=cache, output_hidden_states=True)
            kv = [torch.stack([layer.keys, layer.values]) for layer in cache.layers]
            self._known[prompt] = kv, said.hidden_states[EDGE]
        return self._known[prompt]


class Hesitant:
    """A stored prefix that comes in pieces, a layer at a look or none, and at a look ``dies`` if that is drawn."""

    def __init__(self, kv: list[Tensor], edge: Tensor, tokens: int, draw: random.Random) -> None:
        self.tokens, self.redo = tokens, draw.choice([range(0), range(0), range(1), range(EDGE, 2), range(2)])
        self._edge, self._draw, self._dies = edge, draw, draw.random() < 0.15
        self._left = [(layer, kv[layer]) for layer in range(2) if layer not in self.redo]
        self.closed = 0

    def begin(self) -> None:
        pass

    def hidden_states(self) -> Tensor | None:
        return self._edge if self._draw.random() < 0.4 else None

    def arrived(self) -> list[tuple[int, Tensor]]:
        assert not self.closed, "it was asked after it was closed"
        if self._dies and self._draw.random() < 0.3:
            raise CacheError("the link died")
        return [self._left.pop(0)] if self._left and self._draw.random() < 0.4 else []

    @property
    def complete(self) -> bool:
        return not self._left

    def close(self) -> None:
        self.closed += 1


class Ordeal:
    """One schedule by ``seed`` over ``subject``, in an engine of ``lab``."""

    def __init__(self, lab: Any, subject: Any, prefixes: Prefixes, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.seed, self.subject, self.prefixes = seed, subject, prefixes
        self.left = draw.randint(3, 9)  # requests that are still to come
        self.known = draw.sample(subject.known[2:], draw.choice((1, 4, 4)))
        self.block_tokens = draw.randint(1, 6)
        requests = draw.choice((3, 8))
        smallest = lab.smallest_pool([(len(one.prompt), 24) for one in self.known], self.block_tokens)
        self.run = lab.live(
            subject.model,
            smallest + draw.choice((0, 0, draw.randint(0, 8), draw.randint(0, 40))),
            kind=Failing,
            block_tokens=self.block_tokens,
            host_blocks=draw.choice((0, 20, 200, 200, 200)),
            swap=draw.choice(("overlapped", "overlapped", "coalesced", "per_block")),
            write_through=draw.random() < 0.3,
            preemption=draw.choice(("swap", "swap", "recompute")),
            scheduler=draw.choice(("sarathi", "sarathi", "prefill_first", "iteration_level", "shortest_first")),
            victim=draw.choice(sorted(VICTIMS)),
            requests=requests,
            token_budget=requests * draw.choice((1, 1, 2, 6)),
            share_prefixes=draw.random() < 0.5,
            resume=draw.choice(("in_order", "in_order", "any_that_fits", "shortest_first")),
        )
        self.engine: Engine = self.run.engine
        self.guard = Guard(self.engine)
        self.asked: dict[int, tuple[Any, Sampling, Hesitant | None]] = {}
        self.ended: set[int] = set()  # whom something has befallen
        self.seen: Counter[str] = Counter()

    def go(self) -> Counter[str]:
        """To its end; what has happened on the way."""
        while self.left or self.engine.busy:
            for befalls in self.draw.choices(list(_BEFALL), list(_BEFALL.values()), k=self.draw.choice((0, 0, 0, 1))):
                getattr(self, befalls)()
                self._check()
            pending = [request for request in self.run.requests if request.transfer is not None]
            if pending and self.draw.random() < 0.3:  # a moment that is rare
                self._cancel(pending[0])
            while self.left and (not self.engine.busy or self.draw.random() < 0.3):
                self.comes()
            try:
                self.engine.step()
            except BrokenStep as error:
                self.seen[f"step failed: {error}"] += 1
                if self.draw.random() < 0.3:
                    self.goes()
            self._check()
        path = self.engine.executor.path
        if isinstance(path, Late):
            path.land()
        self.run.all_back()
        self._check()
        for request in self.run.requests:
            one, sampling, source = self.asked[request.number]
            assert source is None or source.closed, "a source was left open"
            assert request.failure is None, (self.seed, request.failure)
            if request.number not in self.ended:
                self.seen["bystanders"] += 1
                assert request.output == one.expected(sampling), f"schedule {self.seed}: request {request.number}"
        self.seen += Counter(f"{one.action}: {one.reason}" for one in self.run.trace.recoveries)
        self.seen["shared"] += self.engine.prefixes is not None and self.engine.prefixes.hit_tokens > 0
        return self.seen

    def comes(self) -> None:
        """A request, whose prefix may come from elsewhere."""
        if not self.left:
            return
        self.left -= 1
        one = self.draw.choice(self.known)
        sampling, source = Sampling(self.draw.choice((1, 6, 12, 24))), None
        if len(one.prompt) > 1 and self.draw.random() < 0.4:
            source = Hesitant(*self.prefixes.of(one.prompt), self.draw.randrange(1, len(one.prompt)), self.draw)
        request = self.engine.submit(one.prompt, sampling, moves=self.draw.random() < 0.6, source=source)
        self.run.requests.append(request)
        self.asked[request.number] = one, sampling, source

    def goes(self) -> None:
        """Somebody's client, wherever the request stands."""
        if open_ := [request for request in self.run.requests if not request.finished]:
            away = [request for request in open_ if request.phase in (Phase.SWAPPED, Phase.RESTORING)]
            self._cancel(self.draw.choice(away if away and self.draw.random() < 0.5 else open_))

    def fails(self) -> None:
        """The next step."""
        self.engine.executor.fails = self.draw.choice(("before", "within", "after"))

    def lands(self) -> None:
        """What is pending."""
        if isinstance(self.engine.executor.path, Late):
            self.engine.executor.path.land()

    def grows(self) -> None:
        """Another view of the same layers; who moves to it computes some of them again, or all, or none, or is lost."""
        layers = self.engine.executor.version.decoder.segments[0].modules
        view = ModelVersion(Decoder(self.subject.model, [LocalSegment(layers)]), HiddenStateCache([EDGE]), stage=1)

        def transition(old: ModelVersion, new: ModelVersion) -> range | None:
            if self.draw.random() < 0.1:
                raise RequestError("it does not move")
            return self.draw.choice((None, range(0), range(EDGE, 2), range(EDGE), range(2)))

        for request, _ in self.engine.publish(view, transition):
            self.seen["lost in a move"] += 1
            self.ended.add(request.number)

    def _cancel(self, request: Request) -> None:
        self.seen[f"cancelled: {self._where(request)}"] += 1
        self.ended.add(request.number)
        self.engine.cancel(request)

    def _where(self, request: Request) -> str:
        if request.number in self.engine.scheduler.pending:
            return "its prefix is awaited"
        if request.transfer is not None:
            return "a copy is pending"
        return "it is computed again in some layers" if request.redo is not None else str(request.phase)

    def _check(self) -> None:
        self.guard.check()
        self.run.audit()
        open_ = {request.number for request in self.run.requests if not request.finished}
        kept = self.engine.executor.version.hidden_cache._entries
        assert kept.keys() <= open_, "hidden states are kept of a request that is over"


_BEFALL = {"comes": 4, "goes": 0.6, "fails": 0.6, "lands": 0.6, "grows": 0.4}
