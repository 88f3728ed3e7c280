"""The step loop. One code for live runs and simulations: the executor brings the clock and the work."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from firsttoken.engine.block_pool import BlockPool, PrefixSharing
from firsttoken.engine.drafts import settle
from firsttoken.engine.executor import Executor, Transition, Version
from firsttoken.engine.preemption import POLICIES, policy_of
from firsttoken.engine.preemption.preemption_policy import PreemptionPolicy, Preemptor, Recovery
from firsttoken.engine.preemption.victims import Victim, victim_named
from firsttoken.engine.request import GREEDY, Kind, Phase, Request, Sampling, ScheduledChunk, split_decodes
from firsttoken.engine.scheduler_state import KVSource
from firsttoken.engine.schedulers.sarathi import scheduler_named
from firsttoken.engine.schedulers.scheduler import Scheduler, SchedulerConfig
from firsttoken.engine.simulated import TOKEN, SimulatedExecutor, without_garbage_collection
from firsttoken.engine.trace import DecodeChunks, Step, Trace
from firsttoken.study.errors import ProfileError, RequestError


@dataclass(frozen=True)
class EngineConfig(SchedulerConfig):
    """The configuration by which requests share the pool. ``scheduler`` is a name, or a class of one's own.

    ``victim`` says who is preempted (LIFO in the paper, 2.2), by name or as a choice of one's own. ``watermark`` is the
    share of blocks that admission leaves free (vLLM: 0.01; CPS: 0, 3.1). With ``share_prefixes``, requests that begin
    alike share blocks; that is off by default, as the preemption policies are taught and measured with prefills from
    nothing. Raises ProfileError for an unknown name, and for bounds that the scheduler cannot keep.
    """

    scheduler: str | type[Scheduler] = "prefill_first"
    preemption: str = "recompute"
    victim: str | Victim = "last_arrived"
    watermark: float = 0.01
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        scheduler_named(self.scheduler).check(self)
        victim_named(self.victim)
        if not 0 <= self.watermark < 1:
            raise ProfileError(f"engine: watermark must be a share from 0 to below 1, not {self.watermark}")


DEFAULT_CONFIG = EngineConfig()


# What can never run is refused before it is taken.


def check_admission(request: Request, source: KVSource | None, executor: Executor, pool: BlockPool) -> None:
    """Raises RequestError for more tokens than the model's context or ``pool`` can ever hold, a token outside the
    vocabulary, and a ``source`` of all tokens of the prompt or more, of a prompt whose own chances are asked for, or
    for a version whose layers are still arriving."""
    limits, most = executor.limits, request.prompt_tokens + request.sampling.max_tokens
    demand = f"a prompt of {request.prompt_tokens} tokens and {request.sampling.max_tokens} new ones"
    if most > limits.context:
        raise RequestError(f"{demand} exceed the model's context of {limits.context} tokens; ask for fewer")
    usable = pool.count - pool.watermark
    if -(-request.most_cached // executor.block_tokens) > usable:
        room = usable * executor.block_tokens
        raise RequestError(f"{demand} exceed the KV pool of {room} tokens; ask for fewer or make the pool larger")
    if min(request.tokens) < 0 or max(request.tokens) >= limits.vocabulary:
        raise RequestError(f"the prompt holds a token outside the vocabulary of {limits.vocabulary}")
    if source is None:
        return
    if not 0 < source.tokens < request.prompt_tokens:
        raise RequestError(
            f"a stored prefix of {source.tokens} tokens does not fit a prompt of {request.prompt_tokens}; "
            "at least one token has to be computed"
        )
    if request.sampling.prompt_logprobs:
        raise RequestError("a prompt with a stored prefix has no prompt_logprobs; leave these out, or the source")
    if (version := request.version or executor.version) is not None and version.arrived < version.depth:
        raise RequestError("a stored prefix is of a model that is here, and layers are on their way; leave it out")


# Steps that are alike, taken at once: as long as all who run decode and nobody comes or ends, a simulation only adds
# up times. The outcome is that of one step after the other (``tests/engine/test_leap.py``).


def fast_forward(engine: Engine, next_arrival_s: float) -> bool:
    """Take the coming steps of a simulated ``engine`` at once; return whether any was taken.

    The last one is that in which a request ends, or that begins after the next arrival. Call it after a step, or an
    earlier call, that decoded all running requests. It takes none where steps may differ: on a device, under a
    scheduler that is not ``steady``, and while requests wait or are swapped out."""
    scheduler, executor = engine.scheduler, engine.executor
    away = scheduler.waiting or scheduler.swapped or scheduler.restoring
    if not isinstance(executor, SimulatedExecutor) or not scheduler.steady or away:
        return False
    running = sorted(scheduler.running, key=lambda request: request.order)
    most = _steps_that_fit(
        scheduler, min([candidate.sampling.max_tokens - len(candidate.times_s) for candidate in running], default=0)
    )
    contexts, now, times = tuple([request.cached for request in running]), executor.now(), []
    if engine.trace is None and type(scheduler).completed is Scheduler.completed:  # nobody looks at single steps
        times, most = executor.charge_decodes(contexts, most, next_arrival_s), 0
        contexts = tuple([tokens + len(times) for tokens in contexts])
    while len(times) < most and now < next_arrival_s:
        start, now = now, executor.charge((), contexts)
        times.append(now)
        scheduler.completed((), contexts, now - start)
        if engine.trace is not None:
            engine.trace.steps.append(Step(start, now - start, (), contexts, DecodeChunks(running, contexts)))
        contexts = tuple([tokens + 1 for tokens in contexts])
    if not times:
        return False
    engine.token_counts[Kind.DECODE] += len(times) * len(running)
    outputs, size = [TOKEN] * len(times), scheduler.block_tokens
    for request in running:
        request.tokens += outputs
        request.times_s += times
    if scheduler.prefixes is not None:
        _publish_in_order(scheduler, scheduler.prefixes, running, len(times))
    for request, end in zip(running, contexts, strict=True):
        if end > len(request.blocks) * size:
            request.blocks += scheduler.pool.allocate(-(-end // size) - len(request.blocks))
        request.advance(end)
    for request in [candidate for candidate in running if len(candidate.times_s) >= candidate.sampling.max_tokens]:
        engine.end(request)
    return True


def _publish_in_order(scheduler: Scheduler, prefixes: PrefixSharing, running: Sequence[Request], steps: int) -> None:
    """Take the blocks of ``running`` and publish those that are filled in the order in which single ``steps`` would: a
    block that is taken may be one that somebody else could have found."""
    size = scheduler.block_tokens
    edges = [
        (step, index)
        for index, request in enumerate(running)
        for step in range(steps)
        if not step or (request.cached + step) % size in (0, size - 1)
    ]
    for step, index in sorted(edges):
        request, cached = running[index], running[index].cached + step
        if cached >= len(request.blocks) * size:
            request.blocks += scheduler.pool.allocate(1)
        prefixes.publish(ScheduledChunk(request, cached, cached + 1, cached))


def _steps_that_fit(scheduler: Scheduler, steps: int) -> int:
    """Halve ``steps`` until the free blocks are enough, so that no request is preempted in them; return the result."""
    size, running, free = scheduler.block_tokens, scheduler.running, scheduler.pool.free
    while steps > 0 and len(running) * (steps // size + 1) > free:  # else they are enough wherever blocks end
        if sum([max(0, -(-(request.cached + steps) // size) - len(request.blocks)) for request in running]) <= free:
            break
        steps //= 2
    return steps


POLL_S = 0.001  # between two looks at what comes from elsewhere


class Engine:
    """An engine: requests go in, tokens come out of ``step``; nothing runs between two steps.

    ``token_counts`` count the tokens that were prefilled, decoded and recomputed. ``policy`` overrides the one that the
    configuration names; ``trace`` collects steps and recoveries if given, ``recovered`` is told of these.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig = DEFAULT_CONFIG,
        *,
        policy: PreemptionPolicy | None = None,
        trace: Trace | None = None,
        recovered: Callable[[Recovery], None] | None = None,
    ) -> None:
        self.executor = executor
        self.config = config
        self.trace = trace
        self.token_counts: Counter[Kind] = Counter()
        self.pool = BlockPool(executor.blocks, watermark=int(config.watermark * executor.blocks))
        recovered = recovered or (trace.recoveries.append if trace else None)
        self.preemptor = Preemptor(policy or policy_of(POLICIES, config.preemption, {}), executor, recovered)
        self.prefixes: PrefixSharing | None = None
        if config.share_prefixes:
            self.prefixes = PrefixSharing(self.pool, executor.block_tokens, self._salt)
        kind, victim = scheduler_named(config.scheduler), victim_named(config.victim)
        self.scheduler: Scheduler = kind(
            self.pool, executor.block_tokens, config, self.preemptor, victim, self.prefixes
        )
        self._coming: list[tuple[tuple[float, int], Request]] = []
        self._open: dict[int, Request] = {}
        self._failed: list[Request] = []
        self._numbers = 0
        self._all_decoded = False  # whether the last step decoded all who ran, and did nothing else

    @property
    def busy(self) -> bool:
        """Return whether a request is open that does not wait for the whole model."""
        return len(self._open) > len(self.scheduler.drafted)

    @property
    def open_requests(self) -> int:
        """The number of requests that were submitted and have not ended."""
        return len(self._open)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        arrival_s: float | None = None,
        *,
        moves: bool = False,
        source: KVSource | None = None,
        version: Version | None = None,
    ) -> Request:
        """Take a request that arrives at ``arrival_s`` of the executor's clock (now, unless given).

        It ``moves`` to views that are published while it is open, or ends with the one that it began with, which is the
        executor's unless a ``version`` is given. ``source`` brings what is stored of its first tokens; where that fails
        they are computed.

        Raises RequestError for a source of all its tokens or more, with ``prompt_logprobs`` or of other layers, for an
        empty prompt, a token outside the vocabulary, or more tokens than the model's context or the pool can ever hold.
        """
        arrival_s = self.executor.now() if arrival_s is None else arrival_s
        request = Request(self._numbers, prompt, sampling, arrival_s, moves=moves)
        request.version = version
        check_admission(request, source, self.executor, self.pool)
        if source is not None:
            version = self.executor.version
            self.scheduler.expect(request, source, None if version is None else version.depth)
        self._numbers += 1
        self._open[request.number] = request
        heapq.heappush(self._coming, (request.order, request))
        return request

    def awaits_prefix(self, request: Request) -> bool:
        """Return whether a stored prefix of ``request`` is wanted that has not come whole."""
        return request.number in self.scheduler.pending

    def cancel(self, request: Request) -> None:
        """End a request early, in any state, and free its blocks at once."""
        if self._open.pop(request.number, None) is None:
            return
        self._coming = [entry for entry in self._coming if entry[1] is not request]
        heapq.heapify(self._coming)
        self.scheduler.end(request)

    def publish(self, version: Version, transition: Transition) -> list[tuple[Request, Exception]]:
        """Let new requests begin with ``version`` from the next step on, and open ones move to it as ``transition``
        says.

        Drafts are verified by one that is whole. Returns the requests that could not move, each with the reason; they
        are ended.
        """
        self.executor.version, lost = version, []
        for request in list(self._open.values()):
            if request.version in (None, version):
                continue
            verifies = request.sampling.verify is not None and not request.version.whole
            if not (request.moves or verifies):
                continue
            if request.phase is Phase.DRAFTED and not version.whole:
                continue  # it has nothing to compute again but for the one that verifies it
            try:
                verified = verifies and version.whole
                layers = range(version.depth) if verified else transition(request.version, version)
                if layers is not None:
                    self.scheduler.move(request, version, layers)
            except Exception as error:  # its own affair: the others go on
                self.cancel(request)
                lost.append((request, error))
        return lost

    def step(self) -> list[tuple[Request, int]]:
        """Process one batch and return the (request, token) pairs that it made. It waits when nothing can run yet; for
        a stored prefix only until it is worth looking again.

        A request whose logits are not finite ends with a ``failure``. Other errors of the executor are passed on, and
        nothing of that step counts then: without shared prefixes the next step takes the same work again.
        """
        chunks = self._next_chunks()
        if not chunks:
            return []
        start = self.executor.now()
        for chunk in chunks:
            chunk.request.version = chunk.request.version or self.executor.version
        try:
            tokens = self.executor.execute(chunks)
        except BaseException:
            self.scheduler.withdraw()
            raise
        now = self.executor.now()
        self._account(chunks, start, now - start)
        produced = []
        for chunk, token in zip(chunks, tokens, strict=True):
            request = chunk.request
            if request.begun_s is None:
                request.begun_s = start
            request.advance(chunk.end)
            self.scheduler.await_copy(request)
            if request.failure is not None:
                self.pool.withdraw(request.blocks)
                self._fail(request)
            elif request.drafting:
                if chunk.completes and self.scheduler.draft(request, token):
                    produced.append((request, token))
            else:
                final, next_token = settle(chunk, token, now)
                produced += [(request, draft) for draft in final]
                if next_token is not None:
                    produced.append((request, next_token))
                    if request.append(next_token, now):
                        self.end(request)
        return produced

    def advance(self) -> None:
        """Take one step, and in a simulation those after it that are alike, up to one in which a request ends."""
        self.step()
        self.leap()

    def run(self) -> None:
        """Step until no request is open; a simulation takes steps that are alike at once. Raises the ``failure`` of the
        first request that ended with one, once the others have ended."""
        with without_garbage_collection() if isinstance(self.executor, SimulatedExecutor) else nullcontext():
            while self.busy:
                self.step()
                while self.leap():
                    pass
        if failed := self.failed():
            raise failed[0].failure

    def leap(self) -> bool:
        """Take the coming steps that are alike at once, in a simulation; return whether there was any."""
        return self._all_decoded and fast_forward(self, self._coming[0][0][0] if self._coming else math.inf)

    def failed(self) -> list[Request]:
        """The requests that ended with a ``failure`` since this was last asked."""
        failed, self._failed = self._failed, []
        return failed

    def serve(self, items: Iterable[tuple[Sequence[int], Sampling, float]]) -> list[Request]:
        """Run (prompt, sampling, seconds from now) to the end; return the requests in order. Raises as ``run``."""
        start = self.executor.now()
        requests = [self.submit(prompt, sampling, start + after_s) for prompt, sampling, after_s in items]
        self.run()
        return requests

    def _next_chunks(self) -> list[ScheduledChunk]:
        """Admit what has arrived and schedule; waits for the next arrival or transfer when that yields nothing."""
        while self.busy:
            now = self.executor.now()
            while self._coming and self._coming[0][0][0] <= now:
                self.scheduler.add(heapq.heappop(self._coming)[1])
            self.scheduler.collect()
            before = self.scheduler.lengths
            if chunks := self.scheduler.plan():
                return chunks
            if self.scheduler.awaiting:
                # A prefix may be long on its way over a link: the caller has its thread back meanwhile, so that
                # requests can still come and be cancelled.
                self.executor.wait_until(self.executor.now() + POLL_S)
                return []
            if self.scheduler.restoring:
                self.scheduler.collect(wait=True)
            elif self.scheduler.lengths == before:  # else a preemption made room: schedule again
                if not self._coming:
                    raise AssertionError("requests are open, and the scheduler runs none of them")
                self.executor.wait_until(self._coming[0][0][0])
        return []

    def _account(self, chunks: Sequence[ScheduledChunk], at_s: float, seconds: float) -> None:
        """Book the step, and what its prefills say about the cost of recomputing."""
        others, contexts = split_decodes(chunks)
        self._all_decoded = len(contexts) == len(chunks) == len(self.scheduler.running)
        for span in [span for chunk in others for span in chunk.token_spans]:
            self.token_counts[span.kind] += span.end - span.start
        if contexts:
            self.token_counts[Kind.DECODE] += len(contexts)
        prefills = tuple((chunk.start, chunk.tokens) for chunk in others)
        self.scheduler.completed(prefills, contexts, seconds)
        if self.trace is not None:
            self.trace.steps.append(Step(at_s, seconds, prefills, contexts, tuple(chunks)))
        new = sum(chunk.tokens for chunk in others) + len(contexts)
        for chunk in chunks if self.preemptor.recovering else others:  # a decode says nothing of recomputing
            self.preemptor.processed(chunk, seconds * chunk.tokens / new)

    def _salt(self, request: Request) -> str:
        version = request.version or self.executor.version
        return request.salted(self.executor.salt if version is None else f"{self.executor.salt} {version.key}")

    def _fail(self, request: Request) -> None:
        self.end(request)
        self._failed.append(request)

    def end(self, request: Request) -> None:
        """End the open ``request``, which has its last token."""
        del self._open[request.number]
        self.scheduler.end(request)
