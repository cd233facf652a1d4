"""The index file: one fixed layout of header, directory, maps and record heap, and the arithmetic of its parts.

    ┌────────┬───────────┬──────────┬──────┬──────────┬──────────────────────────────┬────────┐
    │ header │ directory │ cell map │ ages │ unit map │ heap: records of 64-byte cells │ header │
    └────────┴───────────┴──────────┴──────┴──────────┴──────────────────────────────┴────────┘

Only the records are truth, and each carries its own checksum. Everything else can be rebuilt from them (see
`rebuild`), so a writer that dies half-way, or noise in the file, costs a scan and never an answer. All numbers are
little-endian; nothing here follows a pointer that has not been bounds-checked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from headwater.errors import CapacityError
from headwater.kv.format import checksum

MAGIC = b"HEADWATR"
INDEX_VERSION = 1
PAGE = 4096

# ---- header -----------------------------------------------------------------------------------------------------
_HEADER = struct.Struct("<8sIIQQQQQQ16s16sQ")
HEADER_BYTES = _HEADER.size + 8
WORDS_OFFSET = 1024
"""Where the mutable counters begin in the first page."""


class Word:
    """Positions of the mutable 64-bit counters. All are hints or statistics: noise in them is survivable."""

    DIRTY = 0  # a writer is inside the lock; found set on entry, it died there
    SEQ = 1  # odd while the directory is being rearranged
    CELL_HINT = 2
    UNIT_HINT = 3
    BACKED = 4  # segments that have storage behind them
    USED_UNITS = 5
    USED_CELLS = 6
    PENDING = 7  # bytes reserved and not yet complete
    CHUNKS = 8  # complete chunks
    SUSPECT = 9  # a reader met a record that does not verify
    EVICTED = 10
    DAMAGED = 11
    STORED = 12
    ABORTED = 13
    REBUILDS = 14
    SWEEP = 15  # records without a living parent may exist
    STORED_BYTES = 16
    BOOT = 17  # which boot of the machine last opened it
    EVENTS = 18  # somebody follows: writers note events in the ring
    STORED_RAW_BYTES = 19  # what STORED_BYTES would be if nothing were packed
    COUNT = 32

    @staticmethod
    def offset(word: int) -> int:
        """Where a word lies in the file."""
        return WORDS_OFFSET + 8 * word


@dataclass(frozen=True)
class Geometry:
    """The fixed sizes of one store, chosen when it is created and never changed."""

    capacity: int
    index_bytes: int
    segment_bytes: int
    unit_bytes: int
    generation: bytes
    policy: str
    created_ns: int

    @cached_property
    def data_space(self) -> int:
        """What capacity leaves for data."""
        return self.capacity - self.index_bytes - MEMBERS_BYTES

    @cached_property
    def num_units(self) -> int:
        """Allocation units in the data area; whole segments except perhaps the last."""
        return self.data_space // self.unit_bytes

    @cached_property
    def data_bytes(self) -> int:
        """Bytes that extents may occupy."""
        return self.num_units * self.unit_bytes

    @cached_property
    def units_per_segment(self) -> int:
        """Units in every segment but perhaps the last."""
        return self.segment_bytes // self.unit_bytes

    @cached_property
    def num_segments(self) -> int:
        """Segments, the last one possibly shorter."""
        return -(-self.num_units // self.units_per_segment)

    def segment_size(self, segment: int) -> int:
        """Bytes of one segment."""
        return min(self.segment_bytes, self.data_bytes - segment * self.segment_bytes)

    # Offsets of the parts, in file order.
    @cached_property
    def num_cells(self) -> int:
        """Cells in the record heap. One cell costs 64 bytes, a map byte, and its share of directory and ages."""
        room = self.index_bytes - 2 * PAGE - 4 * PAGE - _round_up(self.num_units, PAGE)
        return max(room // (CELL + 1 + 8 // AGE_CELLS + 4) - 8, 0)

    @cached_property
    def directory_slots(self) -> int:
        """A power of two, at least twice the records that fit (a record takes four cells or more)."""
        return 2 << max(self.num_cells // 4, 64).bit_length()

    @cached_property
    def directory_offset(self) -> int:
        return PAGE

    @cached_property
    def cell_map_offset(self) -> int:
        return self.directory_offset + _round_up(4 * self.directory_slots, PAGE)

    @cached_property
    def ages_offset(self) -> int:
        return self.cell_map_offset + _round_up(self.num_cells, PAGE)

    @cached_property
    def unit_map_offset(self) -> int:
        return self.ages_offset + _round_up(8 * (self.num_cells // AGE_CELLS + 1), PAGE)

    @cached_property
    def heap_offset(self) -> int:
        return self.unit_map_offset + _round_up(self.num_units, PAGE)

    def encode(self) -> bytes:
        """The header's fixed part, with its checksum. Written at both ends of the file."""
        body = _HEADER.pack(
            MAGIC,
            INDEX_VERSION,
            0,
            self.capacity,
            self.index_bytes,
            self.segment_bytes,
            self.unit_bytes,
            self.created_ns,
            self.num_cells,
            self.generation,
            self.policy.encode("ascii"),
            0,
        )
        return body + struct.pack("<Q", checksum(body))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def decode_header(raw: bytes) -> Geometry | int | None:
    """A geometry; or the version number of a newer store; or None where the bytes are no header."""
    if len(raw) < HEADER_BYTES or raw[:8] != MAGIC:
        return None
    body, (stored,) = raw[: _HEADER.size], struct.unpack_from("<Q", raw, _HEADER.size)
    if checksum(body) != stored:
        return None
    _, version, _, capacity, index, segment, unit, created, cells, generation, policy, _ = _HEADER.unpack(body)
    if version > INDEX_VERSION:
        return int(version)
    # A checksum proves that the bytes are as they were written, not that they make sense.
    possible = version == INDEX_VERSION and 0 < unit <= segment and segment % unit == 0 and policy.isascii()
    if not possible or not 0 < index < capacity < 1 << 62 or capacity - index - MEMBERS_BYTES < unit:
        return None
    geometry = Geometry(capacity, index, segment, unit, generation, policy.rstrip(b"\0").decode("ascii"), created)
    return geometry if geometry.num_cells == cells else None


