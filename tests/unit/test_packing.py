"""Packed tiles: every value comes back bit for bit, or the tile does not fit; no bytes whatever do harm to a reader.

What is expected comes from a count of escapes that is made here, and from the second implementation of docs/format.md.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.kv.encoding import PACKED, RAW, packed_or_raw
from headwater.kv.packing import (
    Bytes,
    escape_room,
    fits_packed,
    pack_tile,
    pack_tiles,
    packed_blocks,
    packed_tile_bytes,
    unpack_tile,
    unpack_tiles,
)
from headwater.kv.spec import KVSpec

from support import WAIT_S, second_implementation

CANARY = 0xA5
ENOUGH_TURNS = 30
"""Of another thread during one call: many more than there are moments at which a call only lets go and goes on."""
MARGIN = 64


def make_spec(*widths: int, dtype: str = "bfloat16") -> KVSpec:
    planes = [{"name": f"p{i}", "width": width, "dtype": dtype} for i, width in enumerate(widths)]
    return KVSpec.from_canonical({"num_layers": 1, "num_kv_heads": 1, "planes": planes})


def packed_size(widths: tuple[int, ...], num_tokens: int) -> int:
    """Also of tiles that packing would not make smaller, and that nobody stores packed therefore."""
    last = packed_blocks(widths, num_tokens)[-1]
    return last.start + last.num_bytes


class Guarded(NamedTuple):
    """A buffer between two margins: whatever is written outside of it shows."""

    whole: Bytes
    inner: Bytes

    @staticmethod
    def of(size: int, shift: int = 0) -> Guarded:
        whole = np.full(size + 2 * MARGIN + shift, CANARY, np.uint8)
        return Guarded(whole, whole[MARGIN + shift : MARGIN + shift + size])

    @property
    def is_intact(self) -> bool:
        start = len(self.whole) - MARGIN - len(self.inner)
        return bool((self.whole[:start] == CANARY).all() and (self.whole[start + len(self.inner) :] == CANARY).all())


def as_tile(*planes: np.ndarray) -> Bytes:
    """A raw tile of planes [token][channel] of 16-bit patterns."""
    return np.concatenate([plane.astype("<u2").reshape(-1).view(np.uint8) for plane in planes])


def patterns(rng: np.random.Generator, exponents: np.ndarray) -> np.ndarray:
    """Any sign and mantissa with these exponents."""
    return (
        rng.integers(0, 2, exponents.shape) << 15
        | exponents.astype(np.int64) << 7
        | rng.integers(0, 128, exponents.shape)
    )


def escapes_of(plane: np.ndarray) -> int:
    """The most that a block of a plane has beyond what it has room for: counted value by value of each channel."""
    rows, width = plane.shape
    most = -(1 << 30)
    for first in range(0, width, 128):
        block = plane[:, first : first + 128].astype(np.int64) >> 7 & 0xFF
        count = 0
        for channel in block.T:
            finite = channel[channel != 255]
            count += int(((channel < finite.max() - 14) | (channel == 255)).sum()) if len(finite) else 0
        most = max(most, count - escape_room(rows, block.shape[1]))
    return most


KINDS = ("ordinary", "one exponent", "zeros", "infinities", "mixed", "wide", "any bits", "escapes")


def channel_of(kind: str, rng: np.random.Generator, rows: int) -> np.ndarray:
    base = int(rng.integers(14, 255))
    match kind:
        case "zeros":
            return rng.integers(0, 2, rows) << 15
        case "any bits":
            return rng.integers(0, 1 << 16, rows)
        case "infinities":
            exponents = np.full(rows, 255)
        case "mixed":
            exponents = np.where(rng.random(rows) < 0.05, 255, int(rng.integers(0, 255)))
        case "wide":
            exponents = rng.integers(max(0, base - 15), base + 1, rows)
        case "escapes":
            exponents = np.where(rng.random(rows) < 1 / 300, rng.integers(0, 256, rows), base)
        case "ordinary":
            exponents = rng.integers(base - 6, base + 1, rows)
        case _:
            exponents = np.full(rows, base)
    return patterns(rng, exponents)


def draw_plane(rng: np.random.Generator, rows: int, width: int, kinds: list[str]) -> np.ndarray:
    return np.stack([channel_of(kinds[channel % len(kinds)], rng, rows) for channel in range(width)], axis=1)


KINDS_OF_A_TILE = st.lists(st.sampled_from(KINDS), min_size=1, max_size=9) | st.sampled_from(
    [["ordinary"], ["escapes"]]
)
WIDTHS = st.lists(st.integers(1, 288).map(lambda half: 2 * half), min_size=1, max_size=3).map(tuple)


# ---- what fits comes back ---------------------------------------------------------------------------------------
@given(WIDTHS, st.integers(1, 70), KINDS_OF_A_TILE, st.integers(0, 1 << 32), st.integers(0, 3))
@example((576,), 257, ["ordinary", "zeros", "infinities"], 1, 1)
@example((64, 64), 1, ["any bits"], 2, 0)
@example((2,), 1, ["infinities"], 3, 0)
@example((128, 128, 64), 129, ["ordinary", "escapes"], 4, 1)
@example((130, 2), 31, ["mixed"], 5, 2)
def test_a_tile_comes_back_or_does_not_fit(
    widths: tuple[int, ...], num_tokens: int, kinds: list[str], seed: int, shift: int
) -> None:
    rng = np.random.default_rng(seed)
    planes = [draw_plane(rng, num_tokens, width, kinds) for width in widths]
    spec, raw = make_spec(*widths), as_tile(*planes)
    packed, back = Guarded.of(packed_size(widths, num_tokens), shift), Guarded.of(len(raw), shift)
    fits = max(escapes_of(plane) for plane in planes) <= 0
    assert pack_tile(spec, num_tokens, raw, packed.inner) == fits
    assert fits_packed(spec, num_tokens, packed.inner) == fits
    if fits:
        assert unpack_tile(spec, num_tokens, packed.inner, back.inner)
        assert back.inner.tobytes() == raw.tobytes()
    assert packed.is_intact
    assert back.is_intact


@given(
    st.sampled_from([(2,), (4, 6), (8, 8), (10,), (130, 4), (128, 128), (256, 2)]),
    st.integers(1, 9),
    KINDS_OF_A_TILE,
    st.integers(0, 1 << 32),
)
def test_the_second_implementation_writes_the_same_bytes(
    widths: tuple[int, ...], num_tokens: int, kinds: list[str], seed: int
) -> None:
    rng, second = np.random.default_rng(seed), second_implementation()
    spec = make_spec(*widths)
    raw = as_tile(*[draw_plane(rng, num_tokens, width, kinds) for width in widths])
    expected = second.pack(spec.canonical(), num_tokens, raw.tobytes())
    out = np.full(packed_size(widths, num_tokens), CANARY, np.uint8)
    assert pack_tile(spec, num_tokens, raw, out) == (expected is not None)
    assert expected is None or out.tobytes() == expected


@given(st.permutations(range(256)), st.integers(0, 1 << 32))
def test_every_bit_pattern_comes_back(exponents: list[int], seed: int) -> None:
    """All 65,536, those of one exponent in each channel, each channel in an order of its own: no escapes at all."""
    rng, signs_and_mantissas = np.random.default_rng(seed), np.arange(256)
    bits = (signs_and_mantissas >> 7 << 15 | signs_and_mantissas & 127)[:, None] | np.array(exponents)[None] << 7
    plane = rng.permuted(bits, axis=0)
    assert len(np.unique(plane)) == 1 << 16
    spec, raw = make_spec(256), as_tile(plane)
    out, back = np.empty(packed_tile_bytes(spec, 256), np.uint8), np.empty_like(raw)
    assert pack_tile(spec, 256, raw, out)
    assert unpack_tile(spec, 256, out, back)
    assert back.tobytes() == raw.tobytes()


@pytest.mark.parametrize("low", [0, 1, 13, 14])
def test_infinities_beside_small_exponents_are_escapes(low: int) -> None:
    """Though `base - 255` in 8 bits is a code that others have."""
    spec, exponents = make_spec(8), np.full((16, 8), low)
    exponents[3, 5] = exponents[9, 0] = 255
    raw = as_tile(patterns(np.random.default_rng(low), exponents))
    out, back = np.empty(packed_tile_bytes(spec, 16), np.uint8), np.empty_like(raw)
    assert pack_tile(spec, 16, raw, out)
    assert out[:4].view(np.uint32)[0] == 2
    assert unpack_tile(spec, 16, out, back)
    assert back.tobytes() == raw.tobytes()


@pytest.mark.parametrize("num_tokens", [*range(1, 40), 63, 64, 65, 255])
def test_the_base_is_the_largest_exponent_whichever_row_has_it(num_tokens: int) -> None:
    for row in range(num_tokens):
        exponents = np.full((num_tokens, 2), 100)
        exponents[row] = 101
        out = np.empty(packed_size((2,), num_tokens), np.uint8)
        assert pack_tile(make_spec(2), num_tokens, as_tile(exponents << 7), out)
        (block,) = packed_blocks((2,), num_tokens)
        assert out[block.bases : block.signs].tolist() == [101, 101]


@pytest.mark.parametrize(
    ("num_tokens", "width"), [(16, 8), (13, 6), (128, 16), (255, 16), (256, 64), (256, 128), (100, 130), (33, 576)]
)
def test_a_block_has_room_for_so_many_escapes_and_no_more(num_tokens: int, width: int) -> None:
    """Every block full to its room, the last value of each included; then one of them with one more."""
    rng, spec = np.random.default_rng(width), make_spec(width)
    plane = patterns(rng, np.full((num_tokens, width), 120))
    back = np.empty(plane.size * 2, np.uint8)
    out = np.empty(packed_size((width,), num_tokens), np.uint8)
    blocks = packed_blocks((width,), num_tokens)
    for block in blocks:
        # Two channels at least keep a value of exponent 120 each, so that their base stays.
        values = num_tokens * block.width
        places = np.append(rng.choice(np.arange(block.width, values - 1), block.room - 1, replace=False), values - 1)
        rows, channels = np.divmod(places, block.width)
        plane[rows, block.first + channels] = rng.choice([0x0000, 0x8000, 0x7F80, 0xFF81, 105 << 7], block.room)
    assert escapes_of(plane) == 0
    assert pack_tile(spec, num_tokens, as_tile(plane), out)
    assert [int(out[b.start : b.start + 4].view(np.uint32)[0]) for b in blocks] == [b.room for b in blocks]
    assert fits_packed(spec, num_tokens, out)
    assert unpack_tile(spec, num_tokens, out, back)
    assert back.tobytes() == as_tile(plane).tobytes()
    for block in blocks:
        above = plane.copy()
        free = np.argwhere((above[1:, block.first : block.first + block.width] >> 7 & 0xFF) == 120)[0]
        above[1 + free[0], block.first + free[1]] = 0
        assert escapes_of(above) == 1
        assert not pack_tile(spec, num_tokens, as_tile(above), out)
        assert not fits_packed(spec, num_tokens, out)


def test_a_tile_of_nothing_but_escapes_does_not_fit() -> None:
    spec, exponents = make_spec(64, 64), np.zeros((256, 64), np.int64)
    exponents[0] = 254
    plane = patterns(np.random.default_rng(0), exponents)
    raw = as_tile(plane, plane)
    out = Guarded.of(packed_tile_bytes(spec, 256))
    assert not pack_tile(spec, 256, raw, out.inner)
    assert out.is_intact


# ---- sizes ------------------------------------------------------------------------------------------------------
@given(WIDTHS, st.integers(1, 5000))
@example((16,), 4)  # as many bytes as raw
def test_blocks_lie_one_after_another_and_cover_every_channel_once(widths: tuple[int, ...], num_tokens: int) -> None:
    blocks, second = packed_blocks(widths, num_tokens), second_implementation()
    starts = [block.start for block in blocks] + [packed_size(widths, num_tokens)]
    assert starts == [0, *np.cumsum([block.num_bytes for block in blocks])]
    assert all(block.num_bytes % 16 == 0 for block in blocks)
    covered = [(block.plane, block.first + i) for block in blocks for i in range(block.width)]
    assert covered == [(plane, i) for plane, width in enumerate(widths) for i in range(width)]
    spec = make_spec(*widths)
    size = packed_tile_bytes(spec, num_tokens)
    assert size == second.packed_tile_bytes(spec.canonical(), num_tokens) < spec.tile_bytes(num_tokens)
    assert size in (0, starts[-1])
    assert packed_or_raw(spec, num_tokens) == (PACKED if size else RAW)


@pytest.mark.parametrize("spec", [make_spec(64, dtype="float16"), make_spec(64, 63), make_spec(64, dtype="float32")])
def test_there_is_no_packed_tile_of_other_dtypes_or_odd_widths(spec: KVSpec) -> None:
    assert packed_tile_bytes(spec, 256) == 0
    assert packed_or_raw(spec, 256) == RAW


def test_packing_stores_three_quarters() -> None:
    for widths in ((128, 128), (64, 64), (512, 64), (576,)):
        spec = make_spec(*widths)
        assert 0.75 < packed_tile_bytes(spec, 256) / spec.tile_bytes(256) < 0.76
        assert packed_tile_bytes(spec, 0) == packed_tile_bytes(spec, 1) == 0


# ---- any bytes --------------------------------------------------------------------------------------------------
@settings(max_examples=200)
@given(
    st.sampled_from([(2,), (64, 64), (130, 4), (576,)]),
    st.integers(1, 40),
    st.integers(0, 1 << 32),
    st.sampled_from(["noise", "few escapes", "room exceeded", "largest count", "positions beyond"]),
    st.integers(0, 3),
)
def test_no_bytes_make_a_reader_raise_or_write_outside(
    widths: tuple[int, ...], num_tokens: int, seed: int, kind: str, shift: int
) -> None:
    rng, spec = np.random.default_rng(seed), make_spec(*widths)
    packed, out = Guarded.of(packed_size(widths, num_tokens), shift), Guarded.of(spec.tile_bytes(num_tokens), shift)
    packed.inner[...] = rng.integers(0, 256, len(packed.inner), np.uint8)
    blocks = packed_blocks(widths, num_tokens)
    for block in blocks if kind != "noise" else ():
        positions = rng.integers(0, num_tokens * block.width, block.room)
        put(packed.inner, block.start, rng.integers(0, block.room + 1), *positions | rng.integers(0, 256) << 24)
    block = blocks[int(rng.integers(len(blocks)))]
    match kind:
        case "room exceeded":
            put(packed.inner, block.start, block.room + 1)
        case "largest count":
            put(packed.inner, block.start, 0xFFFFFFFF)
        case "positions beyond":
            put(packed.inner, block.start, 1, num_tokens * block.width)
    before = packed.inner.tobytes()
    assert unpack_tile(spec, num_tokens, packed.inner, out.inner) == could_be_written(spec, num_tokens, before)
    assert could_be_written(spec, num_tokens, before) == (kind == "few escapes") or kind == "noise"
    assert packed.inner.tobytes() == before
    assert packed.is_intact
    assert out.is_intact


def put(buffer: Bytes, at: int, *words: int) -> None:
    """As u32."""
    buffer[at : at + 4 * len(words)] = np.array(words, "<u4").view(np.uint8)


def could_be_written(spec: KVSpec, num_tokens: int, packed: bytes) -> bool:
    """Whether counts and positions are such as there are."""
    for block in packed_blocks(tuple(plane.width for plane in spec.planes), num_tokens):
        count, *escapes = np.frombuffer(packed, "<u4", 1 + block.room, block.start).tolist()
        if count > block.room or any(word % 2**24 >= num_tokens * block.width for word in escapes[:count]):
            return False
    return True


# ---- buffers ----------------------------------------------------------------------------------------------------
def ordinary(spec: KVSpec, num_tokens: int, seed: int) -> Bytes:
    """A tile that fits, with an escape or two."""
    rng = np.random.default_rng(seed)
    planes = [draw_plane(rng, num_tokens, plane.width, ["ordinary", "one exponent", "zeros"]) for plane in spec.planes]
    planes[0][num_tokens // 2, 0] = 0x7F81
    return as_tile(*planes)


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_tiles_may_lie_anywhere_and_sources_are_only_read(shift: int) -> None:
    spec = make_spec(130, 64)
    raw, packed, back = Guarded.of(spec.tile_bytes(37), shift), Guarded.of(packed_tile_bytes(spec, 37), shift), None
    raw.inner[...] = ordinary(spec, 37, 1)
    raw.inner.flags.writeable = False
    assert pack_tile(spec, 37, raw.inner, packed.inner)
    aligned = np.empty(len(packed.inner), np.uint8)
    assert pack_tile(spec, 37, raw.inner.copy(), aligned)
    assert packed.inner.tobytes() == aligned.tobytes()
    packed.inner.flags.writeable = False
    back = Guarded.of(len(raw.inner), shift)
    assert unpack_tile(spec, 37, packed.inner, back.inner)
    assert back.inner.tobytes() == raw.inner.tobytes()
    assert raw.is_intact
    assert packed.is_intact
    assert back.is_intact


def test_many_tiles_at_once_are_the_same_as_one_by_one() -> None:
    """Tiles apart from one another, more than go into one pass, some of which do not fit or cannot be read."""
    spec, num_tokens, num_tiles = make_spec(128, 192, 192, 64), 150, 11
    size, raw_size = packed_tile_bytes(spec, num_tokens), spec.tile_bytes(num_tokens)
    raw = np.full((num_tiles, raw_size + 7), CANARY, np.uint8)[:, 3:-4]
    for number, tile in enumerate(raw):
        tile[...] = ordinary(spec, num_tokens, number)
    bad = [2, 7]
    rng = np.random.default_rng(0)
    for number in bad:
        raw[number] = rng.integers(0, 256, raw_size, np.uint8)
    one_by_one, at_once = (np.full((num_tiles, size + 9), CANARY, np.uint8) for _ in range(2))
    fits = [pack_tile(spec, num_tokens, a, b) for a, b in zip(raw, one_by_one[:, 5:-4], strict=True)]
    assert fits == [number not in bad for number in range(num_tiles)]
    assert pack_tiles(spec, num_tokens, raw, at_once[:, 5:-4]).tolist() == fits
    assert fits_packed(spec, num_tokens, at_once[:, 5:-4]).tolist() == fits
    assert (at_once[fits] == one_by_one[fits]).all()
    assert (at_once[:, :5] == CANARY).all()
    assert (at_once[:, -4:] == CANARY).all()
    at_once[4, 5:9] = 0xFF
    back = np.full((num_tiles, raw_size + 1), CANARY, np.uint8)
    readable = [number not in (*bad, 4) for number in range(num_tiles)]
    assert unpack_tiles(spec, num_tokens, at_once[:, 5:-4], back[:, 1:]).tolist() == readable
    assert (back[readable, 1:] == raw[readable]).all()
    assert (back[:, 0] == CANARY).all()
    assert len(pack_tiles(spec, num_tokens, raw[:0], at_once[:0])) == 0


def test_a_tile_larger_than_a_pass() -> None:
    spec, num_tokens = make_spec(128, 128), 2311
    raw = ordinary(spec, num_tokens, 3)
    out, back = np.empty(packed_tile_bytes(spec, num_tokens), np.uint8), np.empty_like(raw)
    assert pack_tile(spec, num_tokens, raw, out)
    assert unpack_tile(spec, num_tokens, out, back)
    assert back.tobytes() == raw.tobytes()


def test_bytes_of_a_tile_with_gaps_between_them_are_refused() -> None:
    """Rather than written to a copy that nobody sees."""
    spec = make_spec(64, 64)
    raw, packed = ordinary(spec, 16, 5), np.empty(packed_tile_bytes(spec, 16), np.uint8)
    assert pack_tile(spec, 16, raw, packed)
    with pytest.raises(ValueError, match="contiguous"):
        unpack_tile(spec, 16, packed, np.empty(2 * len(raw), np.uint8)[::2])
    with pytest.raises(ValueError, match="contiguous"):
        pack_tile(spec, 16, np.repeat(raw, 2)[::2], packed)


def test_threads_do_not_share_what_is_between_raw_and_packed() -> None:
    """Each with tiles of its own, over and over, and all at the same time."""
    shapes = [((128, 128), 256), ((64, 64), 256), ((576,), 100), ((128, 128), 31), ((64, 64), 17), ((512, 64), 64)]
    gate = threading.Barrier(len(shapes))

    def work(number: int) -> bool:
        widths, num_tokens = shapes[number]
        spec = make_spec(*widths)
        raws = np.stack([ordinary(spec, num_tokens, 10 * number + i) for i in range(3)])
        out, back = np.empty((3, packed_tile_bytes(spec, num_tokens)), np.uint8), np.empty_like(raws)
        gate.wait(WAIT_S)
        for _ in range(60):
            if not (pack_tiles(spec, num_tokens, raws, out).all() and unpack_tiles(spec, num_tokens, out, back).all()):
                return False
            if back.tobytes() != raws.tobytes():
                return False
            back[...] = CANARY
        return True

    with ThreadPoolExecutor(len(shapes)) as threads:
        assert list(threads.map(work, range(len(shapes)))) == [True] * len(shapes)


@pytest.mark.parametrize("work", ["pack", "unpack"])
def test_other_threads_run_meanwhile(work: str) -> None:
    """Python hands over only where somebody lets go of its lock here: numpy does, in every pass over a large array."""
    spec, num_tokens = make_spec(128, 128), 8192
    raw = ordinary(spec, num_tokens, 1)
    packed = np.empty(packed_tile_bytes(spec, num_tokens), np.uint8)
    assert pack_tile(spec, num_tokens, raw, packed)
    turns, done = [0], threading.Event()

    def take_turns() -> None:
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)  # lets go of the lock itself

    other = threading.Thread(target=take_turns)
    interval = sys.getswitchinterval()
    other.start()
    try:
        sys.setswitchinterval(1000)
        deadline, most = time.monotonic() + WAIT_S, 0
        while most < ENOUGH_TURNS and time.monotonic() < deadline:
            before = turns[0]
            if work == "pack":
                pack_tile(spec, num_tokens, raw, packed)
            else:
                unpack_tile(spec, num_tokens, packed, raw)
            most = max(most, turns[0] - before)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        other.join()
    assert most >= ENOUGH_TURNS
