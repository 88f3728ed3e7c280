"""Servers that lie and clients that look: who is convicted within an answer, by the share of answers audited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check, text_of
from firsttoken.engine.request import Sampling, ScheduledChunk
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.checkpoint_blocks import model_sha256, parse_blocks
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import SequenceChunk
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.petals.server import RunningServer, ServerConfig, serving
from firsttoken.petals.session import ServerLimits
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.trust.arbitration import TOLERANCE, difference
from firsttoken.petals.trust.auditor import INCONCLUSIVE, Auditor, Audits
from firsttoken.study.errors import ProfileError, SwarmError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.petals.cell_clients import CellAuditor
from firsttoken_studies.petals.spans import split_evenly, stored
from firsttoken_studies.record.results import Outcome, Rows, frame_of

# Blocks that answer what they did not compute, for tests and experiments to catch.

LIES = {
    "noise": "noise of a hundredth of the answer",
    "lazy": "its last block left out",
    "seldom": "such noise, in a quarter of the answers",
}
"""What a liar may do, by name."""

NOISE, SELDOM = 0.01, 0.25
_BOAST = 1e6  # a liar says that it is so many times as fast as it is, and so is asked before others


class ByzantineBackend(BlockBackend):
    """A ``BlockBackend`` that tells the ``lie``, drawn from ``seed``; ``told`` counts its false answers."""

    def __init__(self, folder: Path, blocks: range, dtype: torch.dtype, kv_tokens: int, *, lie: str, seed: int) -> None:
        super().__init__(folder, blocks, dtype, kv_tokens)
        self.lie, self.told = lie, 0
        self._draw = torch.Generator().manual_seed(seed)

    def run(self, layers: range, chunks: Sequence[ScheduledChunk], hidden: Sequence[Tensor]) -> list[Tensor]:
        """Run the layers as ``BlockBackend.run`` does, and answer falsely."""
        if self.lie == "seldom" and float(torch.rand(1, generator=self._draw)) >= SELDOM:
            return super().run(layers, chunks, hidden)
        self.told += 1
        if self.lie == "lazy":
            return super().run(range(layers.start, layers.stop - 1), chunks, hidden)
        return [self._noisy(rows) for rows in super().run(layers, chunks, hidden)]

    def measured_throughput(self) -> float:
        return _BOAST * super().measured_throughput()

    def _noisy(self, rows: Tensor) -> Tensor:
        size = rows.pow(2).mean(1, keepdim=True).sqrt()
        return rows + NOISE * size * torch.randn(rows.shape, generator=self._draw)


# What honest servers may differ by: their answers beside those of transformers' own layers, and of float64.


@torch.inference_mode()
def rounding(swarm: Swarm, model: nn.Module, spans: Sequence[range], prompts: Sequence[list[int]]) -> Rows:
    """Rows {what: rounding, against: float32 | float64, difference}, one for each of ``spans`` and ``prompts``.

    ``model`` is the same one in this process, in float32; it is in float64 afterwards.
    """
    entering = []
    for prompt in prompts:
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        entering += [(span, states[span.start][0]) for span in spans]
    answers = [wait_for(_answer(swarm, span, inputs)) for span, inputs in entering]
    rows: Rows = []
    for kind in (torch.float32, torch.float64):
        model.to(kind)
        for (span, inputs), answer in zip(entering, answers, strict=True):
            apart = difference(answer.to(kind), _through(model, span, inputs.to(kind)))
            rows.append({"what": "rounding", "against": str(kind).removeprefix("torch."), "difference": apart})
    return rows


async def _answer(swarm: Swarm, span: range, inputs: Tensor) -> Tensor:
    """Return the answer of a server of just ``span`` to ``inputs`` [tokens, hidden]."""
    session = swarm.open_session(next(record for record in swarm.servers() if record.span == span), span, "float32")
    try:
        return await session.run([SequenceChunk(0, 0, len(inputs))], inputs)
    finally:
        session.close()


def _through(model: nn.Module, span: range, inputs: Tensor) -> Tensor:
    """``inputs`` [tokens, hidden] after the layers ``span`` of transformers' model, without its last norm."""
    body = model.model
    layers_and_norm = body.layers, body.norm
    body.layers, body.norm = body.layers[span.start : span.stop], nn.Identity()
    try:
        return body(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]
    finally:
        body.layers, body.norm = layers_and_norm


_ROUNDED = 8  # prompts whose states are computed in float64, too
_LOOKS = 600  # until a client sees the liar before the honest server of its blocks
_PAUSE_S = 0.05  # between two looks: beside other work a server was late, and counts as farther away for some seconds


