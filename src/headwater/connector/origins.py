"""Where the KV in each of an engine's blocks comes from, so that a request saves only KV of its own inputs.

Other connectors may load into an engine's blocks, and the engine's prefix cache may then share them. A request that
gets such blocks is served with them, as the engine wants; nothing that it computes from them goes to the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headwater.connector.tracker import BlockIds, Scheduled, Tracked


class Origins:
    """Blocks whose KV is foreign: that of another connector, or computed from such."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._foreign: set[int] = set()
        self.allocated: dict[str, BlockIds] = {}
        """Requests that got blocks since the last step was ordered."""

    def note(self, scheduled: Sequence[Scheduled], requests: Mapping[str, Tracked]) -> None:
        """A step is ordered: find the requests whose KV is not all their own, and which blocks follow from them.

        In the order of the step: a request may share blocks that an earlier one computes in it.
        """
        waiting, self.allocated = self.allocated, {}
        for item in scheduled:
            tracked = requests[item.request_id]
            waiting.pop(item.request_id, None)
            if tracked.load is None and item.num_computed > tracked.num_explained:
                tracked.is_foreign = True  # another connector loads it in this very step, or has done so
            if item.is_new:
                self._admit(tracked, item.block_ids)
            elif len(item.block_ids) > tracked.num_noted:
                self._extend(tracked, item.block_ids)
        for request_id, block_ids in waiting.items():
            if (loading := requests.get(request_id)) is not None:
                loading.is_foreign |= loading.load is None
                self._admit(loading, block_ids)

    def _admit(self, tracked: Tracked, block_ids: BlockIds) -> None:
        """A request got these blocks, with KV in some of them that the engine found in its own cache."""
        tracked.num_noted = -(-tracked.num_local // self._block_size)
        if not self._foreign.isdisjoint(block_ids[: tracked.num_noted]):
            tracked.is_foreign = True
        self._extend(tracked, block_ids)

    def _extend(self, tracked: Tracked, block_ids: BlockIds) -> None:
        """A request fills the blocks that are new to it. All that follows foreign KV is foreign, too."""
        new = [int(block) for block in block_ids[tracked.num_noted :]]
        tracked.num_noted = len(block_ids)
        if tracked.is_foreign:
            self._foreign.update(new)
        elif self._foreign:
            self._foreign.difference_update(new)
