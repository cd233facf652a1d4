"""Chunks that cannot be packed, as the scheduler side remembers them: all ranks of a server store a chunk in one form.

A rank learns that a tile does not fit when it has packed it; the chunk is aborted, reported, and ordered again, raw. A
model whose KV hardly ever fits would have every chunk saved twice: for such a one, packing ends.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headwater.kv.hashing import ChunkRef

log = logging.getLogger(__name__)

_MOST = 4096
_ENOUGH, _SHARE = 32, 8
"""Packing ends when so many chunks did not fit, and one in so many of all that were ordered."""


class Misfits:
    """Of one server."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.num_chunks = 0
        """That did not fit, ever."""
        self._num_ordered = 0
        self.is_hopeless = False
        """Everything is stored raw from now on."""

    def add(self, keys: Iterable[bytes]) -> None:
        """A rank could not pack these."""
        for key in keys:
            if key not in self._keys:
                self._keys[key] = None
                self.num_chunks += 1
        while len(self._keys) > _MOST:
            self._keys.popitem(last=False)
        is_hopeless = self.num_chunks >= _ENOUGH and self.num_chunks * _SHARE >= self._num_ordered
        if is_hopeless and not self.is_hopeless:
            self.is_hopeless = True
            log.warning(
                "%d of %d chunks of this model's KV could not be packed: everything is stored raw from now on; "
                "`packing=off` in the pool's URL spares the attempt",
                self.num_chunks,
                self._num_ordered,
            )

    def raw(self, chunks: Sequence[ChunkRef]) -> tuple[int, ...]:
        """Which of some chunks that are ordered now are to be saved raw. Cheap while all fit."""
        self._num_ordered += len(chunks)
        if self.is_hopeless:
            return tuple(range(len(chunks)))
        if not self._keys:
            return ()
        return tuple([number for number, chunk in enumerate(chunks) if chunk.key in self._keys])
