"""A second implementation of docs/format.md, for test vectors only. It imports nothing of Headwater, on purpose.

    python tests/vectors/generate.py            write the vector files beside this one
    python tests/vectors/generate.py --check    say which of them differ, and fail if any does

It is written to be read next to the specification, and slow: loops over bytes, no numpy. Besides the files it can
write and read a whole embedded store (`write_store`, `read_store`), which tests/unit/test_vectors.py holds against
the real one.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import xxhash

HERE = Path(__file__).parent
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
Spec = dict[str, Any]


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def xxh64(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=0)


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def compact(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode("ascii")


# ---- 1, 2: specs and identities ---------------------------------------------------------------------------------
def make_spec(layers: int, heads: int, *planes: tuple[str, int, str]) -> Spec:
    described = [{"name": name, "width": width, "dtype": dtype} for name, width, dtype in planes]
    return {"num_layers": layers, "num_kv_heads": heads, "planes": described}


def row_bytes(plane: dict[str, Any]) -> int:
    return int(plane["width"]) * DTYPE_BYTES[plane["dtype"]]


def tile_row_bytes(spec: Spec) -> int:
    return sum(row_bytes(plane) for plane in spec["planes"])


def spec_digest(spec: Spec) -> bytes:
    return sha(b"headwater spec v1\0", compact(spec))


IDENTITY_FIELDS = ("weights", "run_dtype", "quantization", "kv_dtype", "kv_scales", "rope", "epoch")


def identity_digest(identity: dict[str, Any]) -> bytes:
    texts = [str(identity[field]).encode("utf-8") for field in IDENTITY_FIELDS]
    if identity.get("settings"):
        texts.append(identity["settings"].encode("utf-8"))
    return sha(b"headwater identity v1\0", *(u32(len(text)) + text for text in texts))


def scales_digest(shape: list[int], values: list[float]) -> str:
    packed = b"".join(struct.pack("<d", value) for value in values)
    return "sha256:" + sha(b"headwater scales v1\0", u64(len(shape)), *map(u64, shape), packed).hex()


def weights_digest(files: dict[str, bytes], *, sampled: bool = False) -> str:
    parts = []
    for name, content in sorted((name.encode(), content) for name, content in files.items()):
        read = [content[start:end] for start, end in _sampled(len(content))] if sampled else [content]
        parts.append(u32(len(name)) + name + u64(len(content)) + sha(*read))
    return ("sampled-" if sampled else "") + "sha256:" + sha(b"headwater checkpoint v2\0", *parts).hex()


def _sampled(size: int) -> list[tuple[int, int]]:
    length = min(1 << 20, size)
    count = min(16, -(-size // length))
    starts = [i * (size - length) // max(1, count - 1) for i in range(count)]
    return [(start, start + length) for start in starts]


# ---- 3: keys ----------------------------------------------------------------------------------------------------
def root_key(identity: bytes, spec: bytes, chunk_tokens: int, tenant: bytes, adapter: bytes) -> bytes:
    ends = u32(len(tenant)) + tenant + u32(len(adapter)) + adapter
    return sha(b"headwater root\0", u32(1), identity, spec, u32(chunk_tokens), ends)


def chunk_key(parent: bytes, first: int, tokens: list[int], extras: list[dict[str, Any]]) -> bytes:
    """`tokens` are the chunk's own; `extras` are all of the prompt's."""
    encoded = []
    for extra in extras:
        kind, digest, offset = extra["kind"].encode("utf-8"), bytes.fromhex(extra["digest"]), extra["offset"]
        if any(first <= token < first + len(tokens) for token in range(offset, offset + extra["num_tokens"])):
            lengths = bytes((len(kind), len(digest)))
            encoded.append(((offset, kind, digest), lengths + kind + digest + u64(offset)))
    return sha(parent, u32(len(tokens)), *map(u32, tokens), *(code for _, code in sorted(encoded)))


def chain(root: bytes, chunk_tokens: int, tokens: list[int], extras: list[dict[str, Any]]) -> list[bytes]:
    """[root key, key(0), key(1), …] of the full chunks."""
    keys = [root]
    for first in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        keys.append(chunk_key(keys[-1], first, tokens[first : first + chunk_tokens], extras))
    return keys


# ---- 4: tiles ---------------------------------------------------------------------------------------------------
def content(layer: int, head: int, plane: int, position: int, byte: int) -> int:
    """What the example extents hold, by logical coordinates: a byte in a wrong place is a wrong byte."""
    return (101 * layer + 59 * head + 37 * plane + 31 * position + 7 * byte + 13) % 251


def tile_part(spec: Spec, layer: int, head: int, first: int, rows: list[int]) -> bytes:
    """Some rows of a tile, plane after plane. All rows: the tile."""
    out = bytearray()
    for number, plane in enumerate(spec["planes"]):
        for row in rows:
            out += bytes(content(layer, head, number, first + row, byte) for byte in range(row_bytes(plane)))
    return bytes(out)


def tiles_of(spec: Spec) -> list[tuple[int, int]]:
    return [(layer, head) for layer in range(spec["num_layers"]) for head in range(spec["num_kv_heads"])]


def extent(spec: Spec, first: int, num_tokens: int) -> bytes:
    rows = list(range(num_tokens))
    return b"".join(tile_part(spec, layer, head, first, rows) for layer, head in tiles_of(spec))


def part_rows(parts: int, interleave: int, first: int, num_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(parts)]
    for row in range(num_tokens):
        rows[((first + row) // interleave) % parts].append(row)
    return rows


def checksums(spec: Spec, parts: int, interleave: int, first: int, num_tokens: int) -> list[int]:
    """In the order of a record: [layer][head][part]."""
    rows = part_rows(parts, interleave, first, num_tokens)
    return [xxh64(tile_part(spec, layer, head, first, some)) for layer, head in tiles_of(spec) for some in rows]


ENCODING_NAMES = ("raw", "packed")


def stored_tile_bytes(spec: Spec, num_tokens: int, encoding: int) -> int:
    """KeyError for an encoding that nobody has defined. 0: tiles cannot be stored so."""
    sizes = {0: num_tokens * tile_row_bytes(spec), 1: packed_tile_bytes(spec, num_tokens)}
    return sizes[encoding]


# ---- 4.2: packed tiles --------------------------------------------------------------------------------------------
def room_of(num_tokens: int, width: int) -> int:
    return 3 + 4 * (num_tokens * width // 2048)


def block_bytes(num_tokens: int, width: int) -> int:
    values = num_tokens * width
    size = 4 + 4 * room_of(num_tokens, width) + width + values + values // 2
    return (size + 15) // 16 * 16


def blocks_of(spec: Spec) -> list[tuple[int, int, int]]:
    """(plane, first channel, channels) of each, in the order in which they are stored."""
    found = []
    for number, plane in enumerate(spec["planes"]):
        for first in range(0, plane["width"], 128):
            found.append((number, first, min(128, plane["width"] - first)))
    return found


def packed_tile_bytes(spec: Spec, num_tokens: int) -> int:
    if any(plane["dtype"] != "bfloat16" or plane["width"] % 2 == 1 for plane in spec["planes"]):
        return 0
    size = sum(block_bytes(num_tokens, width) for _, _, width in blocks_of(spec))
    return size if size < num_tokens * tile_row_bytes(spec) else 0


def value_at(spec: Spec, num_tokens: int, plane: int, token: int, channel: int) -> int:
    """Where a value of a raw tile begins."""
    before = sum(row_bytes(one) for one in spec["planes"][:plane])
    return num_tokens * before + token * row_bytes(spec["planes"][plane]) + 2 * channel


def pack(spec: Spec, num_tokens: int, raw: bytes, above: int = 0) -> bytes | None:
    """A packed tile; None where it does not fit. `above`: bases are so much larger than writers make them."""
    out = bytearray()
    for plane, first, width in blocks_of(spec):
        values = []
        for token in range(num_tokens):
            for channel in range(first, first + width):
                at = value_at(spec, num_tokens, plane, token, channel)
                values.append(raw[at] + 256 * raw[at + 1])
        exponents = [value // 128 % 256 for value in values]
        bases = []
        for channel in range(width):
            finite = [exponent for exponent in exponents[channel::width] if exponent != 255]
            bases.append(max(finite) + above if finite else 255)
        codes, escapes = [], []
        for position, exponent in enumerate(exponents):
            below = bases[position % width] - exponent
            codes.append(below if 0 <= below <= 14 else 15)
            if codes[-1] == 15:
                escapes.append(exponent * 2**24 + position)
        room = room_of(num_tokens, width)
        if len(escapes) > room:
            return None
        block = u32(len(escapes)) + b"".join(map(u32, escapes + [0] * (room - len(escapes)))) + bytes(bases)
        block += bytes(value // 32768 * 128 + value % 128 for value in values)
        block += bytes(codes[i] + 16 * codes[i + 1] for i in range(0, len(codes), 2))
        out += block.ljust(block_bytes(num_tokens, width), b"\0")
    return bytes(out)


def unpack(spec: Spec, num_tokens: int, packed: bytes) -> bytes | None:
    """The raw tile; None for what nobody has written."""
    raw, start = bytearray(num_tokens * tile_row_bytes(spec)), 0
    for plane, first, width in blocks_of(spec):
        block, room, size = packed[start:], room_of(num_tokens, width), num_tokens * width
        start += block_bytes(num_tokens, width)
        count = int.from_bytes(block[:4], "little")
        if count > room:
            return None
        listed = {}
        for number in range(count):
            escape = int.from_bytes(block[4 + 4 * number : 8 + 4 * number], "little")
            if escape % 2**24 >= size:
                return None
            listed[escape % 2**24] = escape // 2**24
        bases = block[4 + 4 * room :][:width]
        signs = block[4 + 4 * room + width :][:size]
        codes = block[4 + 4 * room + width + size :][: size // 2]
        for position in range(size):
            code = codes[position // 2] // 16 if position % 2 else codes[position // 2] % 16
            exponent = listed.get(position, bases[position % width] - code)
            sign, mantissa = signs[position] // 128, signs[position] % 128
            at = value_at(spec, num_tokens, plane, position // width, first + position % width)
            raw[at : at + 2] = (sign * 32768 + exponent * 128 + mantissa).to_bytes(2, "little")
    return bytes(raw)


# ---- 5: topologies ----------------------------------------------------------------------------------------------
def stage_layers(num_layers: int, pp: int | list[int]) -> list[range]:
    if isinstance(pp, int):
        counts, rest = [num_layers // pp] * pp, num_layers % pp
        for stage in range(pp - 2, pp - 2 - rest, -1):
            counts[stage] += 1
    else:
        counts = pp
    if sum(counts) != num_layers or 0 in counts:
        raise ValueError("stages")
    return [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(len(counts))]


def ranks(layers: int, heads: int, topology: dict[str, Any]) -> list[list[Any]]:
    """One row a rank, by (pp, pcp, tp): see RANK_COLUMNS. ValueError where the topology cannot be."""
    t = {"tp": 1, "pp": 1, "dcp": 1, "pcp": 1, "interleave": 1, "pcp_splits_tokens": False, **topology}
    tp, dcp, pcp = t["tp"], t["dcp"], t["pcp"]
    if heads % tp == 0:
        copies, share = 1, heads // tp
    elif tp % heads == 0:
        copies, share = tp // heads, 1
    else:
        raise ValueError("heads")
    if copies % dcp:
        raise ValueError("dcp")
    table: list[list[Any]] = []
    for pp_rank, stage in enumerate(stage_layers(layers, t["pp"])):
        for pcp_rank in range(pcp):
            for tp_rank in range(tp):
                head, copy = tp_rank // copies * share, tp_rank % copies
                part, replicas, replica = copy % dcp, copies // dcp, copy // dcp
                if t["pcp_splits_tokens"]:
                    part += pcp_rank * dcp
                else:
                    replicas, replica = replicas * pcp, replica * pcp + pcp_rank
                written = [[i for i in stage if (chunk + i) % replicas == replica] for chunk in WRITTEN_CHUNKS]
                place = [pp_rank, pcp_rank, tp_rank, [stage.start, stage.stop], [head, head + share]]
                table.append([*place, part, replicas, replica, written])
    return table


RANK_COLUMNS = ["pp_rank", "pcp_rank", "tp_rank", "layers", "heads", "part", "replicas", "replica", "written"]
WRITTEN_CHUNKS = (0, 1, 6)

# ---- 6 to 8: the files of a store -------------------------------------------------------------------------------
PAGE, CELL, MEMBERS_BYTES = 4096, 64, 4096 + 128 * 8192
FREE, PENDING, COMPLETE, EVICTING, LIMBO = range(5)
FIXED_FIELDS = {
    "key": 32, "id": 8, "parent_id": 8, "offset": 8, "length": 8, "group": 8, "created_ns": 8, "payload_sum": 8,
    "parent_cell": 4, "num_tokens": 4, "number": 4, "num_sums": 4, "interleave": 4, "payload_bytes": 4, "parts": 2,
    "kind": 1, "encoding": 1, "chunk_tokens": 4, "row_bytes": 4, "exclusive": 4,
}  # fmt: skip


def up(value: int) -> int:
    return (value + PAGE - 1) // PAGE * PAGE


def geometry(capacity: int, index_bytes: int, segment_bytes: int, unit_bytes: int) -> dict[str, int]:
    units = (capacity - index_bytes - MEMBERS_BYTES) // unit_bytes
    cells = max(0, (index_bytes - 6 * PAGE - up(units)) // 71 - 8)
    bits = len(f"{max(cells // 4, 64):b}")
    places = {"num_units": units, "num_cells": cells, "directory_slots": 2 ** (1 + bits), "directory_offset": PAGE}
    places["cell_map_offset"] = PAGE + up(4 * places["directory_slots"])
    places["ages_offset"] = places["cell_map_offset"] + up(cells)
    places["unit_map_offset"] = places["ages_offset"] + up(8 * (cells // 4 + 1))
    places["heap_offset"] = places["unit_map_offset"] + up(units)
    places["num_segments"] = -(-units * unit_bytes // segment_bytes)
    return places


def header(sizes: tuple[int, int, int, int], created: int, generation: bytes, policy: str, version: int = 1) -> bytes:
    cells = geometry(*sizes)["num_cells"]
    body = b"HEADWATR" + u32(version) + u32(0) + b"".join(map(u64, (*sizes, created, cells)))
    body += generation + policy.encode().ljust(16, b"\0") + u64(0)
    return body + u64(xxh64(body))


def pack_fixed(fields: dict[str, Any]) -> bytes:
    values = ((fields[name], size) for name, size in FIXED_FIELDS.items())
    return b"".join(value if isinstance(value, bytes) else value.to_bytes(size, "little") for value, size in values)


def unpack_fixed(fixed: bytes) -> dict[str, Any]:
    fields, at = {}, 0
    for name, size in FIXED_FIELDS.items():
        raw = fixed[at : at + size]
        fields[name], at = raw if name == "key" else int.from_bytes(raw, "little"), at + size
    return fields


def state_word(fixed: bytes, state: int) -> int:
    return xxh64(fixed) // 8 * 8 + state


def record_cells(payload_bytes: int) -> int:
    return max(4, -(-(192 + payload_bytes) // CELL))


def mutable_cell(word: int, children: int, tails: list[int]) -> bytes:
    lengths = b"".join(length.to_bytes(2, "little") for length in tails).ljust(16, b"\0")
    return u64(word) + u32(children) + u32(0) + lengths + bytes(24) + u64(0x3148_5741_4552_4357)


def make_fields(kind: int, key: bytes, payload: bytes, chunk_tokens: int, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = dict.fromkeys(FIXED_FIELDS, 0)
    sums = {"payload_sum": xxh64(payload), "payload_bytes": len(payload)}
    return base | {"kind": kind, "key": key, "chunk_tokens": chunk_tokens, **sums, **more}


def write_store(directory: Path, boot: int, *, derived: bool = True, last_encoding: int = 0) -> dict[str, Any]:
    """A store with one space, one root, chunks 0 and 1 (written by two context-parallel ranks) and a tail.

    `derived=False` leaves out everything that a rebuild can make from the records. With a `last_encoding` that nobody
    has defined, the tail's bytes are whatever they are: its record and checksums are right all the same.
    """
    sizes = (4 << 20, 128 << 10, 64 << 10, 256)
    places, image = geometry(*sizes), bytearray(sizes[1])
    image[:112] = image[-PAGE : -PAGE + 112] = header(sizes, 5, bytes(range(16)), "lru")
    spec, identity, chunk_tokens, tokens = EXTENT_SPECS["mla"], IDENTITIES[0], 6, list(range(100, 116))
    described = {"identity": {k: v for k, v in identity.items() if k != "name"}, "spec": spec}
    root_json = {"adapter": "", "chunk_tokens": chunk_tokens, "label": "", "tenant": ""}
    root = root_key(identity_digest(identity), spec_digest(spec), chunk_tokens, b"", b"")
    keys = chain(root, chunk_tokens, tokens, [])
    space = sha(b"headwater space\0", identity_digest(identity))
    records = [
        (make_fields(1, space, compact(described), chunk_tokens), compact(described)),
        (make_fields(2, root, compact(root_json), chunk_tokens), compact(root_json)),
    ]
    chunks = [(keys[1], 0, 6, 1, 1), (keys[2], 1, 6, 2, 2), (chunk_key(keys[2], 12, tokens[12:], []), 2, 4, 1, 1)]
    data, units = bytearray(sizes[2]), 0
    for key, number, count, parts, interleave in chunks:
        raw, sums = extent(spec, 6 * number, count), checksums(spec, parts, interleave, 6 * number, count)
        payload = b"".join(map(u64, sums)) + b"\1" * len(sums)
        data[units * 256 : units * 256 + len(raw)] = raw
        where = {"offset": units * 256, "length": len(raw), "row_bytes": tile_row_bytes(spec), "group": 77}
        where |= {"encoding": last_encoding if number == 2 else 0}
        what = {"number": number, "num_tokens": count, "parts": parts, "interleave": interleave, "num_sums": len(sums)}
        records.append((make_fields(3, key, payload, chunk_tokens, **where, **what), payload))
        units += -(-len(raw) // 256)
    cell = above = 0
    for position, (fields, payload) in enumerate(records):
        cell, above = (cell + record_cells(len(records[position - 1][1])) if position else 1), cell
        fields |= {"id": 2 * position + 1, "created_ns": 1000 + position}
        if position:
            fields |= {"parent_id": 2 * position - 1, "parent_cell": above}
        fixed, children = pack_fixed(fields), int(position < len(records) - 1)
        tails = [4] if fields["number"] == 1 else []
        mutable = mutable_cell(state_word(fixed, COMPLETE), children * derived, tails * derived)
        start = places["heap_offset"] + cell * CELL
        image[start : start + 192 + len(payload)] = mutable + fixed + payload
        if derived:
            slot = int.from_bytes(fields["key"][:8], "little") % places["directory_slots"]
            while any(image[PAGE + 4 * slot : PAGE + 4 * slot + 4]):
                slot = (slot + 1) % places["directory_slots"]
            image[PAGE + 4 * slot : PAGE + 4 * slot + 4] = u32(cell)
    used_cells = cell + record_cells(len(records[-1][1])) - 1
    if derived:
        map_at, units_at = places["cell_map_offset"], places["unit_map_offset"]
        image[map_at + 1 : map_at + 1 + used_cells] = b"\1" * used_cells
        backed = sizes[2] // 256
        absent = b"\2" * (places["num_units"] - backed)
        image[units_at : units_at + places["num_units"]] = (b"\1" * units).ljust(backed, b"\0") + absent
        for word, value in {4: 1, 5: units, 6: used_cells, 8: len(chunks), 17: boot}.items():
            image[1024 + 8 * word : 1032 + 8 * word] = u64(value)
    (directory / "index").write_bytes(image)
    (directory / f"data-{bytes(range(16)).hex()}-0000").write_bytes(data)
    return {"identity": identity, "spec": spec, "chunk_tokens": chunk_tokens, "tokens": tokens, "chunks": chunks}


def read_store(directory: Path) -> dict[bytes, dict[str, Any]]:
    """Every record that verifies and is found under its key, with payload, tails, children and the extent's bytes."""
    image = (directory / "index").read_bytes()
    sizes = struct.unpack_from("<4Q", image, 16)
    assert image[:112] == image[-PAGE : -PAGE + 112]
    assert image[:112] == header(sizes, int.from_bytes(image[48:56], "little"), image[64:80], image[80:96].decode())
    places, found = geometry(*sizes), {}
    for slot in range(places["directory_slots"]):
        cell = int.from_bytes(image[PAGE + 4 * slot : PAGE + 4 * slot + 4], "little")
        raw = image[places["heap_offset"] + cell * CELL :][:192]
        word, fixed = int.from_bytes(raw[:8], "little"), raw[64:]
        if not cell or word != state_word(fixed, word % 8) or word % 8 == FREE:
            continue
        fields = unpack_fixed(fixed)
        # From the home slot to here there is no empty one, so that a probe arrives.
        probe = int.from_bytes(fields["key"][:8], "little") % places["directory_slots"]
        while probe != slot:
            assert any(image[PAGE + 4 * probe : PAGE + 4 * probe + 4])
            probe = (probe + 1) % places["directory_slots"]
        payload = image[places["heap_offset"] + cell * CELL + 192 :][: fields["payload_bytes"]]
        assert xxh64(payload) == fields["payload_sum"] or word % 8 == PENDING
        segment, at = divmod(fields["offset"], sizes[2])
        with open(directory / f"data-{image[64:80].hex()}-{segment:04d}", "rb") as file:
            file.seek(at)
            data = file.read(fields["length"])
        tails = [length for length in struct.unpack_from("<8H", raw, 16) if length]
        more = {"cell": cell, "state": word % 8, "payload": payload, "data": data, "tails": tails}
        found[fields["key"]] = fields | more | {"children": int.from_bytes(raw[8:12], "little")}
    return found


