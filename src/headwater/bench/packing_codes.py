"""What packing does to tiles, and what other codes would: for `headwater bench packing`.

Other codes are counted and not written: how many bytes they would take follows from the exponents alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.bench.packing_kv import Sample
from headwater.errors import EngineError
from headwater.kv.encoding import PACKED, stored_tile_bytes
from headwater.kv.packing import pack_tiles, packed_blocks, unpack_tiles
from headwater.kv.spec import KVSpec

_ESCAPE_BITS = 32
"""A position and an exponent."""


class Packed(NamedTuple):
    """Raw tiles of bfloat16, and packed ones."""

    spec: KVSpec
    num_tokens: int
    raw: npt.NDArray[np.uint8]
    packed: npt.NDArray[np.uint8]


def pack_sample(sample: Sample) -> tuple[Packed, dict[str, Any]]:
    """Pack it, compare every byte that comes back, and say what it took."""
    spec, raw = sample.in_dtype("bfloat16")
    num_tokens = sample.num_tokens
    packed = np.empty((len(raw), stored_tile_bytes(spec, num_tokens, PACKED)), np.uint8)
    fits, back = pack_tiles(spec, num_tokens, raw, packed), np.empty_like(raw)
    readable = unpack_tiles(spec, num_tokens, packed, back)
    if not (readable[fits].all() and (back[fits] == raw[fits]).all()):
        raise EngineError("packed tiles came back as others: this is a bug of Headwater")
    blocks = packed_blocks(tuple(plane.width for plane in spec.planes), num_tokens)
    starts = np.array([block.start for block in blocks])
    counts = packed[:, starts[:, None] + np.arange(4)].copy().view(np.uint32)[..., 0]
    values = np.array([block.num_rows * block.width for block in blocks])
    chunks = fits.reshape(-1, spec.num_tiles).all(axis=1)
    sizes = np.where(chunks, packed.shape[1], raw.shape[1])
    report = {
        "tiles": len(raw),
        "misfit_tiles": int((~fits).sum()),
        "packed_share": float(sizes.mean() / raw.shape[1]),
        "escapes": float(counts.sum() / (values.sum() * len(raw))),
        "escapes_worst": float((counts / values).max()),
    }
    return Packed(spec, num_tokens, raw, packed), report


def count_codes(sample: Sample) -> dict[str, Any]:
    """Shares of the raw bytes that other codes would take, all with one base for each channel of a tile."""
    below = _distances(sample, "bfloat16", mantissa_bits=7, exponent_bits=8)
    report: dict[str, Any] = {}
    for plane, found in below.items():
        report[f"escapes_{plane}"] = float((found >= 15).mean())
        report[f"three_bit_escapes_{plane}"] = float((found >= 7).mean())
    tiles = np.concatenate([found.reshape(len(found), -1) for found in below.values()], axis=1)
    of_three = (tiles >= 7).mean(axis=1)
    base_bits, entropy = 8 / sample.num_tokens, _entropy(tiles)
    report["three_bit_escapes"] = float(of_three.mean())
    report["three_bit_escapes_worst"] = float(of_three.max())
    report["three_bit_share"] = (8 + 3 + base_bits + _ESCAPE_BITS * float(of_three.max())) / 16
    report["exponent_bits"] = entropy
    report["entropy_share"] = (8 + entropy + base_bits) / 16
    _, raw = sample.in_dtype("bfloat16")
    bits = raw.view(np.uint16)
    report["sign_mantissa_bits"] = _entropy((bits >> 8 & 0x80 | bits & 0x7F).reshape(1, -1))
    halves = _distances(sample, "float16", mantissa_bits=10, exponent_bits=5).values()
    report["float16_share"] = (11 + 4 + 5 / sample.num_tokens) / 16
    of_halves = np.concatenate([found.reshape(len(found), -1) for found in halves], axis=1)
    report["float16_entropy_share"] = (11 + _entropy(of_halves) + 5 / sample.num_tokens) / 16
    return report


def _distances(sample: Sample, dtype: str, mantissa_bits: int, exponent_bits: int) -> dict[str, npt.NDArray[np.uint16]]:
    """By plane, how far each exponent lies below the largest one of its channel in the tile."""
    _, raw = sample.in_dtype(dtype)
    found = {}
    for name, plane in sample.planes(raw).items():
        exponents = plane >> mantissa_bits & (1 << exponent_bits) - 1
        found[name] = exponents.max(axis=1, keepdims=True) - exponents
    return found


def _entropy(tiles: npt.NDArray[np.integer[Any]]) -> float:
    """Bits a value, with statistics of each tile's own: the mean over tiles."""
    bits = []
    for tile in tiles:
        shares = np.bincount(tile) / tile.size
        shares = shares[shares > 0]
        bits.append(-(shares * np.log2(shares)).sum())
    return float(np.mean(bits))
