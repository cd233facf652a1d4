"""Blocks whose KV may turn out to be wrong: those of loads that go along with a step and whose end was not heard yet,
and whatever is computed from them or shares them meanwhile. Nothing of them is saved before the end is known.

An engine that schedules ahead (vLLM does) hears of a step's loads only after it has scheduled the next step. Blocks
that turn out to be wrong become `spoiled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwater.connector.tracker import BlockIds


class Uncertain:
    """By request that loads: the blocks that depend on its load."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[int]] = {}
        self.left: list[BlockIds] = []
        """Blocks, in the order of their tokens, of requests that lost them since: the engine may still share them."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def begin(self, request_id: str, block_ids: BlockIds) -> None:
        """A load into these blocks goes along with the next step."""
        self._blocks[request_id] = {int(block) for block in block_ids}

    def spread(self, requests: Sequence[BlockIds]) -> None:
        """A step is computed for requests with these blocks: what follows an uncertain block depends on it."""
        for blocks in self._blocks.values():
            blocks |= followers(blocks, requests)

    def touches(self, block_ids: Iterable[int]) -> bool:
        """Whether one of these blocks is uncertain."""
        return any(not blocks.isdisjoint(block_ids) for blocks in self._blocks.values())

    def leave(self, block_ids: BlockIds) -> None:
        """A request has lost these blocks, which are uncertain."""
        self.left.append(tuple(block_ids))

    def end(self, request_id: str) -> None:
        """The end of a load is known. Others are ignored."""
        self._blocks.pop(request_id, None)
        if not self._blocks:
            self.left.clear()


def followers(blocks: Iterable[int], requests: Sequence[BlockIds]) -> set[int]:
    """These blocks, and all that follow one of them in a request: it computed them from what it found there."""
    found, is_news = set(blocks), True
    while is_news:
        is_news = False
        for block_ids in requests:
            first = next((number for number, block in enumerate(block_ids) if block in found), None)
            if first is not None and not found.issuperset(block_ids[first:]):
                found.update(int(block) for block in block_ids[first:])
                is_news = True
    return found
