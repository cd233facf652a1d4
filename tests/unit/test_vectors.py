"""The committed vectors: what docs/format.md promises to other implementations, held against this one.

The files were made by tests/vectors/generate.py, a second implementation that shares no code with Headwater. A test
that fails here after a change of src means that stored data is lost or, worse, misread: see "Versions" in that page.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headwater.kernels.attention.base import AttentionBatch
from headwater.kernels.attention.reference import ReferenceAttention
from headwater.kv import format as kv_format
from headwater.kv.checkpoint import digest_checkpoint
from headwater.kv.encoding import ENCODINGS, PACKED, decode_tiles, stored_extent_bytes, stored_tile_bytes
from headwater.kv.hashing import FORMAT_VERSION, ChunkKeys, ChunkRef, Extra, root_key
from headwater.kv.identity import Identity, canonical_rope, digest_scales
from headwater.kv.packing import fits_packed, pack_tile, unpack_tile
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Split, Topology, TopologyError, whole_shard
from headwater.models.config_hf import config_from_hf
from headwater.models.context import StepContext
from headwater.models.decoder import Decoder, build_model
from headwater.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.pool.tenants import tenant_tag
from headwater.stores import open_store
from headwater.stores.base import Status
from headwater.stores.embedded import layout
from headwater.stores.embedded.layout import Geometry, Record, Word, cells_for, decode_header, state_word
from headwater.stores.host import boot_id
from headwater.stores.remote.manifest import Manifest, is_of_other_version

from support import second_implementation

VECTORS = Path(__file__).parents[1] / "vectors"
STATES = {"pending": layout.PENDING, "complete": layout.COMPLETE, "evicting": layout.EVICTING, "limbo": layout.LIMBO}


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_bytes())
    return data


KEYS, SHARDS, EXTENT, INDEX, MANIFEST = (load(name) for name in ("keys", "shards", "extent", "index", "manifest"))
LATENT, PACKED_TILES = load("latent"), load("packed")
EXTENT_BYTES = (VECTORS / "extent.bin").read_bytes()
PACKED_BYTES = np.frombuffer((VECTORS / "packed.bin").read_bytes(), np.uint8)
"""Read-only, and its tiles lie anywhere."""


@pytest.fixture(scope="module")
def second() -> ModuleType:
    """The second implementation."""
    return second_implementation()


def test_the_committed_files_are_what_the_generator_makes(second: ModuleType) -> None:
    built = second.build()
    assert {name: (VECTORS / name).read_bytes() == data for name, data in built.items()} == dict.fromkeys(built, True)


def test_the_generator_shares_no_code_with_headwater() -> None:
    source = (VECTORS / "generate.py").read_text()
    assert not re.search(r"^\s*(?:from|import)\s+(?:headwater|numpy)", source, re.MULTILINE)


# ---- latent attention --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vector", LATENT["cases"], ids=lambda v: v["name"])
def test_planes_of_latent_attention(vector: dict[str, Any]) -> None:
    """Through a layer of the engine, into the pages of its cache: the normed latent, and the rotated key in pairs."""
    given = vector["rope_settings"]
    rope: dict[str, Any] = {"rope_theta": given["theta"]}
    if "factor" in given:
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": given["original_length"]}
        rope |= {name: given[name] for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
    width, rope_width, position = len(vector["latent"]), len(vector["rope"]), vector["position"]
    model = one_latent_layer(width, rope_width, rope_parameters=rope)
    attention = model.layers[0].attention
    attention.kv_norm.weight.copy_(torch.tensor(LATENT["norm"]))
    attention.from_input.weight.zero_()
    attention.from_input.weight[-width - rope_width :, 0] = torch.tensor(LATENT["product"])
    page = (1, 1, 1)
    planes = (torch.full((*page, width), torch.nan), torch.full((*page, rope_width), torch.nan))
    backend = ReferenceAttention()
    one = torch.ones(1, dtype=torch.int32)
    batch = AttentionBatch(torch.tensor([0, 1]).int(), one, one.view(1, 1) - 1, (1,), (1,), 1, 1)
    cache = SimpleNamespace(planes=lambda layer: planes)
    ctx = StepContext(torch.tensor([position]), torch.tensor([0]), backend, batch, backend.plan(batch), cache)
    x = torch.zeros(1, model.config.hidden_size)
    x[0, 0] = 1.0
    attention(x, model.cos_sin, ctx)
    # Angles are rounded to float32 before their cosine is taken.
    for plane, name, tolerance in ((planes[0], "latent", 1e-6), (planes[1], "rope", 1e-6 + position * 2e-7)):
        torch.testing.assert_close(plane[0, 0, 0], torch.tensor(vector[name]), rtol=0, atol=tolerance)


def one_latent_layer(latent_dim: int, rope_dim: int, rope_parameters: dict[str, Any]) -> Decoder:
    """A model whose only layer has latents of these widths."""
    values: dict[str, Any] = {"model_type": "deepseek_v2", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 1, "intermediate_size": 4, "max_position_embeddings": 8192, "q_lora_rank": None}
    values |= {"kv_lora_rank": latent_dim, "qk_rope_head_dim": rope_dim, "qk_nope_head_dim": 4, "v_head_dim": 4}
    values |= {"first_k_dense_replace": 1, "rms_norm_eps": LATENT["eps"], "rope_parameters": rope_parameters}
    model = build_model(config_from_hf(values))
    for target in model.targets().values():
        target.destination.zero_()
    return model


# ---- names ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vector", KEYS["specs"], ids=lambda v: v["name"])
def test_spec_digest(vector: dict[str, Any]) -> None:
    spec = KVSpec.from_canonical(json.loads(vector["canonical"]))
    assert json.dumps(spec.canonical(), sort_keys=True, separators=(",", ":")) == vector["canonical"]
    assert spec.digest.hex() == vector["digest"]


@pytest.mark.parametrize("vector", KEYS["identities"], ids=lambda v: v["name"])
def test_identity_digest(vector: dict[str, Any]) -> None:
    fields = {name: value for name, value in vector.items() if name not in ("name", "digest")}
    assert Identity(**fields, label="no part of it").digest.hex() == vector["digest"]


def test_rope_and_scales() -> None:
    assert [canonical_rope(vector["settings"]) for vector in KEYS["ropes"]] == [v["text"] for v in KEYS["ropes"]]
    assert [digest_scales(vector["scales"]) for vector in KEYS["scales"]] == [v["digest"] for v in KEYS["scales"]]


@pytest.mark.parametrize("vector", KEYS["weights"], ids=lambda v: v["digest"][:24])
def test_weights_digest(vector: dict[str, Any], tmp_path: Path) -> None:
    files = {name: bytes.fromhex(data) for name, data in vector.get("files", {}).items()}
    if "pattern" in vector:
        files = {"": ((np.arange(vector["pattern"]) * 31 + 7) % 251).astype(np.uint8).tobytes()}
    for name, data in files.items():
        path = tmp_path / (name or "one.bin")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    sample = vector["digest"].startswith("sampled-")
    target = tmp_path / "one.bin" if "" in files else tmp_path
    assert digest_checkpoint(target, sample=sample, cache=False) == vector["digest"]


@pytest.mark.parametrize("number", range(len(KEYS["roots"])))
def test_root_key(number: int) -> None:
    vector = KEYS["roots"][number]
    identity, spec, tenant, adapter = (
        bytes.fromhex(vector[name]) for name in ("identity_digest", "spec_digest", "tenant", "adapter")
    )
    assert root_key(identity, spec, vector["chunk_tokens"], tenant, adapter).hex() == vector["key"]


def test_every_root_key_of_the_vectors_is_another() -> None:
    """Tenant, adapter, their order, chunk size, identity and spec each make a difference."""
    assert len({vector["key"] for vector in KEYS["roots"]}) == len(KEYS["roots"])


def test_versions_are_those_of_the_vectors() -> None:
    """Whoever raises one must write new vectors and say so in docs/format.md and the changelog."""
    assert KEYS["format_version"] == FORMAT_VERSION
    assert INDEX["index_version"] == layout.INDEX_VERSION


def test_space_keys_and_tenant_tags() -> None:
    assert {t: tenant_tag(bytes.fromhex(t)) for t in KEYS["tenant_tags"]} == KEYS["tenant_tags"]
    with open_pool("memory://?capacity=4MiB") as pool:
        for vector, fields in zip(KEYS["spaces"], KEYS["identities"], strict=True):
            identity = Identity(**{name: value for name, value in fields.items() if name not in ("name", "digest")})
            space = pool.space(identity, KVSpec.from_canonical(EXTENT["specs"]["gqa"]))
            assert (identity.digest.hex(), space.ref.key.hex()) == (vector["identity_digest"], vector["key"])


def chain_inputs(vector: dict[str, Any]) -> tuple[list[int], list[Extra]]:
    tokens = vector["tokens"]
    if isinstance(tokens, dict):
        tokens = list(range(tokens["from"], tokens["from"] + tokens["count"]))
    return tokens, [Extra(**{**extra, "digest": bytes.fromhex(extra["digest"])}) for extra in vector["extras"]]


@pytest.mark.parametrize("number", range(len(KEYS["chains"])))
def test_chunk_and_tail_keys(number: int) -> None:
    vector = KEYS["chains"][number]
    tokens, extras = chain_inputs(vector)
    keys = ChunkKeys(bytes.fromhex(vector["root"]), vector["chunk_tokens"], tokens, extras)
    assert [key.hex() for key in keys.full] == vector["full"]
    assert [[i, n, keys.tail_ref(i, n).key.hex()] for i, n, _ in vector["tails"]] == vector["tails"]


SHORT_CHAINS = [i for i, vector in enumerate(KEYS["chains"]) if len(chain_inputs(vector)[0]) < 1000]


@pytest.mark.parametrize("number", SHORT_CHAINS)
def test_chunk_keys_of_a_prompt_that_grows(number: int) -> None:
    """Token by token, but an extra comes in one piece: it must be known before its first chunk is complete."""
    vector = KEYS["chains"][number]
    tokens, extras = chain_inputs(vector)
    keys = ChunkKeys(bytes.fromhex(vector["root"]), vector["chunk_tokens"])
    first = 0
    for end in range(1, len(tokens) + 1):
        if not any(extra.offset < end < extra.offset + extra.num_tokens for extra in extras):
            keys.extend(tokens[first:end], [extra for extra in extras if first <= extra.offset < end])
            first = end
    assert [key.hex() for key in keys.full] == vector["full"]


# ---- shards -----------------------------------------------------------------------------------------------------
def spec_of(vector: dict[str, Any]) -> KVSpec:
    heads = vector["num_kv_heads"]
    return KVSpec.gqa(num_layers=vector["num_layers"], num_kv_heads=heads, head_dim=8, dtype="float16")


def topology_of(vector: dict[str, Any]) -> Topology:
    settings = dict(vector["topology"])
    if isinstance(settings.get("pp"), list):
        settings["pp"] = tuple(settings["pp"])
    return Topology(**settings)


@pytest.mark.parametrize("number", range(len(SHARDS["cases"])))
def test_every_rank_of_a_topology(number: int) -> None:
    vector = SHARDS["cases"][number]
    topology, spec = topology_of(vector), spec_of(vector)
    rows = []
    for pp_rank, pcp_rank, tp_rank in itertools.product(
        range(topology.num_stages), range(topology.pcp), range(topology.tp)
    ):
        shard = topology.shard(spec, tp_rank=tp_rank, pp_rank=pp_rank, pcp_rank=pcp_rank)
        assert (shard.split.parts, shard.split.interleave) == (vector["parts"], vector["interleave"])
        written = [list(shard.owned(chunk)[0].layers) for chunk in SHARDS["written_chunks"]]
        layers, heads = [shard.layers.start, shard.layers.stop], [shard.heads.start, shard.heads.stop]
        held = [shard.part, shard.replicas, shard.replica, written]
        rows.append([pp_rank, pcp_rank, tp_rank, layers, heads, *held])
    assert rows == vector["ranks"]
    assert len(list(topology.shards(spec))) == topology.num_ranks == len(rows)


@pytest.mark.parametrize("number", range(len(SHARDS["impossible"])))
def test_impossible_topologies(number: int) -> None:
    vector = SHARDS["impossible"][number]
    with pytest.raises(TopologyError):
        list(topology_of(vector).shards(spec_of(vector)))


# ---- bytes ------------------------------------------------------------------------------------------------------
def extent_of(vector: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(EXTENT_BYTES, np.uint8)[vector["offset"] : vector["offset"] + vector["length"]]


def logical(spec: KVSpec, first: int, num_tokens: int) -> list[list[np.ndarray[Any, np.dtype[np.uint8]]]]:
    """The example content as an engine has it: per layer and plane, an array [head][token][byte]."""
    made = []
    for layer in range(spec.num_layers):
        planes = []
        for number, plane in enumerate(spec.planes):
            head, token, byte = np.ogrid[: spec.num_kv_heads, :num_tokens, : plane.row_bytes]
            values = (101 * layer + 59 * head + 37 * number + 31 * (first + token) + 7 * byte + 13) % 251
            planes.append(values.astype(np.uint8))
        made.append(planes)
    return made


def local_tiles(spec: KVSpec, shard: Shard, first: int, num_tokens: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What one rank holds of that content, as (layers, heads, bytes)."""
    rows, planes = shard.split.rows(shard.part, first, num_tokens), logical(spec, first, num_tokens)
    tiles = [
        [np.concatenate([plane[head, rows].reshape(-1) for plane in planes[layer]]) for head in shard.heads]
        for layer in shard.layers
    ]
    return np.array(tiles, np.uint8).reshape(shard.local_shape(spec, first, num_tokens))


