"""Hugging Face directories: config.json beside one or several safetensors files.

The header of the format is simple enough to be read here, with bounds, and the data is read rather than mapped: a file
cut short while it is loaded is then an error and not a crash, and no page of it counts as memory of this process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.errors import ModelError
from headwater.kv.checkpoint import checkpoint_label
from headwater.kv.files import FileState, NamedFile
from headwater.models.checkpoint.base import RowBlocks, opened_states, read_bytes
from headwater.models.config import ModelConfig
from headwater.models.config_hf import config_from_hf
from headwater.models.fields import MAX_JSON_BYTES, read_json
from headwater.models.weights import TensorHandle

if TYPE_CHECKING:
    from headwater.models.tokenizer import Tokenizer

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
INDEX_NAME = "model.safetensors.index.json"
_AMBIGUOUS = ": engines would load different weights. Write the checkpoint again, each tensor once"


class SafetensorsHandle(RowBlocks):
    """One tensor inside a file."""

    def __init__(self, path: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> None:
        super().__init__(name, shape, math.prod(shape) * dtype.itemsize)
        self.dtype = dtype
        self.offset = offset
        self._path = path

    def read_rows(self, start: int, stop: int, like: Tensor) -> Tensor:
        """One read of a consecutive range."""
        row_bytes = self.num_bytes // max(1, self.shape[0])
        raw = read_bytes(self._path, self.offset + start * row_bytes, (stop - start) * row_bytes, self.name)
        return raw.view(self.dtype).view(stop - start, *self.shape[1:])


class SafetensorsCheckpoint:
    """A directory. Raises ModelError when it is opened for a config that cannot be run, and when its tensors are
    listed for files that are missing, damaged or lie elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: tuple[FileState, ...] = opened_states(lambda: _files_read(path))
        self.config: ModelConfig = _untied(read_config(path), path)
        self.label = checkpoint_label(path)

    def weight_files(self) -> list[str]:
        """The files that hold tensors, and the index if there is one: it says which tensor is taken from where."""
        expected = _weight_map(self.path)
        index = [] if expected is None else [INDEX_NAME]
        return index + [file.name for file in _files(self.path, expected)]

    def tensors(self) -> Iterator[tuple[str, TensorHandle]]:
        """Every tensor, file by file. Each header is read once. A file that is read holds what the index places in it
        and nothing else: vLLM loads every tensor of such a file, whatever the index says of it."""
        expected = _weight_map(self.path)
        holders: dict[str, str] = {}
        for file in _files(self.path, expected):
            for handle in read_header(file):
                if handle.name in holders:
                    raise ModelError(f"{handle.name} is in {holders[handle.name]} and in {file.name}{_AMBIGUOUS}")
                if expected is not None and expected.get(handle.name) != file.name:
                    place = f"in {expected[handle.name]}" if handle.name in expected else "nowhere"
                    raise ModelError(f"{INDEX_NAME} places {handle.name} {place}, but {file.name} holds it{_AMBIGUOUS}")
                holders[handle.name] = file.name
                yield handle.name, handle
        if expected is not None and (absent := [name for name in expected if name not in holders]):
            raise ModelError(f"{INDEX_NAME} says that {expected[absent[0]]} holds {absent[0]}, but it does not")

    def load_tokenizer(self) -> Tokenizer:
        """From the tokenizer files of the directory."""
        from headwater.models.tokenizer import load_tokenizer

        return load_tokenizer(self.path, self.config)


def read_config(path: Path) -> ModelConfig:
    """The ModelConfig of a directory."""
    if not (path / "config.json").is_file():
        raise ModelError(f"{str(path)!r} holds no config.json; expected a Hugging Face checkpoint directory")
    generation = path / "generation_config.json"
    config = read_json(path / "config.json")
    return config_from_hf(config, read_json(generation) if generation.is_file() else None, str(path / "config.json"))


def _untied(config: ModelConfig, path: Path) -> ModelConfig:
    """The config with an output matrix of its own where the checkpoint holds one, whatever the config says of tied
    embeddings: transformers and vLLM run it too."""
    if not config.tie_embeddings:
        return config
    try:
        expected = _weight_map(path)
        names = expected or (handle.name for file in _files(path, None) for handle in read_header(file))
        return replace(config, tie_embeddings="lm_head.weight" not in names)
    except ModelError:
        return config  # `tensors` says what is wrong


