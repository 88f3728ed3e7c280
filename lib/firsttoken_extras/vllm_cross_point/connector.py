"""The KV connector: it holds swapped requests' keys and values, and copies them out and in between two steps.

One class, as vLLM wants it, made twice: in the scheduler (which request has which host blocks) and in the worker (the
host memory itself). What the scheduler decides in a step reaches the worker as that step's ``Copies``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.logger import init_logger
from vllm.platforms import current_platform

from firsttoken.engine.swap.host_pool import HostAllocator, Span
from firsttoken.study.errors import ProfileError
from firsttoken_extras.vllm_cross_point.host import KVBlocksOnHost
from firsttoken_extras.vllm_cross_point.settings import CrossPointSettings, supported_cache

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


@dataclass(frozen=True)
class HostCopy:
    """A request's copy on the host: its first ``tokens`` tokens, in ``blocks``."""

    tokens: int
    blocks: Span


@dataclass
class Copies(KVConnectorMetadata):
    """One step's copies: (KV blocks, host blocks), outward first."""

    out: list[tuple[list[int], Span]] = field(default_factory=list)
    back: list[tuple[list[int], Span]] = field(default_factory=list)


class PreemptionStats(KVConnectorStats):
    """The counts of preempted requests by the way that each went since the last report ("KV Transfer metrics" in vLLM's
    log)."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return self.data

    def is_empty(self) -> bool:
        return not self.data


class CrossPointConnector(KVConnectorBase_V1):
    """Swaps preempted requests of at most ``threshold_tokens`` tokens.

    ``counts`` says how often: ``swapped`` and ``restored``; recomputed because ``over_threshold``, because preempted in
    the middle of a prefill (``partial_prefill``), or because the host pool had no room (``host_full``).
    """

    requires_kv_delivery = False  # what is swapped belongs to this server; a lost copy is recomputed

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = CrossPointSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        spec = supported_cache(vllm_config, kv_cache_config)
        self._layers = kv_cache_config.kv_cache_groups[0].layer_names
        self._block_tokens = spec.block_size
        self._host_blocks = self.settings.host_blocks(spec.page_size_bytes * len(self._layers))
        self.counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self.held: dict[str, HostCopy] = {}
        self.host = HostAllocator(self._host_blocks)
        self._copies = Copies()

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        caches = [kv_caches[name] for name in self._layers]
        if caches[0].shape[0] != self._kv_cache_config.num_blocks:
            raise ProfileError(
                f"cross-point scheduling: the attention kernel splits blocks of {self._block_tokens} tokens; "
                "set --block-size to the size that it works in"
            )
        self._pool = KVBlocksOnHost(caches, self._host_blocks, pin_memory=current_platform.is_pin_memory_available())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        for blocks, held in kv_connector_metadata.out:
            self._pool.copy_out(blocks, held)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for blocks, held in self._get_connector_metadata().back:
            self._pool.copy_in(held, blocks)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    # The scheduler's side.

    def preempt(self, request: Request, blocks: list[int]) -> None:
        """Decide how a victim, whose KV cache is in ``blocks``, comes back; called before these are freed."""
        tokens = request.num_computed_tokens
        wanted = -(-tokens // self._block_tokens)
        if request.is_prefill_chunk:
            self.counts["partial_prefill"] += 1
        elif tokens > self.settings.threshold_tokens:
            self.counts["over_threshold"] += 1
        elif (held := self.host.allocate(wanted)) is None:
            self.counts["host_full"] += 1
            logger.warning_once("The host pool of %d KV blocks is full: recomputing instead.", self._host_blocks)
        else:
            self.counts["swapped"] += 1
            self.held[request.request_id] = HostCopy(tokens, held)
            self._copies.out.append((blocks[:wanted], held))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        held = self.held.get(request.request_id)
        return (0 if held is None else max(0, held.tokens - num_computed_tokens)), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        held = self.held.get(request.request_id)
        if held is None:
            return
        if num_external_tokens:  # a prefix cache may have kept the first blocks; they are shared, and not written to
            first = (held.tokens - num_external_tokens) // self._block_tokens
            (block_ids,) = blocks.get_block_ids()
            rest = Span(held.blocks.start + first, held.blocks.blocks - first)
            self._copies.back.append((block_ids[first : held.blocks.blocks], rest))
            self.counts["restored"] += 1
        # Free for the next step's victims: the worker has read it by then, and no step both admits and preempts.
        self._release(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Copies:
        copies, self._copies = self._copies, Copies()
        return copies

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self._release(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        for request_id in list(self.held):
            self._release(request_id)
        return True

    def _release(self, request_id: str) -> None:
        if held := self.held.pop(request_id, None):
            self.host.release(held.blocks)

    # Counting.

    def get_kv_connector_stats(self) -> PreemptionStats | None:
        if self.counts == self._reported:
            return None
        new, self._reported = self.counts - self._reported, self.counts.copy()
        return PreemptionStats(dict(new))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PreemptionStats:
        return PreemptionStats(data or {})

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.SCHEDULER:
            logger.info("Preempted requests: %s", dict(self.counts))
