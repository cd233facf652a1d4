"""A chunk in a remote store: pieces of some layers each, and one manifest that names them and proves their bytes.

    PREFIX:m:KEY             the manifest, published last and only once
    PREFIX:p:KEY:GEN:N       piece N, as [layer][head][plane][token][dim]; GEN is random, one for each attempt to write
    PREFIX:t:PARENT          lengths of the newest tails below a chunk (or root)
    PREFIX:e                 what happened here, for the other hosts (see `announce`)

Two servers may write one chunk at the same time, and their results may differ in the last bit: each writes pieces of
its own generation, and the manifest that is published first says which are the chunk's. A manifest is bound to its
key, checked by its own checksum, and parsed with bounds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headwater.kv.format import checksum
from headwater.kv.hashing import KEY_BYTES, ChunkRef
from headwater.kv.spec import KVSpec

MAGIC = b"HWMANIF1"
_FIXED = struct.Struct("<8s32s32s32s8sIIIIIIIQ")
_SUM = struct.Struct("<Q")
_MAX_TILES = 1 << 20

MAX_MANIFEST_BYTES = _FIXED.size + 8 * _MAX_TILES + _SUM.size
GENERATION_BYTES = 8


@dataclass(frozen=True)
class Manifest:
    """What a reader must know of a remote chunk."""

    key: bytes
    parent: bytes
    root: bytes
    generation: bytes
    num_layers: int
    num_heads: int
    row_bytes: int
    num_tokens: int
    number: int
    chunk_tokens: int
    layers_per_piece: int
    created_ns: int
    sums: npt.NDArray[np.uint64]
    """In [layer][head] order."""

    @classmethod
    def of(
        cls,
        chunk: ChunkRef,
        spec: KVSpec,
        chunk_tokens: int,
        layers_per_piece: int,
        generation: bytes,
        created_ns: int,
        sums: npt.NDArray[np.uint64],
    ) -> Manifest:
        """The manifest of a chunk that is about to be written."""
        return cls(
            key=chunk.key,
            parent=chunk.parent,
            root=chunk.root,
            generation=generation,
            num_layers=spec.num_layers,
            num_heads=spec.num_kv_heads,
            row_bytes=spec.row_bytes,
            num_tokens=chunk.num_tokens,
            number=chunk.number,
            chunk_tokens=chunk_tokens,
            layers_per_piece=layers_per_piece,
            created_ns=created_ns,
            sums=sums,
        )

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        return self.row_bytes * self.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return self.num_layers * self.num_heads * self.tile_bytes

    @cached_property
    def pieces(self) -> tuple[range, ...]:
        """The layers of each piece."""
        step = self.layers_per_piece
        return tuple(range(at, min(at + step, self.num_layers)) for at in range(0, self.num_layers, step))

    def fits(self, chunk: ChunkRef, spec: KVSpec) -> bool:
        """Whether it describes what a reader asks for."""
        mine = (self.num_layers, self.num_heads, self.row_bytes, self.num_tokens, self.number)
        return mine == (spec.num_layers, spec.num_kv_heads, spec.row_bytes, chunk.num_tokens, chunk.number)

    def encode(self) -> bytes:
        """As it is stored."""
        fixed = _FIXED.pack(
            MAGIC,
            self.key,
            self.parent,
            self.root,
            self.generation,
            self.num_layers,
            self.num_heads,
            self.row_bytes,
            self.num_tokens,
            self.number,
            self.chunk_tokens,
            self.layers_per_piece,
            self.created_ns,
        )
        body = fixed + self.sums.astype("<u8", copy=False).tobytes()
        return body + _SUM.pack(checksum(body))

    @classmethod
    def decode(cls, key: bytes, raw: bytes) -> Manifest | None:
        """Read what `encode` wrote under that key; None for anything else."""
        if not _FIXED.size + _SUM.size <= len(raw) <= MAX_MANIFEST_BYTES:
            return None
        body = memoryview(raw)[: -_SUM.size]
        if _SUM.unpack(raw[-_SUM.size :])[0] != checksum(body):
            return None
        magic, own, parent, root, generation, *numbers = _FIXED.unpack_from(raw)
        layers, heads, row_bytes, num_tokens, number, chunk_tokens, layers_per_piece, created_ns = numbers
        sums = np.frombuffer(body[_FIXED.size :], "<u8") if len(body) % 8 == _FIXED.size % 8 else np.empty(0, "<u8")
        right = magic == MAGIC and own == key and 0 < num_tokens <= chunk_tokens and len(sums) == layers * heads
        if not right or not layers_per_piece or not 0 < len(sums) <= _MAX_TILES or not row_bytes:
            return None
        sizes = (layers, heads, row_bytes, num_tokens, number, chunk_tokens, layers_per_piece, created_ns)
        return cls(key, parent, root, generation, *sizes, sums)


@dataclass(frozen=True)
class Names:
    """What the objects of a chunk are called. The prefix keeps pools that share a server apart."""

    prefix: str

    def manifest(self, key: bytes) -> str:
        """Of a chunk's manifest."""
        return f"{self.prefix}:m:{key.hex()}"

    def piece(self, manifest: Manifest, number: int) -> str:
        """Of one piece."""
        return f"{self.prefix}:p:{manifest.key.hex()}:{manifest.generation.hex()}:{number}"

    def tails(self, parent: bytes) -> str:
        """Of the list of tails below a chunk or root."""
        return f"{self.prefix}:t:{parent.hex()}"

    def root(self, key: bytes) -> str:
        """Of the description of a root and its space."""
        return f"{self.prefix}:r:{key.hex()}"

    @property
    def log(self) -> str:
        """Of the log of events."""
        return f"{self.prefix}:e"

    def all_of(self, manifest: Manifest) -> list[str]:
        """The manifest first, so that nobody finds a chunk of which half is gone."""
        return [self.manifest(manifest.key), *(self.piece(manifest, n) for n in range(len(manifest.pieces)))]

    def key_of(self, name: str) -> bytes | None:
        """The chunk whose manifest is called this."""
        digits = name.removeprefix(f"{self.prefix}:m:")
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            return None
        return key if len(key) == KEY_BYTES else None
