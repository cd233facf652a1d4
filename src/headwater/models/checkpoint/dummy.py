"""Random weights of the right shapes, for benchmarks and tests: only a config is needed, and nothing is read.

The numbers depend on the tensor's name alone, so that every rank of every parallel layout has parts of the same model.
They are made on the device they are for, and scaled so that activations stay near 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.kv.files import FileState
from headwater.models.checkpoint.base import RowBlocks
from headwater.models.config import ModelConfig
from headwater.models.weights import TensorHandle

if TYPE_CHECKING:
    from headwater.models.tokenizer import Tokenizer

_BLOCK_ROWS = 1024
_BIAS_SCALE = 0.02


class DummyHandle(RowBlocks):
    """A tensor that is made when it is read. The same on every CPU, and the same on every GPU of one kind."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__(name, shape, torch.Size(shape).numel())

    @property
    def block_rows(self) -> int:
        """A block has its own seed, so its size is part of the numbers."""
        return _BLOCK_ROWS

    def read_into(self, destination: Tensor, dim: int, part: range) -> None:
        """Whole blocks are made, and what is not asked for is thrown away."""
        rows = part if dim == 0 else range(self.shape[0])
        for first in range(rows.start // _BLOCK_ROWS * _BLOCK_ROWS, rows.stop, _BLOCK_ROWS):
            start, stop = max(first, rows.start), min(first + _BLOCK_ROWS, rows.stop)
            block = self.read_rows(first, min(first + _BLOCK_ROWS, self.shape[0]), destination)[start - first :]
            block = block[: stop - start]
            if dim == 1:
                block = block[:, part.start : part.stop]
            destination[start - rows.start : stop - rows.start].copy_(block)

    def read_rows(self, start: int, stop: int, like: Tensor) -> Tensor:
        """One block, uniform around 0; norms are near 1."""
        generator = torch.Generator(like.device).manual_seed(zlib.crc32(f"{self.name}:{start}".encode()))
        shape = (stop - start, *self.shape[1:])
        block = torch.empty(shape, dtype=like.dtype, device=like.device)
        if len(self.shape) == 1:
            offset = 1.0 if self.name.endswith("norm.weight") else 0.0
            return block.uniform_(offset - _BIAS_SCALE, offset + _BIAS_SCALE, generator=generator)
        bound = (3.0 / self.shape[1]) ** 0.5  # a variance of 1 / columns
        return block.uniform_(-bound, bound, generator=generator)


class DummyCheckpoint:
    """Any config, with random weights. `path` is where the config came from, and a tokenizer if there is one."""

    def __init__(self, config: ModelConfig, path: Path, label: str) -> None:
        self.config = config
        self.path = path
        self.label = f"{label} (random weights)"

    @property
    def opened(self) -> tuple[FileState, ...]:
        """Nothing is read."""
        return ()

    def weight_files(self) -> list[str]:
        """None: weights that are made have no file."""
        return []

    def tensors(self) -> Iterator[tuple[str, TensorHandle]]:
        """What a model of this config asks for."""
        for name, shape in tensor_shapes(self.config).items():
            yield name, DummyHandle(name, shape)

    def load_tokenizer(self) -> Tokenizer:
        """From the directory or GGUF file that the config came from. Raises ModelError where there is none."""
        from headwater.models.tokenizer import load_tokenizer

        if self.path.is_dir():
            return load_tokenizer(self.path, self.config)
        return load_tokenizer(self.path.parent, self.config, gguf_file=self.path.name)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model, without allocating any."""
    from headwater.models.decoder import build_model

    # One token of rotary table: shapes are all that is wanted, and the meta device allocates nothing else.
    model = build_model(config, dtype=torch.float32, device="meta", max_len=1)
    return {name: target.shape for name, target in model.targets().items()}