# ---- the examples -----------------------------------------------------------------------------------------------
SPECS = {
    "gqa": make_spec(32, 8, ("k", 128, "bfloat16"), ("v", 128, "bfloat16")),
    "mqa, values of another width": make_spec(2, 1, ("k", 192, "float16"), ("v", 128, "float16")),
    "mla": make_spec(61, 1, ("latent", 512, "fp8_e4m3"), ("rope", 64, "bfloat16")),
    "one of everything": make_spec(1, 1, ("a", 1, "float32"), ("b_2", 2, "int8"), ("_C", 1 << 20, "fp8_e5m2")),
}
EXTENT_SPECS = {
    "gqa": make_spec(2, 2, ("k", 3, "float16"), ("v", 2, "float16")),
    "mla": make_spec(2, 1, ("latent", 5, "fp8_e4m3"), ("rope", 3, "bfloat16")),
}
PLAIN = {"quantization": "none", "kv_scales": "none", "rope": "", "epoch": 0}
IDENTITIES: list[dict[str, Any]] = [
    {**PLAIN, "name": "plain", "weights": "sha256:" + "0f" * 32, "run_dtype": "bfloat16", "kv_dtype": "bfloat16"},
    {
        "name": "everything set",
        "weights": "sampled-sha256:" + "a1" * 32,
        "run_dtype": "float16",
        "quantization": "awq-int4-g128 größer",
        "kv_dtype": "fp8_e4m3",
        "kv_scales": scales_digest([2, 2], [0.5, 2.0, 1.0, 0.1]),
        "rope": '{"factor":8.0,"rope_theta":500000.0}',
        "epoch": 9223372036854775807,
    },
    {
        **PLAIN,
        "name": "settings",
        "weights": "sha256:" + "0f" * 32,
        "run_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "settings": '{"norm_eps":1e-05}',
    },
]
ROPES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"b": 1, "a": [True, None, "x"]}, '{"a":[true,null,"x"],"b":1.0}'),
    (
        {"t": 10000, "big": 1e16, "small": 0.00001, "edge": 0.0001, "zero": -0.0},
        '{"big":1e+16,"edge":0.0001,"small":1e-05,"t":10000.0,"zero":0.0}',
    ),
    ({"é": '"\\\n\x7f', "🌊": {}}, '{"\\u00e9":"\\"\\\\\\n\\u007f","\\ud83c\\udf0a":{}}'),
]
SCALES: list[tuple[Any, list[int], list[float]]] = [
    (1.0, [], [1.0]),
    ([0.5, 2.0], [2], [0.5, 2.0]),
    ([[0.5, 2.0], [1.0, 0.1]], [2, 2], [0.5, 2.0, 1.0, 0.1]),
]
IMAGE = {"kind": "image", "digest": "aa" * 32, "offset": 2, "num_tokens": 4}
AUDIO = {"kind": "audio", "digest": "01", "offset": 7, "num_tokens": 2}
EMBEDDING = {"kind": "größe", "digest": "ff" * 255, "offset": 8, "num_tokens": 1}
TWIN = {"kind": "image", "digest": "ab", "offset": 2, "num_tokens": 1}
TOKENS = [7, 0, 4294967295, 65536, 1, 2, 3, 151643, 9, 10]
CHAINS: list[tuple[int, list[int], list[dict[str, Any]]]] = [
    (4, TOKENS, []),
    (4, TOKENS, [IMAGE]),
    (4, TOKENS, [IMAGE, AUDIO]),
    (4, TOKENS, [AUDIO, EMBEDDING, TWIN, IMAGE]),
    (4, TOKENS, [AUDIO, AUDIO]),
    (1, TOKENS, [IMAGE]),
    (256, list(range(1000, 1000 + 2 * 256 + 100)), []),
    (32768, list(range(40000)), []),
]
TOPOLOGIES: list[tuple[int, int, dict[str, Any]]] = [
    (4, 8, {}),
    (4, 8, {"tp": 2}),
    (4, 8, {"tp": 8}),
    (4, 8, {"tp": 16}),
    (3, 2, {"tp": 8}),
    (3, 2, {"tp": 8, "dcp": 2}),
    (3, 2, {"tp": 8, "dcp": 4, "interleave": 16}),
    (10, 4, {"pp": 4}),
    (11, 4, {"pp": 4, "tp": 2}),
    (5, 1, {"pp": [1, 3, 1]}),
    (5, 1, {"pp": [4, 1], "tp": 4, "dcp": 2}),
    (61, 1, {"tp": 8, "dcp": 8}),
    (4, 1, {"tp": 8, "dcp": 1, "pcp": 2}),
    (4, 1, {"tp": 4, "dcp": 2, "pcp": 2, "interleave": 64}),
    (4, 1, {"tp": 4, "dcp": 2, "pcp": 2, "interleave": 64, "pcp_splits_tokens": True}),
    (4, 8, {"tp": 4, "pcp": 3}),
    (4, 8, {"tp": 4, "pcp": 3, "pcp_splits_tokens": True}),
    (7, 2, {"tp": 4, "pp": 3, "pcp": 2, "interleave": 8}),
]
IMPOSSIBLE: list[tuple[int, int, dict[str, Any]]] = [
    (4, 8, {"tp": 3}),
    (4, 8, {"tp": 12}),
    (4, 8, {"tp": 8, "dcp": 2}),
    (4, 2, {"tp": 6, "dcp": 2}),
    (3, 8, {"pp": 4}),
    (4, 8, {"pp": [2, 1]}),
]
GEOMETRIES = [
    (4 << 20, 128 << 10, 64 << 10, 256),
    (8 << 30, 64 << 20, 256 << 20, 65536),
    ((1 << 30) + 12345, 8 << 20, 256 << 20, 8192),
    (2 << 40, 16 << 30, 1 << 30, 65536),
]


