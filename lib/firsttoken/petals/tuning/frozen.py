"""A server's side of training: its blocks, frozen, forward and backward, with the LoRA that each pass brings.

Nothing is kept between two passes: backward computes forward again, so clients cannot disturb each other, and another
server can take over at any pass. Within one no more than ``MOST_KEPT`` is: many tokens go back a few layers at a time.
The blocks are stock ones, beside the fused ones that generate and have no gradients.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firsttoken.assets.positions import context_of
from firsttoken.petals.checkpoint_blocks import load_span
from firsttoken.petals.fairness import HERE, CancelScope, Client, FairQueue, client_to_evict
from firsttoken.petals.tuning.passes import Adapters, Pass, decode_pass, encode_pass
from firsttoken.study.errors import BusyError, RequestError, SwarmError

MOST_WAITING = 16  # passes; a client whose pass is refused asks another server, or again
MOST_KEPT = 4096  # tokens times layers whose values stay for backward


@dataclass(eq=False)
class _WaitingPass(CancelScope):
    """A client's pass through ``layers`` of a model of ``width``; ``data`` when it has been said."""

    client: Client
    layers: range
    width: int
    answer: asyncio.Future[bytes]
    data: bytes | None = None


class FrozenBlocks:
    """``blocks`` of the model in ``folder`` in ``dtype``, loaded when the first pass comes; one pass at a time, while
    others wait. Between clients the turns are fair in the bytes of their passes."""

    def __init__(self, folder: Path, blocks: range, dtype: torch.dtype) -> None:
        self.blocks = blocks
        self._folder, self._dtype = folder, dtype
        self._model: Any = None
        self.busy = False  # a pass runs
        self._waiting: list[_WaitingPass] = []  # for their turn, or for their message
        self._turns = FairQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="firsttoken-passes")

    async def answer(
        self, receive: Callable[[], Awaitable[bytes]], layers: range, width: int, client: Client = HERE
    ) -> bytes:
        """The message of the answer to the pass of ``client`` that ``receive`` brings. Raises RequestError for one that
        no server takes, BusyError, and does not listen, where too many wait and no other client has more than its share
        of them."""
        self._free_place(client)
        waiting = _WaitingPass(client, layers, width, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            with waiting:
                waiting.data = await receive()
                self._begin()
                return await waiting.answer
        finally:
            if waiting in self._waiting:  # its client has gone before its turn
                self._waiting.remove(waiting)

    def _free_place(self, client: Client) -> None:
        if len(self._waiting) < MOST_WAITING:
            return
        full = BusyError(f"{len(self._waiting)} passes wait here, and no more are taken")
        if (yields := client_to_evict(Counter(waiting.client for waiting in self._waiting), client, 1)) is None:
            raise full
        last = next(waiting for waiting in reversed(self._waiting) if waiting.client == yields)
        self._waiting.remove(last)
        last.cancel(full)

    def _begin(self) -> None:
        """Run the pass whose turn it is, unless one runs. One that runs cannot be stopped: the next has to wait for it
        even when its client has gone, or messages of clients that went would pile up in the queue of the thread."""
        received = [waiting for waiting in self._waiting if waiting.data is not None]
        if self.busy or not received:
            return
        client = self._turns.next(dict.fromkeys(waiting.client for waiting in received))
        waiting = next(waiting for waiting in received if waiting.client == client)
        self._waiting.remove(waiting)
        self._turns.charge(client, len(waiting.data))
        self.busy = True
        job = asyncio.get_running_loop().run_in_executor(
            self._thread, self._answer, waiting.data, waiting.layers, waiting.width
        )
        job.add_done_callback(partial(self._pass_finished, waiting))

    def _pass_finished(self, waiting: _WaitingPass, job: asyncio.Future[bytes]) -> None:
        self.busy, error = False, job.exception()
        if not waiting.answer.done():  # its client is there
            waiting.answer.set_result(job.result()) if error is None else waiting.answer.set_exception(error)
        self._begin()

    async def move(self, blocks: range) -> None:
        """Serve these ``blocks`` from now on; a pass that runs ends first."""

        def move() -> None:
            self.blocks, self._model = blocks, None

        await asyncio.get_running_loop().run_in_executor(self._thread, move)

    def close(self) -> None:
        """End the thread when its pass is done; those that wait hear that the server ends."""
        for waiting in self._waiting:
            waiting.cancel(SwarmError("this server ends: ask another"))
        self._waiting.clear()
        self._thread.shutdown(wait=False)

    def _answer(self, data: bytes, layers: range, width: int) -> bytes:
        try:
            decoded = decode_pass(data, width)
        except SwarmError as error:
            raise RequestError(str(error)) from error
        return encode_pass(self.run(layers, decoded))

    def run(self, layers: range, tuning_pass: Pass) -> Pass:
        """``hidden`` after ``layers``; backward, its gradient and those of the adapters. Raises RequestError for
        adapters that do not fit and for more tokens than the context, SwarmError where the blocks have gone while it
        waited."""
        if layers.start not in self.blocks or layers.stop > self.blocks.stop:
            raise SwarmError(f"this server has blocks [{self.blocks.start}, {self.blocks.stop}) by now")
        if self._model is None:
            self._model = load_span(self._folder, self.blocks, self._dtype)
        if (tokens := tuning_pass.hidden.shape[1]) > (most := context_of(self._model.config)):
            raise RequestError(f"a pass of {tokens} tokens exceeds the context of {most}")
        for (layer, name), (a, b) in tuning_pass.adapters.items():
            if layer not in layers:
                raise RequestError(f"LoRA of layer {layer} came to blocks [{layers.start}, {layers.stop})")
            linear = self._linear(layer, name)
            if (a.shape[1], b.shape[0]) != (linear.in_features, linear.out_features):
                raise RequestError(f"LoRA of {name} in layer {layer} does not fit its module")
        hidden = tuning_pass.hidden.to(self._dtype)
        with torch.no_grad():
            if tuning_pass.gradient is None:
                return Pass(self._forward(layers, hidden, tuning_pass.adapters, tuning_pass.scaling), {})
            several = max(1, MOST_KEPT // (hidden.shape[0] * hidden.shape[1]))
            spans = [layers[start : start + several] for start in range(0, len(layers), several)]
            entered = [hidden]
            for span in spans[:-1]:
                entered.append(self._forward(span, entered[-1], tuning_pass.adapters, tuning_pass.scaling))
        gradient, halves = tuning_pass.gradient.to(self._dtype), {}
        for span in reversed(spans):
            gradient, more = self._backward(span, entered.pop(), gradient, tuning_pass)
            halves |= more
        return Pass(gradient, halves)

    def _backward(self, layers: range, hidden: Tensor, gradient: Tensor, tuning_pass: Pass) -> tuple[Tensor, Adapters]:
        """The gradients of what entered ``layers``, and of their adapters."""
        hidden = hidden.detach().requires_grad_()
        adapters = {
            key: tuple(half.detach().requires_grad_() for half in halves)
            for key, halves in tuning_pass.adapters.items()
            if key[0] in layers
        }
        out = self._forward(layers, hidden, adapters, tuning_pass.scaling)
        inputs = [hidden, *(half for halves in adapters.values() for half in halves)]
        first, *halves = torch.autograd.grad(out, inputs, gradient)
        return first, dict(zip(adapters, zip(halves[::2], halves[1::2], strict=True), strict=True))

    def _forward(self, layers: range, hidden: Tensor, adapters: Adapters, scaling: float) -> Tensor:
        decoder = self._model.model
        positions = torch.arange(hidden.shape[1])[None]
        rotary = decoder.rotary_emb(hidden, positions)
        with ExitStack() as hooked:
            for (layer, name), (a, b) in adapters.items():
                if layer in layers:
                    hooked.enter_context(_added(self._linear(layer, name), a, b, scaling))
            for layer in decoder.layers[layers.start - self.blocks.start : layers.stop - self.blocks.start]:
                hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return hidden

    def _linear(self, layer: int, name: str) -> nn.Linear:
        try:
            module = self._model.model.layers[layer - self.blocks.start].get_submodule(name)
        except AttributeError:
            module = None
        if not isinstance(module, nn.Linear):
            raise RequestError(f"layer {layer} has no linear module {name!r} for LoRA")
        return module


def _added(linear: nn.Linear, a: Tensor, b: Tensor, scaling: float) -> Any:
    """LoRA beside ``linear`` until the handle is left."""

    def add(_: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        return out + ((args[0].to(a.dtype) @ a.t()) @ b.t()).to(out.dtype) * scaling

    return linear.register_forward_hook(add)
