"""What one rank is pushing: transfers, their batches of chunks, how they are announced, and how far each has come. No
sockets in here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from headwater.kv.encoding import RAW
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status

_MOST_MOVES = 16
_MOVE_S = 0.02
"""A peer for which it was too early is asked again so much later, and later each time."""


class Sent(Enum):
    """How far one chunk has come on its way to a peer."""

    ANNOUNCED = auto()  # the peer has not said whether it wants it
    WANTED = auto()  # it does
    THERE = auto()  # the peer has it, or somebody else brings it
    DONE = auto()  # all of this rank's tiles are in the peer's pool
    DROPPED = auto()  # it will not come
    MOVED = auto()  # it was announced once more, in another batch

    @property
    def is_final(self) -> bool:
        """Whether nothing more happens to it."""
        return self in (Sent.THERE, Sent.DONE, Sent.DROPPED, Sent.MOVED)


@dataclass(eq=False)
class PushBatch:
    """Chunks of one transfer that were announced in one put."""

    transfer: PushTransfer
    chunks: tuple[ChunkRef, ...]
    root_payload: bytes = b""
    """How the index describes the root of their chain."""
    encodings: tuple[int, ...] = ()
    """By chunk: how its tiles were announced to be stored."""
    states: list[Sent] = field(init=False)
    ready: list[set[int]] = field(init=False)
    """By chunk: layers that are noted in the own pool, and of which nobody has looked whether they can be sent."""
    sent: list[set[int]] = field(init=False)
    acked: list[set[int]] = field(init=False)
    number: int = 0
    """Of its put on the connection of now."""
    num_tries: int = 0
    num_moves: int = 0
    """How often its chunks were announced before, in other batches."""
    ask_at_s: float = 0.0
    """Not to be announced before."""
    is_announced: bool = False

    def __post_init__(self) -> None:
        self.states = [Sent.ANNOUNCED] * len(self.chunks)
        self.ready = [set() for _ in self.chunks]
        self.again()

    def again(self) -> None:
        """Begin from the first byte: the connection is a new one. What had come to its end stays there."""
        self.sent = [set() for _ in self.chunks]
        self.acked = [set() for _ in self.chunks]
        self.is_announced = False
        self.states = [s if s.is_final else Sent.ANNOUNCED for s in self.states]

    @property
    def is_open(self) -> bool:
        """Whether something of it is still to come."""
        return any(not state.is_final for state in self.states)

    def move_from(self, first: int, *, is_early: bool) -> PushBatch:
        """Chunks from one on, up to those that are dropped, as a batch of their own behind this one, to be announced
        once more: at once, or a moment later. Dropped where that was done too often."""
        stop = next((i for i in range(first, len(self.chunks)) if self.states[i] is Sent.DROPPED), len(self.chunks))
        moved = PushBatch(self.transfer, self.chunks[first:stop], self.root_payload)
        moved.num_tries, moved.num_moves = self.num_tries - 1, self.num_moves + 1
        self.transfer.batches.insert(self.transfer.batches.index(self) + 1, moved)
        self.states[first:stop] = [Sent.MOVED] * (stop - first)
        if is_early:
            moved.ask_at_s = time.monotonic() + _MOVE_S * moved.num_moves
        if moved.num_moves > _MOST_MOVES:
            moved.drop_from(0)
        return moved

    def drop_from(self, first: int) -> int:
        """Give up a chunk and what follows it: without it the peer could not find the others. How many those were."""
        count = 0
        for i in range(first, len(self.chunks)):
            if not self.states[i].is_final:
                self.states[i] = Sent.DROPPED
                count += 1
        return count


@dataclass(eq=False)
class PushTransfer:
    """One request's chunks on their way to one peer."""

    name: bytes
    """16 bytes that all ranks, the peer and the proxy know it by."""
    batches: list[PushBatch] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    used_s: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    on_change: Callable[[], None] | None = None
    """Called beside `changed`, by the link's thread."""

    @property
    def is_settled(self) -> bool:
        """Whether every chunk has come to its end."""
        return not any(batch.is_open for batch in self.batches)

    @property
    def sent_tokens(self) -> int:
        """Tokens from the beginning of the prompt, as far as nothing is missing: sent, or already with the peer."""
        tokens = 0
        for batch in self.batches:
            for chunk, state in zip(batch.chunks, batch.states, strict=True):
                if state is Sent.MOVED:
                    continue  # see the next batch
                if chunk.first_token > tokens or state not in (Sent.THERE, Sent.DONE):
                    return tokens
                tokens = max(tokens, chunk.first_token + chunk.num_tokens)
        return tokens

    def tell(self) -> None:
        """Wake whoever waits for it."""
        with self.changed:
            self.changed.notify_all()
        if (on_change := self.on_change) is not None:
            on_change()


def announced_encodings(
    space: Space, shard: Shard, chunks: Sequence[ChunkRef], takes: int, *, on_device: bool
) -> tuple[int, ...]:
    """How each chunk is stored in the own pool; of those that it has not begun, how they will be, as far as anybody
    knows. As many as a peer takes (`Welcome.encodings`), which may not know all encodings."""
    found = list[int]()
    for chunk, arrived in zip(chunks, space.arrived(chunks, shard), strict=True):
        if arrived.is_announced:
            encoding = arrived.encoding
        else:
            wanted = space.encoding(chunk.num_tokens, shard, on_device=on_device)
            encoding = wanted if takes >> wanted & 1 else RAW
        if encoding != RAW and not takes >> encoding & 1:
            break
        found.append(encoding)
    return tuple(found)


def settle_put(batch: PushBatch, statuses: Sequence[Status]) -> tuple[int, int | None]:
    """Note a peer's answer to a put: how many chunks it has no room for, and the first one that is to be announced once
    more, if there is one, since it cannot say yet."""
    num_refused = 0
    for i, status in enumerate(statuses):
        if batch.states[i].is_final:
            continue
        if status == Status.LOST:
            return num_refused, i
        if status == Status.OK:
            batch.states[i] = Sent.WANTED
        elif status in (Status.EXISTS, Status.BUSY):
            batch.states[i] = Sent.THERE
        else:
            num_refused += batch.drop_from(i)
    return num_refused, None


def consecutive(some: set[int], layers: range) -> list[range]:
    """Some of a rank's layers as runs of consecutive ones, ascending."""
    if len(some) == len(layers):
        return [range(layers.start, layers[-1] + 1)] if layers else []
    runs: list[range] = []
    for layer in sorted(some):
        if runs and runs[-1].stop == layer:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return runs