def read_header(path: Path) -> list[SafetensorsHandle]:
    """The tensors of one file, in the order they lie in it. Raises ModelError for a file that is not safetensors,
    ends early, or holds a dtype that only quantised checkpoints have."""
    header, data_start, size = _read_header(path)
    try:
        handles = [_handle(path, name, entry, data_start, size) for name, entry in header.items()]
    except ModelError:
        raise
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    return sorted(handles, key=lambda handle: handle.offset)


def read_tensor_names(path: Path) -> list[str]:
    """The names of the tensors of one file, of whatever dtype. Raises ModelError for a file that is not safetensors, or
    names one twice."""
    return list(_read_header(path)[0])


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(entries by name, where data starts, bytes of the file)."""
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= min(size - 8, MAX_JSON_BYTES) else b""
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    try:
        header: dict[str, Any] = json.loads(text, object_pairs_hook=lambda pairs: _once(path, pairs))
        header.pop("__metadata__", None)
    except ModelError:
        raise
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise _damaged(path) from error
    return header, 8 + length, size


def _damaged(path: Path) -> ModelError:
    return ModelError(f"{str(path)!r} is not a safetensors file, or is damaged or truncated")


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ModelError(f"the header of {str(path)!r} names {name!r} twice{_AMBIGUOUS}")
        found[name] = value
    return found


def _handle(path: Path, name: str, entry: dict[str, Any], data_start: int, size: int) -> SafetensorsHandle:
    if entry["dtype"] not in DTYPES:
        raise ModelError(
            f"{name} in {str(path)!r} has dtype {entry['dtype']!r}; expected one of {', '.join(DTYPES)}. "
            "Quantised checkpoints are read from GGUF files only"
        )
    dtype = DTYPES[entry["dtype"]]
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if any(type(number) is not int or not 0 <= number < 1 << 48 for number in (*shape, begin, end)):
        raise ValueError("not a shape or an offset")
    if len(shape) > 8 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ModelError(f"{name} in {str(path)!r} takes {end - begin} bytes, which does not fit shape {list(shape)}")
    if data_start + end > size:
        raise ModelError(f"{str(path)!r} is truncated: {name} ends at byte {data_start + end}, and the file has {size}")
    return SafetensorsHandle(path, name, dtype, shape, data_start + begin)


def _files_read(path: Path) -> list[NamedFile]:
    """Everything that loading reads; `generation_config.json` only says when a text ends."""
    expected = _weight_map(path)
    index = [] if expected is None else [path / INDEX_NAME]
    return [NamedFile(file.name, file) for file in (path / "config.json", *index, *_files(path, expected))]


def _weight_map(path: Path) -> dict[str, str] | None:
    """Tensor name to file name, where there is an index. File names are checked: they come from outside."""
    if not (path / INDEX_NAME).is_file():
        return None
    found = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{str(path / INDEX_NAME)!r} has no weight_map")
    for name, file in found.items():
        # A plain name in this directory, so that an index can never lead to another file of this machine.
        # (What cannot be printed, such as NUL, no file system takes.)
        plain = isinstance(file, str) and Path(file).name == file and file.isprintable()
        if not plain or not file.endswith(".safetensors"):
            raise ModelError(f"{INDEX_NAME} places {name} in {file!r}; expected a *.safetensors file beside it")
    return found


def _files(path: Path, expected: dict[str, str] | None) -> list[Path]:
    if expected is not None:
        return [path / name for name in dict.fromkeys(expected.values())]
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if path / "model.safetensors" in files:
        return [path / "model.safetensors"]
    hint = "convert it to safetensors first" if any(path.glob("*.bin")) else "is the download complete?"
    if files:
        raise ModelError(f"{str(path)!r} holds {len(files)} safetensors files but no {INDEX_NAME}; {hint}")
    raise ModelError(f"{str(path)!r} holds no safetensors files; {hint}")
