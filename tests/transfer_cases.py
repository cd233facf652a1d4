"""Random caches and spans, and the slow, plain way to move them: one token of one head at a time.

Shared by the tests that run on the CPU, in Triton's interpreter and on a GPU. Whatever nobody may touch holds noise,
and whole allocations are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import xxhash
from torch import Tensor

from headwater.engine.kvcache.layout import arrange
from headwater.kernels.extent import SUM_BYTES, adds_up
from headwater.kernels.xxh3 import unsigned
from headwater.kv.spec import KVSpec, Plane
from headwater.kv.topology import Shard, Split
from headwater.transfer.convert import ConversionPlan, PageSpan, build_move, plan_spans
from headwater.transfer.view import PagedView, view_description

Mover = Callable[..., None]

ORDERS = [
    ("layer", "plane", "page", "token", "head", "dim"),  # NHD, layer-first
    ("layer", "plane", "page", "head", "token", "dim"),  # HND
    ("page", "layer", "plane", "token", "head", "dim"),  # page-first
    ("page", "layer", "token", "plane", "head", "dim"),
    ("page", "token", "head", "layer", "plane", "dim"),
    ("plane", "head", "layer", "page", "token", "dim"),
    ("layer", "plane", "page", "head", "dim", "token"),  # vectors in pieces
]
SPECS = [
    KVSpec.gqa(num_layers=3, num_kv_heads=4, head_dim=16, dtype="bfloat16"),
    KVSpec.gqa(num_layers=2, num_kv_heads=2, head_dim=5, v_head_dim=3, dtype="float16"),
    KVSpec.gqa(num_layers=4, num_kv_heads=3, head_dim=8, dtype="float32"),
    KVSpec.mla(num_layers=2, latent_dim=40, rope_dim=8, dtype="bfloat16", rope_dtype="float32"),
    KVSpec(2, 2, (Plane("a", 1, "int8"), Plane("b", 3, "float32"), Plane("c", 5, "float16"))),
]


def cache_view(
    spec: KVSpec, shard: Shard, *, num_blocks: int, block_size: int, order: tuple[str, ...], device: str = "cpu"
) -> tuple[PagedView, Tensor]:
    """A cache full of noise; of bfloat16, noise that can be packed."""
    described = arrange(spec, shard, num_blocks, block_size, order)
    data = torch.randint(0, 256, (described.total_bytes,), dtype=torch.uint8, device=device)
    if all(plane.dtype == "bfloat16" for plane in spec.planes):
        make_packable(data)
    return view_description(spec, described, data), data


def make_packable(data: Tensor) -> None:
    """Turn bytes into bfloat16 values whose exponents lie within fifteen of each other, and leave all else random."""
    words = data[: data.numel() // 2 * 2].view(torch.int16)
    exponents = torch.randint(113, 128, words.shape, dtype=torch.int16, device=data.device)
    words.copy_(words & ~0x7F80 | exponents << 7)


def rows_at(view: PagedView, base: int, shard: Shard, span: PageSpan) -> Iterator[tuple[int, int, list[int]]]:
    """Every row of a span in extent order: (layer, head, its bytes' places in the allocation at `base`)."""
    split = shard.split
    owned = [t for t in range(span.first_token + span.num_tokens) if t // split.interleave % split.parts == shard.part]
    places = [place for place, token in enumerate(owned) if token >= span.first_token]
    for (i, layer), (j, head) in product(enumerate(shard.layers), enumerate(shard.heads)):
        for plane, where in zip(view.spec.planes, view.planes[view.layers.index(layer)], strict=True):
            element = plane.row_bytes // plane.width
            for place in places:
                block, token = int(span.block_ids[place // view.block_size]), place % view.block_size
                start = where.address - base + block * where.strides.block + token * where.strides.token
                start += view.heads.index(head) * where.strides.head
                yield i, j, [start + d * where.strides.dim + e for d in range(plane.width) for e in range(element)]


def naive_tiles(view: PagedView, data: Tensor, shard: Shard, span: PageSpan) -> np.ndarray:
    """What `gather` must give for a span."""
    source, parts = data.cpu().numpy(), {}
    for i, j, at in rows_at(view, data.data_ptr(), shard, span):
        parts.setdefault((i, j), []).append(source[at])
    out = np.zeros(shard.local_shape(view.spec, span.first_token, span.num_tokens), np.uint8)
    for (i, j), rows in parts.items():
        out[i, j] = np.concatenate(rows)
    return out


def naive_scatter(
    view: PagedView, base: int, image: np.ndarray, shard: Shard, span: PageSpan, tiles: np.ndarray
) -> None:
    """What `scatter` must do for a span, on an image of the allocation at `base`."""
    used: dict[tuple[int, int], int] = {}
    for i, j, at in rows_at(view, base, shard, span):
        start = used.get((i, j), 0)
        image[at] = tiles[i, j, start : start + len(at)]
        used[i, j] = start + len(at)


@dataclass
class Case:
    """A cache, a shard of it, and some spans of several requests that share no block."""

    view: PagedView
    data: Tensor
    shard: Shard
    spans: list[PageSpan]

    @property
    def plan(self) -> ConversionPlan:
        return plan_spans(self.view, self.shard, self.spans)


def random_case(rng: random.Random, device: str = "cpu", *, spec: KVSpec | None = None) -> Case:
    """Any layout, block size, division of tokens, part of the layers and heads (all heads of a spec that is given), and
    cut of the tokens."""
    first_head = 0 if spec else rng.randrange(8)
    last_head = 8 if spec else rng.randint(0, 8)
    spec = spec or rng.choice(SPECS)
    block_size = rng.choice((1, 2, 3, 8, 16, 20))
    split = rng.choice((Split(), Split(), Split(2, 1), Split(3, 2)))
    heads = range(spec.num_kv_heads)
    held = Shard(range(spec.num_layers), heads)
    first_head %= len(heads)
    shard = Shard(
        range(rng.randrange(spec.num_layers), spec.num_layers, rng.choice((1, 2))),
        range(first_head, max(first_head + 1, min(last_head, len(heads)))),
        split,
        rng.randrange(split.parts),
    )
    chunk, num_blocks = rng.choice((4, 7, 16)), 64
    free = rng.sample(range(num_blocks), num_blocks) if rng.random() < 0.6 else list(range(num_blocks))
    spans = []
    for _ in range(rng.randint(1, 3)):
        tokens = rng.randint(1, min(40, block_size * 16))
        needed = -(-tokens // block_size)
        blocks, free = free[:needed], free[needed:]
        starts = range(0, tokens, chunk) if rng.random() < 0.8 else range(rng.randrange(tokens), tokens, chunk)
        spans += [PageSpan(blocks, start, min(chunk, tokens - start)) for start in starts]
    torch.manual_seed(rng.randrange(2**31))
    view, data = cache_view(
        spec, held, num_blocks=num_blocks, block_size=block_size, order=rng.choice(ORDERS), device=device
    )
    return Case(view, data, shard, spans)


def random_layers(rng: random.Random, shard: Shard) -> range:
    """Some consecutive ones of the shard's layers."""
    first = rng.randrange(len(shard.layers))
    return shard.layers[first : rng.randint(first + 1, len(shard.layers))]


def random_parts(rng: random.Random, layers: range) -> list[range]:
    """All of them, at once or in two calls."""
    cut = rng.randint(0, len(layers))
    return [part for part in (layers[:cut], layers[cut:]) if part]


def check_gather(rng: random.Random, device: str, move_rows: Mover, spec: KVSpec | None = None) -> None:
    """Flat staging, and buffers with gaps that stay as they are, against the plain way."""
    case = random_case(rng, device, spec=spec)
    layers = random_layers(rng, case.shard)
    picked = [case.shard.layers.index(layer) for layer in layers]
    expected = [naive_tiles(case.view, case.data, case.shard, span)[picked] for span in case.spans]
    plan = case.plan
    offset = rng.choice((0, 0, 1, 8))
    room = torch.full((plan.staged_bytes(len(layers)) + 40,), 0xA5, dtype=torch.uint8, device=device)
    for part in random_parts(rng, layers):
        move_rows(build_move(plan, part, room[offset:], writable=True, held=layers), scatter=False)
    flat = b"".join(tiles.tobytes() for tiles in expected)
    assert room.cpu().numpy().tobytes() == b"\xa5" * offset + flat + b"\xa5" * (40 - offset)

    gap = rng.choice((0, 1, 16))
    buffers = []
    for tiles in expected:
        wide = torch.full((tiles.shape[0], tiles.shape[1] + 1, tiles.shape[2] + gap), 0xA5, dtype=torch.uint8)
        buffers.append(wide.to(device))
    inner = [b[:, : t.shape[1], : t.shape[2]] for b, t in zip(buffers, expected, strict=True)]
    move_rows(build_move(plan, layers, inner, writable=True), scatter=False)
    for buffer, tiles in zip(buffers, expected, strict=True):
        want = np.full(tuple(buffer.shape), 0xA5, np.uint8)
        want[:, : tiles.shape[1], : tiles.shape[2]] = tiles
        assert np.array_equal(buffer.cpu().numpy(), want)


def check_scatter(rng: random.Random, device: str, move_rows: Mover, spec: KVSpec | None = None) -> None:
    """Every byte of the allocation is as the plain way leaves it: rows of the spans new, all others untouched."""
    case = random_case(rng, device, spec=spec)
    layers = random_layers(rng, case.shard)
    part = Shard(layers, case.shard.heads, case.shard.split, case.shard.part)
    plan = case.plan
    flat = torch.randint(0, 256, (plan.staged_bytes(len(layers)),), dtype=torch.uint8, device=device)
    want, buffers, start = case.data.cpu().numpy().copy(), [], 0
    for span in case.spans:
        shape = part.local_shape(case.view.spec, span.first_token, span.num_tokens)
        size = shape[0] * shape[1] * shape[2]
        buffers.append(flat[start : start + size].view(shape))
        naive_scatter(case.view, case.data.data_ptr(), want, part, span, buffers[-1].cpu().numpy())
        start += size
    noise = case.data.clone()
    for source in (flat, buffers):
        case.data.copy_(noise)
        move_rows(build_move(plan, layers, source, writable=False), scatter=True)
        assert np.array_equal(case.data.cpu().numpy(), want)


def check_checksums(rng: random.Random, device: str, function: Callable[[Tensor], Tensor]) -> None:
    """Every class of lengths, at any alignment, over axes with gaps, against the C library."""
    classes = [(0, 0), (1, 3), (4, 8), (9, 16), (17, 128), (129, 240), (241, 1100), (1000, 20000)]
    length = rng.choice((rng.randint(*rng.choice(classes)), 64 * rng.randint(4, 40), 1024 * rng.randint(1, 5)))
    unit = rng.choice((1, 2, 4, 8, 16))
    stride = -(-(length + rng.choice((0, 5))) // unit) * unit
    shape = (rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 3))
    data = torch.randint(
        0, 256, (shape[0] * (shape[1] + 1) * shape[2] * stride + 64,), dtype=torch.uint8, device=device
    )
    offset = -data.data_ptr() % 16 + rng.choice((0, unit))
    wide = data[offset : offset + shape[0] * (shape[1] + 1) * shape[2] * stride]
    tiles = wide.view(shape[0], shape[1] + 1, shape[2], stride)[:, 1:, :, :length]
    got = function(tiles)
    assert got.shape == shape
    host = tiles.cpu().contiguous().view(-1, length) if length else None
    expected = [xxhash.xxh3_64_intdigest(row.numpy()) for row in host] if host is not None else None
    assert unsigned(got) == (expected or [xxhash.xxh3_64_intdigest(b"")] * got.numel()), (length, unit)


SUMMED = [
    KVSpec.gqa(num_layers=3, num_kv_heads=2, head_dim=32, dtype="float32"),
    KVSpec.gqa(num_layers=2, num_kv_heads=3, head_dim=128, dtype="bfloat16"),
    KVSpec.gqa(num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16"),
]
"""Whose rows divide a KiB."""


def check_sums(rng: random.Random, device: str, move_rows: Mover, finish: Callable[..., None]) -> int:
    """What a gather adds up, finished, is every tile's checksum, wherever `adds_up` says so; how many those were."""
    spec = rng.choice(SUMMED)
    order = rng.choice(ORDERS[:6])
    rows = SUM_BYTES // spec.planes[0].row_bytes
    view, data = cache_view(
        spec,
        Shard(range(spec.num_layers), range(spec.num_kv_heads)),
        num_blocks=40,
        block_size=rows,
        order=order,
        device=device,
    )
    first = rng.randrange(spec.num_kv_heads)
    shard = Shard(range(spec.num_layers), range(first, rng.randint(first + 1, spec.num_kv_heads)))
    blocks, spans, at = rng.sample(range(40), 40), [], 0
    for _ in range(rng.randint(1, 5)):
        count = rng.choice((rows, 2 * rows, 3 * rows, 5 * rows, 5 * rows + 1, max(1, rows - 1)))
        spans.append(PageSpan(blocks, at, count))
        at += count
    plan, layers = plan_spans(view, shard, spans), random_layers(rng, shard)
    flat = torch.empty(plan.staged_bytes(len(layers)), dtype=torch.uint8, device=device)
    sums = torch.full((len(flat) // SUM_BYTES + 1, 8), -1, dtype=torch.int64, device=device)
    for part in random_parts(rng, layers):
        move_rows(build_move(plan, part, flat, writable=True, sums=sums, held=layers), scatter=False)
    found = 0
    for group, tiles in zip(plan.groups, plan.staged(flat, len(layers)), strict=True):
        start = tiles.data_ptr() - flat.data_ptr()
        for span, expected in zip(group, tiles.cpu().numpy(), strict=True):
            naive = naive_tiles(view, data, shard, spans[span])[[shard.layers.index(layer) for layer in layers]]
            assert np.array_equal(expected, naive)
        if adds_up(view.pages, plan.spans, group.start, start):
            out = torch.zeros(tiles.shape[:-1], dtype=torch.int64, device=device)
            finish(tiles, sums[start // SUM_BYTES :], out)
            wanted = [
                xxhash.xxh3_64_intdigest(tile.tobytes()) for tile in tiles.cpu().numpy().reshape(-1, tiles.shape[-1])
            ]
            assert unsigned(out) == wanted
            found += len(wanted)
    return found