@dataclass(frozen=True)
class ValidationConfig:
    """Answers of ``tokens`` after prompts of ``prompt_tokens`` through ``servers`` servers, each with a spare.

    First by honest ones, every answer audited, for as many prompts at once as each of ``batches`` says; then ``trials``
    times for each of ``lies`` and ``rates``, where one more server of the middle blocks lies. ProfileError for none.
    """

    tokens: int
    prompt_tokens: int
    servers: int
    batches: tuple[int, ...]
    lies: tuple[str, ...]
    rates: tuple[float, ...]
    trials: int

    def __post_init__(self) -> None:
        for lie in self.lies:
            if lie not in LIES:
                raise ProfileError(f"validation.lies: no lie {lie!r}; {unknown(lie, LIES)}")
        if min(self.tokens, self.prompt_tokens, self.servers, self.trials, *self.batches) < 1:
            raise ProfileError("validation: every number must be at least 1")
        if any(not 0 < rate <= 1 for rate in self.rates):
            raise ProfileError("validation.rates must be shares of the answers, above 0 and at most 1")

    def needs(self) -> list[Need]:
        """Require a model with two blocks for each server, and the context, and a text with the prompts."""
        return [
            Need("validation.servers x 2", 2 * self.servers, LAYERS),
            Need("validation.tokens", self.tokens + self.prompt_tokens, CONTEXT),
            Need("validation.batches x prompt_tokens", self.prompts * self.prompt_tokens, text_of("test")),
        ]

    @property
    def prompts(self) -> int:
        """Return the number of prompts that the study needs."""
        return sum(self.batches) + self.trials


def swarm_validation(profile: Profile, *, audit: Callable[..., Any] = Auditor) -> Outcome:
    """Rows {what: rounding, against, difference}, {what: audit, batch, difference},
    {what: honest, batch, convicted, inconclusive, recomputed, computed} and
    {what: liar, lie, rate, trial, caught_at, told, others}: caught_at is the token in whose step it was.

    ``audit`` judges answers: the library's auditor, or a function as ``CellAuditor`` takes it.
    """
    config = profile.section("validation", ValidationConfig)
    check(config.needs(), ModelFacts(profile.model))
    with stored(profile) as (folder, loaded), ExitStack() as stack:
        text = token_windows(running_text("test"), loaded.tokenizer, config.prompt_tokens, config.prompts).tolist()
        study = _Validation(stack, folder, len(layers_of(loaded.model)), config, audit)
        rows = rounding(study.model.swarm, loaded.model, study.spans, text[:_ROUNDED]) + study.honest(
            text[config.trials :]
        )
        cases = [(lie, rate, trial) for lie in config.lies for rate in config.rates for trial in range(config.trials)]
        for number, (lie, rate, trial) in enumerate(track(cases, desc="liars")):
            rows.append(study.liar(lie, rate, trial, text[trial], profile.seed + number))
    return Outcome(rows, provenance=loaded.provenance.as_dict())