def keys_json() -> dict[str, Any]:
    plain, full, other = (identity_digest(identity) for identity in IDENTITIES)
    gqa, mla = spec_digest(SPECS["gqa"]), spec_digest(SPECS["mla"])
    roots, chains = [], []
    for identity, spec, size, tenant, adapter in (
        (plain, gqa, 256, b"", b""),
        (plain, gqa, 256, b"tenant", b""),
        (plain, gqa, 256, b"", b"tenant"),
        (plain, gqa, 255, b"", b""),
        (full, mla, 32768, bytes(1024), bytes(range(256)) * 4),
        (plain, mla, 1, b"\0", b""),
    ):
        digests = {"identity_digest": identity.hex(), "spec_digest": spec.hex(), "chunk_tokens": size}
        key = root_key(identity, spec, size, tenant, adapter)
        roots.append({**digests, "tenant": tenant.hex(), "adapter": adapter.hex(), "key": key.hex()})
    for size, tokens, extras in CHAINS:
        root = root_key(plain, gqa, size, b"", b"")
        keys, tails = chain(root, size, tokens, extras), []
        for index in range(len(keys)):
            left = tokens[index * size : (index + 1) * size]
            lengths = range(1, min(len(left) + 1, size)) if size < 10 else {1, len(left) - 1, len(left)} - {0, size}
            for length in lengths:
                key = chunk_key(keys[index], index * size, left[:length], extras)
                tails.append([index, length, key.hex()])
        shown = tokens if len(tokens) < 20 else {"from": tokens[0], "count": len(tokens)}
        found = {"full": [key.hex() for key in keys[1:]], "tails": tails}
        chains.append({"root": root.hex(), "chunk_tokens": size, "tokens": shown, "extras": extras, **found})
    files = {"a.safetensors": bytes(range(100)), "sub/b.bin": b"x", "model.index.json": b"{}"}
    long = bytes((31 * i + 7) % 251 for i in range((5 << 19) + 3))
    return {
        "format_version": 1,
        "specs": [
            {"name": name, "canonical": compact(spec).decode(), "digest": spec_digest(spec).hex()}
            for name, spec in SPECS.items()
        ],
        "identities": [{**one, "digest": identity_digest(one).hex()} for one in IDENTITIES],
        "ropes": [{"settings": settings, "text": text} for settings, text in ROPES],
        "scales": [{"scales": nested, "digest": scales_digest(shape, flat)} for nested, shape, flat in SCALES],
        "weights": [
            {"files": {name: data.hex() for name, data in files.items()}, "digest": weights_digest(files)},
            {"files": {"": files["a.safetensors"].hex()}, "digest": weights_digest({"": files["a.safetensors"]})},
            {"pattern": len(long), "digest": weights_digest({"": long})},
            {"pattern": len(long), "digest": weights_digest({"": long}, sampled=True)},
        ],
        "spaces": [
            {"identity_digest": d.hex(), "key": sha(b"headwater space\0", d).hex()} for d in (plain, full, other)
        ],
        "tenant_tags": {"": "", b"acme".hex(): sha(b"headwater tenant\0", b"acme").hex()[:16]},
        "roots": roots,
        "chains": chains,
    }


