"""The header of a GGUF file: metadata and the places of its tensors. It knows the container, not the models inside.

Read with bounds, since files come from elsewhere, and without keeping the vocabulary, which makes up nearly all of a
header and which `transformers` reads again for the tokenizer.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headwater.errors import ModelError

MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRING_BYTES = 64 << 20
MAX_KEPT_ITEMS = 4096
"""Longer arrays are vocabularies: skipped."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` has rows first, as in torch."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    row_bytes: int
    """Bytes of one row (of the whole tensor, if it has one dimension)."""

    @property
    def num_rows(self) -> int:
        """Rows; a vector counts as one."""
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class GGUFHeader:
    """All but the data."""

    metadata: dict[str, Any]
    """Scalars, strings and short lists; long arrays are left out."""
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read a header. Raises ModelError for a file that is no GGUF, is damaged, or ends before its last tensor.

    Costs a pass over the header: some hundredths of a second for a vocabulary of 50,000.
    """
    try:
        with open(path, "rb", buffering=1 << 20) as file:
            return _Reader(file, path).header()
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{str(path)!r} is a damaged or truncated GGUF file") from error


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._size = os.fstat(file.fileno()).st_size

    def header(self) -> GGUFHeader:
        if self._file.read(4) != b"GGUF":
            raise ModelError(f"{str(self._path)!r} is not a GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            raise ModelError(f"{str(self._path)!r} is GGUF version {version}; expected 2 or 3, little-endian")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        self._check(num_tensors <= MAX_TENSORS and num_fields <= MAX_FIELDS)
        metadata = {}
        names: set[str] = set()
        for _ in range(num_fields):
            name = self._string()
            if name in names:
                raise ModelError(
                    f"{str(self._path)!r} names {name!r} twice: engines differ in which of the two they take"
                )
            names.add(name)
            value = self._value(self._number("I"))
            if value is not None:
                metadata[name] = value
        infos = [self._info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        self._check(type(alignment) is int and 1 <= alignment <= 1 << 20)
        start = -(-self._file.tell() // alignment) * alignment
        tensors = {name: self._tensor(name, start, *info) for name, info in infos}
        self._check(len(tensors) == num_tensors)  # no two of one name
        return GGUFHeader(metadata, tensors)

    def _info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._string()
        num_dims = self._number("I")
        self._check(1 <= num_dims <= 4)
        dims = tuple(self._number("Q") for _ in range(num_dims))
        self._check(all(0 < dim < 1 << 40 for dim in dims))
        return name, (dims, self._number("I"), self._number("Q"))

    def _tensor(self, name: str, start: int, dims: tuple[int, ...], type_number: int, offset: int) -> GGUFTensor:
        gguf = import_gguf()
        try:
            kind = gguf.GGMLQuantizationType(type_number)
        except ValueError:
            raise ModelError(f"{name} in {str(self._path)!r} has type {type_number}, unknown to this version of the "
                             "gguf package; a newer one may know it") from None  # fmt: skip
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        self._check(dims[0] % block == 0)
        tensor = GGUFTensor(name, dims[::-1], kind.name, start + offset, dims[0] // block * block_bytes)
        end = tensor.offset + tensor.num_bytes
        if end > self._size:
            raise ModelError(f"{str(self._path)!r} is truncated: {name} ends at byte {end}, and it has {self._size}")
        return tensor

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            self._check(kind in _SCALARS)
            return self._number(_SCALARS[kind])
        item, length = self._number("I"), self._number("Q")
        if item == _STRING:
            self._check(length * 8 <= self._size)
            for _ in range(length):
                self._skip(self._number("Q"))
            return None
        self._check(item in _SCALARS)
        code = _SCALARS[item]
        num_bytes = length * struct.calcsize(code)
        if length > MAX_KEPT_ITEMS:
            self._skip(num_bytes)
            return None
        return list(struct.unpack(f"<{length}{code}", self._file.read(num_bytes)))

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._file.read(struct.calcsize(code)))[0]

    def _string(self) -> str:
        length = self._number("Q")
        self._check(length <= min(MAX_STRING_BYTES, self._size))
        data = self._file.read(length)
        self._check(len(data) == length)
        return data.decode("utf-8")

    def _skip(self, num_bytes: int) -> None:
        self._check(num_bytes <= self._size - self._file.tell())
        self._file.seek(num_bytes, os.SEEK_CUR)

    def _check(self, fine: bool) -> None:
        if not fine:
            raise ModelError(f"{str(self._path)!r} is a damaged or truncated GGUF file (near byte {self._file.tell()})")


def import_gguf() -> Any:
    """The `gguf` package, which knows the quantised types, or ModelError saying how to get it."""
    try:
        import gguf
    except ImportError as error:
        raise ModelError("GGUF files need the gguf package: pip install gguf") from error
    return gguf
