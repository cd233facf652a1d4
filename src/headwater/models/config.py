"""What a model is: its sizes, its family, its rotary positions. Plain data, whatever format the checkpoint has.

Nothing here reads files (see `checkpoint`) or allocates tensors (see `decoder`). What this engine cannot run exactly
is refused when the config is built, not approximated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headwater.errors import ModelError
from headwater.kv.spec import KVSpec
from headwater.models.rope import RopeConfig

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_WIDTH = 1 << 18
MAX_VOCAB = 1 << 22
MAX_LENGTH = 1 << 24


@dataclass(frozen=True, slots=True)
class Family:
    """What the architectures of one name have in common, beside their sizes."""

    name: str
    architecture: str
    """The class that Hugging Face names in `architectures`."""
    qkv_bias: bool | None
    """None: the config's `attention_bias` says, for the output projection too."""
    mlp_bias: bool | None
    """None: the config's `mlp_bias` says."""
    qk_norm: bool
    default_head_dim: int | None
    """None: hidden size divided by heads."""


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", None, None, False, None),
        Family("qwen2", "Qwen2ForCausalLM", True, False, False, None),
        Family("qwen3", "Qwen3ForCausalLM", None, False, True, 128),
    )
}


_NOT_COMPUTED_WITH = ("rope", "max_position_embeddings", "eos_token_ids", "bos_token_id", "stored_dtype")
"""Fields of a ModelConfig that are named apart, bound requests, end answers, or are for people."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only model. `checkpoint` builds it from config.json or from GGUF metadata."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    stored_dtype: str = "float32"
    """What the weights are stored in: a torch name, or GGUF's (`Q4_1`). For people; it decides nothing."""

    def __post_init__(self) -> None:
        family_named(self.family)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embeddings need an even number")
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ModelError(f"end-of-sequence token {token_id} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The config that `dataclasses.asdict` was asked about, also after a journey as JSON."""
        rope = dict(values["rope"])
        if rope["freq_factors"] is not None:
            rope["freq_factors"] = tuple(rope["freq_factors"])
        return cls(**{**values, "rope": RopeConfig(**rope), "eos_token_ids": tuple(values["eos_token_ids"])})

    @property
    def scale(self) -> float:
        """What attention scores are multiplied with."""
        return math.pow(self.head_dim, -0.5)

    @property
    def num_parameters(self) -> int:
        """Numbers in all weights; tied embeddings count once."""
        heads = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = heads + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + tables + self.hidden_size

    @property
    def settings(self) -> dict[str, Any]:
        """Part of the identity of the KV: every field that is neither in `rope` nor known to change nothing.

        Sizes count, though weights have them too: vLLM loads the first rows of a matrix larger than its config says.
        """
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_COMPUTED_WITH}

    def kv_spec(self, dtype: str) -> KVSpec:
        """What one token's KV is, when the model runs in `dtype`."""
        return KVSpec.gqa(
            num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype
        )


def family_named(name: str) -> Family:
    """The family, or ModelError with the names there are."""
    if name not in FAMILIES:
        raise ModelError(f"architecture {name!r} is not supported; known are {', '.join(FAMILIES)}")
    return FAMILIES[name]
