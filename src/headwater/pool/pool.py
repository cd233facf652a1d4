"""The pool: a store, opened once, and the spaces in it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from headwater.errors import CapacityError
from headwater.kv.encoding import stored_extent_bytes
from headwater.kv.hashing import DEFAULT_CHUNK_TOKENS, check_chunk_tokens, root_key
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.locks import ForkSafeLock
from headwater.pool.space import Space
from headwater.pool.tenants import tenant_salt, tenant_tag
from headwater.stores import open_urls
from headwater.stores.base import Progress, SpaceRef, Store
from headwater.stores.config import find_pool
from headwater.stores.embedded import EmbeddedStore
from headwater.stores.events import Follower
from headwater.stores.stats import ChunkInfo, StoreStats, TierStats, VerifyReport
from headwater.stores.url import DEFAULT_URL, format_size


@dataclass(frozen=True)
class PoolStats:
    """The store now, and what this process did with it since it opened it."""

    store: StoreStats
    counts: Mapping[str, int] = field(default_factory=dict)
    """`matches`, `matched_tokens`, `asked_tokens`, `read_bytes`, `write_bytes`, and `read_…`/`write_…` per status."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"store": asdict(self.store), "process": dict(self.counts)}


class Pool:
    """KV that processes share. Thread-safe; a forked child may go on using it."""

    def __init__(self, store: Store, *, tenant_secret: bytes | None = None) -> None:
        self._store = store
        self._tenant_secret = tenant_secret
        self._counts: Counter[str] = Counter()
        self._counts_lock = ForkSafeLock()

    def space(self, identity: Identity, spec: KVSpec, *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> Space:
        """The part of the pool that holds KV of these weights in this form.

        Raises CapacityError where the store is too small for one chunk, and SpecMismatchError where it holds KV of
        the same weights under another spec.
        """
        extent, most = stored_extent_bytes(spec, check_chunk_tokens(chunk_tokens)), self._store.max_extent_bytes
        if extent > most:
            raise CapacityError(
                f"one chunk of {chunk_tokens} tokens takes {format_size(extent)}, and this store can hold chunks of at "
                f"most {format_size(most)} (a segment, and a quarter of its data); give it more capacity, a larger "
                "segment, or use fewer chunk_tokens"
            )
        key = hashlib.sha256(b"headwater space\0" + identity.digest).digest()
        described = {"identity": identity.canonical(), "spec": spec.canonical()}
        described["identity"].pop("label", None)
        payload = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
        salt = tenant_salt(self._tenant_secret, b"")
        scope = root_key(identity.digest, spec.digest, chunk_tokens, salt, b"")
        ref = SpaceRef(spec, chunk_tokens, key, payload, scope)
        self._store.check_space(ref)
        return Space(self._store, ref, identity, self.count, self._tenant_secret)

    def clear(
        self, *, space: Space | None = None, tenant: bytes | None = None, progress: Progress | None = None
    ) -> int:
        """Remove one space, one tenant, one tenant in one space, or (with neither) everything. Returns the number of
        chunks removed."""
        if space is None and tenant is None:
            return self._store.clear(None, progress)
        wanted = None if space is None else json.loads(space.ref.payload)
        tag = None if tenant is None else tenant_tag(tenant)

        def match(described: dict[str, Any], root: dict[str, Any]) -> bool:
            if wanted is not None and described != wanted:
                return False
            if space is not None and root.get("chunk_tokens") != space.ref.chunk_tokens:
                return False
            return tag is None or root.get("tenant") == tag

        return self._store.clear(match, progress)

    @property
    def home(self) -> str:
        """Names the first tier, on this host: processes with the same one can fill a chunk together, others cannot."""
        return self._store.home

    @property
    def max_pending_bytes(self) -> int:
        """How many bytes may be reserved and not yet visible, by all servers together."""
        return self._store.max_pending_bytes

    @property
    def first_tier(self) -> Store:
        """The tier that chunks are written to, and the only one that this host serves to other hosts."""
        return self._store.first

    @property
    def directory(self) -> str | None:
        """Where the files of the first tier are; None where it has none (`memory://`, a remote store)."""
        first = self._store.first
        return first.directory if isinstance(first, EmbeddedStore) else None

    def scan(self) -> Iterator[ChunkInfo]:
        """Every chunk that can be found, in no particular order."""
        return self._store.scan()

    def stats(self) -> PoolStats:
        """Figures of the store and of this process."""
        with self._counts_lock:
            counts = dict(self._counts)
        return PoolStats(self._store.stats(), counts)

    def tiers(self) -> tuple[TierStats, ...]:
        """What this process did with each tier; empty if there is only one. Asks no server."""
        return self._store.tiers()

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read and check everything. Damaged chunks are removed."""
        return self._store.verify(progress)

    def follow(self, since: int | None = None) -> Follower:
        """What happens to chunks from now on (`stored`, `removed`, `cleared`, each with its tier), by all writers of
        this host. Call `poll` or `wait` on the result."""
        return self._store.follow(since)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the lower tiers have what the first one has now; False if that takes too long."""
        return self._store.flush(timeout_s)

    def count(self, **amounts: int) -> None:
        """Add to this process's counters."""
        with self._counts_lock:
            self._counts.update(amounts)

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._store.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_pool(url: str = DEFAULT_URL, *, group: int | None = None, create: bool = True) -> Pool:
    """Open the pool at `url` (or at several, separated by commas, fastest first; or one that the configuration names),
    and create it if there is none (unless `create` is False).

    Processes of one server that write parts of the same chunks must pass the same `group` (any random non-zero
    63-bit number they agree on); without it, each process is a server of its own.
    """
    config = find_pool(url)
    return Pool(open_urls(config.urls, group, create=create), tenant_secret=config.tenant_secret)