# ---- records ----------------------------------------------------------------------------------------------------
CELL = 64
WORDS_PER_CELL = CELL // 8
AGE_CELLS = 4
"""Records are at least four cells long, so cells // 4 gives each a word of its own for its age."""
HEAD_BYTES = 3 * CELL
FIXED_OFFSET = CELL
"""A record's first cell is mutable, the next two are fixed, the payload follows."""
RECORD_MAGIC = 0x3148_5741_4552_4357

FREE, PENDING, COMPLETE, EVICTING, LIMBO = range(5)
"""States of a record. LIMBO: unreachable, its bytes held back until nobody reads or writes them."""

SPACE, ROOT, CHUNK = 1, 2, 3
"""Kinds of record, each the parent of the next: a space holds roots, a root holds chunks, chunks hold chunks."""

_FIXED = struct.Struct("<32sQQQQQQQIIIIIIHBBIII")
# The same as sixteen 64-bit words, for scans over many records at once.
ID_WORD, PARENT_WORD, LENGTH_WORD, CREATED_WORD, TOKENS_WORD, NUMBER_WORD, KIND_WORD = 4, 5, 7, 9, 11, 12, 14
PAYLOAD_SUM_AT, ENCODING_AT = 8 * 10, 115
# Offsets inside the mutable cell. The word at 0 is (checksum of the fixed part, low bits replaced by the state).
CHILDREN, PINNED, TAILS, REMAINING, HITS, MAGIC_AT = 8, 12, 16, 32, 40, 56
NUM_TAILS = 8


