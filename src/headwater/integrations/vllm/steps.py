"""From vLLM's scheduler to the scheduler side: its requests, its blocks, its steps. Decides nothing."""

from __future__ import annotations

import logging
from typing import Any

from headwater.connector.orders import ASYNC, StepOrders, StepReport
from headwater.connector.scheduler import SchedulerSide
from headwater.connector.tracker import Inputs, Scheduled
from headwater.connector.transfers import KEY, TransferParams, parse_transfer
from headwater.errors import InvalidArgumentError
from headwater.integrations.vllm.adapters import Adapters
from headwater.integrations.vllm.inputs import request_inputs
from headwater.pool.space import Space

NULL_BLOCK = 0
"""vLLM never reads this block: what must not be written elsewhere may be written here."""
IDLE_WAIT_S = 0.05
"""How long a step that has nothing to compute waits for KV from a lower tier: then vLLM looks for new requests."""


log = logging.getLogger(__name__)


class Steps:
    """One server's requests, as vLLM's scheduler tells of them. Its thread calls this."""

    def __init__(self, side: SchedulerSide, *, hashes_inputs: bool = True, adapters: Adapters | None = None) -> None:
        """`hashes_inputs`: whether vLLM names images and sounds by their content."""
        self.side = side
        self._hashes_inputs = hashes_inputs
        self._adapters = adapters or Adapters()
        self._requests: dict[str, Any] = {}
        self._block_ids: dict[str, list[int]] = {}

    def add(self, request: Any) -> None:
        """A new request, or one whose id was another's before."""
        request_id = request.request_id
        if self._requests.get(request_id) is not request:
            self._requests[request_id] = request
            lora = request.lora_request
            self.side.add(
                request_id,
                request.all_token_ids,
                request.num_prompt_tokens,
                self._inputs(request),
                label=lora.lora_name if lora else None,
                transfer=_transfer(request),
            )

    def match(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed` can be loaded (None: ask again), and whether the request waits for them
        outside the batch."""
        self.add(request)
        if request.skip_reading_prefix_cache:
            self.side.match_nothing(request.request_id, num_computed)
            return 0, False
        plan = self.side.match(request.request_id, num_computed)
        if plan is None:
            return None, False
        return plan.num_tokens, plan.num_tokens > 0 and plan.mode == ASYNC

    def allocated(self, request: Any, block_ids: list[int], num_external: int) -> None:
        """Blocks for a request, `num_external` tokens of which are to be loaded."""
        self.side.allocated(request.request_id, block_ids)
        if num_external:
            self.side.start_load(request.request_id, block_ids)

    def order(self, step: Any) -> StepOrders:
        """What the workers are to do with this step."""
        for request_id in step.preempted_req_ids or ():
            self.side.preempted(request_id)
        new = self._note_blocks(step)
        scheduled = [
            Scheduled(
                request_id,
                self._requests[request_id].num_computed_tokens,
                num_scheduled,
                self._block_ids[request_id],
                request_id in new,
            )
            for request_id, num_scheduled in step.num_scheduled_tokens.items()
        ]
        is_idle = not step.total_num_scheduled_tokens
        if is_idle and self.side.num_fetching and not self._is_busy:
            self.side.wait_fetch(IDLE_WAIT_S)
        return self.side.order(scheduled, is_idle=is_idle)

    def adapters(self, step: Any) -> dict[int, bytes]:
        """The named LoRA adapters that this step computes with, and the state that each one's name was made from."""
        loras = [self._requests[request_id].lora_request for request_id in step.num_scheduled_tokens]
        found = {lora.lora_int_id: self._adapters.named_from(lora.lora_int_id) for lora in loras if lora is not None}
        return {number: state for number, state in found.items() if state is not None}

    @property
    def _is_busy(self) -> bool:
        """Whether there is something else to wait for: a load, which the workers wait for, or an earlier step."""
        return self.side.is_loading or any(request.num_in_flight_tokens for request in self._requests.values())

    def handle_report(self, report: StepReport | None, invalid_blocks: set[int]) -> None:
        """What the workers said after a step."""
        self.side.handle_report(report, invalid_blocks)
        for _ in self.side.pushes.handle_report(report or StepReport()):
            pass  # its answer did not wait for it

    def finish(self, request: Any, block_ids: list[int]) -> dict[str, Any] | None:
        """A request is over; its blocks are its own until the next step. What its answer says of KV that goes to
        another server: how much of it is on its way."""
        request_id: str = request.request_id
        params = None
        if request_id in self._requests and self._requests[request_id] is request:
            del self._requests[request_id]
            self._block_ids.pop(request_id, None)
            self.side.finish(request_id, request.num_computed_tokens, block_ids)
            transfer = _transfer(request)
            if transfer is not None and transfer.push_to:
                is_aborted = request.status.name == "FINISHED_ABORTED"
                sent = 0 if is_aborted else self.side.pushes.num_tokens(request_id)
                params = {KEY: {"transfer": transfer.id, "sent_tokens": sent}}
                self.side.pushes.finish(request_id, is_wanted=not is_aborted)
        return params

    def start_epoch(self, space: Space, *, is_clean: bool = True) -> None:
        """From now on KV of other weights is computed; `is_clean` says whether vLLM's own cache holds no other."""
        self.side.start_epoch(space, is_clean=is_clean)

    def _note_blocks(self, step: Any) -> set[str]:
        """The blocks that requests got for this step; which of them had none before."""
        new = set[str]()
        for request in step.scheduled_new_reqs:
            self._block_ids[request.req_id] = list(request.block_ids[0])
            new.add(request.req_id)
        cached = step.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            more = list(block_ids[0]) if block_ids else []
            if request_id in cached.resumed_req_ids:
                self._block_ids[request_id] = more
                new.add(request_id)
            elif more:
                self._block_ids[request_id] += more
        return new

    def _inputs(self, request: Any) -> Inputs | None:
        if request.mm_features and not self._hashes_inputs:
            return None
        return request_inputs(request, self._adapters)


def _transfer(request: Any) -> TransferParams | None:
    """What the request says of KV that another server sends. vLLM has accepted the request, so it cannot be refused."""
    try:
        return parse_transfer(getattr(request, "kv_transfer_params", None))
    except InvalidArgumentError as error:
        log.warning("the kv_transfer_params of a request are ignored: %s", error)
        return None
