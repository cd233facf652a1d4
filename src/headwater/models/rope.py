"""Rotary positions: what a config says of them, and the table of cosines and sines that the kernels read.

The variants are a table of functions from a `RopeConfig` to inverse frequencies, equal to those of `transformers`. A
variant whose angles depend on how long a sequence has become is refused: its KV could not be shared or continued.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One kind of rotary embedding and its parameters; those that a kind does not use keep their defaults."""

    dim: int
    """Width that is rotated: the whole head, or its first part."""
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_len: int | None = None
    """The length the model was trained with before it was stretched; linear and default need none."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cosines and sines, and so every query and key."""
    freq_factors: tuple[float, ...] | None = None
    """Divisors of the inverse frequencies, as GGUF stores them (`rope_freqs`); then `kind` is default."""

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ModelError(f"rope type {self.kind!r} is not supported; known are {', '.join(ROPE_KINDS)}")
        if self.kind in ("llama3", "yarn", "dynamic") and self.original_max_len is None:
            raise ModelError(f"rope type {self.kind!r} needs original_max_position_embeddings")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"rope type 'llama3' needs low_freq_factor ({self.low_freq_factor:g}) below "
                f"high_freq_factor ({self.high_freq_factor:g})"
            )
        if self.freq_factors is not None and len(self.freq_factors) * 2 != self.dim:
            raise ModelError(f"{len(self.freq_factors)} rope factors do not fit heads of width {self.dim}")

    def inverse_frequencies(self) -> Tensor:
        """float32 [dim / 2], on the CPU."""
        import torch

        frequencies = ROPE_KINDS[self.kind](self)
        if self.freq_factors is not None:
            frequencies = frequencies / torch.tensor(self.freq_factors, dtype=torch.float32)
        return frequencies

    def check_length(self, max_len: int) -> None:
        """Raise ModelError where sequences of `max_len` would need angles that change as the sequence grows."""
        if self.kind == "dynamic" and self.original_max_len is not None and max_len > self.original_max_len:
            raise ModelError(
                f"rope type 'dynamic' turns other angles once a sequence passes {self.original_max_len} tokens, so KV "
                f"already cached would be wrong; set max_model_len to at most {self.original_max_len} (now {max_len})"
            )

    def table(self, max_len: int, device: torch.device | str = "cpu") -> Tensor:
        """float32 [max_len, dim]: cosines of the dim / 2 angles of a position, then their sines.

        Raises ModelError where `check_length` does, and MemoryBudgetError. Costs max_len * dim * 4 bytes.
        """
        import torch

        from headwater.models.memory import empty

        self.check_length(max_len)
        # Made on the CPU: cosines of large angles differ between devices, and KV should not.
        table = empty(max_len, self.dim, dtype=torch.float32, device="cpu")
        positions = torch.arange(max_len, dtype=torch.float32)
        cos, sin = table[:, : self.dim // 2], table[:, self.dim // 2 :]
        torch.outer(positions, self.inverse_frequencies(), out=cos)
        torch.sin(cos, out=sin)
        cos.cos_()
        if self.attention_factor != 1.0:
            table *= self.attention_factor
        return table.to(device)


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """What YaRN multiplies cosines and sines with when the config does not say."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """By how much YaRN raises queries and keys of a context stretched by `factor`."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _default(rope: RopeConfig) -> Tensor:
    return 1.0 / _position_frequencies(rope)


def _linear(rope: RopeConfig) -> Tensor:
    return _default(rope) / rope.factor


def _llama3(rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    import torch

    original = _original_length(rope)
    frequencies = _default(rope)
    wavelengths = 2 * math.pi / frequencies
    stretched = frequencies / rope.factor
    kept = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept) * stretched + kept * frequencies
    is_long = wavelengths > original / rope.low_freq_factor
    is_short = wavelengths < original / rope.high_freq_factor
    return torch.where(is_long, stretched, torch.where(is_short, frequencies, blended))


def _yarn(rope: RopeConfig) -> Tensor:
    """A linear ramp over the dimensions, from kept (they turn often within the trained length) to stretched."""
    import torch

    original = _original_length(rope)

    def dimension_turning(rotations: float) -> float:
        return rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rope.dim - 1.0)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    turns = _position_frequencies(rope)
    return 1.0 / (rope.factor * turns) * (1 - kept) + 1.0 / turns * kept


def _position_frequencies(rope: RopeConfig) -> Tensor:
    import torch

    exponents: Tensor = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    return rope.theta**exponents


def _original_length(rope: RopeConfig) -> int:
    assert rope.original_max_len is not None  # checked when the config was made
    return rope.original_max_len


ROPE_KINDS: dict[str, Callable[[RopeConfig], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _default,  # `check_length` keeps it where the two are the same
}
