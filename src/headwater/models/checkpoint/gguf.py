"""GGUF files as checkpoints: tensors under their Hugging Face names, dequantised block by block as they are read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.errors import ModelError
from headwater.kv.checkpoint import checkpoint_label
from headwater.kv.files import FileState, NamedFile
from headwater.models.checkpoint.base import BLOCK_BYTES, RowBlocks, opened_states, read_bytes
from headwater.models.checkpoint.gguf_experts import expert_tensors
from headwater.models.checkpoint.gguf_file import GGUFHeader, GGUFTensor, import_gguf, read_gguf_header
from headwater.models.checkpoint.gguf_latent import PARTS as LATENT_PARTS
from headwater.models.checkpoint.gguf_latent import joined_up
from headwater.models.config import MLAConfig, ModelConfig
from headwater.models.config_gguf import config_from_gguf
from headwater.models.weights import TensorHandle

if TYPE_CHECKING:
    from headwater.models.tokenizer import Tokenizer

_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    **LATENT_PARTS,
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# llama.cpp turns neighbouring dimensions where Hugging Face turns the halves of a head, and its converter reorders
# these rows to fit; other architectures it runs the Hugging Face way.
_REORDERED = dict.fromkeys(("llama", "mixtral"), ("attn_q", "attn_k"))


class GGUFHandle(RowBlocks):
    """One tensor. `head_dim` is given where the rows of each head must be put back in order."""

    def __init__(self, path: Path, name: str, tensor: GGUFTensor, head_dim: int | None) -> None:
        super().__init__(name, tensor.shape, tensor.num_bytes)
        self._path = path
        self._tensor = tensor
        self._head_dim = head_dim

    @property
    def block_rows(self) -> int:
        """Counted in what the rows become, float32, and in whole heads where rows are reordered."""
        if len(self.shape) == 1:
            return self.shape[0]
        rows = max(1, BLOCK_BYTES // 2 // (4 * self.shape[-1]))
        return rows if self._head_dim is None else -(-rows // self._head_dim) * self._head_dim

    def read_rows(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Read, dequantise, and reorder within heads."""
        if len(self.shape) == 1:
            return self._reordered(self._dequantised(0, 1).flatten())[start:stop]
        if self._head_dim is None:
            return self._dequantised(start, stop)
        first = start // self._head_dim * self._head_dim
        last = -(-stop // self._head_dim) * self._head_dim
        return self._reordered(self._dequantised(first, last))[start - first : stop - first]

    def _dequantised(self, start: int, stop: int) -> Tensor:
        tensor, gguf = self._tensor, import_gguf()
        offset = tensor.offset + start * tensor.row_bytes
        raw = read_bytes(self._path, offset, (stop - start) * tensor.row_bytes, self.name)
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        try:
            values = gguf.quants.dequantize(raw.view(stop - start, tensor.row_bytes).numpy(), kind)
        except NotImplementedError as error:
            raise ModelError(f"{self.name} is stored as {tensor.type_name}, which cannot be dequantised") from error
        return torch.from_numpy(values)

    def _reordered(self, rows: Tensor) -> Tensor:
        """Row `2 i + half` of a head goes to `half * dim / 2 + i`."""
        if self._head_dim is None:
            return rows
        pairs = rows.reshape(-1, self._head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


class GGUFCheckpoint:
    """One file. Raises ModelError for a damaged one and for a model that cannot be run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: tuple[FileState, ...] = opened_states(lambda: [NamedFile("", path)])
        self.label = checkpoint_label(path)
        self.header: GGUFHeader = read_gguf_header(path)
        tensors = self.header.tensors
        if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
            raise ModelError(f"{str(path)!r} has no token_embd.weight; expected the weights of a language model")
        matrices = Counter(tensor.type_name for tensor in tensors.values() if len(tensor.shape) > 1)
        self.config: ModelConfig = config_from_gguf(
            self.header.metadata,
            vocab_size=tensors["token_embd.weight"].shape[0],
            tensor_names=frozenset(tensors),
            freq_factors=self._freq_factors(),
            stored_dtype=matrices.most_common(1)[0][0],
            source=str(path),
        )

    def weight_files(self) -> list[str]:
        """The file itself, whatever it is called."""
        return [""]

    def tensors(self) -> Iterator[tuple[str, TensorHandle]]:
        """Every tensor in the order of the file, under its Hugging Face name (its own, where that is not known)."""
        reordered = _REORDERED.get(self.config.family, ())
        for tensor in sorted(self.header.tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.name == _ROPE_FACTORS:
                continue  # part of the config
            if (experts := expert_tensors(tensor, self.config)) is not None:
                yield from ((name, self._plain(name, own)) for name, own in experts)
                continue
            if isinstance(self.config.attention, MLAConfig):
                joined = joined_up(tensor, self.header.tensors, self.config.attention, self._plain)
                if joined is not None:
                    yield from joined
                    continue
            name, part = _hf_name(tensor.name)
            yield (
                name,
                GGUFHandle(self.path, name, tensor, self.config.gqa.head_dim if part in reordered else None),
            )

    def load_tokenizer(self) -> Tokenizer:
        """From the vocabulary inside the file."""
        from headwater.models.tokenizer import load_tokenizer

        return load_tokenizer(self.path.parent, self.config, gguf_file=self.path.name)

    def _plain(self, name: str, tensor: GGUFTensor) -> GGUFHandle:
        return GGUFHandle(self.path, name, tensor, None)

    def _freq_factors(self) -> tuple[float, ...] | None:
        tensor = self.header.tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return None
        if len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
            raise ModelError(f"{_ROPE_FACTORS} in {str(self.path)!r} has shape {list(tensor.shape)}; expected one row")
        factors = torch.empty(tensor.shape)
        GGUFHandle(self.path, _ROPE_FACTORS, tensor, None).read_into(factors, 0, range(tensor.shape[0]))
        if not bool((factors.isfinite() & (factors > 0)).all()):
            raise ModelError(f"{_ROPE_FACTORS} in {str(self.path)!r} holds values that divide no frequency")
        return tuple(factors.tolist())


def _hf_name(name: str) -> tuple[str, str]:
    """(Hugging Face name, part of the layer)."""
    if name in _NAMES:
        return _NAMES[name], ""
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _LAYER_PARTS:
        return name, ""
    return f"model.layers.{int(found[1])}.{_LAYER_PARTS[found[2]]}.{found[3]}", found[2]
