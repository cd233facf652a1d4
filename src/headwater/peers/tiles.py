"""Where a rank's tiles lie in an extent, as few contiguous pieces: the same arithmetic on both ends of the wire.

On the wire the tiles of a group of layers follow each other chunk by chunk, and in a chunk as they lie in its extent:
`[layer][head]`. All heads of consecutive layers are one piece; some heads of a layer are one piece a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from headwater.kv.encoding import stored_tile_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.stores.base import Loan, Place


class Layout(NamedTuple):
    """One rank's tiles of a group of layers in one chunk."""

    shard: Shard
    """The layers and heads that it sends; no layers where it sends none of this group."""
    regions: tuple[tuple[int, int], ...]
    """(first byte, bytes) in the extent, ascending."""
    num_bytes: int

    @property
    def num_tiles(self) -> int:
        """Tiles of one chunk."""
        return self.shard.num_tiles


class Held(NamedTuple):
    """A loan of all of a rank's layers of some chunks of a batch."""

    loan: Loan
    rows: dict[int, int]
    """By number of the chunk: its row in the loan."""
    layers: range

    def has(self, numbers: Sequence[int]) -> bool:
        """Whether these chunks are in it."""
        places = self.loan.places
        return all(places[self.rows[number]] is not None for number in numbers)

    def part(self, numbers: Sequence[int], layers: range) -> Loan:
        """Some chunks and layers of it, which end with the whole."""
        if layers == self.layers and len(numbers) == len(self.rows):
            return self.loan._replace(lease=None)
        rows = [self.rows[number] for number in numbers]
        columns = [self.layers.index(layer) for layer in layers]
        places, encodings = self.loan.places, self.loan.encodings
        sums = self.loan.sums[np.ix_(rows, columns)]
        return Loan(None, [places[row] for row in rows], sums, [encodings[row] for row in rows])


@lru_cache(maxsize=1024)
def _layout(spec: KVSpec, shard: Shard, layers: range, num_tokens: int, turn: int, encoding: int) -> Layout:
    mine = shard.owned(turn)[0].layers
    inside = [layer for layer in mine if layer in layers]
    owned = range(inside[0], inside[-1] + 1, mine.step) if inside else range(0)
    size = stored_tile_bytes(spec, num_tokens, encoding)
    width, heads = spec.num_kv_heads * size, len(shard.heads) * size
    first = shard.heads.start * size
    regions: list[tuple[int, int]] = []
    for layer in owned:
        at = layer * width + first
        if regions and regions[-1][0] + regions[-1][1] == at:
            regions[-1] = regions[-1][0], regions[-1][1] + heads
        else:
            regions.append((at, heads))
    return Layout(Shard(owned, shard.heads), tuple(regions), len(owned) * heads)


def layouts_of(
    spec: KVSpec, shard: Shard, chunks: Sequence[ChunkRef], encodings: Sequence[int], layers: range
) -> list[Layout]:
    """What a rank with this shard sends of some layers of each chunk, stored so. Equal ones are the very same
    object."""
    made: dict[tuple[int, int, int], Layout] = {}
    found = list[Layout]()
    for chunk, encoding in zip(chunks, encodings, strict=True):
        kind = chunk.num_tokens, chunk.number % shard.replicas, encoding
        layout = made.get(kind)
        if layout is None:
            layout = made[kind] = _layout(spec, shard, layers, *kind)
        found.append(layout)
    return found


def pieces_of(place: Place, layout: Layout) -> list[memoryview]:
    """The bytes of a layout in one extent, in place."""
    memory, base = place.segment.data, place.offset
    return [memory[base + at : base + at + size] for at, size in layout.regions]


def alike(layouts: Sequence[Layout]) -> dict[int, list[int]]:
    """Positions of equal layouts together, by the position of the first of each."""
    groups: dict[int, list[int]] = {}
    first: dict[int, int] = {}
    for at, layout in enumerate(layouts):
        groups.setdefault(first.setdefault(id(layout), at), []).append(at)
    return groups
