"""What administrators do with a remote store: listings, clearing, a full check. Each looks at everything there is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from headwater.stores.base import Progress
from headwater.stores.events import EventKind
from headwater.stores.remote.announce import Announcer, LogEvent
from headwater.stores.remote.base import ObjectClient
from headwater.stores.remote.manifest import MAX_MANIFEST_BYTES, Manifest, Names, is_of_other_version
from headwater.stores.remote.plan import tile_sums
from headwater.stores.stats import ChunkInfo, VerifyReport

Description = tuple[dict[str, Any], dict[str, Any]]
"""What a space and a root are, as their writer described them."""

_DEADLINE_S = 60.0
_BATCH = 256
_MOST_DESCRIBED = 1 << 16


class RemoteAdmin:
    """The administrator's half of a remote store. Raises BackendError and DeadlineError: its callers wait for it."""

    def __init__(self, client: ObjectClient, names: Names, announcer: Announcer) -> None:
        self._client = client
        self._names = names
        self._announcer = announcer

    def clear(self, match: Callable[[dict[str, Any], dict[str, Any]], bool] | None, progress: Progress | None) -> int:
        """See `stores.base.Store.clear`."""
        deadline = time.monotonic() + _DEADLINE_S
        if match is None:
            removed = self._client.remove_prefix(f"{self._names.prefix}:m:", deadline)
            self._client.remove_prefix(f"{self._names.prefix}:", deadline, but=self._names.log)
            self._remove([], [LogEvent(EventKind.CLEARED)], deadline)
            return removed
        chosen: dict[bytes, bool] = {}
        removed = 0
        for found in self._manifests(deadline):
            doomed, told = list[str](), list[LogEvent]()
            for name, manifest in found:
                if manifest is None:
                    doomed.append(name)
                    continue
                if manifest.root not in chosen:
                    chosen[manifest.root] = match(*self._description(manifest.root, deadline))
                if chosen[manifest.root]:
                    doomed += self._names.all_of(manifest)
                    told.append(LogEvent.of(EventKind.REMOVED, manifest))
            removed += len(told)
            self._remove(doomed, told, deadline)
            if progress is not None:
                progress(removed, removed)
        self._remove(
            [], [LogEvent(EventKind.CLEARED, root) for root, is_chosen in chosen.items() if is_chosen], deadline
        )
        return removed

    def _remove(self, names: Sequence[str], told: Sequence[LogEvent], deadline: float) -> None:
        self._client.remove(names, deadline, self._announcer.notice(told))
        self._announcer.happened(told)

    def scan(self) -> Iterator[ChunkInfo]:
        """See `stores.base.Store.scan`."""
        deadline = time.monotonic() + _DEADLINE_S
        roots: dict[bytes, Description] = {}
        for found in self._manifests(deadline):
            for _, manifest in found:
                if manifest is None:
                    continue
                if manifest.root not in roots:
                    roots[manifest.root] = self._description(manifest.root, deadline)
                space, root = roots[manifest.root]
                yield ChunkInfo(
                    key=manifest.key,
                    space=space,
                    root=root,
                    number=manifest.number,
                    num_tokens=manifest.num_tokens,
                    num_bytes=manifest.num_bytes,
                    is_tail=manifest.num_tokens < manifest.chunk_tokens,
                    pinned=False,
                    leased=False,
                    last_used_ns=manifest.created_ns,
                )

    def verify(self, progress: Progress | None) -> VerifyReport:
        """See `stores.base.Store.verify`."""
        deadline = time.monotonic() + _DEADLINE_S
        chunks = tiles = num_bytes = damaged = 0
        for found in self._manifests(deadline):
            for name, manifest in found:
                names = [name] if manifest is None else self._names.all_of(manifest)
                values = self._client.fetch(names[1:], 1 << 30, deadline)
                if manifest is not None and _is_right(manifest, values):
                    chunks, tiles, num_bytes = chunks + 1, tiles + len(manifest.sums), num_bytes + manifest.num_bytes
                else:
                    damaged += 1
                    told = [] if manifest is None else [LogEvent.of(EventKind.REMOVED, manifest)]
                    self._remove(names, told, deadline)
            if progress is not None:
                progress(chunks, chunks)
        return VerifyReport(chunks, tiles, num_bytes, damaged, 0, ())

    def _manifests(self, deadline: float) -> Iterator[list[tuple[str, Manifest | None]]]:
        """All that are listed, in batches; None for noise under such a name. Without those of other versions."""
        for batch in _batches(self._client.scan(f"{self._names.prefix}:m:", deadline)):
            found = list[tuple[str, Manifest | None]]()
            for name, raw in zip(batch, self._client.fetch(batch, MAX_MANIFEST_BYTES, deadline), strict=True):
                key = self._names.key_of(name)
                if raw is not None and not (key is not None and is_of_other_version(key, raw)):
                    found.append((name, Manifest.decode(key, raw) if key is not None else None))
            yield found

    def _description(self, root: bytes, deadline: float) -> Description:
        raw = self._client.fetch([self._names.root(root)], _MOST_DESCRIBED, deadline)[0]
        try:
            space, described = json.loads(raw or b"[{}, {}]")
        except (ValueError, TypeError):
            return {}, {}
        return (space, described) if isinstance(space, dict) and isinstance(described, dict) else ({}, {})


def _is_right(manifest: Manifest, values: Sequence[bytes | None]) -> bool:
    joined = np.frombuffer(b"".join(value or b"" for value in values), np.uint8)
    if len(joined) != manifest.num_bytes:
        return False
    tiles = joined.reshape(manifest.num_layers, manifest.num_heads, manifest.tile_bytes)
    return bool(np.array_equal(tile_sums(tiles), manifest.sums))


def _batches(names: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for name in names:
        batch.append(name)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
