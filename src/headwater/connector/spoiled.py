"""Blocks whose KV is not what the engine takes it for.

Where a load goes along with the step that needs it, an engine may count its tokens as computed, and share its blocks,
before the load is known to have succeeded (vLLM does). After a failure it takes the request back, and expects it to
compute the blocks again; if the request is aborted or preempted before that, or computes them in several steps, other
requests would read wrong KV. So wrong blocks are remembered here until they have been computed: nothing of them is
saved, and a request that is about to use them is taken back in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwater.connector.tracker import BlockIds, Scheduled, Tracked


class Spoiled:
    """By block: how many of its tokens, from its first on, are right again."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_right: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._num_right)

    @property
    def block_ids(self) -> set[int]:
        """All of them."""
        return set(self._num_right)

    def add(self, block_ids: Iterable[int]) -> None:
        """Nothing in these blocks is right."""
        self._num_right.update(dict.fromkeys([int(block) for block in block_ids], 0))

    def touches(self, block_ids: Iterable[int]) -> bool:
        """Whether one of these blocks is spoiled."""
        return not self._num_right.keys().isdisjoint(block_ids)

    def num_right(self, block_ids: BlockIds, num_computed: int) -> int:
        """How many of a request's first `num_computed` tokens are right, counted from the first."""
        for number, block in enumerate(block_ids[: -(-num_computed // self._block_size)]):
            first = number * self._block_size
            right = first + self._num_right.get(block, self._block_size)
            if right < min(num_computed, first + self._block_size):
                return right
        return num_computed

    def wrong(self, block_ids: BlockIds, num_computed: int) -> set[int]:
        """The first block that a request is about to read wrong tokens from, if there is one: the engine takes it back
        to there."""
        right = self.num_right(block_ids, num_computed)
        return {int(block_ids[right // self._block_size])} if right < num_computed else set()

    def rewrite(self, block_ids: BlockIds, start: int, end: int) -> None:
        """Tokens `start` to `end` of a request are computed now, from what is right."""
        size = self._block_size
        for number in range(start // size, min(-(-end // size), len(block_ids))):
            block, first = block_ids[number], number * size
            right = self._num_right.get(block)
            if right is None or first + right < start:
                continue
            if end - first >= size:
                del self._num_right[block]
            else:
                # Begun anew, it may be right for less than before: those tokens were another request's.
                self._num_right[block] = end - first

    def look(self, scheduled: Sequence[tuple[Scheduled, Tracked]]) -> frozenset[int]:
        """Blocks that a step takes for computed and that are not; those that it computes are right from now on."""
        suspects = [(item, tracked) for item, tracked in scheduled if tracked.is_suspect]
        for item, tracked in suspects:
            # A load that fails is reported, and spoils its blocks again.
            start = item.num_computed if tracked.load is None else tracked.load.num_local
            self.rewrite(item.block_ids, start, item.num_computed + item.num_scheduled)
        wrong = set[int]()
        for item, tracked in suspects:
            found = self.wrong(item.block_ids, item.num_computed)
            wrong |= found
            tracked.is_suspect = bool(found) or self.touches(item.block_ids)
        return frozenset(wrong)
