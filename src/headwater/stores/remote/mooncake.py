"""`mooncake://`: a Mooncake cluster as a place for chunks, through its own client library.

The library's calls cannot be cancelled and may hang for minutes while a master is away, so they run in threads of
their own: whoever is late is left behind. Bytes are put straight from the store's mapped memory, which is registered
once. What lies in the memory that this process gave is read in place (see `mooncake_near`); all else arrives in
registered blocks of ours (see `staging`), and is copied from there to the caller and verified while the next block
arrives.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from headwater.errors import BackendError, DeadlineError, StoreError
from headwater.extras import install_hint
from headwater.locks import ForkSafeLock
from headwater.stores.base import Status
from headwater.stores.remote.base import (
    MAX_TAILS,
    BackendUsage,
    Bytes,
    Landed,
    LogEntries,
    NewManifest,
    NewObject,
    Notice,
    ObjectRange,
    Position,
    Survey,
)
from headwater.stores.remote.mooncake_config import MooncakeConfig, own_address
from headwater.stores.remote.mooncake_master import MasterMetrics
from headwater.stores.remote.mooncake_near import NearMemory, find_near
from headwater.stores.remote.mooncake_stream import MooncakeStream, StreamedBatch
from headwater.stores.remote.staging import Blocks
from headwater.stores.url import StoreUrl
from headwater.stores.workers import Workers

log = logging.getLogger("headwater")

_BLOCK_BYTES = 16 << 20
_BLOCKS = 8
_THREADS = 6
_KNOCK_S = 0.5
_CLOSE_S, _CLOSE_DEADLINE_S = 1.0, 10.0
_REGISTER_ABOVE = 1 << 20
_NEAR_TRIES = 3

_NO_ROOM, _RPC_FAILED = (-200, -201), (-900, -901, -1)
_TAILS = struct.Struct(f"<{MAX_TAILS}I")


class MooncakeClient:
    """One client of one cluster. See `base.ObjectClient`."""

    num_writers = 3
    has_log = False  # objects by name are all it has: none that grows, and no names that could be listed

    def __init__(self, url: StoreUrl) -> None:
        self._name = str(url)
        self._config = MooncakeConfig.of(url)
        self._metrics = MasterMetrics(self._config.master_place[0], self._config.metrics_port)
        self._workers = Workers(_THREADS, "headwater-mooncake")
        self._blocks = Blocks(_BLOCK_BYTES, _BLOCKS, self._register, self._unregister)
        self._store: Any = None
        self._replication: Any = None
        self._holding: Any = None
        """The same for objects of chunks that somebody holds."""
        self._registered: dict[int, Any] = {}
        self._given = False
        self._wants_to_give = False
        self._near: NearMemory | None = None
        self._lock = ForkSafeLock()
        self._listing = ForkSafeLock()
        """Held while a list of tails is read, changed and written back: several batches are published at a time."""
        self._setting_up = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    # ---- finding ------------------------------------------------------------------------------------------------
    def ping(self, deadline: float) -> None:
        """See `base.ObjectClient`."""
        self._knock(deadline)
        self._exists([f"{self._name}?"], deadline)

    def survey(self, names: Sequence[str], tail_lists: Sequence[str], deadline: float) -> Survey:
        """See `base.ObjectClient`. Two questions: which manifests, then the tail list where the run ends."""
        present = self._exists(names, deadline) if names else []
        tails: list[tuple[int, ...]] = [()] * len(tail_lists)
        if tail_lists:
            end = next((i for i, there in enumerate(present) if not there), len(present))
            tails[end] = self._tails(tail_lists[end], deadline)
        return Survey(present, tails)

    def _exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        found = self._call(lambda store: store.batch_is_exist(list(names)), deadline)
        return [code == 1 for code in self._codes(found, len(names))]

    def fetch(self, names: Sequence[str], limit: int, deadline: float) -> list[bytes | None]:
        """See `base.ObjectClient`."""
        if not names:
            return []
        values = self._call(lambda store: store.get_batch(list(names)), deadline)
        if not isinstance(values, list) or len(values) != len(names):
            self._exists(names[:1], deadline)  # raises where the master is away
            return [None] * len(names)
        return [bytes(value) if value and len(value) <= limit else None for value in values]

    def _tails(self, name: str, deadline: float) -> tuple[int, ...]:
        raw = self.fetch([name], _TAILS.size, deadline)[0]
        return tuple(n for n in _TAILS.unpack(raw) if n) if raw is not None and len(raw) == _TAILS.size else ()

    # ---- reading ------------------------------------------------------------------------------------------------
    def read(self, spans: Sequence[ObjectRange], deadline: float, landed: Landed) -> None:
        """See `base.ObjectClient`. What is far comes in batches; meanwhile what is near is copied and verified, and
        then one batch while others arrive."""
        near = self._near
        if near is None:
            self._read_far(spans, range(len(spans)), lambda: None, deadline, landed)
            return
        names = list(dict.fromkeys(span.name for span in spans))
        replicas = self._call(lambda store: store.batch_get_replica_desc(names), deadline)
        with near.in_use() as usable:
            places = near.locate(replicas, spans) if usable and isinstance(replicas, dict) else {}
            far = [number for number in range(len(spans)) if number not in places]
            at_hand = partial(near.land, spans, places, deadline, landed)
            if far:
                self._read_far([spans[number] for number in far], far, at_hand, deadline, landed)
            else:
                at_hand()

    def _read_far(
        self,
        spans: Sequence[ObjectRange],
        numbers: Sequence[int],
        meanwhile: Callable[[], None],
        deadline: float,
        landed: Landed,
    ) -> None:
        stream = MooncakeStream(self._ready(deadline), spans, self._blocks, deadline)
        job = self._workers.begin(stream.work)
        if job is None:
            raise BackendError("all threads are blocked in calls that do not return")
        try:
            meanwhile()
            left = len(spans)
            while left:
                arrived = stream.next()
                self._land(arrived, spans, numbers, landed)
                stream.done_with(arrived)
                left -= len(arrived.batch.spans)
        except BaseException:
            self._workers.wait(job, 0.0)  # from now on it counts as late
            raise
        finally:
            stream.abandon()

    def _land(
        self, arrived: StreamedBatch, spans: Sequence[ObjectRange], numbers: Sequence[int], landed: Landed
    ) -> None:
        """Copy a batch to its targets one by one: what was copied is still in the cache when it is verified."""
        (batch, places), block, codes = arrived
        for i, at, code in zip(batch, places, self._codes(codes, len(batch)), strict=True):
            if code != spans[i].length:
                landed(numbers[i], range(0))
                continue
            for number, target in enumerate(spans[i].targets):
                np.copyto(target, block[at : at + target.size])
                at += target.size
                landed(numbers[i], range(number, number + 1))

    # ---- writing ------------------------------------------------------------------------------------------------
    def write(self, objects: Sequence[NewObject], deadline: float) -> list[Status]:
        """See `base.ObjectClient`. Straight from where the parts lie, in one batch; what is held in another."""
        if not objects:
            return []
        self._ready(deadline)
        statuses = [Status.OK] * len(objects)
        for is_held in (False, True):
            share = [i for i, new in enumerate(objects) if new.is_held is is_held]
            if share:
                put = partial(self._put, [objects[i] for i in share])
                for i, code in zip(share, self._codes(self._call(put, deadline), len(share)), strict=True):
                    statuses[i] = _stored(code)
        return statuses

    def _put(self, objects: Sequence[NewObject], store: Any) -> Any:
        """Keeps the objects until the call has ended, however late: the library reads from their memory."""
        config = self._holding if objects[0].is_held else self._replication
        names, places, sizes = [], list[list[int]](), list[list[int]]()
        for new in objects:
            names.append(new.name)
            places.append([self._registered_place(part) for part in new.parts])
            sizes.append([part.nbytes for part in new.parts])
        if all(len(parts) == 1 for parts in places):
            return store.batch_put_from(names, [p[0] for p in places], [s[0] for s in sizes], config)
        return store.batch_put_from_multi_buffers(names, places, sizes, config)

    def publish(self, manifests: Sequence[NewManifest], deadline: float, log: str = "") -> list[Status]:
        """See `base.ObjectClient`. Putting what exists changes nothing and says nothing, so that is asked just before.
        Of two who come within that millisecond one leaves pieces that nobody will read, until they are evicted."""
        there = self._exists([new.name for new in manifests], deadline)
        absent = [new for new, is_there in zip(manifests, there, strict=True) if not is_there]
        for is_held, config in ((False, self._replication), (True, self._holding)):
            group = [new for new in absent if new.is_held is is_held]
            if not group:
                continue
            put = partial(_put_values, [new.name for new in group], [new.value for new in group], config)
            code = self._call(put, deadline)
            if code in _NO_ROOM:
                return [Status.FULL] * len(manifests)
            if code != 0:
                raise BackendError(f"Mooncake failed to put: {code}")
        for new in manifests:
            if new.tail_list is not None:
                self._list_tail(new.tail_list, new.num_tokens, deadline)
        return [Status.EXISTS if is_there else Status.OK for is_there in there]

    def _list_tail(self, name: str, num_tokens: int, deadline: float) -> None:
        """Put a length in front. Two hosts that do so at once may lose one: a tail that is not found, nothing more."""
        if not self._listing.acquire(max(0.0, deadline - time.monotonic())):
            raise DeadlineError("waiting for other updates of tail lists took too long")
        try:
            known = self._tails(name, deadline)
            if known[:1] == (num_tokens,):
                return
            lengths = [num_tokens, *(n for n in known if n != num_tokens)][:MAX_TAILS]
            value = _TAILS.pack(*lengths, *[0] * (MAX_TAILS - len(lengths)))
            self._call(lambda store: store.upsert(name, value, self._replication), deadline)
        finally:
            self._listing.release()

    # ---- keeping and forgetting ---------------------------------------------------------------------------------
    def read_log(self, log: str, after: Position | None, limit: int, deadline: float) -> LogEntries | None:
        """See `base.ObjectClient`."""
        return None

    def remove(self, names: Sequence[str], deadline: float, notice: Notice | None = None) -> None:
        """See `base.ObjectClient`."""
        if names:
            self._codes(self._call(lambda store: store.batch_remove(list(names), True), deadline), len(names))

    def remove_prefix(self, prefix: str, deadline: float, *, but: str = "") -> int:
        """See `base.ObjectClient`."""
        code = self._call(lambda store: store.remove_by_regex(f"^{prefix}.*", True), deadline)
        if not isinstance(code, int) or code < 0:
            raise BackendError(f"Mooncake failed to remove: {code}")
        return code

    def keep(self, names: Sequence[str], pinned: bool, deadline: float) -> None:
        """See `base.ObjectClient`. To ask for an object is to lease it for a while; pins are made when it is put."""
        self._exists(names, deadline)

    def scan(self, prefix: str, deadline: float) -> Iterator[str]:
        """See `base.ObjectClient`: the master says that on the port of its metrics, not to its clients."""
        return self._metrics.names(prefix, deadline)

    def usage(self, deadline: float) -> BackendUsage:
        """See `base.ObjectClient`. Zeros where the master's metrics cannot be asked."""
        self._exists([f"{self._name}?"], deadline)
        try:
            return self._metrics.usage(deadline)
        except (BackendError, DeadlineError):
            return BackendUsage(0, 0)

    # ---- the client ---------------------------------------------------------------------------------------------
    def contribute(self) -> None:
        """See `base.ObjectClient`."""
        self._wants_to_give = True
        if self._store is not None:
            self._workers.post(self._give)

    def _give(self) -> None:
        with self._lock:
            store, size = self._store, self._config.segment_bytes
            if store is None or self._given or not self._wants_to_give or not size:
                return
            self._given = True
        answer = store.allocate_and_mount_segment(size, self._config.protocol)
        if answer.get("ret"):
            log.warning(
                "%s could not add this host's memory to the pool (error %s); its segment is not used",
                self._name,
                answer.get("ret"),
            )
            self._given = False
        elif self._config.prefer_local:
            tries = (find_near(store, self._replication) for _ in range(_NEAR_TRIES))
            self._near = next((near for near in tries if near is not None), None)

    def _ready(self, deadline: float) -> Any:
        """The library's client. Setting it up takes milliseconds, or minutes where the master is away: nobody waits."""
        if self._closed:
            raise StoreError(f"{self._name} was closed")
        if self._pid != os.getpid():
            self._begin_anew()
        if self._store is None:
            self._knock(deadline)
            outcome = self._workers.call(self._set_up, deadline)
            if isinstance(outcome, Exception):
                raise BackendError(f"Mooncake: {outcome}") from outcome
            if self._store is None:
                raise BackendError("Mooncake is still being set up")
        return self._store

    def _knock(self, deadline: float) -> None:
        left = min(_KNOCK_S, deadline - time.monotonic())
        if left <= 0:
            raise DeadlineError("no time is left")
        try:
            socket.create_connection(self._config.master_place, timeout=left).close()
        except TimeoutError as error:
            raise DeadlineError(f"the master at {self._config.master} does not answer") from error
        except OSError as error:
            raise BackendError(f"no master at {self._config.master}: {error}") from error

    def _set_up(self) -> None:
        if not self._setting_up.acquire(blocking=False):
            return
        try:
            if self._store is not None:
                return
            module = _library()
            store, c = module.MooncakeDistributedStore(), self._config
            host = c.host or own_address(c.master_place)
            code = store.setup(host, c.metadata, 0, c.buffer_bytes, c.protocol, c.device, c.master)
            if code != 0:
                raise BackendError(f"the client could not be set up: {code}")
            self._replication, self._holding = (self._replicate(module, store, held) for held in (False, True))
            self._store = store
            self._give()
        finally:
            self._setting_up.release()

    def _replicate(self, module: Any, store: Any, is_held: bool) -> Any:
        """How objects are put. A soft pin lets others be evicted first: for as long as the URL says, else as long as
        the master does."""
        config = module.ReplicateConfig()
        config.replica_num = self._config.replicas
        if self._config.prefer_local:
            config.preferred_segment = store.get_hostname()
        if self._config.pin_s or is_held:
            config.soft_pin_action = module.SoftPinAction.ENABLE
        if self._config.pin_s:
            config.soft_pin_ttl_ms = round(1000 * self._config.pin_s)
        return config

    def _begin_anew(self) -> None:
        """In a forked child, which has none of the library's threads: a client of its own."""
        _left_behind.append(self._store)  # its destructor would wait for threads that are not there
        self._pid, self._store, self._given, self._registered, self._near = os.getpid(), None, False, {}, None
        self._setting_up = threading.Lock()
        self._workers = Workers(_THREADS, "headwater-mooncake")
        self._blocks = Blocks(_BLOCK_BYTES, _BLOCKS, self._register, self._unregister)

    def _call(self, work: Callable[[Any], Any], deadline: float) -> Any:
        store = self._ready(deadline)
        outcome = self._workers.call(lambda: work(store), deadline)
        if isinstance(outcome, Exception):
            raise BackendError(f"Mooncake: {outcome}") from outcome
        if outcome is None:
            raise DeadlineError("Mooncake does not answer in time")
        return outcome

    def _codes(self, found: object, count: int) -> list[int]:
        codes = found if isinstance(found, list) else [-1] * count
        if len(codes) != count or (codes and all(code in _RPC_FAILED for code in codes)):
            raise BackendError(f"the master at {self._config.master} cannot be reached")
        return codes

    # ---- memory -------------------------------------------------------------------------------------------------
    def _register(self, block: Bytes) -> None:
        if self._store is not None:
            self._store.register_buffer(block.ctypes.data, block.nbytes)

    def _unregister(self, block: Bytes) -> None:
        if self._store is not None:
            self._store.unregister_buffer(block.ctypes.data)

    def _registered_place(self, part: Bytes) -> int:
        """Where a part lies. The whole segment around it is registered, once; private memory of callers is not worth
        it."""
        place = int(part.__array_interface__["data"][0])
        if any(start <= place < start + held.nbytes for start, held in self._registered.items()):
            return place
        base: Any = part
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base.nbytes >= _REGISTER_ABOVE and isinstance(base.base, (mmap.mmap, memoryview)):
            with self._lock:
                store, start = self._store, base.ctypes.data
                if store is not None and start not in self._registered:
                    self._registered = {**self._registered, start: base}  # keeps it mapped
                    store.register_buffer(start, base.nbytes)
        return place

    def close(self) -> None:
        """See `base.ObjectClient`. A call that hangs keeps the client, and the memory that it reads from, until it ends
        or the process does."""
        if self._closed:
            return
        self._closed = True
        store, self._store = self._store, None
        if store is not None and self._pid == os.getpid():
            client = _OpenClient(store, self._registered, self._near, self._workers)
            if not client.end(_CLOSE_S):
                _left_behind.append(client)
        self._registered, self._near = {}, None


