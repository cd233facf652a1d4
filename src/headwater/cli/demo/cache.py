"""What the demo has instead of an engine: a model whose KV is known everywhere, and a paged cache to keep it in.

Nothing here knows of a pool. The paged cache is real in what matters: a token's KV lies in a block that a block
table names, blocks are in no order, and each rank holds only its own layers and heads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.stores.base import Tiles

SPEC = KVSpec.gqa(num_layers=16, num_kv_heads=8, head_dim=64, dtype="bfloat16")
"""The KV of a model like Llama-3.2-1B: 32 KiB a token."""

IDENTITY = Identity(
    weights="sha256:" + b"headwater-demo!!".hex() * 2,  # a real one comes from digest_checkpoint(path)
    run_dtype="bfloat16",
    kv_dtype="bfloat16",
    label="headwater-demo",
)

Elements = npt.NDArray[np.uint16]
"""bfloat16 as bit patterns: the pool stores bytes, whatever they mean."""


def make_prompt(num_tokens: int) -> npt.NDArray[np.uint32]:
    """The same token ids in every process."""
    return np.random.default_rng(0).integers(0, 128_256, num_tokens, dtype=np.uint32)


def true_kv(layer: int, plane: int, heads: range, num_tokens: int) -> Elements:
    """What the model computes, as [token, head, dim]: each element a hash of where it belongs, so that any
    element that ends up elsewhere is wrong."""
    token = np.arange(num_tokens, dtype=np.uint32)[:, None, None]
    head = np.arange(heads.start, heads.stop, dtype=np.uint32)[None, :, None]
    dim = np.arange(SPEC.planes[plane].width, dtype=np.uint32)[None, None, :]
    mixed = token * 0x9E3779B1 + head * 0x85EBCA77 + dim * 0xC2B2AE3D
    mixed += (layer * 0x27D4EB2F + plane * 0x165667B1) % 2**32
    mixed ^= mixed >> 15
    mixed *= 0x2C1B3C6D
    return (mixed >> 16).astype(np.uint16)


class PagedCache:
    """One rank's KV of one request: for each layer and plane an array of blocks, [block, slot, head, dim]."""

    def __init__(self, shard: Shard, block_size: int, num_tokens: int, seed: int) -> None:
        self.shard = shard
        self._block_size = block_size
        self._num_tokens = num_tokens
        used = -(-num_tokens // block_size)
        num_blocks = used + 8  # other requests' blocks lie in between
        self._block_table = np.random.default_rng(seed).permutation(num_blocks)[:used]
        self._blocks = {
            (layer, plane): np.zeros((num_blocks, block_size, len(shard.heads), SPEC.planes[plane].width), np.uint16)
            for layer in shard.layers
            for plane in range(len(SPEC.planes))
        }

    def compute(self) -> None:
        """Prefill: fill the cache with what the model computes."""
        slots = self._slots(0, self._num_tokens)
        for (layer, plane), blocks in self._blocks.items():
            _by_slot(blocks)[slots] = true_kv(layer, plane, self.shard.heads, self._num_tokens)

    def count_wrong_bytes(self) -> int:
        """Compare every byte with what the model computes."""
        slots, wrong = self._slots(0, self._num_tokens), 0
        for (layer, plane), blocks in self._blocks.items():
            expected = true_kv(layer, plane, self.shard.heads, self._num_tokens)
            found = _by_slot(blocks)[slots]
            wrong += int(np.count_nonzero(found.view(np.uint8) != expected.view(np.uint8)))
        return wrong

    def gather(self, first_token: int, num_tokens: int) -> Tiles:
        """Blocks → tiles: for each layer and head its planes one after another, each [token][dim]."""
        tiles = np.empty(self.shard.local_shape(SPEC, first_token, num_tokens), np.uint8)
        slots = self._slots(first_token, num_tokens)
        for (layer, plane), part in self._parts(tiles, num_tokens):
            part[:] = _by_slot(self._blocks[layer, plane])[slots].swapaxes(0, 1)
        return tiles

    def scatter(self, first_token: int, num_tokens: int, tiles: Tiles) -> None:
        """Tiles → blocks: the inverse of `gather`."""
        slots = self._slots(first_token, num_tokens)
        for (layer, plane), part in self._parts(tiles, num_tokens):
            _by_slot(self._blocks[layer, plane])[slots] = part.swapaxes(0, 1)

    def _parts(self, tiles: Tiles, num_tokens: int) -> list[tuple[tuple[int, int], Elements]]:
        """Each (layer, plane) with its place in the tiles, as [head, token, dim]."""
        parts, start = [], 0
        elements = tiles.view(np.uint16)
        for number, plane in enumerate(SPEC.planes):
            end = start + num_tokens * plane.width
            for i, layer in enumerate(self.shard.layers):
                part = elements[i, :, start:end].reshape(-1, num_tokens, plane.width)
                parts.append(((layer, number), part))
            start = end
        return parts

    def _slots(self, first_token: int, num_tokens: int) -> npt.NDArray[np.intp]:
        """Where tokens lie: the block that the table names, then the place in that block."""
        position = np.arange(first_token, first_token + num_tokens)
        return self._block_table[position // self._block_size] * self._block_size + position % self._block_size


def _by_slot(blocks: Elements) -> Elements:
    """[block, slot, head, dim] → [slot, head, dim], the same memory."""
    return blocks.reshape(-1, *blocks.shape[2:])
