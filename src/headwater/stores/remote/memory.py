"""What a process remembers of a remote store: manifests it has read, and answers to look-ups of the last second."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from headwater.locks import ForkSafeLock
from headwater.stores.remote.manifest import Manifest

_MANIFESTS = 4096
_KEYS = 1 << 16
_ABSENT_S = 0.05


class Memory:
    """Bounded, and never the last word: a manifest may be an old one, and what was absent may have come since."""

    def __init__(self) -> None:
        self._manifests: OrderedDict[bytes, Manifest] = OrderedDict()
        self._absent_until: OrderedDict[bytes, float] = OrderedDict()
        self._lock = ForkSafeLock()

    def manifest(self, key: bytes) -> Manifest | None:
        """The manifest that was read last under that key."""
        return self._manifests.get(key)

    def keep(self, manifest: Manifest) -> None:
        """Note a manifest that was read."""
        with self._lock:
            self._manifests[manifest.key] = manifest
            while len(self._manifests) > _MANIFESTS:
                self._manifests.popitem(last=False)

    def run_limit(self, keys: Sequence[bytes], now: float) -> int:
        """How many keys are worth asking for: up to the first that was absent a moment ago, so that a scheduler which
        asks for every waiting request at every step does not ask for all of them."""
        absent = self._absent_until
        return next((i for i, key in enumerate(keys) if absent.get(key, 0.0) > now), len(keys))

    def note_absent(self, key: bytes, now: float) -> None:
        """Remember for a moment that a chunk was not there."""
        with self._lock:
            self._absent_until[key] = now + _ABSENT_S
            self._absent_until.move_to_end(key)
            while len(self._absent_until) > _KEYS:
                self._absent_until.popitem(last=False)

    def forget(self, keys: Collection[bytes] | None = None) -> None:
        """Forget these chunks, or everything."""
        with self._lock:
            if keys is None:
                self._manifests.clear()
                self._absent_until.clear()
            for key in keys or ():
                self._manifests.pop(key, None)
                self._absent_until.pop(key, None)