@pytest.mark.parametrize("number", range(len(EXTENT["chunks"])))
def test_whole_tiles_and_their_checksums(number: int) -> None:
    vector = EXTENT["chunks"][number]
    spec, count = KVSpec.from_canonical(EXTENT["specs"][vector["spec"]]), vector["num_tokens"]
    raw = extent_of(vector)
    assert spec.extent_bytes(count) == vector["length"]
    assert local_tiles(spec, whole_shard(spec), vector["first_token"], count).tobytes() == raw.tobytes()
    for tile in vector["tiles"]:
        size = spec.tile_bytes(count)
        at = (tile["layer"] * spec.num_kv_heads + tile["head"]) * size
        assert at == tile["offset"]
        assert f"{kv_format.checksum(raw[at : at + size]):016x}" == tile["checksum"]


@pytest.mark.parametrize("number", range(len(EXTENT["chunks"])))
def test_parts_and_their_checksums(number: int) -> None:
    vector = EXTENT["chunks"][number]
    spec, count = KVSpec.from_canonical(EXTENT["specs"][vector["spec"]]), vector["num_tokens"]
    tiles = extent_of(vector).reshape(spec.num_tiles, -1)
    for want in vector["splits"]:
        split = Split(want["parts"], want["interleave"])
        rows = [kv_format.part_rows(split, part, vector["first_token"], count).tolist() for part in range(split.parts)]
        sums = [kv_format.part_checksums(spec, split, vector["first_token"], count, tile) for tile in tiles]
        assert rows == want["rows"]
        assert [f"{value:016x}" for tile in sums for value in tile] == want["checksums"]


