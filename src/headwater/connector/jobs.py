"""What the two halves tell each other: KV to load into blocks, KV to save from them. Plain data with bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.errors import InvalidArgumentError
from headwater.kv.hashing import KEY_BYTES, ChunkRef

MAX_CHUNKS = 1 << 20


@dataclass(frozen=True)
class Job:
    """Consecutive chunks of one request, and the request's blocks from its first token on."""

    request_id: str
    chunks: tuple[ChunkRef, ...]
    block_ids: npt.NDArray[np.int32]

    def to_wire(self) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
        """As JSON data and arrays. A chunk's parent is the chunk before it, so only the first one's is sent."""
        first = self.chunks[0]
        fields = {
            "request_id": self.request_id,
            "root": first.root.hex(),
            "parent": first.parent.hex(),
            "number": first.number,
            "first_token": first.first_token,
            "keys": "".join(chunk.key.hex() for chunk in self.chunks),
        }
        sizes = np.array([chunk.num_tokens for chunk in self.chunks], dtype=np.int32)
        return fields, [sizes, self.block_ids]

    @classmethod
    def from_wire(cls, fields: dict[str, Any], arrays: list[npt.NDArray[Any]]) -> Job:
        """Read what `to_wire` wrote. Raises InvalidArgumentError for anything else."""
        try:
            sizes, block_ids = arrays
            keys = bytes.fromhex(fields["keys"])
            root, parent = bytes.fromhex(fields["root"]), bytes.fromhex(fields["parent"])
            number, first_token = int(fields["number"]), int(fields["first_token"])
            request_id = str(fields["request_id"])
        except (KeyError, ValueError, TypeError) as error:
            raise InvalidArgumentError(f"this is no job: {error}") from error
        if not 0 < len(sizes) <= MAX_CHUNKS or len(keys) != len(sizes) * KEY_BYTES or len(parent) != KEY_BYTES:
            raise InvalidArgumentError(f"a job of {len(sizes)} chunks with {len(keys)} bytes of keys cannot be")
        chunks = []
        for i, num_tokens in enumerate(sizes.tolist()):
            key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            chunks.append(ChunkRef(key, parent, number + i, first_token, num_tokens, root))
            parent, first_token = key, first_token + num_tokens
        return cls(request_id, tuple(chunks), block_ids)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load on one rank: so many chunks, counted from the job's first, are verified and in place."""

    request_id: str
    num_chunks: int
