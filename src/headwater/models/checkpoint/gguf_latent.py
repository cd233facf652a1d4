"""The matrices of latent attention in a GGUF file. llama.cpp splits `kv_b_proj` into a part for keys, each head of it
transposed, and one for values; older files have it whole, and some have both.

    kv_b_proj   [ head 0: nope rows, v rows | head 1: … ]        each row as wide as the latent
    attn_k_b    [ head 0: latent rows of nope | head 1: … ]
    attn_v_b    [ head 0: v rows | head 1: … ]                   each row as wide as the latent
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.errors import ModelError
from headwater.models.checkpoint.base import BLOCK_BYTES, RowBlocks
from headwater.models.checkpoint.gguf_file import GGUFTensor
from headwater.models.config import MLAConfig

if TYPE_CHECKING:
    from headwater.models.checkpoint.gguf import GGUFHandle

_HALF = re.compile(r"blk\.(\d+)\.attn_([kv])_b\.weight")
PARTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
"""By llama.cpp's name of a part of a layer: Hugging Face's."""
Opener = Callable[[str, GGUFTensor], "GGUFHandle"]


class JoinedUp(RowBlocks):
    """`kv_b_proj` out of its two halves, some heads at a time."""

    def __init__(self, name: str, keys: GGUFTensor, values: GGUFTensor, shape: MLAConfig, opened: Opener) -> None:
        self._head_rows = shape.nope_dim + shape.v_dim
        rows = shape.num_heads * self._head_rows
        super().__init__(name, (rows, shape.latent_dim), keys.num_bytes + values.num_bytes)
        self._shape = shape
        self._keys, self._values = (opened(name, _flat(tensor)) for tensor in (keys, values))

    @property
    def block_rows(self) -> int:
        """Counted in what the rows become, float32, in whole heads."""
        heads = max(1, BLOCK_BYTES // 2 // (4 * self.shape[1] * self._head_rows))
        return heads * self._head_rows

    def read_rows(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Read both halves of the heads that these rows belong to."""
        shape = self._shape
        first, last = start // self._head_rows, -(-stop // self._head_rows)
        keys = self._keys.read_rows(first * shape.latent_dim, last * shape.latent_dim, like)
        values = self._values.read_rows(first * shape.v_dim, last * shape.v_dim, like)
        by_head = (
            keys.view(last - first, shape.latent_dim, shape.nope_dim).transpose(1, 2),
            values.view(last - first, shape.v_dim, shape.latent_dim),
        )
        rows = torch.cat(by_head, dim=1).flatten(0, 1)
        return rows[start - first * self._head_rows : stop - first * self._head_rows]


def joined_up(
    tensor: GGUFTensor, tensors: Mapping[str, GGUFTensor], shape: MLAConfig, opened: Opener
) -> list[tuple[str, RowBlocks]] | None:
    """What one half of a layer's `kv_b_proj` becomes, by Hugging Face name: the whole for that of the keys, nothing for
    that of the values, and nothing where the file has the whole beside them. None if it is no such half. Raises
    ModelError for a half that is alone or of another shape."""
    found = _HALF.fullmatch(tensor.name)
    if found is None:
        return None
    layer = f"blk.{found[1]}"
    if f"{layer}.attn_kv_b.weight" in tensors:
        return []
    halves = {
        f"{layer}.attn_k_b.weight": (shape.num_heads, shape.latent_dim, shape.nope_dim),
        f"{layer}.attn_v_b.weight": (shape.num_heads, shape.v_dim, shape.latent_dim),
    }
    for name, expected in halves.items():
        if name not in tensors:
            raise ModelError(f"{tensor.name} has no other half, {name}")
        if tensors[name].shape != expected:
            raise ModelError(f"{name} has shape {list(tensors[name].shape)}; the metadata asks for {list(expected)}")
    if found[2] == "v":
        return []
    name = f"model.layers.{int(found[1])}.{PARTS['attn_kv_b']}.weight"
    keys, values = (tensors[half] for half in halves)
    return [(name, JoinedUp(name, keys, values, shape, opened))]


def _flat(tensor: GGUFTensor) -> GGUFTensor:
    heads, rows, width = tensor.shape
    return replace(tensor, shape=(heads * rows, width))
