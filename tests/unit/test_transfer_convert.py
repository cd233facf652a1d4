"""Paged cache ⇄ extent order: equal to the plain way, through the pool and across topologies, and bounded."""

from __future__ import annotations

import random
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BufferMismatchError, InvalidArgumentError
from headwater.kernels import extent_cpu
from headwater.kernels.xxh3 import unsigned
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Topology, whole_shard
from headwater.pool import open_pool
from headwater.pool.buffers import RawBuffer
from headwater.stores.base import Filled, Status
from headwater.transfer.convert import PageSpan, gather, plan_spans, scatter
from headwater.transfer.verify import staged_checksums, verify_staged

from support import identity
from transfer_cases import (
    ORDERS,
    SPECS,
    cache_view,
    check_gather,
    check_scatter,
    naive_tiles,
    random_case,
)

SEEDS = st.integers(0, 2**32)
CHUNK = 8


# Whatever the size of the pieces: all by strided copies, all by index, or as it would be.
PATHS = st.sampled_from((0, extent_cpu.SMALL_PIECE_BYTES, 1 << 40))


@given(seed=SEEDS, small_piece_bytes=PATHS)
def test_gather_equals_the_plain_way(seed: int, small_piece_bytes: int) -> None:
    with patch.object(extent_cpu, "SMALL_PIECE_BYTES", small_piece_bytes):
        check_gather(random.Random(seed), "cpu", extent_cpu.move_rows_cpu)


@given(seed=SEEDS, small_piece_bytes=PATHS)
def test_scatter_writes_its_rows_and_nothing_else(seed: int, small_piece_bytes: int) -> None:
    with patch.object(extent_cpu, "SMALL_PIECE_BYTES", small_piece_bytes):
        check_scatter(random.Random(seed), "cpu", extent_cpu.move_rows_cpu)


