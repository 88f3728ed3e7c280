"""vLLM's scheduler with a rule for who is preempted, and for how and when a preempted request comes back."""

from __future__ import annotations

import time
from bisect import insort
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from firsttoken.engine.preemption.victims import victim_named
from firsttoken.study.errors import ProfileError
from firsttoken_extras.vllm_cross_point.connector import CrossPointConnector

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

TIMES = "token_times_s"  # the attribute of vLLM's request that this scheduler adds: when each output token came


def _order(request: Request) -> tuple[float, str]:
    return request.arrival_time, request.request_id


class RunningRequest:
    """A running request of vLLM under the names by which firsttoken's victim rules know a request."""

    def __init__(self, request: Request, blocks: list[int]) -> None:
        self.request = request
        self.number = request.request_id
        self.order = _order(request)
        self.sampling = request.sampling_params
        self.preemptions = request.num_preemptions
        self.cached = request.num_computed_tokens
        self.blocks = blocks
        self.tokens = request.all_token_ids
        self.times_s = getattr(request, TIMES, [])

    @property
    def finished(self) -> bool:
        return self.request.is_finished()


class CrossPointScheduler(Scheduler):
    """vLLM takes it as ``--scheduler-cls firsttoken_extras.vllm_cross_point.scheduler.CrossPointScheduler``.

    It needs CrossPointConnector, in whose settings are the threshold, the victim rule and the resume order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.connector, CrossPointConnector):
            raise ProfileError(
                "CrossPointScheduler needs --kv-transfer-config with kv_connector CrossPointConnector, "
                "kv_connector_module_path firsttoken_extras.vllm_cross_point.connector and kv_role kv_both"
            )
        victim, self._resume = self.connector.settings.victim, self.connector.settings.resume
        if (victim or self._resume) and self.policy is SchedulingPolicy.PRIORITY:
            raise ProfileError("cross-point scheduling: victim and resume go without --scheduling-policy priority")
        if victim:
            self._victim = victim_named(victim)
            # The queues are made by now, so the policy decides only this: the victim has the highest priority number,
            # and is taken out of the step if it is in it. Just before it looks, vLLM asks the connector whether blocks
            # are about to be free.
            self.policy = SchedulingPolicy.PRIORITY
            self.connector.has_pending_block_frees = self._mark_victim

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Take the tokens of a step, and note when they came, which vLLM's requests do not hold."""
        outputs, now_s = super().update_from_output(scheduler_output, model_runner_output), time.monotonic()
        for request in self.running:
            times_s = request.__dict__.setdefault(TIMES, [])
            times_s += [now_s] * (request.num_output_tokens - len(times_s))
        return outputs

    def _mark_victim(self) -> bool:
        """Give the rule's victim the highest priority number. Return False: no transfer is about to free a block."""
        block_ids = self.kv_cache_manager.get_block_ids
        victim = self._victim([RunningRequest(request, block_ids(request.request_id)[0]) for request in self.running])
        for request in self.running:
            request.priority = int(request is victim.request)
        return False

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
        # A block is in vLLM's prefix cache as soon as its tokens are scheduled, and a victim that is taken out of the
        # step does not compute them (vLLM 43569).
        self.kv_cache_manager.evict_blocks(set(blocks[request.num_computed_tokens // self.block_size :]))
        # Only reset_prefix_cache drops output: the keys and values are void then, and not to be kept.
        if not drop_stale_output:
            self.connector.preempt(request, blocks)
        super()._preempt_request(request, timestamp, drop_stale_output)
        if self._resume == "in_order":
            self.waiting.pop_request()  # vLLM has put it at the head
            insort(self.waiting, request, key=_order)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset the cache and drop what is swapped out: a reset means new weights, and old keys must not come back."""
        self.connector.reset_cache()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)
