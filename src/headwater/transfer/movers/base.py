"""What `save` and `load` ask of a mover. See `movers.cpu` and `movers.cuda`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headwater.kv.hashing import ChunkRef
from headwater.transfer.convert import BlockIds, ConversionPlan
from headwater.transfer.extents import ExtentPiece
from headwater.transfer.load_job import Load, LoadBatch, LoadPart
from headwater.transfer.save_job import Gathered, SaveTarget
from headwater.transfer.streams import DeviceEvent

Bytes = npt.NDArray[np.uint8]


class Copied(NamedTuple):
    """Copies into extents that were begun: when they have ended, and what goes where."""

    event: DeviceEvent
    pieces: list[tuple[ExtentPiece, list[SaveTarget]]]


class Storer(Protocol):
    """From staging into extents, for the sender's thread."""

    most_in_flight: int
    """Batches whose copies may be under way at a time."""

    def address(self, segment: Bytes) -> int | None:
        """Where a segment begins; None where this mover cannot reach it in place."""

    def copy(
        self, work: Gathered, plan: ConversionPlan, spans: Sequence[int], starts: list[int], *, blocking: bool
    ) -> Copied:
        """Begin to copy these chunks' staged tiles into their extents. `blocking`: to be waited for asleep."""

    def hash(self, work: Gathered) -> None:
        """Begin to compute the checksums of everything that was gathered, once."""

    def touch(self, copied: Copied) -> None:
        """Prepare copies that are queued behind others."""

    def take_sums(self, work: Gathered, spans: range) -> None:
        """Wait for the checksums of some chunks and note them in their job, and which could not be packed."""

    def host_bytes(self, work: Gathered, low: int, high: int) -> Bytes:
        """A range of the staged bytes as memory of the host, valid until the next call."""

    def stored(self, chunk: ChunkRef, encoding: int, tiles: Bytes) -> Bytes | None:
        """Staged tiles of a chunk in memory of the host, (layers, heads, bytes), as they are to be stored; None where
        one of them cannot be packed."""

    def synchronize(self) -> None:
        """Wait for everything that was begun."""

    def wait_prepared(self) -> None:
        """Wait until the store's memory is ready. For measurements."""

    def stop(self, timeout_s: float) -> None:
        """Begin nothing new. Idempotent."""

    def close(self) -> None:
        """Let go of the store's memory; nothing may be under way. Idempotent."""


class Placer(Protocol):
    """From extents (or memory that a read has filled) into the cache, for the loader's thread."""

    window_chunks: int
    """Chunks that are best looked up and brought together."""
    first_chunks: int
    """The same for the first window of a load, so that the copies begin early."""
    most_in_flight: int
    runs_beside: bool
    """Whether copies go on by themselves once they were begun."""

    def begin(self, load: Load) -> None:
        """Let nothing be written into a load's blocks before the moment when it was asked for."""

    def address(self, segment: Bytes) -> int | None:
        """Where a segment begins; None where this mover cannot reach it in place."""

    def can_place(self, encodings: Sequence[int]) -> bool:
        """Whether tiles in these encodings can be placed as they are stored; otherwise they must be read."""

    def plan(self, chunks: Sequence[ChunkRef], block_ids: BlockIds, encodings: Sequence[int]) -> ConversionPlan:
        """Where some chunks of a request lie in the cache; they will come in these encodings."""

    def expect(self, part: LoadPart, sums: npt.NDArray[np.uint64]) -> None:
        """Note what the checksums of a part's lent tiles, (chunks, layers, heads), must be."""

    def layer_chunks(self, num_layers: int) -> int:
        """Chunks that are best brought together where only so many layers of them come at a time."""

    def take(self, part: LoadPart, layers: range, spans: range) -> LoadBatch | None:
        """Staging for some layers of some of a part's chunks, from the first on: all of them, or as many as there are
        up to the end of the staging; None where there is no room now."""

    def bring(self, load: Load, batch: LoadBatch, layers: range) -> None:
        """Begin to copy a batch of lent tiles and to verify the copy. The CPU also puts them into the cache."""

    def landing(self, num_bytes: int) -> Bytes:
        """Private memory of the host that a read may fill, valid until the next call."""

    def bring_landed(self, batch: LoadBatch, host: Bytes, num_good: int) -> None:
        """Begin to copy what a read has brought and verified: so many chunks from the first on."""

    def put(self, load: Load, batch: LoadBatch, layers: range, num_chunks: int) -> int:
        """Write a batch's first chunks into the blocks, if the load still owns them; bytes written. Does not wait."""

    def event(self) -> DeviceEvent:
        """The moment when everything that was put so far is in the cache."""

    def give_back(self, batch: LoadBatch) -> None:
        """Return a batch's staging: nobody reads it any more."""

    def reset(self) -> None:
        """Return all staging: nothing is under way any more."""

    def synchronize(self) -> None:
        """Wait for everything that was begun."""

    def close(self, timeout_s: float) -> None:
        """Let go. Idempotent."""
