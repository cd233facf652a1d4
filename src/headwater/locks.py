"""A lock that a forked child can use, whoever held it in the parent at the moment of the fork."""

from __future__ import annotations

import os
import threading
import weakref
from typing import ClassVar


class ForkSafeLock:
    """A mutex that is free again in every forked child. What it guards must be consistent at any moment."""

    _all: ClassVar[weakref.WeakSet[ForkSafeLock]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        ForkSafeLock._all.add(self)

    def acquire(self, timeout: float = -1) -> bool:
        """Take the lock, waiting at most `timeout` seconds (-1: for ever)."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Give it back."""
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    @classmethod
    def _renew_all(cls) -> None:
        for lock in cls._all:
            lock._lock = threading.Lock()


os.register_at_fork(after_in_child=ForkSafeLock._renew_all)
