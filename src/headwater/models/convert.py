"""From a GGUF file to a Hugging Face directory: config, tokenizer and safetensors that other engines load.

Tensors are dequantised and written a block at a time, into a directory of a temporary name that takes its own name when
all of it is there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwater.errors import ModelError
from headwater.models.checkpoint.base import BLOCK_BYTES
from headwater.models.checkpoint.gguf import GGUFCheckpoint
from headwater.models.checkpoint.safetensors import INDEX_NAME
from headwater.models.config import ModelConfig, family_named
from headwater.models.rope import RopeConfig
from headwater.models.weights import Progress, TensorHandle

MAX_SHARD_BYTES = 4 << 30
DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "F32"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
}


class Converted(NamedTuple):
    """What was written."""

    path: Path
    num_tensors: int
    num_bytes: int
    num_files: int
    dtype: str


def convert_gguf(
    source: Path,
    directory: Path,
    *,
    dtype: str = "float32",
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> Converted:
    """Write the model in `source` to `directory`, which appears when it is complete.

    With `force` an existing checkpoint there is replaced, and files that are none of a checkpoint's stay. Raises
    ModelError for a model that cannot be read or written down, a directory that exists, and a disk without room.
    Costs the reading of the file, and the model's size in `dtype` on the disk of `directory`.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    directory = directory.absolute()
    _check_directory(directory, force)
    checkpoint = GGUFCheckpoint(source)
    config = hf_config(checkpoint.config, dtype)
    handles = dict(checkpoint.tensors())
    total = sum(prod(handle.shape) for handle in handles.values()) * DTYPES[dtype][0].itemsize
    tokenizer = checkpoint.load_tokenizer()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(directory.parent).free) < total:
            raise ModelError(f"{str(directory.parent)!r} has {free >> 20} MiB free; the model takes {total >> 20} MiB")
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            _write_json(made / "config.json", config)
            _write_json(made / "generation_config.json", _generation_config(checkpoint.config))
            tokenizer.backend.save_pretrained(str(made))
            num_files = _write_shards(made, handles, dtype, max_shard_bytes, total, progress)
            _move_in(made, directory)
    except OSError as error:
        raise ModelError(f"cannot write {str(directory)!r}: {error.strerror or error}") from error
    return Converted(directory, len(handles), total, num_files, dtype)


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`config.json` in the spelling that transformers 4, 5 and the engines built on them all read. Raises ModelError
    for rotary factors that no rope type of theirs gives."""
    family = family_named(config.family)
    if config.mlp is None or config.sparse is not None:
        raise ModelError(f"{config.family} models have experts, which cannot be converted")
    scaling = _rope_scaling(config.rope)
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.gqa.num_heads,
        "num_key_value_heads": config.gqa.num_kv_heads,
        "head_dim": config.gqa.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_all(config.eos_token_ids),
        "torch_dtype": dtype,
    }
    if family.qkv_bias is None:
        if config.gqa.qkv_bias != config.gqa.output_bias:
            raise ModelError(f"{config.family} models have biases on all attention matrices or on none; this has some")
        values["attention_bias"] = config.gqa.qkv_bias
    if family.mlp_bias is None:
        values["mlp_bias"] = config.mlp.mlp_bias
    return values


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.freq_factors is not None:
        rope = _as_llama3(rope)
    if rope.kind == "default":
        return None
    values: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.original_max_len is not None:
        values["original_max_position_embeddings"] = rope.original_max_len
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "attention_factor": rope.attention_factor}
    return values


def _as_llama3(rope: RopeConfig) -> RopeConfig:
    """The parameters that gave the factors in a GGUF file: those of Llama 3.1 and later, which differ in one number."""
    assert rope.freq_factors is not None
    if rope.kind == "default":
        found = RopeConfig(
            dim=rope.dim,
            theta=rope.theta,
            kind="llama3",
            factor=round(max(rope.freq_factors), 3),
            original_max_len=8192,
        )
        if torch.allclose(found.inverse_frequencies(), rope.inverse_frequencies(), rtol=1e-4, atol=0.0):
            return found
    raise ModelError("the rotary factors of this file are not those of a rope type that a config.json could name")


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    return {"bos_token_id": config.bos_token_id, "eos_token_id": _one_or_all(config.eos_token_ids)}


def _one_or_all(token_ids: tuple[int, ...]) -> int | list[int] | None:
    return list(token_ids) if len(token_ids) > 1 else next(iter(token_ids), None)


def _write_shards(
    folder: Path,
    handles: Mapping[str, TensorHandle],
    dtype: str,
    max_shard_bytes: int,
    total: int,
    progress: Progress | None,
) -> int:
    """Fill shards in order; one file needs no index. Returns the number of files."""
    itemsize = DTYPES[dtype][0].itemsize
    shards: list[dict[str, TensorHandle]] = [{}]
    filled = 0
    for name, handle in handles.items():
        size = prod(handle.shape) * itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = handle
        filled += size
    done = 0
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        numbered = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else numbered
        weight_map.update(dict.fromkeys(shard, file))
        done = _write_safetensors(folder / file, shard, dtype, done, total, progress)
    if len(shards) > 1:
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return len(shards)


def _write_safetensors(
    path: Path, handles: Mapping[str, TensorHandle], dtype: str, done: int, total: int, progress: Progress | None
) -> int:
    """One file: the length of the header, the header, the tensors. Returns the bytes done so far, of all files."""
    torch_dtype, code = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, handle in handles.items():
        end = offset + prod(handle.shape) * torch_dtype.itemsize
        header[name] = {"dtype": code, "shape": list(handle.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants its data aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for handle in handles.values():
            rows = handle.shape[0]
            step = max(1, BLOCK_BYTES // (4 * prod(handle.shape[1:])))
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                block = torch.empty(stop - start, *handle.shape[1:], dtype=torch_dtype)
                handle.read_into(block, 0, range(start, stop))
                done += file.write(memoryview(block.view(torch.uint8).numpy()).cast("B"))
                if progress is not None:
                    progress(done, total)
        file.flush()
        os.fsync(file.fileno())
    return done


def _check_directory(directory: Path, force: bool) -> None:
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise ModelError(f"{str(directory)!r} exists and is not a directory")
    if not any(directory.iterdir()):
        return
    if not force:
        raise ModelError(f"{str(directory)!r} exists; pass --force to replace the checkpoint in it, or another name")
    if not (directory / "config.json").is_file():
        raise ModelError(f"{str(directory)!r} holds other things than a checkpoint; --force replaces checkpoints only")


def _move_in(made: Path, directory: Path) -> None:
    """A new directory appears at once; in an old one the config goes first and comes last, so that what lies there
    between is never taken for a checkpoint."""
    if not directory.is_dir() or not any(directory.iterdir()):
        os.replace(made, directory)
        return
    stale = [*directory.glob("model*.safetensors"), directory / INDEX_NAME, directory / "config.json"]
    for path in reversed(stale):
        path.unlink(missing_ok=True)
    for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
        os.replace(path, directory / path.name)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
