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
from headwater.transfer.saver import Saver

from support import identity, temporary_url
from transfer_cases import ORDERS, cache_view

SPEC = KVSpec.gqa(num_layers=3, num_kv_heads=4, head_dim=8, dtype="float32")
CHUNK, BLOCK, CHUNKS = 32, 8, 5
TP = Topology(tp=2)


class Rank:
    """One rank's saver over a cache of noise."""

    def __init__(self, space: Space, number: int, slots: int) -> None:
        self.shard = TP.shard(SPEC, tp_rank=number)
        num_blocks = CHUNKS * CHUNK // BLOCK
        view, _ = cache_view(SPEC, self.shard, num_blocks=num_blocks, block_size=BLOCK, order=ORDERS[0])
        layers, heads, tile = self.shard.local_shape(SPEC, 0, CHUNK)
        staging = slots * layers * heads * tile
        self.saver = Saver(space, view, self.shard, staging_bytes=staging, deadline_s=5.0, group_bytes=1)
        self._blocks = np.arange(num_blocks, dtype=np.int32)

    def save(self, chunks: list[ChunkRef], *, by_layer: bool, num_announced: int = SPEC.num_layers) -> None:
        """Save, in one go or while the layers are computed; what is not announced is taken at the end of the step."""
        if by_layer:
            self.saver.begin("request", chunks, self._blocks)
            for layer in range(num_announced):
                self.saver.layer_done(layer)
            self.saver.end_step()
            assert not self.saver.has_open
        else:
            self.saver.save(chunks, self._blocks)


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
        assert short.saver.take_unsaved() == [("request" if by_layer else "", 2 * CHUNK)]
        assert short.saver.take_unsaved() == []
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


@pytest.mark.parametrize("num_announced", [0, 1])
def test_layers_that_are_not_announced_are_taken_at_the_end_of_the_step(num_announced: int, tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url, open_pool(url, group=7) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(range(CHUNKS * CHUNK)).chunks()
        for number in range(2):
            rank = Rank(space, number, slots=CHUNKS)
            rank.save(chunks, by_layer=True, num_announced=num_announced)
            assert rank.saver.drain(10)
            rank.saver.close()
            assert not rank.saver.take_unsaved()
        assert all(space.exists(chunks))


def test_a_step_that_failed_is_told_as_unsaved(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url, open_pool(url, group=7) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        rank = Rank(space, 0, slots=CHUNKS)
        rank.saver.begin("a", space.keys(range(CHUNKS * CHUNK)).chunks()[2:], rank._blocks)
        rank.saver.layer_done(0)
        rank.saver.discard()
        assert rank.saver.take_unsaved() == [("a", 2 * CHUNK)]
        rank.saver.end_step()
        rank.saver.close()
