"""Copying down: what the first tier has and a slower one lacks goes there in the background, by one process of a host.

The queue is the first tier's own event ring. While a slower tier is away, nothing piles up: it is noted that something
is missing there, and when it is back, the first tier is looked through and compared with it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from headwater.errors import HeadwaterError, StoreClosedError
from headwater.kv.encoding import PACKED, RAW
from headwater.kv.topology import whole_shard
from headwater.stores.base import Packing, Piece, Status
from headwater.stores.embedded.export import Exported
from headwater.stores.embedded.store import EmbeddedStore
from headwater.stores.encode import pack_tiles
from headwater.stores.events import EventKind, Follower
from headwater.stores.remote.plan import is_right
from headwater.stores.tiers.lower import LowerTier, recheck
from headwater.stores.tiers.ownership import Ownership, SoleOwnership
from headwater.stores.workers import run_in_threads

log = logging.getLogger("headwater")

_MOST_WAITING = 4096
COPY_CHUNKS = 32
"""That are looked at and copied together."""
_BATCH_BYTES = 96 << 20
_IDLE_S = 0.02
_OWNER_POLL_S = 0.2
_RETRY_S = 0.5
_LONGEST_RETRY_S = 60.0
_DEMOTE_ABOVE = 0.75
_DEMOTE_SHARE = 8
_EXPORT_DEADLINE_S = 5.0


class Copier:
    """A thread that follows the first tier. One of all processes that have the pool open does the work."""

    _all: ClassVar[weakref.WeakSet[Copier]] = weakref.WeakSet()

    def __init__(self, front: EmbeddedStore, tiers: Sequence[LowerTier], ownership: Ownership | SoleOwnership) -> None:
        self._front = front
        self._tiers = tiers
        self._ownership = ownership
        self._ring = front.journal.ring()
        self._follower = Follower(self._ring)
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        self._early: OrderedDict[bytes, None] = OrderedDict()
        """Chunks whose parents are not where they should go: tried again when others have become complete."""
        self._backlog: Iterator[list[bytes]] | None = None
        self._behind: dict[int, float] = {}
        """Tiers that may lack something which is not waiting, and when to look."""
        self._full: dict[int, float] = {}
        """Tiers that had no room: how long to leave them alone, longer each time."""
        self._demoted_at = 0.0
        self._owner = False
        self._wake = threading.Event()
        self._stop = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        Copier._all.add(self)
        self.start()

    # ---- from other threads -------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin, if it has not: also in a forked child, whose parent kept the thread."""
        if self._thread is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._run, name="headwater-copier", daemon=True)
            self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Chunks known to be missing below."""
        return len(self._waiting)

    @property
    def is_owner(self) -> bool:
        """Whether this process is the one that copies."""
        return self._owner

    @property
    def num_unread(self) -> int:
        """Events of the first tier that the copier has not looked at."""
        return self._ring.head - self._follower.position

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def look_again(self, number: int) -> None:
        """A tier is back, or lacks something: compare it with the first one."""
        self._behind[number] = 0.0
        self._wake.set()

    def flush(self, timeout_s: float, *, also_full: bool = True) -> bool:
        """Wait until all that is in the first tier now has been copied, by whichever process; False if it was not.

        Without `also_full`, what this process could not copy for want of room is not waited for.
        """
        target, end = self._ring.head, time.monotonic() + timeout_s
        while not self._is_done(target, also_full):
            if time.monotonic() >= end:
                return False
            self._wake.set()
            time.sleep(0.002)
        return True

    def _is_done(self, target: int, also_full: bool) -> bool:
        if self._owner:
            behind = [i for i in self._behind if also_full or i not in self._full]
            if self._waiting or behind or self._backlog is not None:
                return False
            if not also_full and self._full:
                return self._follower.position >= target
        return self._ownership.position >= target

    def close(self, timeout_s: float) -> None:
        """Copy what is left for a while, then stop. What is not copied is found by whoever copies next."""
        if self._pid == os.getpid() and self._thread is not None and self._thread.is_alive():
            if self._owner and any(tier.usable for tier in self._tiers):
                self.flush(timeout_s, also_full=False)
            self._stop = True
            self._wake.set()
            self._thread.join(timeout_s + _EXPORT_DEADLINE_S)
        self._ownership.close()

    # ---- the thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stop:
            try:
                if not self._owner and not self._become_owner():
                    self._wake.wait(_OWNER_POLL_S)
                    self._wake.clear()
                    continue
                self._collect()
                if not self._step():
                    self._wake.wait(_IDLE_S)
                    self._wake.clear()
            except StoreClosedError:
                return
            except Exception:  # a copy that fails must not end all copying
                log.exception("copying to lower tiers failed; trying again")
                self._wake.wait(_RETRY_S)

    def _become_owner(self) -> bool:
        self._owner = self._ownership.take()
        if self._owner:
            self._follower = Follower(self._ring, self._ring.head)
            self._behind = dict.fromkeys(range(len(self._tiers)), 0.0)
            for tier in self._tiers:
                tier.own()
        return self._owner

    def _collect(self) -> None:
        stored = False
        for event in self._follower.poll():
            if event.kind == EventKind.STORED and event.tier == self._front_name:
                self._waiting[event.key] = None
                stored = True
            elif event.kind == EventKind.LOST:
                self._behind = dict.fromkeys(range(len(self._tiers)), 0.0)
            elif event.kind == EventKind.REMOVED and event.tier == self._front_name:
                self._early.pop(event.key, None)
                if self._waiting.pop(event.key, self) is None:
                    for tier in self._tiers:
                        tier.counts.add(dropped=1)
        if stored and self._early:
            self._waiting |= self._early
            self._early.clear()
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.clear()
            self._early.clear()
            self._behind = dict.fromkeys(range(len(self._tiers)), 0.0)

    @property
    def _front_name(self) -> str:
        return self._front.journal.tier

    def _step(self) -> bool:
        """Copy one batch, of what is new or else of what was missed; False where there is nothing to do now."""
        if self._waiting:
            keys = [key for key, _ in zip(self._waiting, range(COPY_CHUNKS), strict=False)]
            self._copy(keys, [i for i, tier in enumerate(self._tiers) if tier.mode != "demote"])
            for key in keys:
                self._waiting.pop(key, None)
            return True
        due = [i for i, at in self._behind.items() if at <= time.monotonic() and self._tiers[i].usable]
        if self._backlog is None and due:
            due = [i for i in due if self._tiers[i].mode != "demote"]
            self._backlog = self._compare(due)  # before it is taken off the list: `flush` looks at both
            for i in list(self._behind):
                if i in due or self._tiers[i].mode == "demote":
                    del self._behind[i]
        if self._backlog is not None:
            if next(self._backlog, None) is None:
                self._backlog = None
            return True
        if self._demote():
            return True
        if not self._behind:
            self._ownership.advance(self._follower.position)
        return False

    def _compare(self, numbers: Sequence[int]) -> Iterator[list[bytes]]:
        """Look through the whole first tier, parents first, and copy what these tiers lack."""
        found = sorted(self._front.scan(), key=lambda info: info.number) if numbers else []
        for start in range(0, len(found), COPY_CHUNKS):
            keys = [info.key for info in found[start : start + COPY_CHUNKS]]
            self._copy(keys, numbers)
            yield keys

    def _demote(self) -> bool:
        """Copy the least recently used chunks of a first tier that is nearly full to the tiers that get only those."""
        numbers = [i for i, tier in enumerate(self._tiers) if tier.mode == "demote" and tier.usable]
        now = time.monotonic()
        if not numbers or now < self._demoted_at + _RETRY_S:
            return False
        self._demoted_at = now
        stats = self._front.stats()
        if stats.used_bytes < _DEMOTE_ABOVE * stats.data_bytes:
            return False
        oldest = sorted(self._front.scan(), key=lambda info: (info.last_used_ns, -info.number))
        room, chosen = stats.data_bytes // _DEMOTE_SHARE, []
        for info in oldest:
            if room < 0:
                break
            room -= info.num_bytes
            chosen.append(info)
        keys = [info.key for info in sorted(chosen, key=lambda info: info.number)]
        for start in range(0, len(keys), COPY_CHUNKS):
            self._copy(keys[start : start + COPY_CHUNKS], numbers)
        return False

    # ---- copying ------------------------------------------------------------------------------------------------
    def _copy(self, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        for i in numbers:
            tier = self._tiers[i]
            missing = tier.missing(keys) if tier.usable else None
            full = tier.counts.now()["full"]
            if missing is None or not self.copy_to(tier, missing):
                self._behind.setdefault(i, time.monotonic() + _RETRY_S)
            elif tier.counts.now()["full"] > full:
                # It may be full for long, or have lost its memory for a moment: try again, less and less often.
                self._full[i] = min(2 * self._full.get(i, _RETRY_S / 2), _LONGEST_RETRY_S)
                self._behind.setdefault(i, time.monotonic() + self._full[i])
            elif missing:
                self._full.pop(i, None)

    def copy_to(self, tier: LowerTier, keys: Sequence[bytes]) -> bool:
        """Copy chunks that a tier lacks, as many at once as fit into a batch; False where it must be tried again."""
        done = list[bool]()

        def put(batch: Sequence[Exported]) -> None:
            done.append(self._put(tier, batch))

        def works() -> Iterator[Callable[[], None]]:
            batches = export_batches(self._front, tier, keys)
            while not self._stop and (batch := next(batches, None)) is not None:
                yield partial(put, batch)

        run_in_threads(works(), tier.num_writers)
        return all(done)

    def _export(self, tier: LowerTier, key: bytes) -> Exported | None:
        return _export(self._front, tier, key)

    def _put(self, tier: LowerTier, batch: Sequence[Exported]) -> bool:
        if not batch:
            return True
        try:
            statuses = self._put_verified(tier, batch)
            orphans = [item for item, status in zip(batch, statuses, strict=True) if status == Status.NO_PARENT]
            for item in orphans:
                self._put_chain(tier, item)
        except HeadwaterError as error:
            log.warning("copying to %s failed: %s", tier.url, error)
            return False
        finally:
            for item in batch:
                item.release()
        return not any(status in (Status.TIMEOUT, Status.BUSY) for status in statuses)

    def _put_verified(self, tier: LowerTier, batch: Sequence[Exported]) -> list[Status]:
        """Copy chunks, and see that damage does not stay where it has spread. A fetched chunk that does not verify is
        not stored by the tier, and removed from the first one here."""
        statuses = tier.put(batch)
        for item, status in zip(batch, statuses, strict=True):
            if status == Status.DAMAGED:
                spec, chunk = item.root.space.spec, item.chunk
                shard = whole_shard(spec)
                scratch = np.empty(shard.local_shape(spec, chunk.first_token, chunk.num_tokens), np.uint8)
                self._front.judge(item.root, Piece(chunk, shard, scratch), _EXPORT_DEADLINE_S)
                recheck(self._tiers, item.root, item.chunk, _EXPORT_DEADLINE_S)
            elif status == Status.OK and self._is_suspect(item):
                recheck(self._tiers, item.root, item.chunk, _EXPORT_DEADLINE_S)
        return statuses

    def _is_suspect(self, item: Exported) -> bool:
        """Whether a chunk was damaged while it was copied in place. It is verified only if it has left the first tier
        meanwhile: whoever found the damage there has looked for other copies, perhaps before this one could be seen."""
        if item.sums is None or item.is_fetched or self._front.has_copy(item.chunk.key, item.record_id):
            return False
        return not is_right(item.tiles, item.sums)

    def _put_chain(self, tier: LowerTier, item: Exported) -> None:
        """Copy a chunk after those before it, which the tier lacks: it may have evicted them."""
        chain, key = list[Exported](), item.chunk.parent
        try:
            while (above := self._export(tier, key)) is not None:
                chain.append(above)
                if not tier.missing([above.chunk.parent]):
                    break
                key = above.chunk.parent
            if self._put_verified(tier, [*reversed(chain), item])[-1] == Status.NO_PARENT:
                self._early[item.chunk.key] = None
        finally:
            for above in chain:
                above.release()

    @classmethod
    def _after_fork(cls) -> None:
        for copier in cls._all:
            copier._ownership.after_fork()
            copier._owner = False
            copier._waiting.clear()
            copier._early.clear()
            copier._backlog = None
            copier._wake = threading.Event()


def export_batches(front: EmbeddedStore, tier: LowerTier, keys: Sequence[bytes]) -> Iterator[list[Exported]]:
    """Chunks of the first tier, as many at a time as are best copied together. Whoever takes a batch releases it."""
    at = 0
    while at < len(keys):
        batch, size = list[Exported](), 0
        try:
            while at < len(keys) and size < _BATCH_BYTES:
                item = _export(front, tier, keys[at])
                at += 1
                if item is not None:
                    batch.append(item)
                    size += item.tiles.nbytes
        except BaseException:
            for item in batch:
                item.release()
            raise
        yield batch


def _export(front: EmbeddedStore, tier: LowerTier, key: bytes) -> Exported | None:
    item = front.export(key, _EXPORT_DEADLINE_S, in_place=tier.keeps_sums)
    return item if item is None or tier.packing == Packing.OFF else _packed(item)


def _packed(item: Exported) -> Exported:
    """The chunk with its raw tiles packed: a lower tier is slower than the processor packs. As it is where they cannot
    be, or do not verify."""
    tiles = None
    if item.encoding == RAW:
        tiles = pack_tiles(item.root.space.spec, item.chunk.num_tokens, item.tiles, item.sums)
    return item if tiles is None else item._replace(tiles=tiles, sums=None, encoding=PACKED, is_fetched=False)


class NoCopier:
    """For those who only look: nothing is copied."""

    num_waiting = 0

    def start(self) -> None:
        """See `Copier`."""

    def wake(self) -> None:
        """See `Copier`."""

    def look_again(self, number: int) -> None:
        """See `Copier`."""

    def copy_to(self, tier: LowerTier, keys: Sequence[bytes]) -> bool:
        """See `Copier`."""
        return True

    def flush(self, timeout_s: float, *, also_full: bool = True) -> bool:
        """See `Copier`."""
        return True

    def close(self, timeout_s: float) -> None:
        """See `Copier`."""


os.register_at_fork(after_in_child=Copier._after_fork)