def shards_json() -> dict[str, Any]:
    cases = []
    for layers, heads, topology in TOPOLOGIES:
        parts = topology.get("dcp", 1) * (topology.get("pcp", 1) if topology.get("pcp_splits_tokens") else 1)
        split = {"parts": parts, "interleave": topology.get("interleave", 1) if parts > 1 else 1}
        table = ranks(layers, heads, topology)
        cases.append({"num_layers": layers, "num_kv_heads": heads, "topology": topology, **split, "ranks": table})
    for layers, heads, topology in IMPOSSIBLE:
        try:
            ranks(layers, heads, topology)
        except ValueError:
            continue
        raise AssertionError(f"{topology} is possible")
    impossible = [{"num_layers": a, "num_kv_heads": b, "topology": t} for a, b, t in IMPOSSIBLE]
    return {"columns": RANK_COLUMNS, "written_chunks": WRITTEN_CHUNKS, "cases": cases, "impossible": impossible}


def extent_files() -> tuple[dict[str, Any], bytes]:
    chunks, data = [], b""
    for name, number, count in (("gqa", 0, 6), ("gqa", 1, 6), ("gqa", 1, 1), ("mla", 3, 6), ("mla", 2, 4)):
        spec, first = EXTENT_SPECS[name], 6 * number
        raw, size = extent(spec, first, count), count * tile_row_bytes(spec)
        tiles = [
            {"layer": layer, "head": head, "offset": i * size, "checksum": f"{xxh64(raw[i * size :][:size]):016x}"}
            for i, (layer, head) in enumerate(tiles_of(spec))
        ]
        splits = [
            {
                "parts": parts,
                "interleave": interleave,
                "rows": part_rows(parts, interleave, first, count),
                "checksums": [f"{value:016x}" for value in checksums(spec, parts, interleave, first, count)],
            }
            for parts, interleave in ((2, 1), (2, 2), (3, 4), (4, 16), (8, 1))
        ]
        where = {"spec": name, "number": number, "first_token": first, "num_tokens": count}
        chunks.append({**where, "offset": len(data), "length": len(raw), "tiles": tiles, "splits": splits})
        data += raw
    encodings = []
    for number, name in enumerate(ENCODING_NAMES):
        sizes = [[spec, n, stored_tile_bytes(EXTENT_SPECS[spec], n, number)] for spec in EXTENT_SPECS for n in (1, 6)]
        encodings.append({"number": number, "name": name, "stored_tile_bytes": sizes})
    return {"chunk_tokens": 6, "specs": EXTENT_SPECS, "encodings": encodings, "chunks": chunks}, data


