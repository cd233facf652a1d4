"""Caches, spans and values for packed tiles, and what a gather and a scatter must make of them, by `kv.packing`.

Shared by the tests that run on the CPU, in Triton's interpreter and on a GPU. Values are chosen tile by tile; whatever
nobody may touch holds noise, and whole allocations are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.engine.kvcache.layout import arrange
from headwater.kernels.extent import Compact, ExtentTarget, Move, Spans
from headwater.kernels.extent_cpu import move_rows_cpu
from headwater.kernels.pack import packed_bytes, packed_fits
from headwater.kv.packing import pack_tile, packed_blocks, unpack_tile
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.transfer.view import PagedView, view_description

from transfer_cases import ORDERS, Mover, cache_view

Halves = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Fits = Callable[[Tensor, tuple[int, ...], int], Tensor]

PACKED_SPECS = [
    KVSpec.gqa(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16"),
    KVSpec.gqa(num_layers=2, num_kv_heads=3, head_dim=80, v_head_dim=10, dtype="bfloat16"),
    KVSpec.gqa(num_layers=1, num_kv_heads=2, head_dim=128, dtype="bfloat16"),
    KVSpec.gqa(num_layers=2, num_kv_heads=1, head_dim=256, v_head_dim=96, dtype="bfloat16"),
    KVSpec.mla(num_layers=2, latent_dim=200, rope_dim=64, dtype="bfloat16"),
]


# ---- values -----------------------------------------------------------------------------------------------------
def normal_values(rng: np.random.Generator, rows: int, width: int) -> Halves:
    """As real KV: normal values, each channel with its own scale."""
    values = rng.standard_normal((rows, width)) * np.exp2(rng.uniform(-100, 100, width))
    return _halves(values.astype(np.float32))


def outlying_values(rng: np.random.Generator, rows: int, width: int) -> Halves:
    """The same, with as many values of any kind as a block has room for, or one more or less."""
    values = noise(rng, rows, width) & 0x807F | 64 << 7
    for first in range(0, width, 128):
        block = values[:, first : first + 128]
        room = 3 + 4 * (block.size // 2048)
        count = min(block.size, room + int(rng.integers(-1, 2)))
        at = rng.choice(block.size, count, replace=False)
        exponents = rng.choice([0, 1, 30, 49, 50, 255], count).astype(np.uint16)
        rows_at, columns = np.divmod(at, block.shape[1])
        block[rows_at, columns] = block[rows_at, columns] & 0x807F | exponents << 7
    return values


def special_values(rng: np.random.Generator, rows: int, width: int) -> Halves:
    """Channels of zeros, of denormals, of infinities and of NaNs with their payloads, beside usual ones."""
    values = normal_values(rng, rows, width)
    kinds = rng.integers(0, 5, width)
    values[:, kinds == 0] &= 0x8000
    values[:, kinds == 1] &= 0x807F
    values[:, kinds == 2] = values[:, kinds == 2] & 0x8000 | 0x7F80
    values[:, kinds == 3] |= 0x7F80
    values[0, rng.choice(width, int(rng.integers(0, 3)))] |= 0x7F80
    return values


def noise(rng: np.random.Generator, rows: int, width: int) -> Halves:
    """Any bits: nearly everything is an escape."""
    return rng.integers(0, 1 << 16, (rows, width), dtype=np.uint16)


def zeros(rng: np.random.Generator, rows: int, width: int) -> Halves:
    """Nothing but zeros of one sign."""
    return np.full((rows, width), rng.choice([0, 0x8000]), np.uint16)


VALUES = [normal_values, normal_values, outlying_values, outlying_values, special_values, noise, zeros]


def _halves(values: npt.NDArray[np.float32]) -> Halves:
    """The upper halves of float32: bfloat16, cut off."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


