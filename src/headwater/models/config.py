"""What a model is: its family, its attention, its MLP, its rotary positions. Plain data, whatever format the checkpoint
has.

Nothing here reads files (see `checkpoint`) or allocates tensors (see `decoder`). What this engine cannot run exactly
is refused when the config is built, not approximated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from headwater.errors import ModelError
from headwater.kernels.routing import RoutingRule
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
    """None: the config's `attention_bias` says."""
    mlp_bias: bool | None
    """None: the config's `mlp_bias` says."""
    qk_norm: bool | None
    """None: the config's `use_qk_norm` says."""
    default_head_dim: int | None = None
    """None: hidden size divided by heads."""
    has_other_head_dim: bool = True
    """Whether heads may have another width than hidden size divided by heads; vLLM's class decides."""
    output_bias: bool = True
    """Whether `attention_bias` counts for the output projection too."""
    norms_whole_width: bool = False
    """Queries and keys are normed over all heads together."""
    rotary_part: float = 1.0
    """The part of a head that is rotated where the config does not say; 1: it may say nothing else."""
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    q_latent_dim: int | None = None
    """Latent attention, with queries from a latent of this width where the config does not say; None: keys and values
    are cached by head."""


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", None, None, False),
        Family("qwen2", "Qwen2ForCausalLM", True, False, False),
        Family("qwen3", "Qwen3ForCausalLM", None, False, True, 128),
        Family("mixtral", "MixtralForCausalLM", False, False, False, norm_eps=1e-5, rope_theta=1e6),
        Family("qwen2_moe", "Qwen2MoeForCausalLM", True, False, False, has_other_head_dim=False),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", False, False, True),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            False,
            False,
            True,
            has_other_head_dim=False,
            norms_whole_width=True,
            norm_eps=1e-5,
        ),
        Family("glm4_moe", "Glm4MoeForCausalLM", None, False, None, output_bias=False, rotary_part=0.5, norm_eps=1e-5),
        Family("deepseek_v2", "DeepseekV2ForCausalLM", False, False, False, q_latent_dim=1536),
        Family("deepseek_v3", "DeepseekV3ForCausalLM", False, False, False, q_latent_dim=1536),
        Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", False, False, False, q_latent_dim=768, norm_eps=1e-5),
    )
}


_NOT_COMPUTED_WITH = (
    "rope",
    "num_draft_layers",
    "max_position_embeddings",
    "eos_token_ids",
    "bos_token_id",
    "stored_dtype",
)
"""Fields of a ModelConfig that are named apart, are not run, bound requests, end answers, or are for people."""
_PARTS = ("attention", "mlp")
"""Fields of a ModelConfig whose own fields are named beside it: names that KV was stored under must not change."""
_ADDED: dict[str, Any] = {"norms_whole_width": False, "sparse": None, "num_draft_layers": 0}
"""Fields that came later, for the same reason: they are named only where they have another value than this."""