class _OpenClient(NamedTuple):
    """What must be ended in order: calls, registrations, the client, threads."""

    store: Any
    registered: dict[int, Any]
    near: NearMemory | None
    workers: Workers

    def end(self, patience_s: float) -> bool:
        """End it all, if no call hangs for longer than that."""
        deadline = time.monotonic() + patience_s
        while self._is_busy() and time.monotonic() < deadline:
            time.sleep(0.002)
        if self._is_busy():
            return False
        for address in self.registered:
            with contextlib.suppress(Exception):
                self.store.unregister_buffer(address)
        self.workers.call(self.store.close, time.monotonic() + _CLOSE_DEADLINE_S)
        self.workers.close()
        return True

    def _is_busy(self) -> bool:
        """Whether a call has not ended, or somebody reads from memory that would go."""
        return self.workers.jobs > 0 or (self.near is not None and not self.near.close())


_left_behind: list[Any] = []
"""Clients that could not be ended, kept from being destroyed while a call is inside."""


@atexit.register
def _end_left_behind() -> None:
    """A thread that comes out of the library while the interpreter goes down would take the process with it."""
    for client in _left_behind:
        if isinstance(client, _OpenClient):
            client.end(_CLOSE_DEADLINE_S)


def _library() -> Any:
    try:
        from mooncake import store
    except ImportError as error:
        raise BackendError(
            f"Mooncake's client cannot be loaded ({error}); {install_hint('mooncake')}, and on Debian "
            "apt-get install libibverbs1 libnuma1 libcurl4"
        ) from error
    return store


def _put_values(names: Sequence[str], values: Sequence[bytes], config: Any, store: Any) -> Any:
    return store.put_batch(names, values, config)


def _stored(code: int) -> Status:
    if code == 0:
        return Status.OK
    if code in _NO_ROOM:
        return Status.FULL
    raise BackendError(f"Mooncake refused a write: {code}")
