"""The decoder: one template for every family, which takes its attention and its MLP as parts from a table.

It has no state between steps and synchronises with nothing, so that a step of fixed shape can be captured in a CUDA
graph. Which tokens to run, and where their KV lies, is the `StepContext`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headwater.models.attention import GroupedQueryAttention
from headwater.models.config import ModelConfig
from headwater.models.context import StepContext
from headwater.models.latent import LatentAttention
from headwater.models.layers import ParameterPlacement, RMSNorm, Targets, VocabEmbedding, VocabHead
from headwater.models.moe import count_rows, layer_mlp
from headwater.models.parallel import ALONE, Ranks
from headwater.models.weights import WeightTarget


class Attention(Protocol):
    """Mixes tokens; reads and writes the cache."""

    def __call__(self, x: Tensor, cos_sin: Tensor, ctx: StepContext) -> Tensor:
        """[rows, hidden] to [rows, hidden]."""
        ...

    def targets(self, prefix: str) -> Targets:
        """The checkpoint tensors that fill it."""
        ...


class MLP(Protocol):
    """Works on each token alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] to [rows, hidden]."""
        ...

    def targets(self, prefix: str) -> Targets:
        """The checkpoint tensors that fill it."""
        ...


class Parts(NamedTuple):
    """What a family's layers are made of; both are built from (config, layer number, placement)."""

    attention: Callable[[ModelConfig, int, ParameterPlacement], Attention]
    mlp: Callable[[ModelConfig, int, ParameterPlacement], MLP] = layer_mlp
    block: str = "mlp"
    """The name of the MLP in a checkpoint's layers."""


PARTS: dict[str, Parts] = {
    "llama": Parts(GroupedQueryAttention),
    "qwen2": Parts(GroupedQueryAttention),
    "qwen3": Parts(GroupedQueryAttention),
    "mixtral": Parts(GroupedQueryAttention, block="block_sparse_moe"),
    "qwen2_moe": Parts(GroupedQueryAttention),
    "qwen3_moe": Parts(GroupedQueryAttention),
    "olmoe": Parts(GroupedQueryAttention),
    "glm4_moe": Parts(GroupedQueryAttention),
    "deepseek_v2": Parts(LatentAttention),
    "deepseek_v3": Parts(LatentAttention),
    "glm4_moe_lite": Parts(LatentAttention),
}


class DecoderLayer:
    """Attention and MLP with the norm before each; the sums between them are made by the norms that follow."""

    def __init__(self, config: ModelConfig, layer: int, place: ParameterPlacement) -> None:
        parts = PARTS[config.family]
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, place)
        self.attention = parts.attention(config, layer, place)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, place)
        self.mlp = parts.mlp(config, layer, place)
        self._block = parts.block

    def targets(self, prefix: str) -> Targets:
        """Everything in this layer."""
        yield from self.attention_norm.targets(f"{prefix}.input_layernorm")
        yield from self.attention.targets(f"{prefix}.self_attn")
        yield from self.mlp_norm.targets(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.targets(f"{prefix}.{self._block}")


class Decoder:
    """A model's parameters on one rank, and the two functions that use them."""

    def __init__(self, config: ModelConfig, place: ParameterPlacement, max_len: int) -> None:
        self.config = config
        self.ranks = place.ranks
        self.dtype = place.dtype
        self.device = place.device
        self.max_len = max_len
        self.embedding = VocabEmbedding(config.vocab_size, config.hidden_size, place)
        self.layers = [DecoderLayer(config, layer, place) for layer in range(config.num_layers)]
        mlps = (layer.mlp for layer in self.layers)
        self.expert_rows = count_rows(mlps, config.sparse.num_experts, place.device) if config.sparse else None
        """Rows that went to each expert of each sparse layer, in the steps that `live` was set for."""
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, place)
        tied = self.embedding if config.tie_embeddings else None
        self.head = VocabHead(config.vocab_size, config.hidden_size, place, tied)
        self.cos_sin = config.rope.table(max_len, place.device)
        # The norm that ends layer i is the one that begins layer i + 1.
        self._norms_after = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """Run int64 [rows] token ids through all layers: the normed hidden states [rows, hidden_size].

        Writes the KV of these rows into `ctx.cache`. Positions must lie below `max_len`.
        """
        residual = self.embedding(token_ids)
        x = self.layers[0].attention_norm(residual)
        for number, (layer, norm_after) in enumerate(zip(self.layers, self._norms_after, strict=True)):
            ctx.hooks.before_layer(number)
            x = layer.attention(x, self.cos_sin, ctx)
            ctx.hooks.after_layer(number)
            x, residual = layer.mlp_norm.add(x, residual)
            x = layer.mlp(x)
            x, residual = norm_after.add(x, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size] of the hidden states that are given, in the model's dtype, on every rank.

        Pass only the rows that will be sampled: the output matrix is the largest of the model.
        """
        return self.head(hidden)

    def targets(self) -> dict[str, WeightTarget]:
        """Where each tensor of a checkpoint goes, by its Hugging Face name."""
        found = dict(self.embedding.targets("model.embed_tokens"))
        for number, layer in enumerate(self.layers):
            found.update(layer.targets(f"model.layers.{number}"))
        found.update(self.norm.targets("model.norm"))
        found.update(self.head.targets("lm_head"))
        return found

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint's tensor belongs to a layer behind the last, which only drafts tokens."""
        config = self.config
        drafts = range(config.num_layers, config.num_layers + config.num_draft_layers)
        return name.startswith(tuple(f"model.layers.{number}." for number in drafts))

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return sum(target.destination.nbytes for target in self.targets().values())


def build_model(
    config: ModelConfig,
    ranks: Ranks = ALONE,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_len: int | None = None,
) -> Decoder:
    """Allocate a model on one rank; `load_weights` fills it. `max_len` bounds positions (None: what the config says).

    Raises ModelError or TopologyError where the heads cannot be divided, and ModelError for a `max_len` that the
    rotary embedding does not allow. Costs the memory of this rank's weights, and of the rotary table.
    """
    return Decoder(
        config, ParameterPlacement(ranks, dtype, torch.device(device)), max_len or config.max_position_embeddings
    )
