"""From pieces of chunks to ranges of remote objects, and back: which bytes to ask for, and how each tile is proved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kv.encoding import RAW, stored_tile_bytes
from headwater.kv.format import checksum
from headwater.kv.spec import KVSpec
from headwater.stores.base import Piece, Tiles
from headwater.stores.decode import settle_tiles, takes_stored
from headwater.stores.remote.base import Bytes, ObjectRange
from headwater.stores.remote.manifest import Manifest, Names


class Proof(NamedTuple):
    """The tiles that one span brings, for one piece of the read, and what their checksums must be."""

    piece: int
    tiles: list[Bytes]
    sums: list[int]

    def holds(self, targets: range) -> bool:
        """Whether these tiles are what was written."""
        tiles, sums = self.tiles, self.sums
        for i in targets:  # noqa: SIM110 - a generator would cost as much as all else here
            if checksum(tiles[i]) != sums[i]:
                return False
        return True


class ObjectReadPlan:
    """Spans of one read, each with its proof. Tiles that are not what a reader wants go through scratch memory."""

    def __init__(self, spec: KVSpec, names: Names) -> None:
        self._spec = spec
        self._names = names
        self.spans: list[ObjectRange] = []
        self.proofs: list[Proof] = []
        self._scratch: dict[int, tuple[Tiles, int]] = {}
        """By piece: its stored tiles, and their encoding."""

    def add(self, number: int, piece: Piece, manifest: Manifest) -> None:
        """Plan one piece. Neighbouring tiles of one object are one range."""
        shard, target = piece.shard, piece.tiles
        if not takes_stored(shard, manifest.encoding):
            target = np.empty((len(shard.layers), len(shard.heads), manifest.tile_bytes), np.uint8)
            self._scratch[number] = target, manifest.encoding
        if not target.size:
            return
        width, size, step = manifest.num_heads, manifest.tile_bytes, manifest.layers_per_piece
        sums = manifest.sums.reshape(-1, width)
        all_heads = len(shard.heads) == width
        at: tuple[int, int] | None = None  # (object, layer) that would continue the last span
        for i, layer in enumerate(shard.layers):
            held, inside = divmod(layer, step)
            tiles = [target[i, j] for j in range(len(shard.heads))]
            expected = sums[layer, shard.heads.start : shard.heads.stop].tolist()
            if all_heads and at == (held, layer):
                last, proof = self.spans[-1], self.proofs[-1]
                length = last.length + len(tiles) * size
                whole = length == len(manifest.pieces[held]) * width * size
                self.spans[-1] = last._replace(length=length, is_whole=whole)
                proof.tiles.extend(tiles)  # the span's targets, too
                proof.sums.extend(expected)
            else:
                offset, length = (inside * width + shard.heads.start) * size, len(tiles) * size
                whole = not offset and length == len(manifest.pieces[held]) * width * size
                self.spans.append(ObjectRange(self._names.piece(manifest, held), offset, length, tiles, whole))
                self.proofs.append(Proof(number, tiles, expected))
            at = (held, layer + 1) if (layer + 1) % step else None

    def settle(self, number: int, piece: Piece) -> bool:
        """Bring what was verified in scratch memory to the caller. Call it for pieces that are OK. False where that is
        not readable."""
        if number not in self._scratch:
            return True
        stored, encoding = self._scratch[number]
        return settle_tiles(self._spec, piece.chunk, piece.shard, encoding, stored, piece.tiles)


def layers_per_piece(spec: KVSpec, chunk_tokens: int, piece_bytes: int, encoding: int = RAW) -> int:
    """How many layers go into one object: one, or as many as stay within `piece_bytes`."""
    layer = spec.num_kv_heads * stored_tile_bytes(spec, chunk_tokens, encoding)
    return max(1, min(spec.num_layers, piece_bytes // max(layer, 1)))


def tile_sums(tiles: Tiles) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Checksums of whole tiles in [layer][head] order."""
    sums: Sequence[int] = [checksum(tiles[i, j]) for i in range(tiles.shape[0]) for j in range(tiles.shape[1])]
    return np.array(sums, np.uint64)


def is_right(tiles: Tiles, sums: npt.NDArray[np.uint64] | None) -> bool:
    """Whether whole tiles are what their checksums say, if there are any."""
    return sums is None or np.array_equal(tile_sums(tiles), sums.reshape(-1))
