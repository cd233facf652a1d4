"""From a GGUF file to a Hugging Face directory: config, tokenizer and safetensors that other engines load.

Tensors are dequantised and written a block at a time, into a directory of a temporary name that takes its own name when
all of it is there.
"""

from __future__ import annotations

import json
import os
import re
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
from headwater.models.config_json import generation_config, hf_config
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
    handles = {name: handle for name, handle in checkpoint.tensors() if not _only_drafts(name, checkpoint)}
    total = sum(_num_bytes(name, handle, dtype) for name, handle in handles.items())
    tokenizer = checkpoint.load_tokenizer()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(directory.parent).free) < total:
            raise ModelError(f"{str(directory.parent)!r} has {free >> 20} MiB free; the model takes {total >> 20} MiB")
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            _write_json(made / "config.json", config)
            _write_json(made / "generation_config.json", generation_config(checkpoint.config))
            tokenizer.backend.save_pretrained(str(made))
            num_files = _write_shards(made, handles, dtype, max_shard_bytes, total, progress)
            _move_in(made, directory)
    except OSError as error:
        raise ModelError(f"cannot write {str(directory)!r}: {error.strerror or error}") from error
    return Converted(directory, len(handles), total, num_files, dtype)


def _only_drafts(name: str, checkpoint: GGUFCheckpoint) -> bool:
    """Whether a tensor is of a layer behind the last, which a config.json without such layers does not name."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= checkpoint.config.num_layers


def _stored_as(name: str, dtype: str) -> tuple[torch.dtype, str]:
    """What chooses experts stays as exact as it is: a rounded bias chooses others."""
    return DTYPES["float32" if name.endswith(".e_score_correction_bias") else dtype]


def _num_bytes(name: str, handle: TensorHandle, dtype: str) -> int:
    return prod(handle.shape) * _stored_as(name, dtype)[0].itemsize


def _write_shards(
    folder: Path,
    handles: Mapping[str, TensorHandle],
    dtype: str,
    max_shard_bytes: int,
    total: int,
    progress: Progress | None,
) -> int:
    """Fill shards in order; one file needs no index. Returns the number of files."""
    shards: list[dict[str, TensorHandle]] = [{}]
    filled = 0
    for name, handle in handles.items():
        size = _num_bytes(name, handle, dtype)
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
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, handle in handles.items():
        end = offset + _num_bytes(name, handle, dtype)
        header[name] = {"dtype": _stored_as(name, dtype)[1], "shape": list(handle.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants its data aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, handle in handles.items():
            rows = handle.shape[0]
            step = max(1, BLOCK_BYTES // (4 * prod(handle.shape[1:])))
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                block = torch.empty(stop - start, *handle.shape[1:], dtype=_stored_as(name, dtype)[0])
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