def bfloat16(*values: int) -> bytes:
    return b"".join(value.to_bytes(2, "little") for value in values)


def ordinary(spec: Spec, num_tokens: int) -> bytearray:
    """A tile like those of a model: a channel's exponents are at most six apart; signs and mantissas are all over."""
    raw, state = bytearray(), 1
    for number, plane in enumerate(spec["planes"]):
        for _ in range(num_tokens):
            for channel in range(plane["width"]):
                state = (state * 1103515245 + 12345) % 2**31
                noise = state // 65536
                exponent = 110 + (5 * channel + 3 * number) % 17 + noise % 7
                raw += bfloat16(noise // 128 % 2 * 32768 + exponent * 128 + noise % 128)
    return raw


PACKED_SPECS = {
    "gqa": make_spec(2, 2, ("k", 8, "bfloat16"), ("v", 4, "bfloat16")),
    "one plane": make_spec(1, 1, ("k", 16, "bfloat16")),
    "mla": make_spec(2, 1, ("latent", 160, "bfloat16"), ("rope", 8, "bfloat16")),
    "head of 128": make_spec(32, 8, ("k", 128, "bfloat16"), ("v", 128, "bfloat16")),
    "head of 64": make_spec(30, 3, ("k", 64, "bfloat16"), ("v", 64, "bfloat16")),
    "deepseek": make_spec(61, 1, ("latent", 512, "bfloat16"), ("rope", 64, "bfloat16")),
    "odd": make_spec(1, 1, ("k", 129, "bfloat16"), ("v", 128, "bfloat16")),
    "two dtypes": make_spec(1, 1, ("latent", 512, "fp8_e4m3"), ("rope", 64, "bfloat16")),
    "float16": make_spec(1, 1, ("k", 128, "float16"), ("v", 128, "float16")),
}
SPECIALS = {
    "zeros": (0x0000, 0x8000),
    "infinities": (0x7F80, 0xFF80),
    "NaNs": (0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF, 0x7FA5),
    "denormals": (0x0001, 0x8001, 0x007F, 0x807F, 0x0040),
    "the largest and the smallest normal number": (0x7F7F, 0x0080),
}


def packed_cases() -> list[tuple[str, str, int, bytes]]:
    """Name, spec, tokens and raw tile."""
    cases = []
    for name, count in (("gqa", 16), ("gqa", 40), ("gqa", 13), ("mla", 9), ("one plane", 128)):
        cases.append((f"{name}, {count} tokens", name, count, bytes(ordinary(PACKED_SPECS[name], count))))
    spec, count = PACKED_SPECS["gqa"], 16

    def tile(changes: dict[tuple[int, int, int], int], spec: Spec = spec, count: int = count) -> bytes:
        raw = ordinary(spec, count)
        for (plane, token, channel), value in changes.items():
            at = value_at(spec, count, plane, token, channel)
            raw[at : at + 2] = bfloat16(value)
        return bytes(raw)

    for name, values in SPECIALS.items():
        whole = {(0, token, 3): values[token % len(values)] for token in range(16)}
        cases.append((f"a channel of {name}", "gqa", 16, tile(whole)))
        cases.append((f"one of {name}", "gqa", 16, tile({(0, 5, 2): values[0], (1, 15, 3): values[-1]})))
    infinite = {(0, token, 3): 0x7F80 for token in range(16)}
    cases.append(("infinities, but for one", "gqa", 16, tile(infinite | {(0, 7, 3): 0x3F80})))
    cases.append(("everything zero", "gqa", 16, bytes(len(tile({})))))
    places = [(0, token, channel) for token, channel in ((0, 0), (0, 7), (9, 4), (15, 7))]
    for number in (3, 4):  # the room is 3
        cases.append((f"{number} escapes", "gqa", 16, tile(dict.fromkeys(places[:number], 0x0001))))
    larger = PACKED_SPECS["one plane"]
    for number in (7, 8):  # 2,048 values: the room is 7
        zeros = {(0, 16 * i + i, 2 * i): 0x8000 for i in range(number)}
        cases.append((f"{number} escapes of 2,048 values", "one plane", 128, tile(zeros, larger, 128)))
    edges = {(0, token, 3): (110 + 30 - token) * 128 for token in range(16)}  # codes 0 to 14, and one escape
    cases.append(("every code", "gqa", 16, tile(edges)))
    return cases


def packed_files() -> tuple[dict[str, Any], bytes]:
    sizes = [
        [name, count, stored_tile_bytes(spec, count, 1)]
        for name, spec in PACKED_SPECS.items()
        for count in (1, 2, 4, 5, 13, 16, 31, 32, 100, 255, 256, 4096)
    ]
    tiles, data = [], b""
    for title, name, count, raw in packed_cases():
        spec = PACKED_SPECS[name]
        for above in (0, 1) if title == "gqa, 16 tokens" else (0,):
            packed = pack(spec, count, raw, above)
            shown = {"name": title if not above else f"{title}, other bases", "spec": name, "num_tokens": count}
            shown |= {"raw": [len(data), len(raw)], "written": not above}
            data += raw
            if packed is None:
                tiles.append({**shown, "packed": None})
                continue
            if unpack(spec, count, packed) != raw:
                raise AssertionError(f"{title} comes back as another tile")
            checksum = f"{xxh64(packed):016x}"
            tiles.append({**shown, "packed": [len(data), len(packed)], "checksum": checksum})
            data += packed
    by_name = {tile["name"]: tile for tile in tiles}
    unreadable = []
    for title, name, at, word in (
        ("a count above the room", "3 escapes", 0, 4),
        ("a count above the room, and what follows could be an escape", "everything zero", 0, 4),
        ("the largest count", "3 escapes", 0, 2**32 - 1),
        ("a count above the room, second block", "everything zero", block_bytes(16, 8), 4),
        ("a position beyond the values", "3 escapes", 12, 16 * 8),
        ("the largest position", "3 escapes", 4, 2**24 - 1),
    ):
        start, length = by_name[name]["packed"]
        changed = bytearray(data[start : start + length])
        changed[at : at + 4] = u32(word)
        if unpack(PACKED_SPECS["gqa"], 16, bytes(changed)) is not None:
            raise AssertionError(f"{title} is read")
        unreadable.append({"name": title, "tile": name, "at": at, "bytes": u32(word).hex()})
    described = {"encoding": ENCODING_NAMES.index("packed"), "specs": PACKED_SPECS, "stored_tile_bytes": sizes}
    return {**described, "tiles": tiles, "unreadable": unreadable}, data


def index_json() -> dict[str, Any]:
    offsets, at = {}, 0
    for name, size in FIXED_FIELDS.items():
        offsets[name], at = [at, size], at + size
    sums = checksums(EXTENT_SPECS["mla"], 2, 2, 6, 6)
    payload = b"".join(map(u64, sums)) + b"\1" * len(sums)
    top = {"id": (1 << 63) - 1, "parent_id": 1, "offset": 256, "length": 132, "group": 1 << 62, "created_ns": 1 << 60}
    rest = {"parent_cell": 9, "num_tokens": 6, "number": 1, "num_sums": len(sums), "interleave": 2, "parts": 2}
    chunk = make_fields(3, sha(b"a chunk"), payload, 6, row_bytes=11, **top, **rest)
    space = make_fields(1, sha(b"a space"), b"{}", 256, id=3, created_ns=4)
    records = []
    strange = chunk | {"encoding": UNDEFINED_ENCODING, "length": 100}
    for fields, data in ((chunk, payload), (space, b"{}"), (strange, payload)):
        fixed = pack_fixed(fields)
        words = {name: f"{state_word(fixed, state):016x}" for state, name in enumerate(STATE_NAMES) if state}
        shown = {"fields": fields | {"key": fields["key"].hex()}, "payload": data.hex(), "fixed": fixed.hex()}
        records.append({**shown, "state_words": words, "cells": record_cells(len(data))})
    geometries = [
        {"capacity": s[0], "index_bytes": s[1], "segment_bytes": s[2], "unit_bytes": s[3], **geometry(*s)}
        for s in GEOMETRIES
    ]
    raw = header(GEOMETRIES[0], 1700000000123456789, bytes(range(16)), "fifo")
    newer = header(GEOMETRIES[0], 1700000000123456789, bytes(range(16)), "fifo", version=2)
    shown = {"created_ns": 1700000000123456789, "generation": bytes(range(16)).hex(), "policy": "fifo"}
    return {
        "index_version": 1,
        "header": {**geometries[0], **shown, "hex": raw.hex(), "newer_hex": newer.hex()},
        "geometries": geometries,
        "field_offsets": offsets,
        "mutable_cell": mutable_cell(0x1122334455667780 + COMPLETE, 3, [5, 1]).hex(),
        "records": records,
    }


STATE_NAMES = ("free", "pending", "complete", "evicting", "limbo")
UNDEFINED_ENCODING = 200


# ---- 14: manifests ----------------------------------------------------------------------------------------------
MANIFEST_FIELDS = {
    "magic": 8, "key": 32, "parent": 32, "root": 32, "generation": 8, "num_layers": 4, "num_heads": 4, "row_bytes": 4,
    "num_tokens": 4, "number": 4, "chunk_tokens": 4, "layers_per_piece": 4, "created_ns": 8, "encoding": 4,
    "tile_bytes": 8,
}  # fmt: skip


def manifest(fields: dict[str, Any], sums: list[int], version: int = 2) -> bytes:
    body = b""
    for name, size in MANIFEST_FIELDS.items():
        value = b"HWMANIF%d" % version if name == "magic" else fields[name]
        if version > 1 or name not in ("encoding", "tile_bytes"):
            body += value if isinstance(value, bytes) else value.to_bytes(size, "little")
    body += b"".join(map(u64, sums))
    return body + u64(xxh64(body))


def manifest_json() -> dict[str, Any]:
    spec, offsets, at = EXTENT_SPECS["gqa"], {}, 0
    for name, size in MANIFEST_FIELDS.items():
        offsets[name], at = [at, size], at + size
    keys = {"key": sha(b"a chunk"), "parent": sha(b"its parent"), "root": sha(b"its root"), "generation": b"\1" * 8}
    shape = {"num_layers": 2, "num_heads": 2, "row_bytes": tile_row_bytes(spec), "num_tokens": 6, "number": 1}
    rest = {"chunk_tokens": 6, "layers_per_piece": 1, "created_ns": 1 << 60}
    raw = keys | shape | rest | {"encoding": 0, "tile_bytes": stored_tile_bytes(spec, 6, 0)}
    strange = raw | {"encoding": UNDEFINED_ENCODING, "tile_bytes": 42}
    sums = checksums(spec, 1, 1, 6, 6)
    cases = []
    for name, fields, version in (("raw", raw, 2), ("first version", raw, 1), ("undefined encoding", strange, 2)):
        shown = {k: v.hex() if isinstance(v, bytes) else v for k, v in fields.items()}
        cases.append({"name": name, "fields": shown, "hex": manifest(fields, sums, version).hex()})
    newer = manifest(raw, sums, version=3)
    numbers = [f"{value:016x}" for value in sums]
    return {"field_offsets": offsets, "spec": "gqa", "checksums": numbers, "manifests": cases, "newer_hex": newer.hex()}


# ---- 1.1: the planes of latent attention --------------------------------------------------------------------------
def latent_row(raw: list[float], norm: list[float], eps: float) -> list[float]:
    scale = math.sqrt(sum(x * x for x in raw) / len(raw) + eps)
    return [x / scale * weight for x, weight in zip(raw, norm, strict=True)]


def rope_row(raw: list[float], position: int, rope: dict[str, Any]) -> list[float]:
    out = []
    for pair, turn in enumerate(frequencies(len(raw), rope)):
        cos, sin = (f(position * turn) * rope_factor(rope) for f in (math.cos, math.sin))
        even, odd = raw[2 * pair], raw[2 * pair + 1]
        out += [even * cos - odd * sin, even * sin + odd * cos]
    return out


def frequencies(dim: int, rope: dict[str, Any]) -> list[float]:
    plain = [rope["theta"] ** (-2 * pair / dim) for pair in range(dim // 2)]
    if "factor" not in rope:
        return plain

    def pair_turning(times: float) -> float:
        return dim * math.log(rope["original_length"] / (times * 2 * math.pi)) / (2 * math.log(rope["theta"]))

    low = max(math.floor(pair_turning(rope["beta_fast"])), 0)
    high = min(math.ceil(pair_turning(rope["beta_slow"])), dim - 1)
    stretched = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(dim // 2)]
    return [x * (1 - part) + x / rope["factor"] * part for x, part in zip(plain, stretched, strict=True)]


def rope_factor(rope: dict[str, Any]) -> float:
    if "factor" not in rope:
        return 1.0
    weights = (rope["mscale"], rope["mscale_all_dim"])
    above, below = (0.1 * weight * math.log(rope["factor"]) + 1.0 for weight in weights)
    return above / below


LATENT_ROPES: dict[str, dict[str, Any]] = {
    "plain": {"theta": 10000.0},
    "yarn": {"theta": 10000.0, "factor": 8.0, "original_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    | {"mscale": 0.707, "mscale_all_dim": 1.0},
}


def latent_json() -> dict[str, Any]:
    """One token of one layer: the product with `kv_a_proj_with_mqa`, and the two rows that are stored of it."""
    raw = [round(math.sin(1 + 3 * i), 6) for i in range(12)]
    norm = [round(1 + 0.3 * math.cos(i), 6) for i in range(12)]
    rope_raw = [round(math.cos(2 + 5 * i), 6) for i in range(16)]
    cases = []
    for name, rope in LATENT_ROPES.items():
        for position in (0, 1, 77, 5000):
            rows = {"latent": latent_row(raw, norm, 1e-6), "rope": rope_row(rope_raw, position, rope)}
            shown = {plane: [round(x, 7) for x in row] for plane, row in rows.items()}
            cases.append({"name": f"{name}, {position}", "rope_settings": rope, "position": position, **shown})
    return {"product": raw + rope_raw, "norm": norm, "eps": 1e-6, "cases": cases}


def pretty(data: dict[str, Any]) -> bytes:
    """JSON with one line for each item of a list and each member, so that a difference is a line."""
    members = []
    for name, value in data.items():
        items = [json.dumps(item) for item in value] if isinstance(value, list) else None
        text = json.dumps(value) if items is None else "[\n  " + ",\n  ".join(items) + "\n ]"
        members.append(f" {json.dumps(name)}: {text}")
    return ("{\n" + ",\n".join(members) + "\n}\n").encode("ascii")


def build() -> dict[str, bytes]:
    """Every vector file, by name."""
    described, data = extent_files()
    packed, packed_data = packed_files()
    tables = {"keys": keys_json(), "shards": shards_json(), "extent": described, "index": index_json()}
    tables["manifest"] = manifest_json()
    tables["latent"] = latent_json()
    tables["packed"] = packed
    binary = {"extent.bin": data, "packed.bin": packed_data}
    return {f"{name}.json": pretty(table) for name, table in tables.items()} | binary


def main() -> int:
    files = build()
    if "--check" not in sys.argv[1:]:
        for name, data in files.items():
            (HERE / name).write_bytes(data)
        return 0
    old = {name: (HERE / name).read_bytes() if (HERE / name).exists() else b"" for name in files}
    different = [name for name in files if old[name] != files[name]]
    print("\n".join(different) or "all as committed")
    return len(different)


if __name__ == "__main__":
    sys.exit(main())
