"""The plan of `headwater bench vllm --device cuda` as plain data: sizes, repetitions, sides and parts.

Nothing here runs anything. Prompt lengths are whole chunks; every prompt that is asked has one token more, so that a
hit in the pool and a hit in vLLM's own cache compute the same single row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.bench.vllm_gpu.model import LLAMA_8B, LlamaShape
from headwater.errors import EngineConfigError

PLAIN = "plain"
HEADWATER = "headwater"
LAYERWISE = "headwater_layerwise"
PACKED, UNPACKED = "headwater_packed", "headwater_unpacked"
"""With `packing=on` and `packing=off`."""
OFFLOADING = "offloading"
LMCACHE = "lmcache"
LMCACHE_V3 = "lmcache_v3"
"""LMCache with its `use_gpu_connector_v3`. Without it, 0.5.6 moves half of each row of vLLM 0.32's packed cache."""
SIDES = (PLAIN, HEADWATER, LAYERWISE, PACKED, UNPACKED, OFFLOADING, LMCACHE, LMCACHE_V3)

PARTS = ("hits", "local", "throughput", "reuse", "burst", "tiers", "others")
"""`others` are cold prompts and local hits beside the other connectors, which have no bar."""
CHUNK_TOKENS = 256


@dataclass(frozen=True)
class UniquePrompts:
    """Prompts that have nothing in common, all at once."""

    count: int = 48
    tokens: int = 3000
    output: int = 64


@dataclass(frozen=True)
class ReusedPrompts:
    """Requests of which most begin with the same prefix, a few at a time."""

    count: int = 100
    at_once: int = 25
    share: float = 0.8
    prefix: int = 8192
    suffix: int = 256
    output: int = 32


@dataclass(frozen=True)
class GpuPlan:
    """All sizes and repetitions of a run. The defaults are a full run."""

    device: str = "cuda"
    """"cpu" is a trial of the same code without a GPU, with a tiny model: whether it runs, not how fast."""
    sides: tuple[str, ...] = SIDES
    parts: tuple[str, ...] = PARTS
    is_eager: bool = True
    """Without compilation and CUDA graphs: starts in seconds."""
    is_quick: bool = False
    """Too small to be judged."""
    profile: bool = False
    shape: LlamaShape = LLAMA_8B
    model: Path | None = None
    """Where the checkpoint is, or is to be made; None for a temporary one."""
    lmcache_path: Path | None = None
    """Where LMCache and what it needs are installed, if not beside vLLM: it wants older versions of some packages."""
    pairs: int = 9
    throughput_pairs: int = 5
    reuse_pairs: int = 3
    aside_pairs: int = 3
    """Of cold prompts and local hits beside a connector that is not judged by them."""
    hit_tokens: tuple[int, ...] = (8192, 32768)
    share_tokens: tuple[int, ...] = (1024, 8192, 32768)
    batched_tokens: int = 8192
    large_batched_tokens: int = 16384
    unique: UniquePrompts = UniquePrompts()
    reused: ReusedPrompts = ReusedPrompts()
    burst_prompts: int = 12
    burst_tokens: int = 8192
    equal_prompts: int = 8
    equal_tokens: int = 2048
    equal_output: int = 32
    tier_tokens: int = 32768
    tier_threads: int = 4
    """That read the file in the comparison, as many as a load uses."""
    capacity_bytes: int = 30 << 30
    """Of every connector's host memory."""
    memory_share: float = 0.4
    """Of the GPU, for each of two engines that live at a time."""
    seconds: float = float("inf")
    """Nothing is begun that would probably not end within this time."""
    start_s: float = 300.0
    answer_s: float = 180.0
    out: Path | None = None
    again: bool = False
    """Measure also what the file of results has already."""
    more_settings: dict[str, Any] = field(default_factory=dict)
    """For every engine."""

    def __post_init__(self) -> None:
        for name, given, known in (("side", self.sides, SIDES), ("part", self.parts, PARTS)):
            if wrong := [one for one in given if one not in known]:
                raise EngineConfigError(f"unknown {name} {', '.join(wrong)}; known are {', '.join(known)}")

    @property
    def mode(self) -> str:
        """`eager` or `compiled`."""
        return "eager" if self.is_eager else "compiled"

    @property
    def dtype(self) -> str:
        """The dtype of weights and KV."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for each token."""
        return self.shape.token_bytes(2 if self.dtype == "bfloat16" else 4)

    @property
    def max_model_len(self) -> int:
        """Room for the longest prompt and its answer."""
        longest = max(*self.hit_tokens, *self.share_tokens, self.tier_tokens, self.unique.tokens, self.burst_tokens)
        longest = max(longest, self.reused.prefix + self.reused.suffix, self.equal_tokens)
        return longest + CHUNK_TOKENS

    def fingerprint(self) -> dict[str, Any]:
        """The sizes that two runs must have in common for one to continue the other."""
        return {
            "device": self.device,
            "layers": self.shape.num_layers,
            "token_bytes": self.token_bytes,
            "batched_tokens": self.batched_tokens,
            "is_quick": self.is_quick,
        }


_QUICK_SIZES: dict[str, Any] = {
    "is_quick": True,
    "pairs": 2,
    "throughput_pairs": 1,
    "reuse_pairs": 1,
    "aside_pairs": 1,
    "hit_tokens": (512, 1024),
    "share_tokens": (256, 1024),
    "batched_tokens": 512,
    "large_batched_tokens": 1024,
    "unique": UniquePrompts(count=4, tokens=300, output=4),
    "reused": ReusedPrompts(count=10, at_once=4, prefix=512, suffix=32, output=2),
    "burst_prompts": 3,
    "burst_tokens": 512,
    "equal_prompts": 2,
    "equal_tokens": 512,
    "equal_output": 8,
    "tier_tokens": 1024,
}

QUICK = GpuPlan(capacity_bytes=8 << 30, **_QUICK_SIZES)
"""Everything once and small on a GPU: a smoke test."""

TRIAL = GpuPlan(
    device="cpu",
    shape=LlamaShape(num_layers=2, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64),
    capacity_bytes=256 << 20,
    **_QUICK_SIZES,
)
"""The same without a GPU, in vLLM's build for CPUs."""
