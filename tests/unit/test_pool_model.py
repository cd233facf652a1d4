"""Random operations against a plain model of the pool, the whole invariant checked after each.

Two servers (writer groups) work on one store that is far too small for what they write.
"""

from __future__ import annotations

import shutil
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Topology, whole_shard
from headwater.pool import Match, Pool, Space, open_pool
from headwater.stores.base import Filled, Status

from support import empty_tiles, gqa, identity, local_tiles, temporary_url

SPEC = gqa(layers=2, heads=2, dim=128)
CHUNK = 8
TOPOLOGIES = [Topology(), Topology(tp=2), Topology(pp=2), Topology(tp=4, dcp=2), Topology(tp=2, pcp=2)]
TENANTS = [b"", b"blue"]


class PoolModel(RuleBasedStateMachine):
    """`present` is what must be there: everything completed and not seen evicted, removed or cleared."""

    scheme = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="hwmodel-")
        self.urls = temporary_url(self.scheme, self.folder, "capacity=1536KiB")
        url = self.urls.__enter__()
        # Two groups in one process have two cores on a shared store, as two processes would.
        groups = (1,) if self.scheme == "memory" else (1, 2)
        self.pools: list[Pool] = [open_pool(url, group=group) for group in groups]
        self.spaces: list[Space] = [pool.space(identity(), SPEC, chunk_tokens=CHUNK) for pool in self.pools]
        self.present: dict[bytes, ChunkRef] = {}
        self.protected: dict[str, Match] = {}
        self.pinned: dict[bytes, Match] = {}
        self.hidden: dict[bytes, ChunkRef] = {}
        self.roots = {self.spaces[0].root(tenant=tenant).key for tenant in TENANTS}
        self.evicted = 0

    def teardown(self) -> None:
        assert all(pool.verify().clean for pool in self.pools)
        for pool in self.pools:
            pool.close()
        self.urls.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    # ---- helpers ------------------------------------------------------------------------------------------------
    def draw_keys(self, data: st.DataObject, space: Space):  # type: ignore[no-untyped-def]
        branch = data.draw(st.integers(0, 5), "branch")
        length = data.draw(st.integers(1, 7 * CHUNK), "tokens")
        split = data.draw(st.integers(0, length), "shared")
        tokens = [1] * split + [10 + branch] * (length - split)
        return space.keys(tokens, tenant=data.draw(st.sampled_from(TENANTS), "tenant"))

    def draw_space(self, data: st.DataObject) -> Space:
        return self.spaces[data.draw(st.integers(0, len(self.spaces) - 1), "server")]

    def kept(self) -> set[bytes]:
        """Keys that a lease or a pin protects, with all their prefixes."""
        return {c.key for match in [*self.protected.values(), *self.pinned.values()] for c in match.chunks}

    def forget(self, gone) -> None:  # type: ignore[no-untyped-def]
        self.present = {key: chunk for key, chunk in self.present.items() if not gone(chunk)}
        self.pinned = {key: match for key, match in self.pinned.items() if key in self.present}
        self.protected = {name: match for name, match in self.protected.items() if match.chunks[-1].key in self.present}

    # ---- operations ---------------------------------------------------------------------------------------------
    @initialize()
    def start_full(self) -> None:
        """Without this, most runs would never come to evict anything."""
        assert self.pools[0].stats().store.chunks == 0
        self.fill(100)

    @rule(seed=st.integers(101, 104))
    def fill(self, seed: int) -> None:
        space, shard = self.spaces[0], whole_shard(SPEC)
        for branch in range(4):
            chunks = space.keys([seed + 10 * branch] * (6 * CHUNK)).chunks()
            statuses = space.write(chunks, shard, [local_tiles(SPEC, chunk, shard) for chunk in chunks])
            stored = [chunk for chunk, status in zip(chunks, statuses, strict=True) if status.stored]
            self.settle({chunk.key: chunk for chunk in stored})

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        space, topology = self.draw_space(data), data.draw(st.sampled_from(TOPOLOGIES))
        chunks = self.draw_keys(data, space).chunks()
        done = {chunk.key: True for chunk in chunks}
        for shard in topology.shards(SPEC):
            statuses = space.write(chunks, shard, [local_tiles(SPEC, chunk, shard) for chunk in chunks])
            for chunk, status in zip(chunks, statuses, strict=True):
                assert status in (Status.OK, Status.EXISTS, Status.FULL, Status.NO_PARENT, Status.BUSY, Status.LOST)
                done[chunk.key] &= status.stored
        self.settle({chunk.key: chunk for chunk in chunks if done[chunk.key]})

    @rule(data=st.data())
    def write_half_and_give_up(self, data: st.DataObject) -> None:
        space = self.draw_space(data)
        chunks = self.draw_keys(data, space).chunks()[:3]
        shard = next(iter(Topology(tp=2).shards(SPEC)))
        space.write(chunks, shard, [local_tiles(SPEC, chunk, shard) for chunk in chunks])
        if data.draw(st.booleans(), "abort"):
            for reservation in space.reserve(chunks, shard):
                reservation.abort()
        self.settle({})

    @rule(data=st.data())
    def fill_in_place(self, data: st.DataObject) -> None:
        space = self.draw_space(data)
        chunk, shard = self.draw_keys(data, space).chunks()[0], whole_shard(SPEC)
        (reservation,) = space.reserve([chunk], shard)
        if reservation.status == Status.OK:
            from headwater.kv.format import checksum

            tiles = reservation.tiles
            assert tiles is not None
            tiles[:] = local_tiles(SPEC, chunk, shard)
            sums = [checksum(tiles[i, j]) for i in range(2) for j in range(2)]
            (done,) = space.commit([Filled(reservation, shard.layers, shard.heads, 0, sums)])
            reservation.close()
            self.settle({chunk.key: chunk} if done == Status.OK else {})

    @rule(data=st.data())
    def match_and_read(self, data: st.DataObject) -> None:
        space, topology = self.draw_space(data), data.draw(st.sampled_from(TOPOLOGIES))
        keys = self.draw_keys(data, space)
        match = space.match(keys)
        assert all(chunk.key in self.present for chunk in match.chunks)
        full = 0
        while full < len(keys.full) and keys.full[full] in self.present:
            full += 1
        assert len([c for c in match.chunks if c.num_tokens == CHUNK]) == full
        for shard in topology.shards(SPEC):
            buffers = [empty_tiles(SPEC, chunk, shard) for chunk in match.chunks]
            assert space.read(match.chunks, shard, buffers) == [Status.OK] * len(buffers)
            for chunk, buffer in zip(match.chunks, buffers, strict=True):
                assert np.array_equal(buffer, local_tiles(SPEC, chunk, shard))

    @rule(data=st.data(), name=st.sampled_from(["r1", "r2", "r3"]))
    def lease(self, data: st.DataObject, name: str) -> None:
        space = self.spaces[0]
        match = space.match(self.draw_keys(data, space))
        lease = space.lease(match, name)
        assert lease.held == bool(match.chunks)
        if match.chunks:
            self.protected[name] = match

    @precondition(lambda self: self.protected)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.protected)))
        self.spaces[0].release(name)
        self.spaces[0].release(name)
        del self.protected[name]

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        space = self.draw_space(data)
        match = space.match(self.draw_keys(data, space))
        if match.chunks and len(self.pinned) < 3:
            assert space.pin(match)
            self.pinned[match.chunks[-1].key] = match

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        match = self.pinned.pop(data.draw(st.sampled_from(sorted(self.pinned))))
        assert self.draw_space(data).unpin(match)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def borrow(self, data: st.DataObject) -> None:
        chunk = self.present[data.draw(st.sampled_from(sorted(self.present)))]
        with self.draw_space(data).borrow(chunk, whole_shard(SPEC)) as view:
            assert view is not None
            assert np.array_equal(view, local_tiles(SPEC, chunk, whole_shard(SPEC)))
            assert not view.flags.writeable

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 3), "rarely"):
            return
        pool = self.pools[data.draw(st.integers(0, len(self.pools) - 1))]
        space = self.spaces[0]
        tenant = data.draw(st.sampled_from([None, b"blue", b""]), "clear")
        roots = {space.root(tenant=t).key for t in TENANTS if tenant in (None, t)}
        pool.clear(tenant=tenant)
        self.forget(lambda chunk: chunk.root in roots)
        self.hidden = {key: chunk for key, chunk in self.hidden.items() if chunk.root not in roots}

    # ---- laws ---------------------------------------------------------------------------------------------------
    def settle(self, wrote: dict[bytes, ChunkRef]) -> None:
        """After a write: what is gone was evicted, and was allowed to be."""
        kept = self.kept()
        stats = self.pools[0].stats().store
        # A complete chunk is found only once its parent is. If that was being written by somebody who gave up, the
        # chunk went with it, so of older ones that waited nothing is certain.
        self.hidden.update(wrote)
        for chunk in sorted(self.hidden.values(), key=lambda chunk: chunk.number):
            if chunk.parent in self.present or chunk.parent in self.roots:
                del self.hidden[chunk.key]
                if chunk.key in wrote or self.spaces[0].exists([chunk])[0]:
                    self.present[chunk.key] = chunk
        visible = {key for key, chunk in self.present.items() if self.spaces[0].exists([chunk])[0]}
        vanished = set(self.present) - visible
        assert not vanished & kept, "a leased or pinned chunk was evicted"
        assert len(vanished) <= stats.evicted - self.evicted
        if stats.evicted != self.evicted:
            self.hidden = {}
        self.evicted = stats.evicted
        self.present = {key: self.present[key] for key in visible}

    @invariant()
    def nothing_is_wrong(self) -> None:
        for pool in self.pools:
            assert pool._store.audit() == []  # type: ignore[attr-defined]
        stats = self.pools[0].stats().store
        assert stats.used_bytes <= stats.data_bytes
        assert stats.chunks >= len(self.present)

    @invariant()
    def prefixes_outlive_what_hangs_on_them(self) -> None:
        for chunk in self.present.values():
            assert chunk.parent in self.roots or chunk.parent in self.present


@pytest.mark.parametrize("scheme", ["memory", pytest.param("shm", marks=pytest.mark.slow)])
def test_pool_against_a_plain_model(scheme: str) -> None:
    machine = type("Machine", (PoolModel,), {"scheme": scheme})
    many = settings(max_examples=25, stateful_step_count=40, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=many)
