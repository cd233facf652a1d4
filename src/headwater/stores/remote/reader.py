"""Reading from a remote store: manifests, then ranges, each tile verified where it lands while others arrive."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from headwater.kv.encoding import ENCODINGS, can_decode, refuse
from headwater.kv.spec import KVSpec
from headwater.stores.base import Piece, Run, Status
from headwater.stores.events import EventKind
from headwater.stores.remote.announce import Announcer, LogEvent
from headwater.stores.remote.base import ObjectClient
from headwater.stores.remote.guard import Guard
from headwater.stores.remote.manifest import MAX_MANIFEST_BYTES, Manifest, Names, is_of_other_version
from headwater.stores.remote.memory import Memory
from headwater.stores.remote.plan import ObjectReadPlan

log = logging.getLogger("headwater")

_ATTEMPTS = 2

Attempt = Callable[[Sequence[int], bool], list[int]]
"""One attempt at some items, with remembered manifests or without: which of them are worth another."""


class RemoteReader:
    """The reading half of a remote store."""

    def __init__(
        self,
        client: ObjectClient,
        names: Names,
        guard: Guard,
        memory: Memory,
        announcer: Announcer,
        lookup_s: float,
    ) -> None:
        self._client = client
        self._announcer = announcer
        self._names = names
        self._guard = guard
        self._memory = memory
        self._lookup_s = lookup_s
        self._met_other_version = False

    # ---- finding ------------------------------------------------------------------------------------------------
    def run(self, parent: bytes, keys: Sequence[bytes]) -> Run:
        """The run of `keys` that hang under `parent`, wherever that is stored, and the tails below its end.

        One question to the backend; nothing found where it does not answer in time.
        """
        now = time.monotonic()
        keys = keys[: self._memory.run_limit(keys, now)]
        names = [self._names.manifest(key) for key in keys]
        lists = [self._names.tails(key) for key in (parent, *keys)]
        end = now + self._lookup_s
        found = self._guard.run("look-up", lambda: self._client.survey(names, lists, end), end)
        if found is None:
            return Run(0, ())
        length = next((i for i, there in enumerate(found.present) if not there), len(keys))
        if length < len(keys):
            self._memory.note_absent(keys[length], now)
        return Run(length, found.tails[length])

    def has(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Whether each manifest is there; None where the backend does not say so in time."""
        if not keys:
            return []
        end = time.monotonic() + self._lookup_s
        names = [self._names.manifest(key) for key in keys]
        found = self._guard.run("look-up", lambda: self._client.survey(names, (), end), end)
        return None if found is None else found.present

    def known(self, keys: Sequence[bytes]) -> set[bytes]:
        """Which of these chunks' manifests are remembered."""
        return {key for key in keys if self._memory.manifest(key) is not None}

    def manifests(self, keys: Sequence[bytes], known: set[bytes], deadline: float) -> dict[bytes, Manifest | None]:
        """The manifests of these chunks; those of `known` from memory. Noise under such a name is removed, and what
        another version of Headwater wrote stays."""
        found = {key: self._memory.manifest(key) for key in known}
        missing = [key for key in keys if found.get(key) is None]
        if not missing:
            return found
        raw = self._client.fetch([self._names.manifest(key) for key in missing], MAX_MANIFEST_BYTES, deadline)
        for key, value in zip(missing, raw, strict=True):
            found[key] = manifest = None if value is None else Manifest.decode(key, value)
            if manifest is not None:
                self._memory.keep(manifest)
            elif value is not None and is_of_other_version(key, value):
                self._note_other_version()
            elif value is not None:
                self._guard.count(damaged=1)
                self._client.remove([self._names.manifest(key)], deadline)
        return found

    def _note_other_version(self) -> None:
        if not self._met_other_version:
            self._met_other_version = True
            log.warning("%s has manifests of another version of Headwater: those chunks are misses", self._guard.name)

    # ---- reading ------------------------------------------------------------------------------------------------
    def read(self, spec: KVSpec, pieces: Sequence[Piece], deadline: float) -> list[Status]:
        """See `stores.base.Store.read`. Two round trips, one where the manifests are known.

        A second attempt is safe, since reading changes nothing: it is made after an error, and for chunks whose
        remembered manifest turned out to be an old one.
        """
        statuses = [Status.MISS] * len(pieces)
        undecided = self.attempt(partial(self._read, spec, pieces, statuses, deadline), statuses, deadline)
        self.judge(
            [piece.chunk.key for piece in pieces],
            statuses,
            undecided,
            [number for number in ENCODINGS if can_decode(number)],
        )
        self.count([piece.tiles.nbytes for piece in pieces], statuses)
        return statuses

    def attempt(self, work: Attempt, statuses: list[Status], deadline: float) -> Collection[int]:
        """Do some work for all items, and again for those that it says are worth it, or after an error for those that
        are not OK. Returns the items of which nothing is known, because the backend failed."""
        wanted, again = list(range(len(statuses))), None
        for number in range(_ATTEMPTS):
            again = self._guard.run("read", partial(work, tuple(wanted), number == 0), deadline, retry=False)
            wanted = [i for i in wanted if statuses[i] != Status.OK] if again is None else again
            if not wanted or time.monotonic() >= deadline or not self._guard.breaker.closed:
                break
        if time.monotonic() >= deadline:
            for i in wanted:
                statuses[i] = Status.TIMEOUT
        return wanted if again is None else ()

    def count(self, sizes: Sequence[int], statuses: Sequence[Status]) -> None:
        """Count hits and misses of one read."""
        good = [size for size, status in zip(sizes, statuses, strict=True) if status == Status.OK]
        self._guard.count(hits=len(good), hit_bytes=sum(good), misses=len(statuses) - len(good))

    def _read(
        self,
        spec: KVSpec,
        pieces: Sequence[Piece],
        statuses: list[Status],
        deadline: float,
        wanted: Sequence[int],
        use_memory: bool,
    ) -> list[int]:
        """One attempt at what is wanted. Returns what is worth another: what an old manifest may have led astray."""
        keys = list(dict.fromkeys(pieces[i].chunk.key for i in wanted))
        known = self.known(keys) if use_memory else set[bytes]()
        for i in wanted:
            statuses[i] = Status.MISS  # until all of it is here and verified, also if this ends early
        manifests = self.manifests(keys, known, deadline)
        plan, outcome = ObjectReadPlan(spec, self._names), dict[int, Status]()
        for i in wanted:
            manifest = manifests.get(pieces[i].chunk.key)
            if manifest is not None and not can_decode(manifest.encoding):
                refuse(manifest.encoding, self._guard.name)
            elif manifest is not None and manifest.fits(pieces[i].chunk, spec):
                outcome[i] = Status.OK
                plan.add(i, pieces[i], manifest)
        wrong: list[tuple[int, Status]] = []

        def landed(number: int, targets: range) -> None:
            proof = plan.proofs[number]
            if not targets:
                wrong.append((proof.piece, Status.MISS))
            elif not proof.holds(targets):
                wrong.append((proof.piece, Status.DAMAGED))

        if plan.spans:
            self._client.read(plan.spans, deadline, landed)
        for i, status in wrong:
            outcome[i] = max(outcome[i], status)
        for i, status in outcome.items():
            is_good = status != Status.OK or plan.settle(i, pieces[i])
            statuses[i] = status if is_good else Status.DAMAGED
        again = [i for i in wanted if statuses[i] != Status.OK and pieces[i].chunk.key in known]
        self._memory.forget({pieces[i].chunk.key for i in again})
        return again

    def judge(
        self, keys: Sequence[bytes], statuses: Sequence[Status], undecided: Collection[int], encodings: Collection[int]
    ) -> None:
        """Take manifests away that promise what is not there any more, or is not what was written. Only of chunks in
        encodings that the reader knows: what others wrote is not ours to judge."""
        gone: dict[bytes, Manifest] = {}
        for i, (key, status) in enumerate(zip(keys, statuses, strict=True)):
            manifest = self._memory.manifest(key)
            if manifest is None or manifest.encoding not in encodings or i in undecided:
                continue
            if status in (Status.MISS, Status.DAMAGED) and key not in gone:
                gone[key] = manifest
                self._guard.count(damaged=status == Status.DAMAGED, vanished=status == Status.MISS)
        if gone and self._guard.breaker.closed:
            names = [name for manifest in gone.values() for name in self._names.all_of(manifest)]
            deadline = time.monotonic() + self._lookup_s
            told = [LogEvent.of(EventKind.REMOVED, manifest) for manifest in gone.values()]
            notice = self._announcer.notice(told)

            def work() -> bool:
                self._client.remove(names, deadline, notice)
                return True

            if self._guard.run("removal", work, deadline):
                self._announcer.happened(told)
            self._memory.forget(gone)
