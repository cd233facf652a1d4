"""Where the chains of a space's tenants and adapters begin: the roots that this process has named, by key."""

from __future__ import annotations

import json

from headwater.errors import InvalidArgumentError
from headwater.kv.hashing import root_key
from headwater.kv.identity import Identity
from headwater.locks import ForkSafeLock
from headwater.pool.tenants import tenant_salt, tenant_tag
from headwater.stores.base import RootRef, SpaceRef

_MAX_ROOTS = 65536


class Roots:
    """Of one space. Thread-safe; remembers the newest ones."""

    def __init__(self, ref: SpaceRef, identity: Identity, tenant_secret: bytes | None) -> None:
        self._ref = ref
        self._identity = identity
        self._tenant_secret = tenant_secret
        self._roots: dict[bytes, RootRef] = {}
        self._lock = ForkSafeLock()
        self.any = self.name()
        """The nameless tenant's: for whatever needs no particular one."""

    def name(self, tenant: bytes = b"", adapter: bytes = b"") -> RootRef:
        """The root of a tenant and adapter."""
        ref, identity = self._ref, self._identity
        salt = tenant_salt(self._tenant_secret, tenant)
        key = root_key(identity.digest, ref.spec.digest, ref.chunk_tokens, salt, adapter)
        with self._lock:
            root = self._roots.pop(key, None)
            if root is None:
                described = {"chunk_tokens": ref.chunk_tokens, "tenant": tenant_tag(tenant)}
                described |= {"adapter": adapter.hex()[:64], "label": identity.label[:128]}
                payload = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
                root = RootRef(ref, key, payload)
                self._make_room()
            self._roots[key] = root  # the last one, now, to be forgotten
        return root

    def adopt(self, key: bytes, payload: bytes) -> RootRef:
        """A root whose key another host computed, with its description there."""
        root = RootRef(self._ref, key, payload)
        with self._lock:
            self._make_room()
            return self._roots.setdefault(key, root)

    def _make_room(self) -> None:
        while len(self._roots) >= _MAX_ROOTS:
            self._roots.pop(next(iter(self._roots)))

    def find_or_any(self, key: bytes) -> RootRef:
        """For reading, which needs no root; only what is brought to a faster tier does."""
        with self._lock:
            return self._roots.get(key, self.any)

    def find(self, key: bytes) -> RootRef:
        """For writing. Raises InvalidArgumentError for a root that this process has not named."""
        root = self.find_or_any(key)
        if root.key != key:
            raise InvalidArgumentError(
                "these chunks belong to another space, or to a tenant or adapter that this process has not named; "
                "call Space.root(tenant=…, adapter=…) first"
            )
        return root
