"""The CPU's saver among its peers: a chunk that one rank cannot save is given up by all of them, at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the transfer needs torch")

from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Topology
from headwater.pool import Space, open_pool
from headwater.stores.base import Status
from headwater.transfer.save import Saver
from transfer_layer_cases import held_up

from support import identity, temporary_url
from transfer_cases import ORDERS, cache_view

SPEC = KVSpec.gqa(num_layers=3, num_kv_heads=4, head_dim=8, dtype="float32")
CHUNK, BLOCK, CHUNKS = 32, 8, 5
TP = Topology(tp=2)


class Rank:
    """One rank's saver over a cache of noise."""

    def __init__(self, space: Space, number: int, slots: int) -> None:
        self._space = space
        self.shard = TP.shard(SPEC, tp_rank=number)
        num_blocks = CHUNKS * CHUNK // BLOCK
        view, _ = cache_view(SPEC, self.shard, num_blocks=num_blocks, block_size=BLOCK, order=ORDERS[0])
        layers, heads, tile = self.shard.local_shape(SPEC, 0, CHUNK)
        staging = slots * layers * heads * tile
        self.saver = Saver(space, view, self.shard, staging_bytes=staging, deadline_s=5.0, group_bytes=1)
        self._blocks = np.arange(num_blocks, dtype=np.int32)

    def save(self, chunks: list[ChunkRef], *, by_layer: bool) -> None:
        """Save, in one go or while the layers are computed. Nothing leaves the staging meanwhile."""
        with held_up(self._space, "reserve"), held_up(self._space, "write"):
            if by_layer:
                self.saver.begin("r", chunks, self._blocks)
                for layer in range(SPEC.num_layers):
                    self.saver.layer_done(layer)
            else:
                self.saver.save("r", chunks, self._blocks)


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("first", ["the other", "the one that drops"])
@pytest.mark.parametrize("scheme", ["shm", "file"])
def test_a_part_that_is_dropped_aborts_its_chunk(scheme: str, first: str, by_layer: bool, tmp_path: Path) -> None:
    with temporary_url(scheme, tmp_path, "capacity=4MiB") as url, open_pool(url, group=7) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(range(CHUNKS * CHUNK)).chunks()
        short, roomy = Rank(space, 0, slots=2), Rank(space, 1, slots=CHUNKS)
        order = [roomy, short] if first == "the other" else [short, roomy]
        try:
            for rank in order:
                rank.save(chunks, by_layer=by_layer)
                assert rank.saver.drain(10)
        finally:
            short.saver.close()
            roomy.saver.close()
        assert short.saver.num_dropped == CHUNKS - 2
        assert space.exists(chunks) == [True, True, False, False, False]
        stats = pool.stats().store
        assert stats.pending_bytes == 0, "the other rank's part waits for one that never comes"
        assert stats.chunks == 2
        # Without its peer, a part is stored for nothing, or not at all.
        outcomes = {Status.OK, Status.LOST, Status.BUSY, Status.NO_PARENT}
        assert set(roomy.saver.statuses) <= outcomes, roomy.saver.statuses
        assert pool.verify().clean
        # The next to come saves them: nothing stands in its way.
        again = [Rank(space, number, slots=CHUNKS) for number in range(2)]
        for rank in again:
            rank.save(chunks, by_layer=by_layer)
            assert rank.saver.drain(10)
            rank.saver.close()
        assert all(space.exists(chunks))
