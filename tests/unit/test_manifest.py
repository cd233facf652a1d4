"""Manifests and the plan of a remote read: what is not exactly right is nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.kv.hashing import ChunkKeys
from headwater.kv.spec import KVSpec
from headwater.kv.topology import whole_shard
from headwater.stores.base import Piece
from headwater.stores.remote.manifest import Manifest, Names
from headwater.stores.remote.plan import ObjectReadPlan, layers_per_piece, tile_sums

from support import empty_tiles, gqa, local_tiles, specs, topologies

ROOT = bytes(range(32))


def make(spec: KVSpec, num_tokens: int = 8, piece_bytes: int = 1) -> tuple[Manifest, Piece]:
    chunk = ChunkKeys(ROOT, 8, range(num_tokens)).chunks()[-1]
    shard = whole_shard(spec)
    tiles = local_tiles(spec, chunk, shard)
    step = layers_per_piece(spec, 8, piece_bytes)
    return Manifest.of(chunk, spec, 8, step, b"generati", 123, tile_sums(tiles)), Piece(chunk, shard, tiles)


@given(specs(), st.integers(1, 8))
def test_round_trip(spec: KVSpec, num_tokens: int) -> None:
    manifest, piece = make(spec, num_tokens)
    back = Manifest.decode(piece.chunk.key, manifest.encode())
    assert back is not None
    assert back.fits(piece.chunk, spec)
    assert np.array_equal(back.sums, manifest.sums)
    assert (back.generation, back.parent, back.root) == (manifest.generation, piece.chunk.parent, ROOT)


@given(st.data())
def test_any_flipped_bit_and_any_cut_is_no_manifest(data: st.DataObject) -> None:
    manifest, piece = make(gqa())
    raw = bytearray(manifest.encode())
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(raw) * 8 - 1))
        raw[at // 8] ^= 1 << at % 8
    else:
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    assert Manifest.decode(piece.chunk.key, bytes(raw)) is None


@given(st.binary(max_size=400))
def test_noise_is_no_manifest(raw: bytes) -> None:
    assert Manifest.decode(bytes(32), raw) is None


def test_a_manifest_is_bound_to_its_key() -> None:
    manifest, _ = make(gqa())
    assert Manifest.decode(bytes(32), manifest.encode()) is None


@given(st.data())
def test_the_plan_reads_what_was_written_for_any_topology(data: st.DataObject) -> None:
    spec = data.draw(specs())
    piece_bytes = data.draw(st.sampled_from([1, 100, 1 << 20]))
    manifest, whole = make(spec, data.draw(st.integers(1, 8)), piece_bytes)
    names = Names("t")
    objects = {
        names.piece(manifest, number): whole.tiles[layers.start : layers.stop].tobytes()
        for number, layers in enumerate(manifest.pieces)
    }
    for shard in data.draw(topologies(spec)).shards(spec):
        piece = Piece(whole.chunk, shard, empty_tiles(spec, whole.chunk, shard))
        plan = ObjectReadPlan(spec, names)
        plan.add(0, piece, manifest)
        for span, proof in zip(plan.spans, plan.proofs, strict=True):
            value = objects[span.name]
            assert span.is_whole == (span.offset == 0 and span.length == len(value))
            got = np.frombuffer(value[span.offset : span.offset + span.length], np.uint8)
            at = 0
            for target in span.targets:
                target[:] = got[at : at + target.size]
                at += target.size
            assert at == span.length == len(got)
            assert proof.holds(range(len(span.targets)))
        plan.settle(0, piece)
        assert np.array_equal(piece.tiles, local_tiles(spec, whole.chunk, shard))


def test_a_proof_fails_on_a_wrong_byte() -> None:
    spec = gqa()
    manifest, whole = make(spec)
    plan = ObjectReadPlan(spec, Names("t"))
    plan.add(0, Piece(whole.chunk, whole.shard, whole.tiles), manifest)
    assert all(proof.holds(range(len(proof.tiles))) for proof in plan.proofs)
    whole.tiles[1, 2, 3] ^= 1
    assert sum(not proof.holds(range(len(proof.tiles))) for proof in plan.proofs) == 1
