"""What was not saved, for the scheduler side: it may order it again, in another form, or say so."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Unsaved:
    """By request: the first token of its first chunk that was not saved. Thread-safe; forgotten once it was taken."""

    def __init__(self) -> None:
        self._first_tokens: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, lost: Iterable[tuple[str, int]]) -> None:
        """Note requests and first tokens of chunks that were not saved."""
        with self._lock:
            for name, first_token in lost:
                self._first_tokens[name] = min(first_token, self._first_tokens.get(name, first_token))

    def take(self) -> list[tuple[str, int]]:
        """All that was noted since the last call."""
        if not self._first_tokens:
            return []
        with self._lock:
            taken, self._first_tokens = self._first_tokens, {}
        return list(taken.items())


class Misfits:
    """Keys of chunks that could not be packed. Thread-safe; forgotten once they were taken."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._lock = threading.Lock()

    def add(self, keys: Iterable[bytes]) -> None:
        """Note some."""
        with self._lock:
            self._keys += keys

    def take(self) -> list[bytes]:
        """All that were noted since the last call."""
        if not self._keys:
            return []
        with self._lock:
            taken, self._keys = self._keys, []
        return taken
