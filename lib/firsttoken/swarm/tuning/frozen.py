"""A server's side of training: its blocks, frozen, forward and backward, with the LoRA that each pass brings.

Nothing is kept between two passes: backward computes forward again, so clients cannot disturb each other, and another
server can take over at any pass. Within one no more than ``MOST_KEPT`` is: many tokens go back a few layers at a time.
The blocks are stock ones, beside the fused ones that generate and have no gradients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firsttoken.assets.positions import context_of
from firsttoken.study.errors import BusyError, RequestError, SwarmError
from firsttoken.swarm.blocks import load_span
from firsttoken.swarm.tuning.passes import Adapters, Pass, decode_pass, encode_pass

MOST_WAITING = 16  # passes; a client whose pass is refused asks another server, or again
MOST_KEPT = 4096  # tokens times layers whose values stay for backward


class FrozenBlocks:
    """``blocks`` of the model in ``folder`` in ``dtype``, loaded when the first pass comes; one pass at a time, while
    ``waiting`` others do."""

    def __init__(self, folder: Path, blocks: range, dtype: torch.dtype) -> None:
        self.blocks = blocks
        self._folder, self._dtype = folder, dtype
        self._model: Any = None
        self.waiting = 0
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="firsttoken-passes")

    async def answer(self, said: Callable[[], Awaitable[bytes]], layers: range, width: int) -> bytes:
        """The message of the answer to the pass that is ``said``. Raises RequestError for one that no server takes,
        BusyError, and does not listen, where too many wait."""
        if self.waiting >= MOST_WAITING:
            raise BusyError(f"{self.waiting} passes wait here, and no more are taken")
        self.waiting += 1
        try:
            data = await said()
            await self._turn.acquire()
        finally:
            self.waiting -= 1
        # A pass that runs cannot be stopped. The next has to wait for it even when its client has gone: in the queue of
        # the thread the messages of clients that went, too, would pile up behind it.
        job = asyncio.get_running_loop().run_in_executor(self._thread, self._answer, data, layers, width)
        job.add_done_callback(self._over)
        return await asyncio.shield(job)

    def _over(self, job: asyncio.Future[bytes]) -> None:
        self._turn.release()
        if not job.cancelled():
            job.exception()  # looked at: where the client has gone nobody else does, and asyncio would print it

    async def move(self, blocks: range) -> None:
        """These ``blocks`` from now on; a pass that runs ends first."""
        async with self._turn:
            self.blocks, self._model = blocks, None

    @property
    def busy(self) -> bool:
        """Whether a pass runs."""
        return self._turn.locked()

    def close(self) -> None:
        """End the thread when its pass is done."""
        self._thread.shutdown(wait=False)

    def _answer(self, data: bytes, layers: range, width: int) -> bytes:
        try:
            one = decode_pass(data, width)
        except SwarmError as error:
            raise RequestError(str(error)) from error
        return encode_pass(self.run(layers, one))

    def run(self, layers: range, one: Pass) -> Pass:
        """``hidden`` after ``layers``; backward, its gradient and those of the adapters. Raises RequestError for
        adapters that do not fit and for more tokens than the context, SwarmError where the blocks have gone while it
        waited."""
        if layers.start not in self.blocks or layers.stop > self.blocks.stop:
            raise SwarmError(f"this server has blocks [{self.blocks.start}, {self.blocks.stop}) by now")
        if self._model is None:
            self._model = load_span(self._folder, self.blocks, self._dtype)
        if (tokens := one.hidden.shape[1]) > (most := context_of(self._model.config)):
            raise RequestError(f"a pass of {tokens} tokens exceeds the context of {most}")
        for (layer, name), (a, b) in one.adapters.items():
            if layer not in layers:
                raise RequestError(f"LoRA of layer {layer} came to blocks [{layers.start}, {layers.stop})")
            linear = self._linear(layer, name)
            if (a.shape[1], b.shape[0]) != (linear.in_features, linear.out_features):
                raise RequestError(f"LoRA of {name} in layer {layer} does not fit its module")
        hidden = one.hidden.to(self._dtype)
        with torch.no_grad():
            if one.gradient is None:
                return Pass(self._forward(layers, hidden, one.adapters, one.scaling), {})
            several = max(1, MOST_KEPT // (hidden.shape[0] * hidden.shape[1]))
            stretches = [layers[at : at + several] for at in range(0, len(layers), several)]
            entered = [hidden]
            for stretch in stretches[:-1]:
                entered.append(self._forward(stretch, entered[-1], one.adapters, one.scaling))
        gradient, halves = one.gradient.to(self._dtype), {}
        for stretch in reversed(stretches):
            gradient, more = self._backward(stretch, entered.pop(), gradient, one)
            halves |= more
        return Pass(gradient, halves)

    def _backward(self, layers: range, hidden: Tensor, gradient: Tensor, one: Pass) -> tuple[Tensor, Adapters]:
        """The gradients of what entered ``layers``, and of their adapters."""
        hidden = hidden.detach().requires_grad_()
        adapters = {
            where: tuple(half.detach().requires_grad_() for half in halves)
            for where, halves in one.adapters.items()
            if where[0] in layers
        }
        out = self._forward(layers, hidden, adapters, one.scaling)
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
            found = self._model.model.layers[layer - self.blocks.start].get_submodule(name)
        except AttributeError:
            found = None
        if not isinstance(found, nn.Linear):
            raise RequestError(f"layer {layer} has no linear module {name!r} for LoRA")
        return found


def _added(linear: nn.Linear, a: Tensor, b: Tensor, scaling: float) -> Any:
    """LoRA beside ``linear`` until the handle is left."""

    def add(_: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        return out + ((args[0].to(a.dtype) @ a.t()) @ b.t()).to(out.dtype) * scaling

    return linear.register_forward_hook(add)
