"""A random Llama as a checkpoint: written layer by layer, the same for the same seed and device.

The names and shapes are plain data; only `write_checkpoint` needs torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama. The defaults are those of the 8B model with a smaller vocabulary."""

    num_layers: int = 32
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 32000

    def token_bytes(self, element_bytes: int) -> int:
        """Bytes of KV for each token."""
        return 2 * element_bytes * self.num_layers * self.num_kv_heads * self.head_dim

    def config(self, dtype: str) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "num_hidden_layers": self.num_layers,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "torch_dtype": dtype,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def files(self) -> Iterator[tuple[str, Mapping[str, tuple[int, ...]]]]:
        """(file, shapes of its tensors by name), one file a layer."""
        yield (
            "model-00000.safetensors",
            {
                "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
                "lm_head.weight": (self.vocab_size, self.hidden_size),
                "model.norm.weight": (self.hidden_size,),
            },
        )
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            yield f"model-{layer + 1:05d}.safetensors", {prefix + name: size for name, size in self._layer().items()}

    def _layer(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }

    def as_dict(self) -> dict[str, int]:
        """Plain data, from which it can be made again."""
        return asdict(self)


LLAMA_8B = LlamaShape()


def is_checkpoint(directory: Path) -> bool:
    """Whether a checkpoint lies there. `write_checkpoint` leaves a whole one or none."""
    return (directory / "config.json").exists()


def read_shape(directory: Path) -> LlamaShape:
    """The shape of a checkpoint that `write_checkpoint`, or somebody else, has made."""
    config = json.loads((directory / "config.json").read_text())
    heads = int(config["num_attention_heads"])
    return LlamaShape(
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads", heads)),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocab_size=int(config["vocab_size"]),
    )


def write_checkpoint(shape: LlamaShape, directory: Path, *, dtype: str, device: str, seed: int = 0) -> None:
    """Write the checkpoint; it appears under its name when it is complete. Takes the memory of one layer.

    20 s for 16 GB on a GPU and a fast disk.
    """
    import torch
    from safetensors.torch import save_file

    partial = directory.with_name(directory.name + f".{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        generator, kind = torch.Generator(device).manual_seed(seed), getattr(torch, dtype)
        where: dict[str, str] = {}
        for file, sizes in shape.files():
            tensors = {}
            for name, size in sizes.items():
                if len(size) == 1:
                    tensors[name] = torch.ones(size, dtype=kind)
                else:
                    scale = 1.0 if "embed_tokens" in name else 0.02
                    noise = torch.randn(size, device=device, generator=generator, dtype=kind)
                    tensors[name] = noise.mul_(scale).cpu()
                where[name] = file
            save_file(tensors, partial / file, metadata={"format": "pt"})
        (partial / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": where}))
        (partial / "config.json").write_text(json.dumps(shape.config(dtype)))
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
