"""The KV cache: its shape in tokens and bytes, and the pool of blocks that every request draws from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from firsttoken.study.errors import RequestError
from firsttoken.study.system.cgroup_limits import free_memory_bytes

if TYPE_CHECKING:  # a model of ours needs none of it
    from transformers import PretrainedConfig

_LINE = 64  # bytes of the cache


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's keys and values, and the number of tokens in a block."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(f"KV cache: {name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype, block_tokens: int = 16) -> KVShape:
        """Return the shape that a model of ``config`` needs."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(config.num_hidden_layers, kv_heads, head_dim, dtype, block_tokens)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.bytes_per_token

    @property
    def copy_bytes(self) -> int:
        """One block of one layer, keys or values: what vLLM 0.2.4 moves with one copy."""
        return self.block_bytes // (2 * self.layers)

    def blocks(self, tokens: int) -> int:
        """The number of blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    def copies(self, tokens: int) -> int:
        """Copies that vLLM 0.2.4 makes to move ``tokens`` tokens one way: one a block, layer, and keys or values."""
        return self.blocks(tokens) * self.layers * 2


class KVPool:
    """Keys and values of all requests in ``rows`` [blocks, layers, 2, block_tokens, kv_heads, head_dim].

    Block-major: one block, with all its layers, is one contiguous row, so a request is moved by moving rows. The memory
    is written once when it is made, so that no request pays for its first touch; what is not ``touched`` on a CPU is
    zeros, too, and there in microseconds (0.4 GB: 60 ms of a first token from a fast disk). What is kept ``elsewhere``
    has no memory here. Raises RequestError for more memory than is free.
    """

    def __init__(
        self,
        shape: KVShape,
        blocks: int,
        device: torch.device | str = "cpu",
        *,
        touched: bool = True,
        elsewhere: bool = False,
    ) -> None:
        if blocks < 1:
            raise RequestError(f"KV cache: it needs at least 1 block, not {blocks}")
        self.shape = shape
        self.device = torch.device(device)
        size = (blocks, shape.layers, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
        if elsewhere:
            self.rows = torch.empty(size, dtype=shape.dtype, device="meta")
            return
        _check_room(blocks * shape.block_bytes, f"{blocks:,} blocks of {shape.block_tokens} tokens", self.device)
        if touched or self.device.type != "cpu":
            self.rows = torch.empty(size, dtype=shape.dtype, device=self.device).zero_()
        else:  # numpy asks the system for zeros, torch writes them; rows begin at lines of the cache, as torch's do
            wanted = blocks * shape.block_bytes
            zeros = np.zeros(wanted + _LINE, np.uint8)
            zeros = zeros[-zeros.ctypes.data % _LINE :][:wanted]
            self.rows = torch.from_numpy(zeros).view(shape.dtype).view(size)

    @property
    def blocks(self) -> int:
        return self.rows.shape[0]

    @property
    def block_rows(self) -> torch.Tensor:
        """[blocks * layers * 2, block_tokens * kv_heads * head_dim]: a row is one layer's keys or values of a block."""
        return self.rows.view(self.blocks * self.shape.layers * 2, -1)

    @property
    def token_rows(self) -> torch.Tensor:
        """[blocks * layers * 2 * block_tokens, kv_heads * head_dim]: a row is one layer's key or value of a token."""
        return self.rows.view(-1, self.shape.kv_heads * self.shape.head_dim)


def _check_room(needed: int, subject: str, device: torch.device) -> None:
    """Refuse what the device has no memory for: Linux promises more than there is, and later ends who uses it."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes()
    if free is not None and needed > free:
        raise RequestError(
            f"KV cache: {subject} need {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory are free; "
            "ask for fewer (serve --kv-blocks, swarm serve --kv-tokens)"
        )
