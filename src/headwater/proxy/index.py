"""Which server has which block of a prompt: from events, and from where earlier requests were sent.

An entry is a block's key and a mask with one bit for each place that has it. Everything here is memory of one process
with a bound; nothing waits. Blocks of a prompt are chained, so a server's run ends at the first block it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Mask = int


class Bits:
    """Hands out the bits of masks. One that was given back may stand in old entries for a while, and rests so long."""

    def __init__(self, rest_s: float, clock: Callable[[], float]) -> None:
        self._rest_s = rest_s
        self._clock = clock
        self._num_made = 0
        self._resting: list[tuple[float, Mask]] = []

    def take(self) -> Mask:
        """A bit that stands in no entry."""
        if self._resting and self._clock() - self._resting[0][0] >= self._rest_s:
            return self._resting.pop(0)[1]
        self._num_made += 1
        return 1 << (self._num_made - 1)

    def give_back(self, bit: Mask) -> None:
        """Nobody asks for this bit any more."""
        self._resting.append((self._clock(), bit))


class Table:
    """What events say: a block is there until an event says that it is not. Full, it takes no new blocks and counts
    them."""

    def __init__(self, max_blocks: int = 1 << 22) -> None:
        self.masks: dict[bytes, Mask] = {}
        self.num_dropped = 0
        self._max_blocks = max_blocks

    def add(self, key: bytes, bit: Mask) -> None:
        """The place of that bit has the block."""
        mask = self.masks.get(key)
        if mask is None and len(self.masks) >= self._max_blocks:
            self.num_dropped += 1
            return
        self.masks[key] = (mask or 0) | bit

    def remove(self, key: bytes, bits: Mask) -> None:
        """Those places do not have the block."""
        mask = self.masks.get(key, 0) & ~bits
        if mask:
            self.masks[key] = mask
        else:
            self.masks.pop(key, None)

    def clear(self, bits: Mask) -> None:
        """Those places have nothing. Looks at all entries."""
        for key in [key for key, mask in self.masks.items() if mask & bits]:
            self.remove(key, bits)

    def replace(self, held: Iterable[bytes], bit: Mask) -> None:
        """The place has these blocks and no others."""
        keys = set(held)
        for key in [key for key, mask in self.masks.items() if mask & bit and key not in keys]:
            self.remove(key, bit)
        for key in keys:
            self.add(key, bit)


class History:
    """Where prompts were sent, for `age_s` at most and half of it at least, and as many blocks as there is room for.

    Two generations: entries go to the young one, and when that is full or old, it becomes the old one, whose
    predecessor is forgotten. So ageing costs nothing per entry.
    """

    def __init__(self, max_blocks: int, age_s: float, clock: Callable[[], float]) -> None:
        self._max_young = max(1, max_blocks // 2)
        self._half_age_s = age_s / 2
        self._clock = clock
        self._turned_at = clock()
        self.young: dict[bytes, Mask] = {}
        self.old: dict[bytes, Mask] = {}

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    def note(self, keys: Sequence[bytes], bit: Mask) -> None:
        """A prompt of these blocks was sent to the server of that bit."""
        self.turn()
        for key in keys:
            if len(self.young) >= self._max_young and key not in self.young:
                self._become_old()
            self.young[key] = self.young.get(key, 0) | bit

    def turn(self) -> None:
        """Let time pass."""
        elapsed = self._clock() - self._turned_at
        if elapsed >= self._half_age_s:
            self._become_old()
            if elapsed >= 2 * self._half_age_s:
                self.old = {}

    def _become_old(self) -> None:
        self.old, self.young = self.young, {}
        self._turned_at = self._clock()


def runs(keys: Sequence[bytes], masks: Sequence[Mask], tables: Sequence[dict[bytes, Mask]]) -> list[int]:
    """How many blocks from the start each server has; a server is the mask of its bits. One lookup per block and
    table."""
    lengths = [len(keys)] * len(masks)
    tables = [table for table in tables if table]
    alive = list(range(len(masks)))
    last = -1
    for number, key in enumerate(keys):
        found = 0
        for table in tables:
            found |= table.get(key, 0)
        if found == last:
            continue
        last = found
        going = [server for server in alive if found & masks[server]]
        if len(going) < len(alive):
            for server in alive:
                if not found & masks[server]:
                    lengths[server] = number
            alive = going
            if not alive:
                break
    return lengths