@given(seed=SEEDS, orders=st.tuples(*[st.sampled_from(ORDERS)] * 2), sizes=st.tuples(*[st.integers(1, 20)] * 2))
def test_kv_survives_the_way_into_another_cache(
    seed: int, orders: tuple[tuple[str, ...], ...], sizes: tuple[int, int]
) -> None:
    rng = random.Random(seed)
    spec = rng.choice(SPECS)
    shard = whole_shard(spec)
    found = []
    staging: torch.Tensor | None = None
    for order, block_size in zip(orders, sizes, strict=True):
        view, data = cache_view(spec, shard, num_blocks=40, block_size=block_size, order=order)
        blocks = rng.sample(range(40), -(-30 // block_size))
        spans = [PageSpan(blocks, start, min(CHUNK, 30 - start)) for start in range(0, 30, CHUNK)]
        plan = plan_spans(view, shard, spans)
        if staging is None:
            staging = torch.empty(plan.staged_bytes(spec.num_layers), dtype=torch.uint8)
            gather(plan, shard.layers, staging)
        else:
            scatter(plan, shard.layers, staging)
        found.append([naive_tiles(view, data, shard, span) for span in spans])
    for before, after in zip(*found, strict=True):
        assert np.array_equal(before, after)


TOPOLOGIES = [
    Topology(tp=1),
    Topology(tp=2),
    Topology(tp=4, pp=2),
    Topology(tp=8, dcp=2, interleave=3),
    Topology(tp=2, pp=(2, 1)),
]


@pytest.mark.parametrize("reader", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("writer", TOPOLOGIES, ids=str)
def test_every_topology_reads_what_any_other_wrote(writer: Topology, reader: Topology) -> None:
    spec = KVSpec.gqa(num_layers=3, num_kv_heads=4, head_dim=8, v_head_dim=6, dtype="float16")
    rng = random.Random(str((writer, reader)))
    num_tokens = 29
    truth, truth_data = cache_view(spec, whole_shard(spec), num_blocks=32, block_size=1, order=ORDERS[0])
    with open_pool("memory://?capacity=8MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=CHUNK)
        keys = space.keys(list(range(num_tokens)))
        chunks = [*keys.refs(num_tokens // CHUNK), keys.tail_ref(num_tokens // CHUNK, num_tokens % CHUNK)]
        everything = [PageSpan(range(32), c.first_token, c.num_tokens) for c in chunks]
        tiles = [naive_tiles(truth, truth_data, whole_shard(spec), span) for span in everything]

        for shard in writer.shards(spec):
            view, spans = _filled(spec, shard, tiles, chunks, rng)
            buffers = [space.empty(chunk, shard) for chunk in chunks]
            gather(plan_spans(view, shard, spans), shard.layers, buffers)
            assert all(status.stored for status in space.write(chunks, shard, buffers))
        stored = [space.empty(chunk, whole_shard(spec)) for chunk in chunks]
        assert space.read(chunks, whole_shard(spec), stored) == [Status.OK] * len(chunks)
        assert all(np.array_equal(a, b) for a, b in zip(stored, tiles, strict=True))

        for shard in reader.shards(spec):
            view, data, spans = _empty_cache(spec, shard, chunks, rng)
            buffers = [space.empty(chunk, shard) for chunk in chunks]
            assert space.read(chunks, shard, buffers) == [Status.OK] * len(chunks)
            scatter(plan_spans(view, shard, spans), shard.layers, buffers)
            for span, whole in zip(spans, tiles, strict=True):
                assert np.array_equal(naive_tiles(view, data, shard, span), _part(spec, shard, span, whole))


def _part(spec: KVSpec, shard: Shard, span: PageSpan, whole: np.ndarray) -> np.ndarray:
    """A shard's piece of a whole chunk."""
    picked = whole[shard.layers.start : shard.layers.stop, shard.heads.start : shard.heads.stop]
    rows = shard.split.rows(shard.part, span.first_token, span.num_tokens)
    planes, start = [], 0
    for plane in spec.planes:
        size = span.num_tokens * plane.row_bytes
        rows_of = picked[:, :, start : start + size].reshape(*picked.shape[:2], span.num_tokens, plane.row_bytes)
        planes.append(rows_of[:, :, rows].reshape(*picked.shape[:2], -1))
        start += size
    return np.concatenate(planes, axis=2)


def _empty_cache(spec, shard, chunks, rng):
    block_size = rng.choice((1, 3, 8, 16))
    view, data = cache_view(spec, shard, num_blocks=40, block_size=block_size, order=rng.choice(ORDERS))
    blocks = rng.sample(range(40), -(-32 // block_size))
    return view, data, [PageSpan(blocks, chunk.first_token, chunk.num_tokens) for chunk in chunks]


def _filled(spec, shard, tiles, chunks, rng):
    view, _, spans = _empty_cache(spec, shard, chunks, rng)
    parts = [np.ascontiguousarray(_part(spec, shard, span, whole)) for span, whole in zip(spans, tiles, strict=True)]
    scatter(plan_spans(view, shard, spans), shard.layers, parts)
    return view, spans


def test_gather_straight_into_a_reserved_extent() -> None:
    spec = SPECS[0]
    shard = Topology(tp=2).shard(spec, tp_rank=1)
    view, data = cache_view(spec, shard, num_blocks=8, block_size=3, order=ORDERS[1])
    other = Topology(tp=2).shard(spec, tp_rank=0)
    with open_pool("memory://?capacity=8MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=CHUNK)
        chunk = space.keys(list(range(CHUNK))).refs(1)[0]
        plan = plan_spans(view, shard, [PageSpan([5, 1, 2], 0, CHUNK)])
        (reservation,) = space.reserve([chunk], shard)
        extent = reservation.tiles
        assert extent is not None
        for layer in shard.layers:
            part = extent[layer : layer + 1, shard.heads.start : shard.heads.stop]
            gather(plan, range(layer, layer + 1), [part])
            sums = unsigned(staged_checksums(plan, torch.from_numpy(part.reshape(-1).copy()), 1))
            space.commit([Filled(reservation, range(layer, layer + 1), shard.heads, 0, sums)])
        reservation.close()
        assert space.write([chunk], other, [space.empty(chunk, other)])[0].stored
        with space.borrow(chunk, shard) as stored:
            assert stored is not None
            assert np.array_equal(stored, naive_tiles(view, data, shard, PageSpan([5, 1, 2], 0, CHUNK)))


def test_damage_is_seen_in_its_own_tile_only() -> None:
    case = random_case(random.Random(8), spec=SPECS[0])
    plan, layers = case.plan, case.shard.layers
    flat = torch.empty(plan.staged_bytes(len(layers)), dtype=torch.uint8)
    gather(plan, layers, flat)
    sums = staged_checksums(plan, flat, len(layers))
    assert verify_staged(plan, flat, len(layers), sums).all()
    flat[plan.tile_bytes(0)] ^= 1  # the first byte of the second tile
    good = verify_staged(plan, flat, len(layers), sums)
    assert good.sum() == good.numel() - 1
    assert not good.reshape(-1)[1]


def test_memory_by_address() -> None:
    case = random_case(random.Random(3))
    plan, layers = case.plan, case.shard.layers
    expected = [naive_tiles(case.view, case.data, case.shard, span) for span in case.spans]
    out = [np.zeros_like(tiles) for tiles in expected]
    gather(plan, layers, [RawBuffer(tiles.ctypes.data) for tiles in out])
    assert all(np.array_equal(a, b) for a, b in zip(out, expected, strict=True))


def _small_plan():
    spec = SPECS[0]
    view, _ = cache_view(spec, whole_shard(spec), num_blocks=4, block_size=4, order=ORDERS[0])
    return view, plan_spans(view, whole_shard(spec), [PageSpan([0, 3], 0, 8)])


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (PageSpan([0], 0, 5), "need 2 blocks"),
        (PageSpan([0, 4], 0, 5), "from 0 to 3"),
        (PageSpan([0, -1], 0, 5), "from 0 to 3"),
        (PageSpan([0], -1, 1), "expected at least 1, from 0 on"),
        (PageSpan([0], 0, 0), "expected at least 1, from 0 on"),
    ],
)
def test_spans_out_of_bounds_are_refused(span: PageSpan, message: str) -> None:
    view, plan = _small_plan()
    with pytest.raises(InvalidArgumentError, match=message):
        plan_spans(view, plan.shard, [span])
    with pytest.raises(InvalidArgumentError, match="at least one"):
        plan_spans(view, plan.shard, [])


def test_a_shard_that_the_cache_does_not_hold() -> None:
    spec = SPECS[0]
    shard = Topology(tp=2).shard(spec)
    view, _ = cache_view(spec, shard, num_blocks=4, block_size=4, order=ORDERS[0])
    with pytest.raises(InvalidArgumentError, match="the cache holds"):
        plan_spans(view, whole_shard(spec), [PageSpan([0], 0, 1)])


def test_buffers_that_do_not_fit() -> None:
    view, plan = _small_plan()
    layers = view.layers
    shape = plan.shard.local_shape(view.spec, 0, 8)
    read_only = np.zeros(shape, np.uint8)
    read_only.setflags(write=False)
    wrong = [
        torch.zeros(plan.staged_bytes(len(layers)) - 1, dtype=torch.uint8),
        torch.zeros(plan.staged_bytes(len(layers)), dtype=torch.int8),
        [np.zeros(shape, np.uint8)] * 2,
        [np.zeros((shape[0], shape[1], shape[2] + 1), np.uint8)],
        [np.zeros(shape, np.int8)],
        [np.zeros((*shape[:2], 2 * shape[2]), np.uint8)[:, :, ::2]],
        [read_only],
    ]
    for out in wrong:
        with pytest.raises(BufferMismatchError):
            gather(plan, layers, out)
    flat = torch.zeros(plan.staged_bytes(1), dtype=torch.uint8)
    with pytest.raises(BufferMismatchError):
        gather(plan, layers[:1], flat, held=layers)
    with pytest.raises(InvalidArgumentError, match="for staging of"):
        gather(plan, layers[:1], flat, held=layers[1:])
    scatter(plan, layers, [read_only])
    for bad in (range(0), range(2, 4), range(2, 0, -1)):
        with pytest.raises(InvalidArgumentError, match="ascending"):
            gather(plan, bad, [np.zeros(shape, np.uint8)])
