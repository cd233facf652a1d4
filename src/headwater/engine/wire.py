"""Messages between the ranks of one engine: a JSON header and raw arrays over a socket pair, with bounds.

Typed by their readers, never unpickled. A closed socket is the end of the other side: `receive` raises
EngineDeadError at once, which is how a rank learns that another one died.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.errors import EngineDeadError, EngineError

MAX_HEADER_BYTES = 16 << 20
MAX_ARRAY_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_DTYPES: dict[str, np.dtype[Any]] = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}


class Message(NamedTuple):
    """What one rank says to another."""

    kind: str
    fields: dict[str, Any]
    arrays: list[npt.NDArray[Any]]


def send(sock: socket.socket, kind: str, fields: dict[str, Any] | None = None, arrays: Sequence[Any] = ()) -> None:
    """Send one message. Raises EngineDeadError if nobody reads any more."""
    shapes = [[array.dtype.name, list(array.shape)] for array in arrays]
    header = json.dumps({"kind": kind, "fields": fields or {}, "arrays": shapes}).encode()
    try:
        sock.sendall(b"".join([_LENGTH.pack(len(header)), header, *(array.tobytes() for array in arrays)]))
    except OSError as error:
        raise EngineDeadError(f"a rank is gone: {error}") from error


def receive(sock: socket.socket) -> Message:
    """Wait for one message. Raises EngineDeadError at the end of the stream, EngineError for what is no message."""
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise EngineError(f"a rank sent a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = json.loads(_read(sock, length))
        kind, fields = str(header["kind"]), dict(header["fields"])
        shapes = [(_DTYPES[name], tuple(int(n) for n in shape)) for name, shape in header["arrays"]]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"a rank sent a malformed message: {error}") from error
    arrays = []
    for dtype, shape in shapes:
        count = int(np.prod(shape, dtype=np.int64))
        if min(shape, default=0) < 0 or count * dtype.itemsize > MAX_ARRAY_BYTES:
            raise EngineError(f"a rank sent an array of shape {shape}; at most {MAX_ARRAY_BYTES} bytes are allowed")
        arrays.append(np.frombuffer(_read(sock, count * dtype.itemsize), dtype=dtype).reshape(shape))
    return Message(kind, fields, arrays)


def _read(sock: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        try:
            count = sock.recv_into(view)
        except OSError as error:
            raise EngineDeadError(f"a rank is gone: {error}") from error
        if not count:
            raise EngineDeadError("a rank is gone: its socket was closed")
        view = view[count:]
    return bytes(data)