# ---- cases ------------------------------------------------------------------------------------------------------
@dataclass
class PackedCase:
    """A cache, and spans of which some are packed, each with the raw tiles that its rows hold: [layer, head, byte]."""

    view: PagedView
    data: Tensor
    order: tuple[str, ...]
    spans: Spans
    layers: range
    heads: range
    raw: list[Bytes]

    @property
    def spec(self) -> KVSpec:
        return self.view.spec

    def rows(self, span: int) -> int:
        return int(self.spans.num_rows[span])

    def is_packed(self, span: int) -> bool:
        return bool(self.spans.packed_bytes[span])

    def stored_bytes(self, span: int) -> int:
        return int(self.spans.tile_bytes(self.spec.row_bytes)[span])

    def stored(self, span: int, layer: int, head: int) -> tuple[Bytes, bool]:
        """One tile as it is stored, and whether it fits; one that does not is as `pack_tile` left it."""
        raw = self.raw[span][layer, head]
        if not self.is_packed(span):
            return raw, True
        out = np.full(self.stored_bytes(span), 0xA5, np.uint8)
        return out, pack_tile(self.spec, self.rows(span), raw, out)

    def move(self, staged: Compact | list[ExtentTarget], layers: range | None = None) -> Move:
        return Move(self.view.pages, self.spans, self.layers if layers is None else layers, self.heads, staged)

    def image(self, before: Tensor, raw: list[Bytes]) -> Tensor:
        """An allocation on the CPU after raw tiles have been put into the rows of the spans."""
        after = before.cpu().clone()
        self._move_raw(after, raw, scatter=True)
        return after

    def rows_in(self, data: Tensor) -> list[Bytes]:
        """The raw tiles that an allocation on the CPU holds."""
        raw = [np.empty_like(each) for each in self.raw]
        self._move_raw(data, raw, scatter=False)
        return raw

    def _move_raw(self, data: Tensor, raw: list[Bytes], *, scatter: bool) -> None:
        described = arrange(self.spec, _held(self.spec), self.view.num_blocks, self.view.block_size, self.order)
        pages, spans = view_description(self.spec, described, data).pages, self.spans
        targets = [ExtentTarget(tiles.ctypes.data, tiles.strides[0], tiles.strides[1]) for tiles in raw]
        plain = Spans(spans.blocks, spans.first_block, spans.offset, spans.num_rows)
        move_rows_cpu(Move(pages, plain, self.layers, self.heads, targets), scatter=scatter)


def _held(spec: KVSpec) -> Shard:
    return Shard(range(spec.num_layers), range(spec.num_kv_heads))