def test_encodings_and_the_lengths_that_they_store() -> None:
    defined = {vector["number"]: vector["name"] for vector in EXTENT["encodings"]}
    assert {number: known.name for number, known in ENCODINGS.items()} == defined
    for vector in EXTENT["encodings"]:
        for name, num_tokens, size in vector["stored_tile_bytes"]:
            spec = KVSpec.from_canonical(EXTENT["specs"][name])
            assert stored_tile_bytes(spec, num_tokens, vector["number"]) == size
            assert stored_extent_bytes(spec, num_tokens, vector["number"]) == size * spec.num_tiles


# ---- packed tiles -------------------------------------------------------------------------------------------------
def packed_spec(vector: dict[str, Any]) -> KVSpec:
    return KVSpec.from_canonical(PACKED_TILES["specs"][vector["spec"]])


def bytes_at(place: list[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return PACKED_BYTES[place[0] : place[0] + place[1]]


def test_sizes_of_packed_tiles() -> None:
    assert PACKED_TILES["encoding"] == PACKED
    for name, num_tokens, size in PACKED_TILES["stored_tile_bytes"]:
        spec = KVSpec.from_canonical(PACKED_TILES["specs"][name])
        assert (name, num_tokens, stored_tile_bytes(spec, num_tokens, PACKED)) == (name, num_tokens, size)


@pytest.mark.parametrize("vector", PACKED_TILES["tiles"], ids=lambda v: v["name"])
def test_a_packed_tile(vector: dict[str, Any]) -> None:
    """Both directions; bases that this implementation does not write are read all the same."""
    spec, count, raw = packed_spec(vector), vector["num_tokens"], bytes_at(vector["raw"])
    made = np.full(stored_tile_bytes(spec, count, PACKED), 0xA5, np.uint8)
    assert pack_tile(spec, count, raw, made) == (vector["packed"] is not None)
    assert fits_packed(spec, count, made) or vector["packed"] is None
    if vector["packed"] is None:
        return
    packed, out = bytes_at(vector["packed"]), np.full(len(raw), 0xA5, np.uint8)
    if vector["written"]:
        assert made.tobytes() == packed.tobytes()
        assert f"{kv_format.checksum(made):016x}" == vector["checksum"]
    assert unpack_tile(spec, count, packed, out)
    assert out.tobytes() == raw.tobytes()


@pytest.mark.parametrize("vector", PACKED_TILES["unreadable"], ids=lambda v: v["name"])
def test_a_packed_tile_that_nobody_writes(vector: dict[str, Any]) -> None:
    tile = next(tile for tile in PACKED_TILES["tiles"] if tile["name"] == vector["tile"])
    spec, change = packed_spec(tile), np.frombuffer(bytes.fromhex(vector["bytes"]), np.uint8)
    packed = bytes_at(tile["packed"]).copy()
    out = np.empty(tile["raw"][1], np.uint8)
    assert decode_tiles(PACKED, spec, tile["num_tokens"], packed[None], out[None])
    packed[vector["at"] : vector["at"] + len(change)] = change
    assert not decode_tiles(PACKED, spec, tile["num_tokens"], packed[None], out[None])


def open_space(pool: Pool, name: str) -> Space:
    identity = Identity(weights="sha256:" + "0" * 64, run_dtype="float16", kv_dtype="float16")
    return pool.space(identity, KVSpec.from_canonical(EXTENT["specs"][name]), chunk_tokens=EXTENT["chunk_tokens"])


def write_all(space: Space, refs: list[ChunkRef], topology: Topology) -> None:
    """Every rank of the topology writes its part."""
    for shard in topology.shards(space.spec):
        tiles = [local_tiles(space.spec, shard, ref.first_token, ref.num_tokens) for ref in refs]
        assert all(status.stored for status in space.write(refs, shard, tiles))


def refs_of(space: Space, vector: dict[str, Any]) -> list[ChunkRef]:
    return space.keys(list(range(vector["first_token"] + vector["num_tokens"]))).chunks()


TOPOLOGIES = {
    "gqa": [
        Topology(),
        Topology(tp=2, pp=2),
        Topology(tp=8, dcp=2, interleave=2),
        Topology(tp=4, pcp=3),
        Topology(pcp=2, interleave=2, pcp_splits_tokens=True),
    ],
    "mla": [
        Topology(),
        Topology(tp=4, pp=2),
        Topology(tp=3, dcp=3, interleave=4),
        Topology(tp=2, dcp=2, pcp=4, pcp_splits_tokens=True),
    ],
}


@pytest.mark.parametrize(
    ("number", "topology"),
    [(i, topology) for i, v in enumerate(EXTENT["chunks"]) for topology in TOPOLOGIES[v["spec"]]],
    ids=str,
)
def test_what_any_topology_stores_is_the_extent(number: int, topology: Topology) -> None:
    """The bytes know nothing of who wrote them; the record's checksums are those of the writers' parts."""
    vector = EXTENT["chunks"][number]
    with open_pool("memory://?capacity=4MiB") as pool:
        space = open_space(pool, vector["spec"])
        refs = refs_of(space, vector)
        write_all(space, refs, topology)
        with space.borrow(refs[-1], whole_shard(space.spec)) as view:
            assert view is not None
            assert view.tobytes() == extent_of(vector).tobytes()
        index = pool._store._core.index  # type: ignore[attr-defined]
        entry = index.find(refs[-1].key)
        sums = np.frombuffer(index.payload(entry)[: 8 * entry.record.num_sums], "<u8")
    split = (topology.split.parts, topology.split.interleave)
    assert (entry.record.parts, entry.record.interleave) == split
    wanted = {(want["parts"], want["interleave"]): want["checksums"] for want in vector["splits"]}
    wanted[1, 1] = [tile["checksum"] for tile in vector["tiles"]]
    assert [f"{value:016x}" for value in sums] == wanted[split]


# ---- files ------------------------------------------------------------------------------------------------------
def test_header() -> None:
    want = INDEX["header"]
    geometry = Geometry(
        capacity=want["capacity"],
        index_bytes=want["index_bytes"],
        segment_bytes=want["segment_bytes"],
        unit_bytes=want["unit_bytes"],
        generation=bytes.fromhex(want["generation"]),
        policy=want["policy"],
        created_ns=want["created_ns"],
    )
    raw = bytes.fromhex(want["hex"])
    assert geometry.encode() == raw
    assert decode_header(raw) == geometry
    assert decode_header(bytes.fromhex(want["newer_hex"])) == 2


@pytest.mark.parametrize("place", [0, 7, 8, 16, 63, 64, 80, 96, 103, 104, 111])
def test_a_header_with_one_wrong_bit_is_none(place: int) -> None:
    raw = bytearray.fromhex(INDEX["header"]["hex"])
    raw[place] ^= 1
    assert decode_header(bytes(raw)) is None


@pytest.mark.parametrize(
    ("place", "value"),
    [(8, bytes(4)), (32, bytes(8)), (40, bytes(8)), (80, b"\xff")],
    ids=["version 0", "segments of 0 bytes", "units of 0 bytes", "policy that is no text"],
)
def test_a_header_with_impossible_content_and_a_right_checksum_is_none(place: int, value: bytes) -> None:
    raw = bytearray.fromhex(INDEX["header"]["hex"])
    raw[place : place + len(value)] = value
    raw[104:] = kv_format.checksum(bytes(raw[:104])).to_bytes(8, "little")
    assert decode_header(bytes(raw)) is None


@pytest.mark.parametrize("number", range(len(INDEX["geometries"])))
def test_where_the_parts_of_the_index_are(number: int) -> None:
    want = dict(INDEX["geometries"][number])
    sizes = [want.pop(name) for name in ("capacity", "index_bytes", "segment_bytes", "unit_bytes")]
    geometry = Geometry(*sizes, generation=bytes(16), policy="lru", created_ns=0)
    assert {name: getattr(geometry, name) for name in want} == want
    assert geometry.heap_offset + geometry.num_cells * layout.CELL <= geometry.index_bytes - layout.PAGE
    assert geometry.index_bytes + layout.MEMBERS_BYTES + geometry.data_bytes <= geometry.capacity


@pytest.mark.parametrize("number", range(len(INDEX["records"])))
def test_record(number: int) -> None:
    want = INDEX["records"][number]
    record = Record(**{**want["fields"], "key": bytes.fromhex(want["fields"]["key"])})
    fixed = record.pack()
    assert fixed.hex() == want["fixed"]
    assert Record._make(layout.unpack_record(fixed)) == record
    assert {name: f"{state_word(fixed, state):016x}" for name, state in STATES.items()} == want["state_words"]
    assert record.num_cells == cells_for(len(want["payload"]) // 2) == want["cells"]
    assert record.payload_sum == kv_format.checksum(bytes.fromhex(want["payload"]))


def test_offsets_of_the_fixed_part() -> None:
    """One distinct value a field, found at the documented place."""
    offsets = INDEX["field_offsets"]
    values = {name: 1 + i for i, name in enumerate(offsets)}
    fixed = Record(**{**values, "key": bytes(31) + b"\7"}).pack()
    assert len(fixed) == 128
    assert list(offsets) == list(Record._fields)
    for name, (at, size) in offsets.items():
        if name != "key":
            assert int.from_bytes(fixed[at : at + size], "little") == values[name]


def test_mutable_cell() -> None:
    raw = bytes.fromhex(INDEX["mutable_cell"])
    assert len(raw) == layout.CELL
    assert int.from_bytes(raw[:8], "little") & 7 == layout.COMPLETE
    assert int.from_bytes(raw[layout.CHILDREN : layout.CHILDREN + 4], "little") == 3
    assert int.from_bytes(raw[layout.PINNED : layout.PINNED + 4], "little") == 0
    assert np.frombuffer(raw, "<u2", layout.NUM_TAILS, layout.TAILS).tolist() == [5, 1, 0, 0, 0, 0, 0, 0]
    assert int.from_bytes(raw[layout.REMAINING : layout.REMAINING + 4], "little") == 0
    assert int.from_bytes(raw[layout.MAGIC_AT : layout.MAGIC_AT + 8], "little") == layout.RECORD_MAGIC


@pytest.mark.parametrize("derived", [True, False], ids=["complete", "records only"])
def test_headwater_reads_a_store_that_the_second_implementation_wrote(
    second: ModuleType, tmp_path: Path, derived: bool
) -> None:
    made = second.write_store(tmp_path, boot_id(), derived=derived)
    identity = Identity(**{name: value for name, value in made["identity"].items() if name != "name"})
    spec = KVSpec.from_canonical(made["spec"])
    with open_pool(f"file://{tmp_path}") as pool:
        space = pool.space(identity, spec, chunk_tokens=made["chunk_tokens"])
        hit = space.match(space.keys(made["tokens"]))
        assert [(c.key, c.number, c.num_tokens) for c in hit.chunks] == [chunk[:3] for chunk in made["chunks"]]
        out = [np.zeros(spec.extent_bytes(chunk.num_tokens), np.uint8) for chunk in hit.chunks]
        assert space.read(hit.chunks, whole_shard(spec), out) == [Status.OK] * 3
        for chunk, tiles in zip(hit.chunks, out, strict=True):
            assert tiles.tobytes() == second.extent(made["spec"], chunk.first_token, chunk.num_tokens)
        report = pool.verify()
        assert report.clean
        assert report.chunks == 3
        assert pool.stats().store.rebuilds == (0 if derived else 1)


def test_a_chunk_in_an_encoding_that_nobody_has_defined_is_not_found_and_stays(
    second: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = second.write_store(tmp_path, boot_id(), last_encoding=second.UNDEFINED_ENCODING)
    identity = Identity(**{name: value for name, value in made["identity"].items() if name != "name"})
    spec = KVSpec.from_canonical(made["spec"])
    with open_pool(f"file://{tmp_path}") as pool:
        space = pool.space(identity, spec, chunk_tokens=made["chunk_tokens"])
        keys = space.keys(made["tokens"])
        tail = keys.chunks()[-1]
        for _ in range(2):
            assert space.match(keys).num_tokens == 12
            assert space.read([tail], whole_shard(spec), [space.empty(tail, whole_shard(spec))]) == [Status.MISS]
        report = pool.verify()
        assert (report.clean, report.chunks, pool.stats().store.damaged) == (True, 2, 0)
    found = second.read_store(tmp_path)[tail.key]
    assert (found["state"], found["encoding"]) == (layout.COMPLETE, second.UNDEFINED_ENCODING)
    assert [f"encoding {second.UNDEFINED_ENCODING}" in message for message in caplog.messages] == [True]


def test_the_second_implementation_reads_a_store_that_headwater_wrote(second: ModuleType, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}?capacity=8MiB&index=1MiB&segment=64KiB")
    with Pool(store) as pool:
        space = open_space(pool, "mla")
        refs = space.keys(list(range(16))).chunks()
        write_all(space, refs, Topology(tp=4, dcp=2, interleave=2))
        # Others around them, so that the directory has probes and the heap more than one chain.
        for salt in range(300):
            keys = space.keys([salt, 1, 2, 3, 4, 5], tenant=b"%d" % salt)
            write_all(space, keys.chunks(), Topology())
        found = second.read_store(tmp_path)
        words = list(store._core.index.words)  # type: ignore[attr-defined]
    spec_data, above = EXTENT["specs"]["mla"], space.root().key
    assert len(found) == 1 + 301 + 303
    assert (words[Word.CHUNKS], words[Word.DIRTY], words[Word.PENDING]) == (303, 0, 0)
    assert json.loads(found[space.ref.key]["payload"])["spec"] == spec_data
    assert found[above]["parent_id"] == found[space.ref.key]["id"]
    for ref in refs:
        record = found[ref.key]
        split = (record["parts"], record["interleave"])
        assert (record["state"], record["kind"], record["num_tokens"], split) == (2, 3, ref.num_tokens, (2, 2))
        assert (record["parent_id"], record["parent_cell"]) == (found[above]["id"], found[above]["cell"])
        assert record["data"] == second.extent(spec_data, ref.first_token, ref.num_tokens)
        sums = second.checksums(spec_data, 2, 2, ref.first_token, ref.num_tokens)
        assert record["payload"] == b"".join(map(second.u64, sums)) + b"\1" * len(sums)
        above = ref.key
    assert [found[ref.key]["tails"] for ref in refs] == [[], [4], []]
    assert [found[ref.key]["children"] for ref in refs] == [1, 1, 0]


# ---- manifests --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vector", MANIFEST["manifests"], ids=lambda v: v["name"])
def test_manifest(vector: dict[str, Any]) -> None:
    raw, fields = bytes.fromhex(vector["hex"]), dict(vector["fields"])
    for name in ("key", "parent", "root", "generation"):
        fields[name] = bytes.fromhex(fields[name])
    manifest = Manifest.decode(fields["key"], raw)
    assert manifest is not None
    assert {name: getattr(manifest, name) for name in fields} == fields
    assert [f"{value:016x}" for value in manifest.sums] == MANIFEST["checksums"]
    if vector["name"] != "first version":
        assert manifest.encode() == raw
        for name, value in fields.items():
            at, size = MANIFEST["field_offsets"][name]
            assert raw[at : at + size] == (value if isinstance(value, bytes) else value.to_bytes(size, "little"))
    spec, tokens = KVSpec.from_canonical(EXTENT["specs"][MANIFEST["spec"]]), fields["num_tokens"]
    chunk = ChunkRef(fields["key"], fields["parent"], fields["number"], 6, tokens, fields["root"])
    assert manifest.fits(chunk, spec) == (fields["encoding"] in ENCODINGS)
    assert not is_of_other_version(fields["key"], raw)


def test_a_manifest_of_a_newer_version_is_told_from_noise() -> None:
    raw, key = bytes.fromhex(MANIFEST["newer_hex"]), bytes.fromhex(MANIFEST["manifests"][0]["fields"]["key"])
    assert Manifest.decode(key, raw) is None
    assert is_of_other_version(key, raw)
    assert not is_of_other_version(bytes(32), raw)
    assert not is_of_other_version(key, raw[:-1] + bytes([raw[-1] ^ 1]))
