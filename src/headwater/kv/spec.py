"""What one token's KV is in one model: layers, KV heads and planes, and every size that follows from them.

A spec says nothing of who computes the KV (see `topology`) or which weights made it (see `identity`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headwater.errors import SpecError

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
"""The element types KV can be stored in, with their width. Bytes are stored as they are, never converted."""

MAX_LAYERS = 1 << 14
MAX_KV_HEADS = 1 << 14
MAX_WIDTH = 1 << 20


def _check_count(name: str, value: object, most: int) -> None:
    # Not "equal to an integer": 2.0 and True would be other JSON, and so another digest.
    if type(value) is not int or not 1 <= value <= most:
        raise SpecError(f"{name} is {value!r}; expected an integer from 1 to {most}")


@dataclass(frozen=True, slots=True)
class Plane:
    """One named vector per token and head, e.g. `k` of width 128 in bfloat16."""

    name: str
    width: int
    dtype: str

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.name.isidentifier() and len(self.name) <= 32):
            raise SpecError(f"plane name {self.name!r} must be a short ASCII identifier such as 'k' or 'latent'")
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"plane {self.name!r} has dtype {self.dtype!r}; known are {', '.join(DTYPE_BYTES)}")
        _check_count(f"width of plane {self.name!r}", self.width, MAX_WIDTH)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in this plane."""
        return self.width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KVSpec:
    """Layers × KV heads × planes. Build one with `gqa` (also MHA and MQA) or `mla`."""

    num_layers: int
    num_kv_heads: int
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        _check_count("num_layers", self.num_layers, MAX_LAYERS)
        _check_count("num_kv_heads", self.num_kv_heads, MAX_KV_HEADS)
        if not 1 <= len(self.planes) <= 8:
            raise SpecError(f"a spec has 1 to 8 planes, not {len(self.planes)}")
        names = [plane.name for plane in self.planes]
        if len(set(names)) != len(names):
            raise SpecError(f"plane names must differ, got {names}")

    @classmethod
    def gqa(
        cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str, v_head_dim: int | None = None
    ) -> KVSpec:
        """Keys and values per KV head: MHA, GQA and MQA differ only in `num_kv_heads`."""
        planes = (Plane("k", head_dim, dtype), Plane("v", head_dim if v_head_dim is None else v_head_dim, dtype))
        return cls(num_layers, num_kv_heads, planes)

    @classmethod
    def mla(
        cls, *, num_layers: int, latent_dim: int, rope_dim: int, dtype: str, rope_dtype: str | None = None
    ) -> KVSpec:
        """Multi-head latent attention: one head whose planes are the latent vector and the rotary key."""
        return cls(num_layers, 1, (Plane("latent", latent_dim, dtype), Plane("rope", rope_dim, rope_dtype or dtype)))

    # Cached: these are asked for once a piece on the read path.
    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token in one tile (all planes)."""
        return sum(plane.row_bytes for plane in self.planes)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Channels of each plane."""
        return tuple([plane.width for plane in self.planes])

    @cached_property
    def num_tiles(self) -> int:
        """Tiles in one chunk: layers × heads."""
        return self.num_layers * self.num_kv_heads

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and heads."""
        return self.num_tiles * self.row_bytes

    def tile_bytes(self, num_tokens: int) -> int:
        """Bytes of one tile of `num_tokens` tokens, unencoded; `encoding` says how many are stored."""
        return num_tokens * self.row_bytes

    def extent_bytes(self, num_tokens: int) -> int:
        """Bytes of a whole chunk of `num_tokens` tokens, unencoded."""
        return num_tokens * self.token_bytes

    def canonical(self) -> dict[str, Any]:
        """The spec as plain JSON data; `from_canonical` reads it back."""
        planes = [{"name": p.name, "width": p.width, "dtype": p.dtype} for p in self.planes]
        return {"num_layers": self.num_layers, "num_kv_heads": self.num_kv_heads, "planes": planes}

    @classmethod
    def from_canonical(cls, data: Mapping[str, Any]) -> KVSpec:
        """Read what `canonical` wrote. Raises SpecError on anything else."""
        try:
            planes = tuple(Plane(str(p["name"]), p["width"], str(p["dtype"])) for p in data["planes"])
            return cls(data["num_layers"], data["num_kv_heads"], planes)
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(f"not a spec: {error}") from error

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON (sorted keys, no spaces); part of every chunk key."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"headwater spec v1\0" + text.encode("ascii")).digest()

    def __str__(self) -> str:
        planes = " + ".join(f"{p.name}[{p.width}] {p.dtype}" for p in self.planes)
        return f"{self.num_layers} layers × {self.num_kv_heads} heads × ({planes})"
