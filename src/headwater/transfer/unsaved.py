"""Which requests have chunks that were not saved, for the scheduler side: it may order them again, or say so."""

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
