"""Where the KV in each of an engine's blocks comes from, so that a request saves only KV of its own inputs.

Other connectors may load into an engine's blocks, and the engine's prefix cache may tell fewer inputs apart than chunk
keys do (vLLM's hash omits which positions of a prompt are embeddings). A request that shares such blocks is served with
them, as the engine wants; nothing that it computes from them goes to the pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from headwater.connector.tracker import BlockIds, Inputs, Scheduled, Tracked


class Origins:
    """By block: the inputs of the request that filled it, as far as they begin before the block ends.

    None is foreign KV: that of another connector, of a request whose inputs have no name, or computed from such. Blocks
    that were never filled here are foreign, too.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._origins: dict[int, Inputs | None] = {}
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
                self._fill(tracked, item.block_ids)
        for request_id, block_ids in waiting.items():
            if (loading := requests.get(request_id)) is not None:
                loading.is_foreign |= loading.load is None
                self._admit(loading, block_ids)

    def clear(self) -> None:
        """The engine's cache is not to be believed any more, unless it is empty."""
        self._origins.clear()

    def _admit(self, tracked: Tracked, block_ids: BlockIds) -> None:
        """A request got these blocks, with KV in some of them that the engine found in its own cache."""
        tracked.num_noted = -(-tracked.num_local // self._block_size)
        shared = block_ids[: tracked.num_noted]
        for block, origin in zip(shared, self._own(tracked, 0, len(shared)), strict=True):
            if origin is None or self._origins.get(int(block)) != origin:
                tracked.is_foreign = True
                break
        self._fill(tracked, block_ids)

    def _fill(self, tracked: Tracked, block_ids: BlockIds) -> None:
        """A request fills the blocks that are new to it."""
        new = [int(block) for block in block_ids[tracked.num_noted :]]
        self._origins.update(zip(new, self._own(tracked, tracked.num_noted, len(block_ids)), strict=True))
        tracked.num_noted = len(block_ids)

    def _own(self, tracked: Tracked, start: int, stop: int) -> Iterator[Inputs | None]:
        """The origins that blocks number `start` to `stop` of a request have if it fills them. All that follows foreign
        KV is foreign, too."""
        inputs = None if tracked.is_foreign else tracked.inputs
        if inputs is None or not inputs.extras:
            yield from [inputs] * (stop - start)
            return
        extras = sorted(inputs.extras, key=lambda extra: extra.offset)
        offsets = [extra.offset for extra in extras]
        begun, num_begun = inputs, -1
        for number in range(start, stop):
            if (count := bisect_left(offsets, (number + 1) * self._block_size)) != num_begun:
                num_begun, begun = count, inputs._replace(extras=tuple(extras[:count]))
            yield begun
