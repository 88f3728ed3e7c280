"""vLLM's scheduler, told to ask how each preempted request comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from firsttoken.study.errors import ProfileError
from firsttoken_extras.vllm_cross_point.connector import CrossPointConnector

if TYPE_CHECKING:
    from vllm.v1.request import Request


class CrossPointScheduler(Scheduler):
    """vLLM takes it as ``--scheduler-cls firsttoken_extras.vllm_cross_point.scheduler.CrossPointScheduler``.

    It needs CrossPointConnector.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.connector, CrossPointConnector):
            raise ProfileError(
                "CrossPointScheduler needs --kv-transfer-config with kv_connector CrossPointConnector, "
                "kv_connector_module_path firsttoken_extras.vllm_cross_point.connector and kv_role kv_both"
            )

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        # Only reset_prefix_cache drops output: the keys and values are void then, and not to be kept.
        if not drop_stale_output:
            (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
            self.connector.preempt(request, blocks)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset the cache and drop what is swapped out: a reset means new weights, and old keys must not come back."""
        self.connector.reset_cache()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)