@dataclass(frozen=True, kw_only=True)
class GQAConfig:
    """Grouped-query attention: a KV head serves several query heads (MHA and MQA are its ends)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    norms_whole_width: bool = False
    """Queries and keys are normed over all heads together, not each head alone."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embeddings need an even number")

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return math.pow(self.head_dim, -0.5)

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers in the matrices of one layer."""
        return hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    def kv_spec(self, num_layers: int, dtype: str) -> KVSpec:
        """One token's KV."""
        return KVSpec.gqa(num_layers=num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention: the cache holds one latent vector and one rotary key a token, whatever the heads."""

    num_heads: int
    latent_dim: int
    """The width of the latent that keys and values are made from (`kv_lora_rank`)."""
    rope_dim: int
    nope_dim: int
    """The part of a head's query and key that is not rotated."""
    v_dim: int
    q_latent_dim: int | None
    """The width of the latent that queries are made from (`q_lora_rank`); None: they are made from the input."""
    score_factor: float = 1.0
    """YaRN's second factor, `mscale(mscale_all_dim)²`; its first is `RopeConfig.attention_factor`."""

    def __post_init__(self) -> None:
        if self.rope_dim % 2:
            raise ModelError(f"qk_rope_head_dim is {self.rope_dim}; rotary embeddings need an even number")

    @property
    def qk_dim(self) -> int:
        """The width of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return math.pow(self.qk_dim, -0.5) * self.score_factor

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers in the matrices of one layer."""
        heads, q_latent = self.num_heads, self.q_latent_dim
        queries = heads * self.qk_dim
        from_input = queries if q_latent is None else q_latent
        matrices = hidden_size * (from_input + self.latent_dim + self.rope_dim + heads * self.v_dim)
        return matrices + self.latent_dim * heads * (self.nope_dim + self.v_dim) + (q_latent or 0) * queries

    def kv_spec(self, num_layers: int, dtype: str) -> KVSpec:
        """One token's KV."""
        return KVSpec.mla(num_layers=num_layers, latent_dim=self.latent_dim, rope_dim=self.rope_dim, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """A gated MLP that every token passes through."""

    intermediate_size: int
    mlp_bias: bool = False

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers in the matrices of one layer."""
        return 3 * hidden_size * self.intermediate_size


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """A mixture of experts: gated MLPs of which each token passes through a few."""

    num_experts: int
    expert_size: int
    """The width of one expert, as `intermediate_size` is a dense MLP's."""
    routing: RoutingRule
    biased: bool = False
    """The checkpoint holds a bias for the choice."""
    shared_size: int = 0
    """The width of the shared experts together; 0: there are none."""
    shared_gate: bool = False
    """A gate of its own weighs the shared experts."""
    layers: tuple[int, ...]
    """The layers that are sparse, counted from 0."""

    def __post_init__(self) -> None:
        self.routing.check(self.num_experts)

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers in the matrices of one layer."""
        return self._parameters(hidden_size, self.num_experts)

    def num_active_parameters(self, hidden_size: int) -> int:
        """Those of them that one token is multiplied with."""
        return self._parameters(hidden_size, self.routing.top_k)

    def _parameters(self, hidden_size: int, num_experts: int) -> int:
        mlps = 3 * (num_experts * self.expert_size + self.shared_size)
        return hidden_size * (mlps + self.num_experts + self.shared_gate)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only model. `checkpoint` builds it from config.json or from GGUF metadata."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: GQAConfig | MLAConfig
    mlp: DenseConfig | None
    """The MLP of dense layers, if there are any."""
    sparse: SparseConfig | None = None
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool = False
    num_draft_layers: int = 0
    """Layers behind the last that the checkpoint may hold for speculation; they are not loaded."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    stored_dtype: str = "float32"
    """What the weights are stored in: a torch name, or GGUF's (`Q4_1`). For people; it decides nothing."""

    def __post_init__(self) -> None:
        family_named(self.family)
        sparse = () if self.sparse is None else self.sparse.layers
        if not set(sparse) <= set(range(self.num_layers)):
            raise ModelError(f"sparse layers {sparse} are not among the model's {self.num_layers}")
        if self.mlp is None and len(set(sparse)) != self.num_layers:
            raise ModelError("some layers are neither dense nor sparse; expected the width of dense ones")
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ModelError(f"end-of-sequence token {token_id} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The config that `dataclasses.asdict` was asked about, also after a journey as JSON."""
        rope, sparse, mlp = dict(values["rope"]), values["sparse"], values["mlp"]
        if rope["freq_factors"] is not None:
            rope["freq_factors"] = tuple(rope["freq_factors"])
        attention = values["attention"]
        kind = MLAConfig if "latent_dim" in attention else GQAConfig
        made = dict(values) | {"attention": kind(**attention), "rope": RopeConfig(**rope)}
        if mlp is not None:
            made["mlp"] = DenseConfig(**mlp)
        if sparse is not None:
            nested = {"routing": RoutingRule(**sparse["routing"]), "layers": tuple(sparse["layers"])}
            made["sparse"] = SparseConfig(**{**sparse, **nested})
        return cls(**made | {"eos_token_ids": tuple(values["eos_token_ids"])})

    @property
    def gqa(self) -> GQAConfig:
        """The attention of a model that caches keys and values. Raises ModelError for latent attention."""
        if not isinstance(self.attention, GQAConfig):
            raise ModelError(f"{self.family} models cache latents, not keys and values by head")
        return self.attention

    @property
    def num_parameters(self) -> int:
        """Numbers in all matrices and in the norms between layers; tied embeddings count once."""
        layer = self.attention.num_parameters(self.hidden_size) + 2 * self.hidden_size
        mlps = sum(self.mlp_of(number).num_parameters(self.hidden_size) for number in range(self.num_layers))
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + mlps + tables + self.hidden_size

    def mlp_of(self, layer: int) -> DenseConfig | SparseConfig:
        """The MLP of one layer."""
        if self.sparse is not None and layer in self.sparse.layers:
            return self.sparse
        assert self.mlp is not None  # checked when the config was made
        return self.mlp

    @property
    def settings(self) -> dict[str, Any]:
        """Part of the identity of the KV: every field that is neither in `rope` nor known to change nothing.

        Sizes count, though weights have them too: vLLM loads the first rows of a matrix larger than its config says.
        """
        return {name: value for name, value in self.flat().items() if name not in _NOT_COMPUTED_WITH}

    def flat(self) -> dict[str, Any]:
        """Every field by name, those of the parts beside the model's own."""
        found = _named(self)
        for name in _PARTS:
            part = found.pop(name)
            found |= {} if part is None else _named(part)
        if self.sparse is not None:
            found["sparse"] = asdict(self.sparse)
        return found

    def kv_spec(self, dtype: str) -> KVSpec:
        """What one token's KV is, when the model runs in `dtype`."""
        return self.attention.kv_spec(self.num_layers, dtype)


def _named(part: Any) -> dict[str, Any]:
    found = {field.name: getattr(part, field.name) for field in fields(part)}
    return {name: value for name, value in found.items() if name not in _ADDED or value != _ADDED[name]}


def family_named(name: str) -> Family:
    """The family, or ModelError with the names there are."""
    if name not in FAMILIES:
        raise ModelError(f"architecture {name!r} is not supported; known are {', '.join(FAMILIES)}")
    return FAMILIES[name]
