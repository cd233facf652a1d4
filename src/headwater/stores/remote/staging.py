"""Memory that a transfer library may write to whenever it likes: blocks of our own, which no caller ever sees.

A call into such a library cannot be cancelled. If one is late, nobody waits for it any more, but its bytes may still
arrive; so they arrive in a block that is not used again until that call has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from headwater.stores.remote.base import Bytes


class Blocks:
    """Equal blocks, made when first needed and registered once."""

    def __init__(
        self,
        block_bytes: int,
        most: int,
        register: Callable[[Bytes], None],
        unregister: Callable[[Bytes], None],
    ) -> None:
        self.block_bytes = block_bytes
        self._most = most
        self._register = register
        self._unregister = unregister
        self._made = 0
        self._free: list[Bytes] = []
        self._changed = threading.Condition()

    def take(self, num_bytes: int, deadline: float) -> Bytes | None:
        """A block that nobody uses, of at least that size; None where there is none in time. What is larger than a
        block gets memory of its own."""
        if num_bytes > self.block_bytes:
            return self._make(num_bytes)
        with self._changed:
            while not self._free and self._made == self._most:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None
            if self._free:
                return self._free.pop()
            self._made += 1
        return self._make(self.block_bytes)

    def give_back(self, block: Bytes) -> None:
        """The block's last user has ended."""
        if block.nbytes != self.block_bytes:
            self._unregister(block)
            return
        with self._changed:
            self._free.append(block)
            self._changed.notify()

    def _make(self, num_bytes: int) -> Bytes:
        block = np.zeros(num_bytes, np.uint8)
        self._register(block)
        return block