class Record(NamedTuple):
    """The fixed part of a record."""

    key: bytes
    id: int
    parent_id: int
    offset: int
    length: int
    """Of the extent as it is stored: every tile has an equal share."""
    group: int
    created_ns: int
    payload_sum: int
    parent_cell: int
    num_tokens: int
    number: int
    num_sums: int
    interleave: int
    payload_bytes: int
    parts: int
    kind: int
    encoding: int
    """Of its tiles: see `kv.encoding`. 0, raw, for records that were written before encodings had names."""
    chunk_tokens: int
    row_bytes: int
    exclusive: int
    """1: one filler fills the whole extent (a fetch); 0: the ranks of its group fill it together."""

    @property
    def num_cells(self) -> int:
        """Cells this record occupies."""
        return cells_for(self.payload_bytes)

    @property
    def is_exclusive(self) -> bool:
        """Whether nobody may join its filler."""
        return bool(self.exclusive)

    @property
    def is_tail(self) -> bool:
        """Whether this is the short last chunk of some prompt."""
        return self.num_tokens < self.chunk_tokens

    @property
    def first_token(self) -> int:
        """Position of the chunk's first token in its prompt."""
        return self.number * self.chunk_tokens

    @property
    def raw_bytes(self) -> int:
        """Bytes of the extent, if its tiles were raw."""
        return self.num_sums // max(self.parts, 1) * self.num_tokens * self.row_bytes

    @property
    def tile_bytes(self) -> int:
        """Stored bytes of one tile of a chunk."""
        return self.length * self.parts // self.num_sums

    def pack(self) -> bytes:
        """The fixed 128 bytes."""
        return _FIXED.pack(*self)


unpack_record = _FIXED.unpack
iter_records = _FIXED.iter_unpack


def cells_for(payload_bytes: int) -> int:
    """Cells of a record with that payload."""
    return max(-(-(HEAD_BYTES + payload_bytes) // CELL), AGE_CELLS)


def state_word(fixed: bytes, state: int) -> int:
    """The word that makes a record valid: bound to its content, so that noise is never a record."""
    return (checksum(fixed) & ~7) | state


# ---- members ----------------------------------------------------------------------------------------------------
NUM_SLOTS = 128
SLOT_BYTES = 8192
MEMBERS_BYTES = PAGE + NUM_SLOTS * SLOT_BYTES

# ---- choosing sizes ---------------------------------------------------------------------------------------------
DEFAULT_SEGMENT = 256 << 20
MIN_INDEX = 128 << 10
MIN_CAPACITY = MEMBERS_BYTES + MIN_INDEX + (256 << 10)


def index_size(capacity: int, wanted: int) -> int:
    """What an index of about `wanted` bytes gets."""
    return _round_up(min(max(wanted, MIN_INDEX), capacity // 2), PAGE)


def segment_size(data: int, unit: int, wanted: int) -> int:
    """What segments of about `wanted` bytes are."""
    return _round_up(min(wanted, data), max(unit, PAGE))


def choose_geometry(
    capacity: int, index: int | None, segment: int | None, policy: str, generation: bytes, created_ns: int
) -> Geometry:
    """Sizes for a new store: by default one part in 128 of the capacity is index, and segments are 256 MiB."""
    if capacity < MIN_CAPACITY:
        raise CapacityError(f"capacity is {capacity} bytes; the smallest store has {MIN_CAPACITY}")
    index_bytes = index_size(capacity, index or capacity // 128)
    data = capacity - index_bytes - MEMBERS_BYTES
    # Small units waste less on small chunks, and their map costs a byte each: whoever asks for a large index has many.
    unit, most = 256, max(131072, min(1 << 22, (index or 0) // 16))
    while unit < 65536 and data // unit > most:
        unit *= 2
    segment_bytes = segment_size(data, unit, segment or DEFAULT_SEGMENT)
    geometry = Geometry(capacity, index_bytes, segment_bytes, unit, generation, policy, created_ns)
    if geometry.num_cells < 256:
        raise CapacityError(f"index={index_bytes} bytes leaves no room for records; give at least {MIN_INDEX}")
    return geometry
