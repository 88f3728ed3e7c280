"""A model to train with: its ends are here, its blocks on servers, gradients go through all of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from firsttoken.petals.access import Access, CallError, answer_of
from firsttoken.petals.checkpoint_blocks import load_ends, model_sha256
from firsttoken.petals.event_loop import begin, wait_for
from firsttoken.petals.messages import HEADERS, MOST_TOKENS, PASS, VERSION, most_bytes
from firsttoken.petals.records import Record
from firsttoken.petals.routing import Hop, check_cover
from firsttoken.petals.server_session import REFUSALS
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.tuning.client_adapters import Lora, SoftPrompt
from firsttoken.petals.tuning.passes import Adapters, Pass, decode_pass, encode_pass
from firsttoken.study.errors import RequestError, SwarmError

# A client's way through the servers for training: what entered each is kept until the gradient comes back.

_BACKWARD = 3  # times the patience: forward again, and twice its products


class SpanInput(NamedTuple):
    """``hidden`` [rows, tokens, hidden] entered ``blocks`` of one server."""

    blocks: range
    hidden: Tensor


@dataclass
class _Failing:
    """Since when (monotonic clock, 0: not) nobody answers a pass, ``why``, and who has ``refused`` it (subkeys)."""

    since_s: float = 0.0
    why: str = ""
    refused: set[str] = field(default_factory=set)


class TrainingChain:
    """``layers`` on the servers of ``swarm``, of which those that do not train are passed by. Lives in its loop."""

    def __init__(self, swarm: Swarm, layers: range) -> None:
        self.swarm = swarm
        self.layers = layers
        self.faults: list[tuple[str, str]] = []  # (subkey, why) of each server that was replaced
        self.moved_bytes = 0  # of messages that were answered, both ways

    async def forward(self, hidden: Tensor, adapters: Adapters, scaling: float) -> tuple[Tensor, list[list[SpanInput]]]:
        """``hidden`` [rows, tokens, hidden] after the layers, and what entered whom, for each part of the batch that
        fits a message. Raises SwarmError when blocks stay unserved, RequestError for what all refuse who serve them."""
        parts = [await self._forward(self.layers, rows, adapters, scaling) for rows in _parts(hidden)]
        return torch.cat([out for out, _ in parts]), [entered for _, entered in parts]

    async def backward(
        self, entered: list[list[SpanInput]], gradient: Tensor, adapters: Adapters, scaling: float
    ) -> tuple[Tensor, Adapters]:
        """The gradients of ``hidden`` and of the adapters, from that of what came out. Raises as ``forward``."""
        firsts: list[Tensor] = []
        sums: Adapters = {}
        for part, rows in zip(entered, _parts(gradient), strict=True):
            check_cover([entry.blocks for entry in part], self.layers)
            for entry in reversed(part):
                rows, halves = await self._backward(entry, rows, adapters, scaling)
                for key, (a, b) in halves.items():
                    total = sums.get(key)
                    sums[key] = (a, b) if total is None else (total[0] + a, total[1] + b)
            firsts.append(rows)
        return torch.cat(firsts), sums

    async def _forward(
        self, layers: range, hidden: Tensor, adapters: Adapters, scaling: float
    ) -> tuple[Tensor, list[SpanInput]]:
        entered: list[SpanInput] = []
        block, failing = layers.start, _Failing()
        while block < layers.stop:
            hop, record = (await self._route(range(block, layers.stop), failing))[0]
            request = Pass(hidden, _within(adapters, hop.blocks), scaling)
            if (answer := await self._ask(record, hop.blocks, request, failing)) is not None:
                entered.append(SpanInput(hop.blocks, hidden))
                hidden, block, failing = answer.hidden, hop.blocks.stop, _Failing()
        check_cover([entry.blocks for entry in entered], layers)
        return hidden, entered

    async def _backward(
        self, entry: SpanInput, gradient: Tensor, adapters: Adapters, scaling: float
    ) -> tuple[Tensor, Adapters]:
        failing = _Failing()
        while True:
            (hop, record), *others = await self._route(entry.blocks, failing)
            if others:  # whoever took over has other blocks: its inputs are computed on the way
                _, entered = await self._forward(entry.blocks, entry.hidden, adapters, scaling)
                halves: Adapters = {}
                for part in reversed(entered):
                    gradient, more = await self._backward(part, gradient, adapters, scaling)
                    halves |= more
                return gradient, halves
            request = Pass(entry.hidden, _within(adapters, hop.blocks), scaling, gradient)
            if (answer := await self._ask(record, hop.blocks, request, failing)) is not None:
                return answer.hidden, answer.adapters

    async def _route(self, blocks: range, failing: _Failing) -> list[tuple[Hop, Record]]:
        """Find a route as ``Swarm.route`` does, without the servers that have refused.

        Raises RequestError where nobody else has the blocks.
        """
        until = failing.since_s + self.swarm.timeouts.find_s if failing.since_s else None
        try:
            return await self.swarm.route(blocks, failing.why, until, failing.refused)
        except SwarmError as error:
            raise (RequestError if failing.refused else SwarmError)(str(error)) from error

    async def _ask(self, record: Record, blocks: range, request: Pass, failing: _Failing) -> Pass | None:
        """The answer of one server; None when it failed or refused, and is not asked for a while.

        Raises SwarmError once it has been the last for ``find_s``, and RequestError for a pass that is too large
        or holds what no model has.
        """
        swarm, message = self.swarm, encode_pass(request)
        if len(message) > (most := most_bytes(request.hidden.shape[2], len(blocks))):
            raise RequestError(f"a pass of {len(message):,} bytes; at most {most:,} are taken: fewer tokens or ranks")
        try:
            decode_pass(message, request.hidden.shape[2])
        except SwarmError as error:  # as of a training that diverged: no server is to be blamed for it
            raise RequestError(str(error)) from error
        tokens = request.hidden.shape[0] * request.hidden.shape[1]
        limit_s = swarm.timeouts.limit_s(tokens) * (1 if request.gradient is None else _BACKWARD)
        opened = zip(HEADERS, (VERSION, swarm.model, f"{blocks.start}:{blocks.stop}", "float32"), strict=True)
        headers = (*opened, *swarm.access.headers)
        try:
            data = await answer_of(swarm.channel(record.address).unary_unary(PASS), message, headers, limit_s)
            answer = _answer(decode_pass(data, request.hidden.shape[2]), request)
            self.moved_bytes += len(message) + len(data)
            return answer
        except CallError as error:
            refused = error.code in REFUSALS
            why = f"refuses: {error}" if refused else str(error)
            failing.refused |= {record.server} if refused else set()
        except SwarmError as error:
            why = str(error)
        self.faults.append((record.server, why))
        swarm.conduct.failed(record.server)
        await swarm.reconnect(record.address)
        failing.why = f"{record.name}{' ' if why.startswith('refuses: ') else ': '}{why}"
        failing.since_s = failing.since_s or time.monotonic()
        if time.monotonic() - failing.since_s > (most := swarm.timeouts.find_s):
            raise SwarmError(f"{failing.why} (the servers that took over failed too, for {most:g} s)")
        return None


def _parts(batch: Tensor) -> list[Tensor]:
    """``batch`` [rows, tokens, hidden] as parts that fit a message. Raises RequestError for a row that does not."""
    if batch.shape[1] > MOST_TOKENS:
        raise RequestError(f"a row of {batch.shape[1]} tokens; at most {MOST_TOKENS} are trained on")
    return list(batch.split(max(1, MOST_TOKENS // batch.shape[1])))


def _answer(answer: Pass, request: Pass) -> Pass:
    """Return ``answer``. Raises SwarmError for one of another shape, or with gradients of other adapters."""
    if answer.hidden.shape != request.hidden.shape:
        raise SwarmError(f"an answer has the shape {list(answer.hidden.shape)}, not {list(request.hidden.shape)}")
    if _shapes(answer) != (_shapes(request) if request.gradient is not None else {}):
        raise SwarmError("an answer has gradients of other adapters than were sent")
    return answer


def _shapes(tuning_pass: Pass) -> dict[tuple[int, str], tuple[torch.Size, torch.Size]]:
    return {key: (a.shape, b.shape) for key, (a, b) in tuning_pass.adapters.items()}


def _within(adapters: Adapters, blocks: range) -> Adapters:
    return {key: halves for key, halves in adapters.items() if key[0] in blocks}


IGNORED = -100  # the label of a token that is not learned, as everywhere


class RemoteTraining(AbstractContextManager["RemoteTraining"]):
    """The model in ``folder``, its blocks on servers with --train of the swarm that ``peers`` (HOST:PORT) belong to;
    ``prompt`` and ``lora`` are trained, the rest is frozen. Float32. A context manager; raises as a RemoteModel."""

    def __init__(
        self,
        folder: Path,
        peers: Sequence[str],
        *,
        prompt: SoftPrompt | None = None,
        lora: Lora | None = None,
        timeouts: Timeouts | None = None,
        access: Access | None = None,
    ) -> None:
        self.model = load_ends(folder, torch.float32).requires_grad_(False)
        self.sha256 = model_sha256(folder)
        self.prompt, self.lora = prompt, lora
        width, depth = self.model.config.hidden_size, self.model.config.num_hidden_layers
        swarm = Swarm(self.sha256, peers, width, access or Access(), timeouts or Timeouts(), depth)
        self.chain = TrainingChain(swarm, range(depth))
        wait_for(swarm.check(self.chain.layers))
        self._refreshing = begin(swarm.keep_refreshing())

    def hidden(self, input_ids: Tensor) -> Tensor:
        """``input_ids`` [rows, tokens] -> [rows, tokens, hidden] after the norm, for the model's head or one's own.

        Rows of fewer tokens are filled up at their ends: no token sees what comes after it. Raises RequestError for
        rows too long for a pass, SwarmError when blocks stay unserved.
        """
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise RequestError(f"input_ids must be whole numbers [rows, tokens], not {list(input_ids.shape)}")
        hidden, before = self.model.model.embed_tokens(input_ids), 0
        if self.prompt is not None:
            before = len(self.prompt.weight)
            hidden = torch.cat([self.prompt.weight.expand(len(hidden), -1, -1), hidden], 1)
        return self.model.model.norm(self.through(self.chain, hidden))[:, before:]

    def through(self, chain: TrainingChain, hidden: Tensor) -> Tensor:
        """``hidden`` [rows, tokens, hidden] after the layers of ``chain``, with LoRA where it is trained."""
        adapters, scaling = ({}, 1.0) if self.lora is None else (self.lora.adapters(), self.lora.scaling)
        adapters = _within(adapters, chain.layers)
        halves = [half for both in adapters.values() for half in both]
        return ThroughChain.apply(chain, list(adapters), scaling, hidden, *halves)

    def loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean over the next tokens of ``labels`` [rows, tokens] that are not ``IGNORED``. Raises as ``hidden``."""
        logits = self.model.lm_head(self.hidden(input_ids)[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)

    def save(self, folder: Path) -> None:
        """Write the trained prompt and LoRA as PEFT folders with the base's hash in ``folder``: prompt, lora."""
        for name, trained in (("prompt", self.prompt), ("lora", self.lora)):
            if trained is not None:
                trained.save(folder / name, self.sha256)

    def close(self) -> None:
        self._refreshing.cancel()
        wait_for(self.chain.swarm.close())

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ThroughChain(torch.autograd.Function):
    """``hidden`` [rows, tokens, hidden] after the chain's layers, with LoRA's ``halves`` A, B of each of ``places``."""

    @staticmethod
    def forward(
        ctx: Any, chain: TrainingChain, places: list[tuple[int, str]], scaling: float, hidden: Tensor, *halves: Tensor
    ) -> Tensor:
        adapters = _paired(places, halves)
        out, ctx.entered = wait_for(chain.forward(hidden.detach(), adapters, scaling))
        ctx.chain, ctx.places, ctx.scaling = chain, places, scaling
        ctx.save_for_backward(*halves)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        adapters = _paired(ctx.places, ctx.saved_tensors)
        gradients_of_inputs = ctx.chain.backward(ctx.entered, gradients[0].contiguous(), adapters, ctx.scaling)
        first, sums = wait_for(gradients_of_inputs)
        return (None, None, None, first, *(half for key in ctx.places for half in sums[key]))


def _paired(places: Sequence[tuple[int, str]], halves: Sequence[Tensor]) -> dict:
    pairs = zip(halves[::2], halves[1::2], strict=True)
    return {key: (a.detach(), b.detach()) for key, (a, b) in zip(places, pairs, strict=True)}
