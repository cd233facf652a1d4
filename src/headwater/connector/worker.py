"""The worker half: one rank's cache and the pool. Executes the scheduler half's jobs; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.connector.clock import PROCESS_THREADS, timed
from headwater.connector.config import ConnectorConfig
from headwater.connector.jobs import Job, Loaded
from headwater.connector.stats import LOAD_BUCKETS_S, Durations, TransferStats
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.load import Loader
from headwater.transfer.ring import sums_bytes
from headwater.transfer.save import Saver
from headwater.transfer.save_job import Wanted
from headwater.transfer.view import PagedView

DEFAULT_STAGING_BYTES = {"cpu": 256 << 20, "cuda": 512 << 20}
"""On a GPU two halves of it are under way at a time, and copies below 64 MiB do not fill the bus."""
SAVE_PATIENCE_S = 0.02
"""How long a step may wait for room in the staging before chunks are dropped: a bus moves a gigabyte meanwhile."""


def staging_bytes(config: ConnectorConfig | None, device_type: str) -> int:
    """Memory of a device that one rank's worker half takes, both directions together; none without a pool."""
    if config is None:
        return 0
    each = _one_way_bytes(config, device_type)
    return 2 * each + (sums_bytes(each) if device_type == "cuda" else 0)


def _one_way_bytes(config: ConnectorConfig, device_type: str) -> int:
    return config.staging_bytes or DEFAULT_STAGING_BYTES[device_type]


class WorkerHalf:
    """Loads and saves of one rank. `on_loaded` is called from the loader's thread."""

    def __init__(
        self,
        space: Space,
        view: PagedView,
        shard: Shard,
        config: ConnectorConfig,
        on_loaded: Callable[[Loaded], None],
    ) -> None:
        self._on_loaded = on_loaded
        self._load_times = Durations(LOAD_BUCKETS_S)
        self.step_seconds = 0.0
        """Time of the thread that runs the model, spent here since the start."""
        kind = "cuda" if view.device.type == "cuda" else "cpu"
        each = _one_way_bytes(config, kind)
        self._saver = Saver(
            space,
            view,
            shard,
            staging_bytes=each,
            group_bytes=config.group_bytes,
            deadline_s=config.save_deadline_s,
            patience_s=SAVE_PATIENCE_S,
        )
        self._loader = Loader(
            space,
            view,
            shard,
            staging_bytes=each,
            group_bytes=config.group_bytes,
            deadline_s=config.load_deadline_s,
            on_done=self._end_load,
        )

    @timed
    def save(self, jobs: Sequence[Job]) -> None:
        """Take the jobs' KV out of the cache now and store it in the background. Together they cost a GPU's engine
        hardly more than one."""
        self._saver.save_all([Wanted(job.request_id, job.chunks, job.block_ids) for job in jobs])

    @timed
    def begin_save(self, job: Job) -> None:
        """Take the job's KV out of the cache layer by layer, in the course of the step that computes it."""
        self._saver.begin(job.request_id, job.chunks, job.block_ids)

    @timed
    def load(self, job: Job, *, layerwise: bool = False) -> None:
        """Bring the job's KV into its blocks in the background; with `layerwise`, for a step that begins now."""
        self._load_times.start(job.request_id)
        self._loader.load(job.request_id, job.chunks, job.block_ids, layerwise=layerwise)

    @property
    def follows_layers(self) -> bool:
        """Whether the coming step must call `before_layer` and `after_layer`."""
        return self._saver.has_open or self._loader.has_open

    @timed
    def before_layer(self, layer: int) -> None:
        """Wait for the KV of one layer (of the whole model). On a GPU the stream waits, the caller hardly."""
        self._loader.wait_layer(layer)

    @timed
    def after_layer(self, layer: int) -> None:
        """The step has written its KV of one layer: save it, if somebody wants to."""
        self._saver.layer_done(layer)

    def discard(self) -> None:
        """The step failed: what it was to save must not be taken from blocks that it has not written."""
        self._saver.discard()

    def cancel(self, request_id: str) -> None:
        """The request is gone: stop its load if it has not ended."""
        self._loader.cancel(request_id)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all saves so far are stored or given up."""
        return self._saver.drain(timeout_s)

    def stats(self) -> TransferStats:
        """Counts since the start."""
        return TransferStats(
            loaded_bytes=self._loader.num_bytes,
            saved_bytes=self._saver.num_bytes,
            load_seconds=self._loader.seconds,
            load_times=self._load_times.total,
            num_dropped=self._saver.num_dropped,
            num_damaged=self._loader.statuses[Status.DAMAGED],
            step_seconds=self.step_seconds,
            thread_seconds=PROCESS_THREADS.seconds(),
        )

    def take_load_times(self) -> list[float]:
        """Seconds that each load took which has ended since the last call, from its order on."""
        return self._load_times.take()

    def close(self) -> None:
        """Drain saves for a moment, then stop both threads. Idempotent."""
        self._saver.close()
        self._loader.close()

    def _end_load(self, request_id: str, num_chunks: int) -> None:
        self._load_times.end(request_id)
        self._on_loaded(Loaded(request_id, num_chunks))
