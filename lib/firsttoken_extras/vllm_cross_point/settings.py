"""The settings in ``kv_connector_extra_config``, and the servers in which Cross-Point Scheduling refuses to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from firsttoken.engine.preemption.victims import VICTIMS
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import build_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

WHERE = "kv_connector_extra_config"


@dataclass(frozen=True)
class CrossPointSettings:
    """Swap a preempted request that holds at most ``threshold_tokens`` tokens (0: none), recompute a longer one (3.1).

    ``host_bytes`` of host memory are taken at the start, and are all that swapped requests ever take. On CUDA they are
    pinned, and torch rounds pinned memory up to a power of two. ``victim`` is the rule of
    firsttoken.engine.preemption.victims by which a request is preempted, ``resume`` the order in which preempted
    requests come back; None leaves either to vLLM.
    """

    threshold_tokens: int
    host_bytes: int
    victim: str | None = None
    resume: Literal["last_preempted_first", "in_order"] | None = None

    def __post_init__(self) -> None:
        if self.threshold_tokens < 0:
            raise ProfileError(f"{WHERE}: threshold_tokens must be 0 or more, not {self.threshold_tokens}")
        if self.victim is not None and self.victim not in VICTIMS:
            raise ProfileError(f"{WHERE}: no victim choice {self.victim!r}; {unknown(self.victim, VICTIMS)}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CrossPointSettings:
        """Read the settings. Raises ProfileError for an unknown or missing key, or a value that cannot be."""
        return build_config(cls, values, location=WHERE)

    def host_blocks(self, block_bytes: int) -> int:
        """KV blocks that the host memory holds. Raises ProfileError when it is not even one."""
        if self.host_bytes < block_bytes:
            raise ProfileError(f"{WHERE}: host_bytes is {self.host_bytes}, a KV block {block_bytes}; raise it")
        return self.host_bytes // block_bytes


def supported_cache(config: VllmConfig, cache: KVCacheConfig) -> FullAttentionSpec:
    """The one kind of KV cache that the server has. Raises ProfileError for a server that CPS does not run in."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    refusals = {
        "more than one worker; run with tensor, pipeline and data parallel size 1": (
            config.parallel_config.world_size_across_dp > 1
        ),
        "asynchronous scheduling; add --no-async-scheduling": config.scheduler_config.async_scheduling,
        "speculative decoding; leave --speculative-config out": config.speculative_config is not None,
        "vLLM's own scheduler; add --scheduler-cls firsttoken_extras.vllm_cross_point.scheduler.CrossPointScheduler": (
            config.scheduler_config.scheduler_cls is None
        ),
        f"a KV cache of {', '.join(type(spec).__name__ for spec in specs)}; some layers must have full attention": (
            len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec)
        ),
    }
    for feature, present in refusals.items():
        if present:
            raise ProfileError(f"cross-point scheduling does not run with {feature}")
    return specs[0]
