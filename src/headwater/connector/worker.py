"""The worker half: one rank's cache and the pool. Executes the scheduler half's jobs; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.connector.config import ConnectorConfig
from headwater.connector.jobs import Job, Loaded
from headwater.connector.stats import TransferStats
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.device_loader import DeviceLoader
from headwater.transfer.device_ring import sums_bytes
from headwater.transfer.device_saver import DeviceSaver
from headwater.transfer.layers import CPU_GROUP_BYTES, GPU_GROUP_BYTES
from headwater.transfer.loader import Loader
from headwater.transfer.saver import Saver, Wanted
from headwater.transfer.view import PagedView

DEFAULT_STAGING_BYTES = {"cpu": 256 << 20, "cuda": 512 << 20}
"""On a GPU two halves of it are under way at a time, and copies below 64 MiB do not fill the bus."""
DEFAULT_GROUP_BYTES = {"cpu": CPU_GROUP_BYTES, "cuda": GPU_GROUP_BYTES}


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
        kind = "cuda" if view.device.type == "cuda" else "cpu"
        each = _one_way_bytes(config, kind)
        group_bytes = config.group_bytes or DEFAULT_GROUP_BYTES[kind]
        make_saver, make_loader = (DeviceSaver, DeviceLoader) if kind == "cuda" else (Saver, Loader)
        self._saver = make_saver(
            space,
            view,
            shard,
            staging_bytes=each,
            group_bytes=group_bytes,
            deadline_s=config.save_deadline_s,
        )
        self._loader = make_loader(
            space,
            view,
            shard,
            staging_bytes=each,
            group_bytes=group_bytes,
            deadline_s=config.load_deadline_s,
            on_done=lambda name, count: on_loaded(Loaded(name, count)),
        )

    def save(self, jobs: Sequence[Job]) -> None:
        """Take the jobs' KV out of the cache now and store it in the background. Together they cost a GPU's engine
        hardly more than one."""
        self._saver.save_all([Wanted(job.request_id, job.chunks, job.block_ids) for job in jobs])

    def begin_save(self, job: Job) -> None:
        """Take the job's KV out of the cache layer by layer, in the course of the step that computes it."""
        self._saver.begin(job.request_id, job.chunks, job.block_ids)

    def load(self, job: Job, *, layerwise: bool = False) -> None:
        """Bring the job's KV into its blocks in the background; with `layerwise`, for a step that begins now."""
        self._loader.load(job.request_id, job.chunks, job.block_ids, layerwise=layerwise)

    @property
    def follows_layers(self) -> bool:
        """Whether the coming step must call `before_layer` and `after_layer`."""
        return self._saver.has_open or self._loader.has_open

    def before_layer(self, layer: int) -> None:
        """Wait for the KV of one layer (of the whole model). On a GPU the stream waits, the caller hardly."""
        self._loader.wait_layer(layer)

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
            num_dropped=self._saver.num_dropped,
            num_damaged=self._loader.statuses[Status.DAMAGED],
        )

    def close(self) -> None:
        """Drain saves for a moment, then stop both threads. Idempotent."""
        self._saver.close()
        self._loader.close()
