"""The executor that runs a model: an unmodified Hugging Face decoder over the paged pool, PEFT adapters included."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from firsttoken.engine.attention import NAME, Attend
from firsttoken.engine.executor import Limits
from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.engine.native.attend import NativeAttend, supports
from firsttoken.engine.padded import PaddedAttend
from firsttoken.engine.request import Request, Work
from firsttoken.engine.sampling import next_tokens
from firsttoken.engine.swap import make_path
from firsttoken.engine.swap.arena import HostArena
from firsttoken.engine.swap.path import Moved, SwapPath, Transfer
from firsttoken.engine.swap.spans import Span
from firsttoken.engine.varlen import VarlenAttend
from firsttoken.study.errors import ModelError


class LiveExecutor:
    """Runs ``model`` where it lies, with ``blocks`` KV blocks there and ``host_blocks`` in host memory (0: never swap).

    The model's attention is switched to the paged one, and back by ``close``; ``attend`` names the way it is computed,
    by default the fastest for this model here. Raises ModelError for a model whose
    layers do not all see the whole context, whose attention cannot be replaced, or that runs in an engine already;
    RequestError for a pool or block size below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: int,
        *,
        block_tokens: int = 16,
        host_blocks: int = 0,
        swap: str = "coalesced",
        attend: type[Attend] | None = None,
    ) -> None:
        config = model.config
        kinds = getattr(config, "layer_types", None)
        if kinds is None and getattr(config, "sliding_window", None):
            kinds = ["sliding_attention"]  # Mistral has a window, and no list as all of its layers are alike
        if odd := set(kinds or []) - {"full_attention"}:
            raise ModelError(f"{config.model_type} has layers of {min(odd)}; the engine runs full_attention only")
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._stock = self._base.config._attn_implementation
        if self._stock == NAME:
            raise ModelError(f"the {config.model_type} model runs in an engine already; close that one first")
        parameter = next(model.parameters())
        self._adapted = next((module for module in model.modules() if isinstance(module, BaseTunerLayer)), None)
        self.model = model
        self.limits = Limits(config.max_position_embeddings, config.vocab_size)
        self.block_tokens = block_tokens
        self.pool = KVPool(KVShape.of(config, parameter.dtype, block_tokens), blocks, parameter.device)
        self.arena: HostArena | None = None
        self.path: SwapPath | None = None
        if host_blocks:
            self.arena = HostArena(self.pool.shape, host_blocks, pinned=self.pool.device.type == "cuda")
            self.path = make_path(swap, self.pool, self.arena)
        self._attend = attend or _fastest(self.pool)
        self._base.set_attn_implementation(NAME)
        if self._base.config._attn_implementation != NAME:  # transformers only warns; each token would see all others
            self.close()
            raise ModelError(f"{config.model_type} has an attention of its own, which the engine cannot page")

    @property
    def blocks(self) -> int:
        """Blocks of the pool."""
        return self.pool.blocks

    @property
    def salt(self) -> str:
        """The adapters that are on."""
        on = self._adapted is not None and not self._adapted.disable_adapters
        return ",".join(self._adapted.active_adapters) if on else ""

    def now(self) -> float:
        """The machine's monotonic clock."""
        return time.perf_counter()

    def wait_until(self, moment_s: float) -> None:
        """Sleep until ``moment_s``."""
        time.sleep(max(0.0, moment_s - self.now()))

    @torch.inference_mode()
    def execute(self, works: Sequence[Work]) -> list[int]:
        """One forward pass over the new tokens of all ``works``, laid end to end. Raises ModelError once closed."""
        if self._base.config._attn_implementation != NAME:
            raise ModelError("the engine was closed, or the model's attention changed: its tokens would be wrong")
        order = sorted(range(len(works)), key=lambda index: works[index].tokens)
        batch = [works[index] for index in order]
        ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        last: list[int] = []
        for work in batch:
            request, start, end = work.request, work.start, work.end
            ids += request.tokens[start:end]
            positions += range(start, end)
            blocks += [request.blocks[position // self.block_tokens] for position in range(start, end)]
            last.append(len(ids) - 1)
        device = self.pool.device
        where = torch.tensor(positions)
        offsets = (where % self.block_tokens).to(device)
        logits = self.model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=where[None].to(device),
            use_cache=False,
            logits_to_keep=torch.tensor(last, device=device),
            paged=self._attend(self.pool, batch, torch.tensor(blocks, device=device), offsets),
        ).logits[0]
        tokens = next_tokens(logits, batch)
        ordered = [0] * len(works)
        for index, token in zip(order, tokens, strict=True):
            ordered[index] = token
        return ordered

    def swap_out(self, request: Request) -> Moved | None:
        """Copy what the request has cached to the host pool; None when that is full, or there is none."""
        count = self.pool.shape.blocks(request.cached)
        span = self.arena.take(count) if self.arena else None
        if span is None:
            return None
        request.host = span
        return self.path.out(request.blocks[:count], span)

    def swap_in(self, request: Request) -> Transfer:
        """Begin to copy it back."""
        return self.path.into(request.host, request.blocks[: request.host.blocks])

    def drop(self, host: Span) -> None:
        """Give the span back to the host pool."""
        self.arena.give(host)

    def close(self) -> None:
        """Give the model its own attention back, and end the swap path's threads."""
        if self.path is not None:
            self.path.close()
        self._base.set_attn_implementation(self._stock)


def _fastest(pool: KVPool) -> type[Attend]:
    half = pool.shape.dtype in (torch.float16, torch.bfloat16)
    if pool.device.type == "cuda" and half:
        return VarlenAttend
    return NativeAttend if supports(pool.shape, pool.device) else PaddedAttend