class _Validation:
    """A swarm of honest servers, two of each span, and a client; the first server judges."""

    def __init__(
        self, stack: ExitStack, folder: Path, depth: int, config: ValidationConfig, audit: Callable[..., Any]
    ) -> None:
        self.folder, self.depth, self.config, self._audit = folder, depth, config, audit
        self.spans = [parse_blocks(text, depth) for text in split_evenly(depth, config.servers)]
        self.sha256 = model_sha256(folder)
        self.door = ""
        for span in (*self.spans, *self.spans):
            stack.enter_context(self._serving(span))
        self.model = stack.enter_context(RemoteModel(folder, [self.door], timeouts=Timeouts(step_s=30.0)))

    def honest(self, prompts: Sequence[list[int]]) -> Rows:
        """Return the rows of honest servers, with every answer audited."""
        rows, remaining = [], iter(prompts)
        for batch in self.config.batches:
            auditor = self._watched(1.0, 0)
            batch_prompts = [next(remaining) for _ in range(batch)]
            self._answer(batch_prompts)
            rows += [{"what": "audit", "batch": batch, "difference": difference} for difference in auditor.differences]
            computed = batch * (self.config.prompt_tokens + self.config.tokens - 1) * self.depth
            row = {"convicted": len(self.model.swarm.convicted), "inconclusive": auditor.ends[INCONCLUSIVE]}
            rows.append(
                {"what": "honest", "batch": batch, **row, "recomputed": auditor.recomputed, "computed": computed}
            )
        return rows

    def liar(self, lie: str, rate: float, trial: int, prompt: list[int], seed: int) -> dict[str, Any]:
        """Measure an answer through a server that tells ``lie``, while the client audits ``rate`` of the answers it
        gets."""
        span = self.spans[len(self.spans) // 2]
        with self._serving(span, partial(ByzantineBackend, lie=lie, seed=seed)) as up:
            self._choose(up)
            self._watched(rate, seed)
            before = set(self.model.swarm.convicted)
            caught_at = self._answer([prompt], until=up.record.server)
            wait_for(self._end())
            newly_convicted = self.model.swarm.convicted - before
            row = {"what": "liar", "lie": lie, "rate": rate, "trial": trial, "caught_at": caught_at}
            return row | {"told": up.sessions.batcher.backend.told, "others": len(newly_convicted - {up.record.server})}

    async def _end(self) -> None:
        self.model.chain.close()

    def _watched(self, rate: float, seed: int) -> Auditor:
        swarm, audits = self.model.swarm, Audits(rate, self.door, seed=seed)
        library = self._audit is Auditor
        auditor = Auditor(swarm, audits) if library else CellAuditor(swarm, audits, self._audit, self.folder)
        self.model.chain.auditor = auditor
        return auditor

    def _answer(self, prompts: Sequence[list[int]], until: str = "") -> int:
        """Answer all prompts. Where the server ``until`` is convicted, end, and return the token in whose step that
        was; else return -1."""
        engine, convicted = self.model.engine, self.model.swarm.convicted
        requests = [engine.submit(prompt, Sampling(self.config.tokens)) for prompt in prompts]
        try:
            while not all(request.finished for request in requests):
                token = len(requests[0].output)
                engine.step()
                if until in convicted:
                    return token
        finally:
            for request in requests:
                engine.cancel(request)
        return -1

    def _choose(self, up: RunningServer) -> None:
        """Look the swarm over until the client would ask the server ``up``. Raises SwarmError when it never does."""
        for _ in range(_LOOKS):
            wait_for(self.model.swarm.refresh())
            chain = wait_for(self.model.swarm.route(self.model.chain.layers))
            if up.record.server in {record.server for _, record in chain}:
                return
            time.sleep(_PAUSE_S)
        raise SwarmError(f"{up.record.name} is never the fastest of its swarm, so no client asks it; run it again")

    @contextmanager
    def _serving(self, span: range, make_backend: Any = BlockBackend) -> Iterator[RunningServer]:
        """Run a server in this process, which others reach over gRPC alone."""
        limits, peers = ServerLimits(kv_tokens=4096), (self.door,) if self.door else ()
        config = ServerConfig(self.folder, span, torch.float32, peers=peers, limits=limits)
        opened = AsyncExitStack()
        try:
            up = wait_for(opened.enter_async_context(serving(config, self.sha256, make_backend)))
            self.door = self.door or up.record.address
            yield up
        finally:
            wait_for(opened.aclose())


def foreseen(lie: str, rate: float, answers: int) -> float:
    """The share of liars that are caught within so many answers, if each false one that is audited is enough."""
    return 1 - (1 - rate * (SELDOM if lie == "seldom" else 1.0)) ** answers


def validation_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Liars caught by lie and rate, with what the draws foresee; honest servers convicted; their differences in parts
    of the tolerance; what auditing every answer computes beside the answer."""
    config, summary = parameters["validation"], Summary()
    audits, rounded, honest, liars = (frame_of(rows, what=kind) for kind in ("audit", "rounding", "honest", "liar"))
    audits["alarm"], liars["caught"] = audits.difference > TOLERANCE, liars.caught_at >= 0
    honest["again"] = honest.recomputed / honest.computed
    most, wrong = audits.difference.max(), honest.convicted.max() + liars.others.sum()
    summary.by(rounded, {}, {"difference": ("difference", "median", "")}, case="rounding")
    summary.add("difference", {"value": most, "n": len(audits), "unit": ""}, case="audit", across="most")
    largest = {"value": max(most, rounded.difference.max()) / TOLERANCE, "n": len(audits) + len(rounded), "unit": "x"}
    summary.add("difference_x", largest, case="honest", across="most", than="tolerance")
    summary.add("convicted", {"value": wrong, "n": len(audits) + len(liars), "unit": "servers"}, case="honest")
    summary.by(audits, {}, {"alarms_pct": ("alarm", "mean", "%", 100)}, case="honest")
    unsure = {"value": honest.inconclusive.sum(), "n": len(audits), "unit": "audits"}
    summary.add("inconclusive", unsure, case="honest")
    summary.by(honest, {}, {"recomputed_x": ("again", "mean", "x")}, case="honest", than="computed")
    apart = []
    for lie, rate in product(config["lies"], config["rates"]):
        rate_rows = liars[(liars.lie == lie) & (liars.rate == rate)]
        expected, labels = 100 * foreseen(lie, rate, config["tokens"]), {"case": lie, "audited": rate}
        summary.by(rate_rows, {}, {"caught_pct": ("caught", "mean", "%", 100)}, source="measured", **labels)
        summary.add("caught_pct", {"value": expected, "unit": "%"}, source="foreseen", **labels)
        apart.append(abs(100 * rate_rows.caught.sum() / len(rate_rows) - expected))
    summary.add("caught_off_points", bootstrap(apart).summary("points"), than="foreseen", across="mean")
    return summary
