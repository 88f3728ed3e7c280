"""A model to train with: its ends are here, its blocks on servers, gradients go through all of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from firsttoken.petals.access import Access
from firsttoken.petals.background import begin, wait_for
from firsttoken.petals.blocks import load_ends, model_sha256
from firsttoken.petals.patience import Patience
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.tuning.adapters import Lora, SoftPrompt
from firsttoken.petals.tuning.training_chain import TrainingChain
from firsttoken.study.errors import RequestError

IGNORED = -100  # the label of a token that is not learned, as everywhere


class RemoteTraining:
    """The model in ``folder``, its blocks on servers with --train of the swarm that ``peers`` (HOST:PORT) belong to;
    ``prompt`` and ``lora`` are trained, the rest is frozen. Float32. A context manager; raises as a RemoteModel."""

    def __init__(
        self,
        folder: Path,
        peers: Sequence[str],
        *,
        prompt: SoftPrompt | None = None,
        lora: Lora | None = None,
        patience: Patience | None = None,
        access: Access | None = None,
    ) -> None:
        self.model = load_ends(folder, torch.float32).requires_grad_(False)
        self.sha256 = model_sha256(folder)
        self.prompt, self.lora = prompt, lora
        width, depth = self.model.config.hidden_size, self.model.config.num_hidden_layers
        swarm = Swarm(self.sha256, peers, width, access or Access(), patience or Patience(), depth)
        self.chain = TrainingChain(swarm, range(depth))
        wait_for(swarm.check(self.chain.layers))
        self._looking = begin(swarm.keep_looking())

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
        places, halves = [], []
        if self.lora is not None:
            for where, (a, b) in self.lora.adapters().items():
                places.append(where)
                halves += [a, b]
        scaling = 1.0 if self.lora is None else self.lora.scaling
        out = _ThroughChain.apply(self.chain, places, scaling, hidden, *halves)
        return self.model.model.norm(out)[:, before:]

    def loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean over the next tokens of ``labels`` [rows, tokens] that are not ``IGNORED``. Raises as ``hidden``."""
        logits = self.model.lm_head(self.hidden(input_ids)[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)

    def save(self, folder: Path) -> None:
        """What was trained, as PEFT folders with the base's hash in ``folder``: prompt, lora."""
        for name, trained in (("prompt", self.prompt), ("lora", self.lora)):
            if trained is not None:
                trained.save(folder / name, self.sha256)

    def close(self) -> None:
        """Close all connections."""
        self._looking.cancel()
        wait_for(self.chain.swarm.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _ThroughChain(torch.autograd.Function):
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
        asked = ctx.chain.backward(ctx.entered, gradients[0].contiguous(), adapters, ctx.scaling)
        first, sums = wait_for(asked)
        return (None, None, None, first, *(half for where in ctx.places for half in sums[where]))


def _paired(places: Sequence[tuple[int, str]], halves: Sequence[Tensor]) -> dict:
    pairs = zip(halves[::2], halves[1::2], strict=True)
    return {where: (a.detach(), b.detach()) for where, (a, b) in zip(places, pairs, strict=True)}
