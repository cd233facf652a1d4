"""`HeadwaterConnector`: vLLM's interface for KV connectors, over the two sides that do the work.

Nothing here decides anything. Whatever goes wrong with the pool switches the connector off, with a warning; vLLM
goes on without it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from headwater.connector.arrivals import Arrivals
from headwater.connector.clock import timed
from headwater.connector.events import Announcements, NoListener
from headwater.connector.idle import IdleWorker
from headwater.connector.metrics import Source, Values
from headwater.connector.orders import StepOrders
from headwater.connector.published import figures
from headwater.connector.stats import TransferStats
from headwater.connector.totals import Spread
from headwater.connector.worker import WorkerSide
from headwater.integrations.vllm.adapters import check_loaded
from headwater.integrations.vllm.declined import LOGGER, DeclinedError
from headwater.integrations.vllm.events import as_vllm_event
from headwater.integrations.vllm.logs import join_logs
from headwater.integrations.vllm.messages import StepMetadata, WorkerGreeting, WorkerMetadata
from headwater.integrations.vllm.options import read_options, settle_load_mode
from headwater.integrations.vllm.reloads import Freshness
from headwater.integrations.vllm.startup import (
    SEVERAL_HOSTS,
    TWO_NAMES,
    Membership,
    new_epoch,
    start_receiver,
    start_scheduling,
    start_working,
)
from headwater.integrations.vllm.stats import HeadwaterPromMetrics, HeadwaterStats, Reporter
from headwater.integrations.vllm.steps import NULL_BLOCK, Steps
from headwater.integrations.vllm.takeback import Takeback, why_outside
from headwater.peers.process import ReceiverChild

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(LOGGER)


class HeadwaterConnector(KVConnectorBase_V1, SupportsHMA):
    """One of them lives with vLLM's scheduler, and one in each worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_logs()
        transfer = vllm_config.kv_transfer_config
        self._options = read_options(transfer.kv_connector_extra_config, transfer.kv_role)
        self._takeback: Takeback | None = None
        self._member: Membership | None = None
        self._steps: Steps | None = None
        self._left: Steps | None = None
        """What was switched off, until the loads that it has promised to vLLM are ordered."""
        self._worker: WorkerSide | IdleWorker = IdleWorker("its caches are not there yet", Arrivals(1, NULL_BLOCK))
        # With micro-batches a layer runs more than once in a step: it is saved when all of them have run, and loads are
        # waited for before the first.
        self._saves_layers = not vllm_config.parallel_config.use_ubatching
        self._layers: dict[str, int] = {}
        self._receiver: ReceiverChild | None = None
        events = vllm_config.kv_events_config
        self._events = Announcements() if events is not None and events.enable_kv_cache_events else NoListener()
        self._has_told_home = False
        self._freshness = Freshness(self._options.epoch)
        self._epoch = self._options.epoch
        self._stale_epoch: int | None = None
        self._blocks: BlockPool | None = None
        self._reporter = Reporter()
        self.step_seconds = 0.0
        """Time of the thread that runs the model, spent here since the start."""
        if role == KVConnectorRole.SCHEDULER:
            self._set_failure_policy()
            self._options = settle_load_mode(self._options, why_outside(vllm_config, self._options.connector.load_mode))
            self._takeback = Takeback.of_caller()
            try:
                self._steps, self._member = start_scheduling(vllm_config, kv_cache_config, self._options, self._events)
            except DeclinedError as error:
                log.warning("Headwater is off: %s", error)
            except Exception:
                log.exception("Headwater is off: it could not be started")
            if self._steps is not None and self._member is not None:
                self._member.publisher.add(self._member.role, self._figures)
                self._steps.side.loads_in_step = False  # until vLLM's scheduler is made
                self._receiver = start_receiver(self._options)
                self._reporter.watch(self._receiver)

    # ---- the scheduler side -------------------------------------------------------------------------------------
    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss for somebody, and nothing more."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM's scheduler is made: loads go along with steps only if it can take these back."""
        super().bind_kv_cache_manager(kv_cache_manager)  # which binds the pool of blocks
        why_not = "its scheduler did not make the connector" if self._takeback is None else self._takeback.why_not()
        if self._steps is not None:
            self._steps.side.loads_in_step = not why_not
        if why_not:
            self._takeback = None
            settle_load_mode(self._options, why_not)

    def on_new_request(self, request: Request) -> None:
        """Hash the prompt."""
        with self._survive():
            if self._steps is not None:
                self._steps.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much the pool has beyond that, and whether vLLM is to go on without the request meanwhile."""
        found: tuple[int | None, bool] = 0, False
        with self._survive():
            if self._steps is not None and self._epoch != self._stale_epoch:
                found = self._steps.match(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note the blocks, and order the load."""
        if self._steps is not None:
            self._steps.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The orders of this step."""
        orders, adapters, steps = StepOrders(), dict[int, bytes](), self._steps
        if self._takeback is not None and (preempted := scheduler_output.preempted_req_ids):
            # Without this side nobody knows what they were computed from.
            self._takeback.drop_output(
                [name for name in preempted if steps is None or steps.side.holds_uncertain(name)]
            )
        if steps is not None:
            with self._survive():
                adapters = steps.adapters(scheduler_output)
                orders = steps.order(scheduler_output)
        if self._left is not None:
            orders, adapters, self._left = self._left.side.leave(), {}, None
        return StepMetadata(orders, adapters)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Order the last save, and tell the answer how much of a push is on its way. Blocks are never held back."""
        params: dict[str, Any] | None = None
        with self._survive():
            if self._steps is not None:
                params = self._steps.finish(request, block_ids[0])
        return False, params

    def has_pending_push_work(self) -> bool:
        """Whether one more step is needed, though nothing is left to compute: it carries the end of a push."""
        return self._steps is not None and self._steps.side.pushes.has_orders

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same, for a vLLM without its hybrid cache manager."""
        return self.request_finished_all_groups(request, (block_ids,))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear what the workers did."""
        self._handle_report(connector_output)
        invalid = connector_output.invalid_block_ids
        if self._takeback is not None and invalid:
            # An exception here ends vLLM: the next tokens would be wrong. Where nobody has kept the account of who
            # computed what from which blocks, nothing is believed any more.
            self._takeback.take_back(invalid | self._steps.side.wrong_blocks if self._steps is not None else None)

    def _handle_report(self, connector_output: KVConnectorOutput) -> None:
        told = connector_output.kv_connector_worker_meta
        report = told.report if isinstance(told, WorkerMetadata) else None
        if self._steps is None:
            return
        homes = told.homes if isinstance(told, WorkerMetadata) else frozenset()
        if reason := (report.declined if report is not None else "") or self._why_apart(homes):
            self._switch_off(reason)
            return
        if isinstance(told, WorkerMetadata) and self._epoch in told.stale:
            self._stale_epoch = self._epoch
        with self._survive():
            self._steps.handle_report(report, connector_output.invalid_block_ids or set())

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn whether every worker takes part, and has the same pool.

        Inside `MultiConnector` the greetings of another connector may come instead: then the first reports tell.
        """
        pool = self._options.connector.pool
        greetings = [given for given in metadata.values() if isinstance(given, WorkerGreeting) and given.pool == pool]
        declined = next((greeting.declined for greeting in greetings if greeting.declined), "")
        reason = declined or self._why_apart({given.home for given in greetings})
        if self._steps is not None and reason:
            self._switch_off(reason)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Where vLLM counts its own blocks."""
        self._blocks = gpu_block_pool

    def reset_cache(self) -> bool | None:
        """Begin an epoch of this server's own: nobody else's chunks are touched, and none of them is used again.

        vLLM resets its own cache first, and calls this even if it could not, because blocks were in use: then the pool
        is not used in this epoch, since requests share blocks of the last one.
        """
        is_clean = True
        with self._survive():
            if self._steps is not None and self._member is not None:
                is_clean = self._is_local_cache_empty()
                self._epoch = new_epoch()
                self._steps.start_epoch(self._member.space(self._epoch), is_clean=is_clean)
        if not is_clean:
            log.warning(
                "Headwater: vLLM could not reset its own cache, because blocks are in use, so nothing is saved or "
                "loaded any more; call reset_prefix_cache(reset_connector=True) again when no request runs"
            )
        return is_clean

    def _is_local_cache_empty(self) -> bool:
        """As vLLM asks before it resets its cache: one block is always in use."""
        return self._blocks is not None and self._blocks.num_gpu_blocks - self._blocks.get_num_free_blocks() == 1

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Chunks that can be found now, and some that are gone."""
        return [as_vllm_event(event) for event in self._events.take()]

    @contextmanager
    def _survive(self) -> Iterator[None]:
        """What goes wrong inside switches the connector off, and does not end vLLM."""
        try:
            yield
        except Exception as error:
            log.exception("Headwater failed; vLLM goes on without it")
            self._switch_off(f"{type(error).__name__}: {error}")

    def _why_apart(self, homes: AbstractSet[str]) -> str:
        """Why the workers' KV cannot be this side's; "" if it can."""
        if self._member is None or homes <= {self._member.home}:
            return ""
        same_pool = all(home.rpartition(" ")[0] == self._member.pool.home for home in homes)
        return TWO_NAMES if same_pool else SEVERAL_HOSTS

    def _switch_off(self, reason: str) -> None:
        log.warning("Headwater is off: %s", reason)
        self._left, self._steps = self._steps or self._left, None

    def _set_failure_policy(self) -> None:
        """vLLM fails requests whose load failed unless it is told otherwise; a pool's failure is only a miss."""
        transfer = self._kv_transfer_config
        if self._options.load_failure_policy != "recompute" or transfer.kv_load_failure_policy == "recompute":
            return
        if _is_inside("MultiConnector"):
            log.warning(
                "Headwater cannot set kv_load_failure_policy from inside MultiConnector; set it to recompute there, or "
                "requests fail when the pool does"
            )
            return
        transfer.kv_load_failure_policy = "recompute"
        log.info("Headwater: kv_load_failure_policy is set to recompute, so a failed load is computed instead")

    # ---- the worker side ----------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Prove where the KV lies, and join the pool."""
        self._freshness = Freshness(self._options.epoch)
        try:
            self._worker, self._member = start_working(
                self._vllm_config, self._kv_cache_config, self._options, kv_caches
            )
            self._member.publisher.add(self._member.role, self._figures)
        except DeclinedError as error:
            self._decline(str(error))
        except Exception as error:
            log.exception("Headwater could not be started")
            self._decline(f"{type(error).__name__}: {error}")

    def _decline(self, reason: str) -> None:
        log.warning("Headwater is off in this worker: %s", reason)
        groups = self._kv_cache_config.kv_cache_groups
        arrivals = Arrivals(groups[0].kv_cache_spec.block_size if groups else 1, NULL_BLOCK)
        if isinstance(self._worker, WorkerSide):
            arrivals = self._worker.leave()
        self._worker = IdleWorker(reason, arrivals)

    @contextmanager
    def _survive_in_worker(self) -> Iterator[None]:
        """What goes wrong inside ends this worker's part in the pool, and not vLLM."""
        try:
            yield
        except Exception as error:
            log.exception("Headwater failed in this worker; vLLM goes on without it")
            self._decline(f"{type(error).__name__}: {error}")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Whether this worker takes part, and where its pool is."""
        declined = self._worker.reason if isinstance(self._worker, IdleWorker) else ""
        return WorkerGreeting(self._options.connector.pool, declined, self._member.home if self._member else "")

    @timed
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The first thing of every step: take what is to be saved before anything is written."""
        assert isinstance(kv_connector_metadata, StepMetadata)
        with self._survive_in_worker():
            self._worker.start_step(self._freshness.admit(kv_connector_metadata.orders))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Just before the forward pass: the adapters of this step are loaded, and nothing of it is saved."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if connector_metadata.adapters and isinstance(self._worker, WorkerSide):
            try:
                check_loaded(connector_metadata.adapters)
            except DeclinedError as error:
                self._decline(str(error))

    @timed
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the loads."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        with self._survive_in_worker():
            if self._freshness.is_stale and isinstance(self._worker, WorkerSide):
                self._worker.refuse_loads(metadata.orders)
            else:
                self._worker.start_loads(metadata.orders)
            if self._worker.needs_layers and not (self._saves_layers and _has_hooks(forward_context)):
                self._worker.wait_layers()

    def has_connector_metadata(self) -> bool:
        """Asked before each layer's two calls: most steps need neither, and a decode step has no time to give away."""
        return self._worker.follows_layers and super().has_connector_metadata()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for one layer, where loads go along with the step."""
        if self._worker.follows_layers:
            self._before_layer(self._layer(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Save one layer, where the step's KV is to be saved."""
        if self._saves_layers and self._worker.follows_layers:
            self._after_layer(self._layer(layer_name))

    @timed
    def _before_layer(self, layer: int) -> None:
        with self._survive_in_worker():
            self._worker.before_layer(layer)

    @timed
    def _after_layer(self, layer: int) -> None:
        with self._survive_in_worker():
            self._worker.after_layer(layer)

    @timed
    def wait_for_save(self) -> None:
        """The end of every step: save layers that were not announced, as in a step that is one CUDA graph."""
        with self._survive_in_worker():
            if sys.exception() is None:
                self._worker.end_step()
            else:  # vLLM calls this also where the forward pass has failed
                self._worker.discard()

    @timed
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended, of requests that wait for them outside the batch. Those that went along with the step
        end here at the latest: with speculative decoding, `wait_for_save` comes after the step's report."""
        with self._survive_in_worker():
            self._worker.end_loads()
        return KVConnectorTransferResults(finished_recving=self._worker.take_finished())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute."""
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """What the scheduler side should know."""
        report, homes = self._worker.take_report(), frozenset[str]()
        if not self._has_told_home and self._member is not None:
            homes, self._has_told_home = frozenset([self._member.home]), True
        stale = self._freshness.epochs()
        return WorkerMetadata(report, homes, stale) if report or homes or stale else None

    def _layer(self, layer_name: str) -> int:
        if (layer := self._layers.get(layer_name)) is None:
            from vllm.model_executor.models.utils import extract_layer_index

            layer = self._layers[layer_name] = extract_layer_index(layer_name)
        return layer

    def get_kv_connector_stats(self) -> HeadwaterStats | None:
        """What has been counted since the last call: bytes by the workers, tokens by the scheduler side, and now and
        then the pool's own figures."""
        shared = None if self._member is None else self._member.figures
        if self.role == KVConnectorRole.WORKER:
            return self._reporter.worker(self._moved, self._worker.take_times(), shared)
        if self._steps is None:
            return self._reporter.scheduler(TransferStats(), {}, None)  # that it is off, once
        counts = self._steps.side.counts
        return self._reporter.scheduler(counts.stats(), counts.take_times(), shared)

    @property
    def _moved(self) -> TransferStats:
        return replace(self._worker.stats(), step_seconds=self.step_seconds)

    def _figures(self) -> tuple[Values, Spread]:
        """The same since the start, as it is published beside the pool. From any thread."""
        if self.role == KVConnectorRole.WORKER:
            return figures(self._moved, Source.WORKER)
        steps = self._steps
        return figures(TransferStats() if steps is None else steps.side.counts.stats(), Source.SCHEDULER)

    def shutdown(self) -> None:
        """Finish what is being saved, publish the last figures, and end the receiver."""
        self._worker.close()
        if self._member is not None:
            self._member.publisher.remove(self._member.role)
        if self._receiver is not None:
            self._receiver.close()

    # ---- what vLLM asks of the class ----------------------------------------------------------------------------
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A load that goes layer by layer must be waited for between the layers."""
        return extra_config.get("load_mode") == "layerwise"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HeadwaterStats:
        """Statistics that were on their way between processes."""
        return HeadwaterStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HeadwaterPromMetrics:
        """Headwater's metrics for vLLM's /metrics."""
        return HeadwaterPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _register() -> None:
    """Let vLLM find the class by its name alone: MultiConnector's statistics ask for it that way."""
    try:
        KVConnectorFactory.register_connector(
            HeadwaterConnector.__name__, "headwater.integrations.vllm", HeadwaterConnector.__name__
        )
    except ValueError:
        pass  # it is already


_register()


def _has_hooks(context: Any) -> bool:
    """Whether vLLM calls `wait_for_layer_load` in this step: not where it replays one graph of all layers. Its second
    model runner gives such a step a context without the attention's metadata."""
    mode = getattr(getattr(context, "cudagraph_runtime_mode", None), "name", "")
    return getattr(context, "attn_metadata", None) is not None and mode in ("NONE", "PIECEWISE")


def _is_inside(class_name: str) -> bool:
    """Whether an object of that class is making this one: it does not say so, and its settings are not ours to set."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if type(frame.f_locals.get("self")).__name__ == class_name:
            return True
    return False
