"""What a checkpoint offers, whatever its format, and the way that tensors are copied out of it: in blocks of rows.

A block is small, so that converting, dequantising or slicing a tensor never needs a second copy of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from headwater.errors import IdentityError, ModelError
from headwater.kv.files import FileState, NamedFile, take_states
from headwater.models.config import ModelConfig
from headwater.models.weights import TensorHandle

if TYPE_CHECKING:
    from headwater.models.tokenizer import Tokenizer

BLOCK_BYTES = 16 << 20


class Checkpoint(Protocol):
    """A model on disk, opened but not loaded."""

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        ...

    @property
    def path(self) -> Path:
        """The directory or file it lies in."""
        ...

    @property
    def label(self) -> str:
        """A name for people."""
        ...

    @property
    def opened(self) -> tuple[FileState, ...]:
        """The state of every file that it is read from, taken before anything was read; none for random weights, and
        none where some are missing."""
        ...

    def weight_files(self) -> list[str]:
        """Names of the files whose bytes the weights are, relative to `path` ("" for `path` itself): what names them.
        Raises ModelError where the directory does not say which."""
        ...

    def tensors(self) -> Iterator[tuple[str, TensorHandle]]:
        """Every tensor by its Hugging Face name, in the order they lie on disk. Reads nothing but headers."""
        ...

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to it. Imports `transformers`; takes a second or so."""
        ...


def opened_states(files: Callable[[], Iterable[NamedFile]]) -> tuple[FileState, ...]:
    """For `Checkpoint.opened`. A directory without weights may be opened too, for its tokenizer say."""
    try:
        return take_states(files())
    except (IdentityError, ModelError):
        return ()


class RowBlocks(ABC):
    """A tensor handle that is read some rows at a time."""

    def __init__(self, name: str, shape: tuple[int, ...], num_bytes: int) -> None:
        self.name = name
        self.shape = shape
        self.num_bytes = num_bytes

    @abstractmethod
    def read_rows(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Rows `start` to `stop` with all their columns, on the CPU or the device of `like`."""

    @property
    def block_rows(self) -> int:
        """How many rows are read at once."""
        return max(1, BLOCK_BYTES // max(1, self.num_bytes // max(1, self.shape[0])))

    def read_into(self, destination: Tensor, dim: int, part: range) -> None:
        """Copy `part` along `dim` into `destination`, block by block."""
        rows = part if dim == 0 else range(self.shape[0])
        for start in range(rows.start, rows.stop, self.block_rows):
            stop = min(start + self.block_rows, rows.stop)
            block = self.read_rows(start, stop, destination)
            if dim == 1:
                block = block[:, part.start : part.stop]
            destination[start - rows.start : stop - rows.start].copy_(block)


def read_bytes(path: Path, offset: int, num_bytes: int, what: str) -> Tensor:
    """Bytes of a file as an uint8 tensor. Raises ModelError naming `what` where the file ends before them."""
    import torch

    raw = torch.empty(num_bytes, dtype=torch.uint8)
    view = memoryview(raw.numpy())
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while view:
                count = file.readinto(view)
                if not count:
                    raise ModelError(f"{str(path)!r} ends inside {what}; the file is truncated")
                view = view[count:]
    except OSError as error:
        raise ModelError(f"cannot read {what} from {str(path)!r}: {error.strerror or error}") from error
    return raw
