"""The worker side: one rank's cache and the pool. Executes the orders of each step; decides nothing.

An engine calls it in this order: `start_step`, `start_loads`, then `before_layer` and `after_layer` around each layer,
`end_step`, `take_report`. Layers that are not announced are saved at the end of the step. A step that announces none
calls `wait_layers` before it computes: a load whose layers were not waited for has failed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from headwater.connector.arrivals import Arrivals, OnEnd
from headwater.connector.clock import PROCESS_THREADS, timed
from headwater.connector.config import ConnectorConfig
from headwater.connector.orders import (
    BLOCKING,
    LAYERWISE,
    LoadOrder,
    PushOrder,
    SaveOrder,
    StepOrders,
    StepReport,
    TransferJob,
)
from headwater.connector.peering import peer_options
from headwater.connector.push_desk import OnPushed, PushDesk
from headwater.connector.staging import ring_bytes
from headwater.connector.stats import TRANSFER_BUCKETS_S, Durations, Times, TransferStats
from headwater.kv.topology import Shard
from headwater.peers.sender import PeerSender
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.load import Loader
from headwater.transfer.save import Saver
from headwater.transfer.save_job import SaveRequest
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

SAVE_PATIENCE_S = 0.02
"""How long a step may wait for room in the staging before chunks are dropped: a bus moves a gigabyte meanwhile."""
IDLE_WAIT_S = 0.05
"""How long a step that has nothing to compute waits for a load: then the engine may look for new requests."""

PUSH_DROPS = (
    "chunks_dropped",
    "chunks_refused",
    "chunks_lost",
    "chunks_unsaved",
    "chunks_evicted",
    "chunks_stale",
    "chunks_unreadable",
)
"""Counts of `PeerSender` that are chunks which did not get to their peer."""


class WorkerSide:
    """Loads and saves of one rank. The thread that runs the model calls it."""

    def __init__(
        self,
        space: Space,
        view: PagedView,
        shard: Shard,
        config: ConnectorConfig,
        *,
        block_size: int | None = None,
        dummy_block: int = 0,
        open_space: Callable[[int], Space] | None = None,
        on_end: OnEnd | None = None,
        starting: Callable[[], AbstractContextManager[None]] = nullcontext,
        mover: str | None = None,
        server: int | None = None,
        rank: int = 0,
        on_pushed: OnPushed | None = None,
    ) -> None:
        """`block_size`: of the orders, where the view's blocks are smaller. `open_space` gives the space of another
        epoch. With `on_end`, the ends of loads are told at once, from the loader's thread, and not in reports; with
        `on_pushed`, so are those of pushes. Threads are started inside `starting()`. `server`: the number that its
        ranks push under, `rank`: this one's among them."""
        self._view = view
        self._shard = shard
        self._config = config
        self._mover = mover
        self._server = server
        self._rank = rank
        self._on_pushed = on_pushed
        self._pushed: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        """Flushes that are over and were not reported."""
        self._load_times = Durations(TRANSFER_BUCKETS_S)
        self._save_times = Durations(TRANSFER_BUCKETS_S)
        self._counting = threading.Lock()
        self.step_seconds = 0.0
        """Time of the thread that runs the model, spent here since the start."""
        self._open_space = open_space
        self._starting = starting
        self._ratio = (block_size or view.block_size) // view.block_size
        self._arrivals = Arrivals(block_size or view.block_size, dummy_block, on_end)
        self._is_silent = False
        """A step did not announce all of its layers, and lost its loads: later ones might not, either."""
        self._begun: StepOrders | None = None
        """The orders whose loads were begun last."""
        self._enter(space)

    def _enter(self, space: Space) -> None:
        """Use this space from now on."""
        load_bytes, save_bytes = ring_bytes(self._config, "cuda" if self._view.device.type == "cuda" else "cpu")
        self._space = space
        self._pushes = PushDesk(self._make_sender, self._on_pushed or self._end_push)
        with self._starting():
            self._saver = Saver(
                space,
                self._view,
                self._shard,
                staging_bytes=save_bytes,
                group_bytes=self._config.group_bytes,
                deadline_s=self._config.save_deadline_s,
                patience_s=SAVE_PATIENCE_S,
                mover=self._mover,
                sink=self._pushes,
            )
            self._loader = Loader(
                space,
                self._view,
                self._shard,
                staging_bytes=load_bytes,
                group_bytes=self._config.group_bytes,
                deadline_s=self._config.load_deadline_s,
                on_done=self._end_load,
                mover=self._mover,
            )

    # ---- a step -------------------------------------------------------------------------------------------------
    @timed
    def start_step(self, orders: StepOrders) -> None:
        """Take what is to be saved before the step writes anything, and prepare what is to be saved in its course."""
        if self._saver.has_open:  # of a step that failed, and whose engine did not say so
            self._saver.discard()
        self._loader.finish_layers()
        if self._open_space is not None and orders.epoch not in (None, self._space.identity.epoch):
            assert orders.epoch is not None
            self.close()
            self._enter(self._open_space(orders.epoch))
        for request_id in orders.cancelled:
            self._loader.cancel(request_id)
        for order in (*orders.before, *orders.during):
            self._name_root(order)
        if orders.pushes:
            self._push(orders.pushes)  # before their saves: these are told what is awaited
        if orders.before:
            self._saver.save_all([self._wanted(order) for order in orders.before])
        for order in orders.during:
            self._saver.begin(*self._wanted(order))
        if orders.flushes:
            with self._starting():
                for flush in orders.flushes:
                    self._pushes.flush(flush)

    def _push(self, orders: Sequence[PushOrder]) -> None:
        with self._starting():
            for order in orders:
                self._name_root(order)
                self._pushes.push(order)

    @timed
    def start_loads(self, orders: StepOrders) -> None:
        """Start the step's loads; those that the step has to wait for have ended on return."""
        self._begun = orders
        self._arrivals.fail_blocks(orders.wrong_blocks)
        self._arrivals.expect(orders.loads)
        for number, order in enumerate(orders.loads):
            try:
                self._name_root(order)
                self._load_times.start(order.job.request_id)
                job = order.job
                is_layerwise = order.mode == LAYERWISE
                self._loader.load(
                    job.request_id, job.chunks, self._block_ids(job), layerwise=is_layerwise, wait=order.wait
                )
            except BaseException:
                for left in orders.loads[number:]:
                    self._arrivals.end(left.job.request_id, 0)
                raise
        if self._is_silent:
            self._loader.wait_layers()
        if any(order.mode == BLOCKING for order in orders.loads):
            self._arrivals.wait(BLOCKING)
        elif orders.is_idle and self._arrivals.has():
            self._arrivals.wait_any(IDLE_WAIT_S)

    def refuse_loads(self, orders: StepOrders) -> None:
        """Load nothing of these orders: their blocks have to be computed."""
        self._begun = orders
        self._arrivals.fail_blocks(orders.wrong_blocks)
        self._arrivals.expect(orders.loads)
        for order in orders.loads:
            self._arrivals.end(order.job.request_id, 0)

    @property
    def follows_layers(self) -> bool:
        """Whether the coming step should call `before_layer` and `after_layer`."""
        return self._saver.has_open or self._loader.has_open

    @property
    def needs_layers(self) -> bool:
        """Whether the coming step must call `before_layer`: it computes with KV that comes layer by layer."""
        return self._loader.has_open

    @timed
    def before_layer(self, layer: int) -> None:
        """Wait for the KV of one layer (of the whole model). On a GPU the stream waits, the caller hardly."""
        if self._loader.has_open:
            self._loader.wait_layer(layer)

    @timed
    def wait_layers(self) -> None:
        """Wait for the KV of all layers, for a step that does not call `before_layer`. On a GPU the stream waits; the
        caller does so for room in the staging."""
        if self._loader.has_open:
            self._loader.wait_layers()

    @timed
    def after_layer(self, layer: int) -> None:
        """The step has written its KV of one layer: save it, if that was ordered."""
        if self._saver.has_open:
            self._saver.layer_done(layer)

    @timed
    def end_step(self) -> None:
        """The step's KV is in the cache: save what was not announced. Loads that went along with it have ended."""
        self._saver.end_step()
        self._end_loads()

    @timed
    def end_loads(self) -> None:
        """The step has read all KV that it reads: loads that went along with it have ended. For an engine that asks for
        a report before the step's end; it may be called again."""
        self._end_loads()

    def _end_loads(self) -> None:
        if self._arrivals.has(LAYERWISE):
            if not self._loader.finish_layers() and not self._is_silent:
                self._is_silent = True
                log.warning(
                    "the engine does not announce all layers; from now on each step waits for its KV before it computes"
                )
            self._arrivals.wait(LAYERWISE)

    def discard(self, orders: StepOrders | None = None) -> None:
        """The step failed: what it was to save must not be taken from blocks that it has not written. Of the loads in
        its orders, those that were not begun have ended with nothing, and so do those that it did not wait for."""
        self._saver.discard()
        self._loader.finish_layers()
        if orders is not None and self._begun is not orders:
            self._arrivals.expect(orders.loads)
            for order in orders.loads:
                self._arrivals.end(order.job.request_id, 0)

    # ---- what happened ------------------------------------------------------------------------------------------
    def take_finished(self) -> set[str]:
        """Requests that wait outside the batch and whose load has ended since the last call."""
        return self._arrivals.take_finished()

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were to be filled and were not, since the last call."""
        return self._arrivals.take_failed_blocks()

    def take_report(self) -> StepReport:
        """What the scheduler side should know."""
        unsaved, misfits = dict[str, int](), tuple(self._saver.take_misfits())
        for name, first_token in self._saver.take_unsaved():
            unsaved[name] = min(first_token, unsaved.get(name, first_token))
        report = self._arrivals.take_report().merged(StepReport(unsaved=unsaved, misfits=misfits))
        while not self._pushed.empty():
            request_id, num_tokens = self._pushed.get()
            report = report.merged(StepReport(pushed={request_id: (num_tokens,)}))
        return report

    def drain(self, timeout_s: float) -> bool:
        """Wait until all saves so far are stored or given up."""
        return self._saver.drain(timeout_s)

    def stats(self) -> TransferStats:
        """Counts since the start, or since the last epoch began. From any thread."""
        self._count_saves()
        pushes = self._pushes.stats()
        return TransferStats(
            loaded_bytes=self._loader.num_bytes,
            saved_bytes=self._saver.num_bytes,
            load_seconds=self._loader.seconds,
            load_times=self._load_times.total,
            save_times=self._save_times.total,
            num_dropped=self._saver.num_dropped,
            num_damaged=self._loader.statuses[Status.DAMAGED],
            step_seconds=self.step_seconds,
            thread_seconds=PROCESS_THREADS.seconds(),
            pushed_bytes=pushes["bytes"],
            num_pushed=pushes["chunks_sent"] + pushes["chunks_there"],
            num_push_drops=sum(pushes[name] for name in PUSH_DROPS),
        )

    def take_times(self) -> Times:
        """How long each load and each save took that has ended since the last call."""
        self._count_saves()
        return {"load_times": self._load_times.take(), "save_times": self._save_times.take()}

    def _count_saves(self) -> None:
        with self._counting:  # those who publish figures ask from a thread of their own
            for seconds in self._saver.take_timings():
                self._save_times.add(seconds)

    def close(self) -> None:
        """Drain saves for a moment, then stop both threads; loads under way end. Idempotent."""
        self._saver.close()
        self._count_saves()
        self._pushes.close()
        self._loader.close()

    def leave(self) -> Arrivals:
        """Close it for good; its loads have all ended then, and whoever comes next reports them."""
        self.close()
        return self._arrivals

    # ---- helpers ------------------------------------------------------------------------------------------------
    def _end_load(self, request_id: str, num_chunks: int) -> None:
        self._load_times.end(request_id)
        self._arrivals.end(request_id, num_chunks)

    def _end_push(self, request_id: str, num_tokens: int) -> None:
        self._pushed.put((request_id, num_tokens))

    def _make_sender(self) -> PeerSender:
        settings = peer_options(self._config).link_settings()
        return PeerSender(
            self._space,
            self._shard,
            server=self._server,
            rank=self._rank,
            settings=settings,
            on_device=self._view.device.type == "cuda",
        )

    def _name_root(self, order: SaveOrder | LoadOrder | PushOrder) -> None:
        """Chunks are stored under a root that this process must know."""
        self._space.root(tenant=order.tenant, adapter=order.adapter)

    def _wanted(self, order: SaveOrder) -> SaveRequest:
        job = order.job
        raw = frozenset([job.chunks[number].key for number in order.raw])
        return SaveRequest(job.request_id, job.chunks, self._block_ids(job), raw)

    def _block_ids(self, job: TransferJob) -> npt.NDArray[np.int32]:
        """The job's blocks as those of the view, where these are smaller than the engine's."""
        if self._ratio == 1:
            return job.block_ids
        parts = np.arange(self._ratio, dtype=np.int32)
        ids: npt.NDArray[np.int32] = (job.block_ids[:, None] * self._ratio + parts).ravel()
        return ids
