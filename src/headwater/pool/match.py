"""Matches and the leases that keep them: chunks of one prompt, for every group of layers that has chunks of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from headwater.kv.hashing import ChunkRef


@dataclass(frozen=True)
class Match:
    """The longest prefix of a prompt that the pool holds: complete chunks, then perhaps a tail."""

    chunks: tuple[ChunkRef, ...]
    """Of the first group of layers; all layers of a model form one group today."""
    others: tuple[tuple[ChunkRef, ...], ...] = ()
    """Of further groups (sliding windows, draft models), each a chain of its own."""

    @property
    def groups(self) -> tuple[tuple[ChunkRef, ...], ...]:
        """The chunks of every group of layers."""
        return (self.chunks, *self.others)

    @property
    def num_tokens(self) -> int:
        """Tokens covered."""
        return self.chunks[-1].first_token + self.chunks[-1].num_tokens if self.chunks else 0


class RequestLease:
    """A lease that belongs to a request. It ends by `release`, with the `with` block, or with the process."""

    def __init__(self, match: Match, release: Callable[[], None], held: bool) -> None:
        self.match = match
        self.held = held
        """False where a chunk was evicted between match and lease: reads will miss."""
        self._release = release

    def release(self) -> None:
        """End the lease."""
        self._release()

    def __enter__(self) -> RequestLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def chain_runs(chunks: Sequence[ChunkRef]) -> list[list[ChunkRef]]:
    """Chunks in chain order, cut where one does not follow the one before; each once."""
    runs: list[list[ChunkRef]] = []
    ordered = sorted({chunk.key: chunk for chunk in chunks}.values(), key=lambda chunk: chunk.number)
    for chunk in ordered:
        if runs and runs[-1][-1].key == chunk.parent:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs
