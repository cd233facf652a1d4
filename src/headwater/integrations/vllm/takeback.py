"""Takes back what vLLM computed from a load that went along with a step and failed.

vLLM drops what the step said of requests whose blocks are reported as wrong, and leaves the blocks in its prefix cache
until those requests have computed them anew. With async scheduling, step N+1 is scheduled before the report of step N
is heard, and what N+1 says counts. So such requests are preempted here in the way of vLLM's own `reset_prefix_cache`,
which drops all output that is under way, and their blocks leave the prefix cache.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Iterable
from typing import Any

from headwater.connector.config import AUTO
from headwater.connector.uncertain import followers

_SCHEDULER = ("running", "requests", "prev_step_scheduled_req_ids", "kv_cache_manager")
_MANAGER = ("get_block_ids", "evict_blocks", "block_pool")
_REQUEST = ("num_stale_output_tokens", "drop_stale_output")


def why_outside(config: Any, load_mode: str) -> str:
    """Why requests must always wait for their loads outside the batch; "" where they need not."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "it has pipeline stages"
    if config.max_concurrent_batches > 2:
        return f"it schedules {config.max_concurrent_batches} steps ahead"
    if load_mode == AUTO and parallel.data_parallel_size > 1:
        return "its data-parallel ranks compute every step together"
    return ""


class Takeback:
    """One scheduler of vLLM. Its thread calls this."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = weakref.ref(scheduler)

    @classmethod
    def of_caller(cls) -> Takeback | None:
        """That of the scheduler that is being made by one of our callers: it makes its connector."""
        from vllm.v1.core.sched.scheduler import Scheduler

        frame = sys._getframe()
        while (caller := frame.f_back) is not None:
            frame = caller
            if frame.f_code.co_name == "__init__" and isinstance(found := frame.f_locals.get("self"), Scheduler):
                return cls(found)
        return None

    def why_not(self) -> str:
        """What this vLLM lacks, once its scheduler is made; "" where it has all that is needed."""
        from vllm.v1.request import Request

        scheduler = self._scheduler()
        missing = [name for name in _SCHEDULER if not hasattr(scheduler, name)]
        missing += [name for name in _MANAGER if not hasattr(getattr(scheduler, "kv_cache_manager", None), name)]
        missing += [name for name in _REQUEST if name not in Request.__init__.__code__.co_names]
        preempt = getattr(scheduler, "_preempt_request", None)
        if preempt is None or "drop_stale_output" not in inspect.signature(preempt).parameters:
            missing.append("_preempt_request(drop_stale_output)")
        return f"its scheduler has no {', '.join(missing)}" if missing else ""

    def drop_output(self, request_ids: Iterable[str]) -> None:
        """Requests that were just preempted, and of which a step is under way: what that says does not count. vLLM
        would deliver it, and does not ask whether the blocks of a request that has none any more were wrong."""
        requests = self._made().requests
        for request in filter(None, map(requests.get, request_ids)):
            request.drop_stale_output = True

    def take_back(self, wrong_blocks: set[int] | None) -> None:
        """Preempt every running request that has one of these blocks (None: of all blocks), drop what is under way for
        it, and let nobody else find what was computed from them. To be called at the end of `update_from_output`."""
        scheduler = self._made()
        manager = scheduler.kv_cache_manager
        blocks = {request: manager.get_block_ids(request.request_id)[0] for request in scheduler.running}
        every = range(manager.block_pool.num_gpu_blocks) if wrong_blocks is None else wrong_blocks
        wrong = followers(every, list(blocks.values()))
        manager.evict_blocks(wrong)
        affected = [request for request, block_ids in blocks.items() if not wrong.isdisjoint(block_ids)]
        scheduler.running = [request for request in scheduler.running if request not in affected]
        now = time.monotonic()
        for request in reversed(affected):  # each goes to the front of the queue
            scheduler._preempt_request(request, now, drop_stale_output=True)
            # The workers have it in their batch: it is to be told to them as one that they do not have.
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def _made(self) -> Any:
        scheduler = self._scheduler()
        assert scheduler is not None, "vLLM's scheduler calls this"
        return scheduler