def random_packed_case(
    rng: random.Random,
    device: str,
    spec: KVSpec | None = None,
    *,
    num_rows: list[int] | None = None,
    order: tuple[str, ...] | None = None,
    block_size: int | None = None,
) -> PackedCase:
    """Any layout, block size, part of the layers and heads, and lengths; most spans are packed, and the first one."""
    spec = spec or rng.choice(PACKED_SPECS)
    block_size = block_size or rng.choice((1, 3, 16, 20, 32))
    counts = num_rows or [rng.choice((3, rng.randint(3, 20), rng.randint(20, 40))) for _ in range(rng.randint(1, 3))]
    offsets = [rng.randrange(block_size) for _ in counts]
    needed = [-(-(offset + rows) // block_size) for offset, rows in zip(offsets, counts, strict=True)]
    num_blocks = sum(needed) + 3
    torch.manual_seed(rng.randrange(2**31))
    order = order or rng.choice(ORDERS)
    view, data = cache_view(spec, _held(spec), num_blocks=num_blocks, block_size=block_size, order=order, device=device)
    blocks = np.array(rng.sample(range(num_blocks), sum(needed)), np.int64)
    sizes = [packed_bytes(view.pages.widths, rows) for rows in counts]
    sizes = [size if not i or rng.random() < 0.75 else 0 for i, size in enumerate(sizes)]
    first_block = np.cumsum(needed) - needed
    spans = Spans(
        blocks, first_block, np.array(offsets, np.int64), np.array(counts, np.int64), np.array(sizes, np.int64)
    )
    layers = range(rng.randrange(spec.num_layers), spec.num_layers, rng.choice((1, 2)))
    first_head = rng.randrange(spec.num_kv_heads)
    heads = range(first_head, rng.randint(first_head + 1, spec.num_kv_heads))
    case = PackedCase(view, data, order, spans, layers, heads, [])
    case.raw = [random_tiles(rng, spec, len(layers), len(heads), rows) for rows in counts]
    return case


def random_tiles(rng: random.Random, spec: KVSpec, num_layers: int, num_heads: int, rows: int) -> Bytes:
    """Raw tiles [layer, head, byte], each of values of some kind."""
    values = np.random.default_rng(rng.randrange(2**32))
    tiles = [
        np.concatenate(
            [rng.choice(VALUES)(values, rows, plane.width).view(np.uint8).reshape(-1) for plane in spec.planes]
        )
        for _ in range(num_layers * num_heads)
    ]
    return np.stack(tiles).reshape(num_layers, num_heads, -1)


# ---- checks -----------------------------------------------------------------------------------------------------
def check_pack(
    rng: random.Random, device: str, move_rows: Mover, case: PackedCase | None = None, fits: Fits = packed_fits
) -> int:
    """Flat staging, and tiles with gaps between them that stay as they are; how many tiles fitted."""
    case = case or random_packed_case(rng, device)
    case.data.copy_(case.image(torch.randint(0, 256, case.data.shape, dtype=torch.uint8), case.raw))
    total, shift = _staged_bytes(case), rng.choice((0, 0, 2, 1, 16))
    before = rng.choice((0, 0xA5))  # as counts, one that fits and one that does not
    room = torch.full((total + 64,), before, dtype=torch.uint8, device=device)
    cut = rng.randint(0, len(case.layers))
    for part in (case.layers[:cut], case.layers[cut:]):
        if part:
            staged = Compact(room.data_ptr() + shift, len(case.layers), case.layers.index(part[0]))
            move_rows(case.move(staged, part), scatter=False)
    fitted = _check_tiles(case, _flat_tiles(case, room[shift : shift + total]), fits)
    assert (room[:shift] == before).all()
    assert (room[shift + total :] == before).all()

    gap = rng.choice((0, 2, 1, 16))
    buffers = [_gapped(case, span, gap, device).fill_(before) for span in range(len(case.raw))]
    move_rows(case.move([_target(buffer) for buffer in buffers]), scatter=False)
    inner = [buffer[:, : len(case.heads), : case.stored_bytes(span)] for span, buffer in enumerate(buffers)]
    assert _check_tiles(case, inner, fits) == fitted
    for buffer, part in zip(buffers, inner, strict=True):
        part.fill_(before)
        assert (buffer == before).all()
    return fitted


def check_unpack(rng: random.Random, device: str, move_rows: Mover, case: PackedCase | None = None) -> None:
    """Every byte of the allocation: rows of the spans as `unpack_tile` makes them, all others untouched."""
    case = case or random_packed_case(rng, device)
    total, shift = _staged_bytes(case), rng.choice((0, 0, 2, 1, 16))
    room = torch.zeros(total + 64, dtype=torch.uint8)
    flat = _flat_tiles(case, room[shift : shift + total])
    for span, tiles in enumerate(flat):
        for layer in range(len(case.layers)):
            for head in range(len(case.heads)):
                stored, fits = case.stored(span, layer, head)
                if not fits:  # something else that does
                    values = np.random.default_rng(rng.randrange(2**32))
                    rows = case.rows(span)
                    other = [normal_values(values, rows, p.width).view(np.uint8).reshape(-1) for p in case.spec.planes]
                    case.raw[span][layer, head] = np.concatenate(other)
                    stored, fits = case.stored(span, layer, head)
                assert fits
                tiles[layer, head] = torch.from_numpy(stored)
    noise_before = torch.randint(0, 256, case.data.shape, dtype=torch.uint8)
    want = case.image(noise_before, case.raw)
    room = room.to(device)
    gapped = [_gapped(case, span, 16 * shift % 48 + shift, device) for span in range(len(flat))]
    for span, tiles in enumerate(flat):
        gapped[span][:, : tiles.shape[1], : tiles.shape[2]] = tiles.to(device)
    for staged in (
        Compact(room.data_ptr() + shift, len(case.layers)),
        [_target(buffer) for buffer in gapped],
    ):
        case.data.copy_(noise_before)
        move_rows(case.move(staged), scatter=True)
        assert torch.equal(case.data.cpu(), want)


def check_hostile(rng: random.Random, device: str, move_rows: Mover, fits: Fits = packed_fits) -> None:
    """Tiles that nobody packed: whatever they say, no byte outside the rows of the spans changes; where `unpack_tile`
    takes one, the rows are as it says, and `fits` says that it does."""
    case = random_packed_case(rng, device)
    values = np.random.default_rng(rng.randrange(2**32))
    tiles, refused = [], []
    for span, raw in enumerate(case.raw):
        shape = (*raw.shape[:2], case.stored_bytes(span))
        tiles.append(values.integers(0, 256, shape, dtype=np.uint8))
        refused.append(np.zeros(shape[:2], np.bool_))
        for place in np.ndindex(shape[:2]):
            if case.is_packed(span):
                _make_nonsense(rng, values, case, span, tiles[span][place])
                refused[span][place] = not unpack_tile(case.spec, case.rows(span), tiles[span][place], raw[place])
            else:
                raw[place] = tiles[span][place]
    for span, each in enumerate(tiles):
        if case.is_packed(span):
            said = fits(torch.from_numpy(each).to(device), case.view.pages.widths, case.rows(span)).cpu().numpy()
            assert np.array_equal(said, ~refused[span])
    before = torch.randint(0, 256, case.data.shape, dtype=torch.uint8)
    room = torch.from_numpy(np.concatenate([each.reshape(-1) for each in tiles])).to(device)
    case.data.copy_(before)
    move_rows(case.move(Compact(room.data_ptr(), len(case.layers))), scatter=True)
    got = case.data.cpu()
    for span, there in enumerate(case.rows_in(got)):
        for place in np.ndindex(there.shape[:2]):
            # Rows of a tile that is refused may hold anything.
            if not refused[span][place]:
                assert np.array_equal(there[place], case.raw[span][place]), (span, place)
    blank = [np.zeros_like(raw) for raw in case.raw]
    assert torch.equal(case.image(got, blank), case.image(before, blank))


def _make_nonsense(rng: random.Random, values: np.random.Generator, case: PackedCase, span: int, tile: Bytes) -> None:
    """Counts and places of escapes that may be anything, or what a writer could have meant."""
    for block in packed_blocks(case.view.pages.widths, case.rows(span)):
        words, size = tile[block.start : block.start + block.bases].view(np.uint32), block.num_rows * block.width
        words[0] = rng.choice((0, 1, block.room, block.room, block.room + 1, 1 << 31, (1 << 32) - 1))
        # Each value at most once: of two escapes of one, either may win.
        places = values.choice(size, block.room, replace=False).astype(np.uint32)
        if rng.random() < 0.4:
            places[rng.randrange(block.room)] = rng.choice((size, size + 1, (1 << 24) - 1))
        words[1:] = words[1:] & 0xFF000000 | places


def _check_tiles(case: PackedCase, found: list[Tensor], fits: Fits) -> int:
    fitted = 0
    for span, tiles in enumerate(found):
        said = None
        if case.is_packed(span):
            said = fits(tiles, case.view.pages.widths, case.rows(span)).cpu()
            assert said.shape == tiles.shape[:2]
        for layer in range(len(case.layers)):
            for head in range(len(case.heads)):
                stored, fit = case.stored(span, layer, head)
                if said is not None:
                    assert bool(said[layer, head]) == fit
                    fitted += fit
                if fit:
                    assert np.array_equal(tiles[layer, head].cpu().numpy(), stored), (span, layer, head)
    return fitted


def _staged_bytes(case: PackedCase) -> int:
    return int(case.spans.tile_bytes(case.spec.row_bytes).sum()) * len(case.layers) * len(case.heads)


def _flat_tiles(case: PackedCase, flat: Tensor) -> list[Tensor]:
    """Flat staging as [layer, head, byte], span by span."""
    found, start = [], 0
    for span in range(len(case.raw)):
        shape = (len(case.layers), len(case.heads), case.stored_bytes(span))
        size = shape[0] * shape[1] * shape[2]
        found.append(flat[start : start + size].view(shape))
        start += size
    return found


def _gapped(case: PackedCase, span: int, gap: int, device: str) -> Tensor:
    shape = (len(case.layers), len(case.heads) + 1, case.stored_bytes(span) + gap)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def _target(buffer: Tensor) -> ExtentTarget:
    return ExtentTarget(buffer.data_ptr(), buffer.stride(0), buffer.stride(1))


def every_pattern(rng: random.Random, device: str) -> PackedCase:
    """Each of the 65,536 values, in 256 channels of one exponent each: none is an escape."""
    spec = KVSpec.gqa(num_layers=1, num_kv_heads=1, head_dim=256, v_head_dim=2, dtype="bfloat16")
    case = random_packed_case(rng, device, spec, num_rows=[256])
    low = np.random.default_rng(rng.randrange(2**32)).permuted(np.tile(np.arange(256), (256, 1)), axis=1).T
    values = (low & 0x80) << 8 | low & 0x7F | np.arange(256)[None] << 7
    case.raw[0][0, 0, : 256 * 512] = np.ascontiguousarray(values, np.uint16).view(np.uint8).reshape(-1)
    case.raw[0][0, 0, 256 * 512 :] = 0
    assert case.is_packed(0)
    return case


def full_of_escapes(rng: random.Random, device: str, more: int = 0) -> PackedCase:
    """As many escapes in each block as it lists, or `more`, some of them in one row."""
    spec = KVSpec.gqa(num_layers=1, num_kv_heads=1, head_dim=128, v_head_dim=64, dtype="bfloat16")
    case = random_packed_case(rng, device, spec, num_rows=[256])
    values = np.random.default_rng(rng.randrange(2**32))
    tile = noise(values, 256, 192).reshape(-1) & 0x807F | 64 << 7
    for block in packed_blocks((128, 64), 256):
        part = tile[block.raw_start // 2 :][: 256 * block.width]
        alone = (1 + values.choice(254, block.room + more - 20, replace=False)) * block.width
        places = np.concatenate([alone + 5, 255 * block.width + np.arange(20) * 3])
        part[places] = part[places] & 0x807F | values.choice([0, 30, 49, 255], len(places)).astype(np.uint16) << 7
    case.raw[0][0, 0] = tile.view(np.uint8)
    return case
