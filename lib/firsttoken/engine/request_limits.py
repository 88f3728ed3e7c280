"""The limits on requests to a model that is served: their length, their number, and how they share its engine."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.preemption import Recompute
from firsttoken.engine.preemption.preemption_policy import PreemptionPolicy
from firsttoken.study.errors import LengthError, RequestError

BLOCK_TOKENS = 16
POOL_TOKENS = 16_384  # 0.4 GB of keys and values of the default model in 16 bits
# a prompt that waits this long goes before shorter ones, where short ones go first: a stream of them has no end
# on loads on which no victim was chosen this one has the shortest tail of those that know no length (notebook 24)
STALL_FREE = EngineConfig(scheduler="sarathi", victim="least_delayed", watermark=0.0, wait_s=5.0)


@dataclass(frozen=True)
class RequestLimits:
    """A prompt and its answer together have ``max_model_len`` tokens at most; None: as many as both limits allow.

    The KV pool holds ``max_sessions`` of the longest requests, but at most ``POOL_TOKENS`` tokens, or one such request;
    or ``kv_blocks``. ``engine`` says how they share it, ``preemption`` how who gave way comes back (computed again,
    unless given): where that may be a swap, the host's pool is as large.
    """

    max_sessions: int = 64
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 1024
    max_model_len: int | None = None
    kv_blocks: int | None = None
    engine: EngineConfig = STALL_FREE
    preemption: PreemptionPolicy | None = None

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer at most."""
        both = self.max_prompt_tokens + self.max_new_tokens
        return both if self.max_model_len is None else min(both, self.max_model_len)

    @property
    def blocks(self) -> int:
        """The number of blocks of the KV pool."""
        if self.kv_blocks is not None:
            return self.kv_blocks
        tokens = max(self.longest, min(self.max_sessions * self.longest, POOL_TOKENS))
        return -(-tokens // BLOCK_TOKENS)

    @property
    def host_blocks(self) -> int:
        """The number of blocks of the pool that victims are swapped to; 0 where all of them recompute."""
        return 0 if self.preemption is None or isinstance(self.preemption, Recompute) else self.blocks

    def check(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raises RequestError for a prompt or a length outside the limits, LengthError where they are too long."""
        if not 1 <= prompt_tokens <= self.max_prompt_tokens:
            raise LengthError(f"the prompt has {prompt_tokens} tokens; 1 to {self.max_prompt_tokens} are taken")
        if prompt_tokens + max_new_tokens > self.longest:
            raise LengthError(
                f"this model's maximum context length is {self.longest} tokens, and a prompt of {prompt_tokens} with "
                f"{max_new_tokens} new ones has {prompt_tokens + max_new_tokens}; shorten it or ask for fewer"
            )
        if not 1 <= max_new_tokens <= self.max_new_tokens:
            raise RequestError(f"max_tokens is {max_new_tokens}; 1 to {self.max_new_tokens} can be asked for")
