"""What one rank is pushing: transfers, their batches of chunks, and how far each has come. No sockets in here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from headwater.kv.hashing import ChunkRef
from headwater.stores.base import Status


class Sent(Enum):
    """How far one chunk has come on its way to a peer."""

    ANNOUNCED = auto()  # the peer has not said whether it wants it
    WANTED = auto()  # it does
    THERE = auto()  # the peer has it, or somebody else brings it
    DONE = auto()  # all of this rank's tiles are in the peer's pool
    DROPPED = auto()  # it will not come

    @property
    def is_final(self) -> bool:
        """Whether nothing more happens to it."""
        return self in (Sent.THERE, Sent.DONE, Sent.DROPPED)


@dataclass(eq=False)
class PushBatch:
    """Chunks of one transfer that were announced in one put."""

    transfer: PushTransfer
    chunks: tuple[ChunkRef, ...]
    root_payload: bytes = b""
    """How the index describes the root of their chain."""
    states: list[Sent] = field(init=False)
    ready: list[set[int]] = field(init=False)
    """By chunk: layers that are noted in the own pool, and of which nobody has looked whether they can be sent."""
    sent: list[set[int]] = field(init=False)
    acked: list[set[int]] = field(init=False)
    number: int = 0
    """Of its put on the connection of now."""
    num_tries: int = 0
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


def settle_put(batch: PushBatch, statuses: Sequence[Status]) -> int:
    """Note a peer's answer to a put; how many chunks it has no room for."""
    for i, status in enumerate(statuses):
        if batch.states[i].is_final:
            continue
        if status == Status.OK:
            batch.states[i] = Sent.WANTED
        elif status in (Status.EXISTS, Status.BUSY):
            batch.states[i] = Sent.THERE
        else:
            return batch.drop_from(i)
    return 0


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
