"""Pushing KV to other hosts, one sender a rank: a second sink of the save path.

The hook for whoever saves, in the order of a request's life. Nothing here waits, except `flush`:

    push(transfer, peer, chunks)   when the save of these chunks is ordered (parents first; the next chunks of the same
                                   prompt in further calls). What the own pool has already is sent at once.
    noted(chunks, layers)          after `Space.commit_shard` of these layers returned OK: they are lent and sent. A
                                   save that commits all layers at the end calls it once: the push is by step.
    lost(chunks)                   a save of them failed: the peer gives its part up for all ranks.
    flush(transfer, deadline_s)    at the end of prefill: sends what is left, waits for the peer's answers, and says how
                                   many tokens from the beginning of the prompt are with it.
    cancel(transfer)               the request was aborted.

Bytes are read out of the own pool's extents, lent and never copied, so pages of the cache are not held for a peer.
Where the own pool has no room for a chunk, it is not pushed either: the push is dropped from there on, and counted.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from headwater.errors import InvalidArgumentError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.peers.address import PeerAddress, parse_address
from headwater.peers.caller import LinkSettings, PeerCaller
from headwater.peers.hello import PeerRole, describe_space, scope_of
from headwater.peers.link import PeerLink
from headwater.peers.outgoing import PushBatch, PushTransfer
from headwater.peers.wire import MAX_PUT_CHUNKS
from headwater.pool.space import Space

MAX_PEERS = 256
MAX_TRANSFERS = 4096
TRANSFER_BYTES = 16


def transfer_name(text: str) -> bytes:
    """The 16 bytes of a transfer's id in hex. Raises InvalidArgumentError for anything else."""
    try:
        name = bytes.fromhex(text)
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"{str(text)[:80]!r} is not the id of a transfer; expected hexadecimal digits"
        ) from error
    if not 1 <= len(name) <= TRANSFER_BYTES:
        raise InvalidArgumentError(f"an id of a transfer has 2 to {2 * TRANSFER_BYTES} hexadecimal digits")
    return name.ljust(TRANSFER_BYTES, b"\0")


class PeerSender:
    """See the module. Thread-safe; one a rank."""

    def __init__(
        self,
        space: Space,
        shard: Shard,
        *,
        server: int | None = None,
        rank: int = 0,
        settings: LinkSettings | None = None,
        on_device: bool = False,
    ) -> None:
        """`server`: the writer group that all ranks of this server share; alone, a random one. `on_device`: whether
        this rank's KV is saved from a GPU (see `Space.encoding`). Raises InvalidArgumentError where the space's extents
        cannot be lent, or tokens of a tile are split among ranks."""
        if not space.mapped or shard.split.parts != 1:
            raise InvalidArgumentError(
                "a push reads whole tiles in place: the first tier must be shm:// (or memory://), and the layout must "
                "not use context parallelism"
            )
        self._space = space
        self._shard = shard
        self._settings = settings or LinkSettings()
        self._on_device = on_device
        self._caller = PeerCaller(
            PeerRole.PUSH, server or secrets.randbits(62) | 1, rank, scope_of(space), describe_space(space)
        )
        self.counts: Counter[str] = Counter()
        self._links: dict[PeerAddress, PeerLink] = {}
        self._transfers: dict[bytes, tuple[PeerLink, PushTransfer]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    # ---- the hook -----------------------------------------------------------------------------------------------
    def push(self, transfer: str, peer: str, chunks: Sequence[ChunkRef]) -> bool:
        """Announce chunks of a request (consecutive ones of one chain, parents first) to a peer, and send each group of
        layers as it is noted. False where the push is dropped: the peer failed a moment ago, or too much is queued.

        Raises InvalidArgumentError for an id or address that is none, and for chunks of a tenant or adapter that this
        process has not named (`Space.root`)."""
        if not chunks:
            return True
        name, address, root = transfer_name(transfer), parse_address(peer), self._space.describe(chunks[0].root)
        with self._lock:
            known = None if self._is_closed else self._transfer(name, address)
        if known is None or known[0].is_dead:
            self.counts["chunks_dropped"] += len(chunks)
            return False
        link, outgoing = known
        outgoing.used_s = time.monotonic()
        for at in range(0, len(chunks), MAX_PUT_CHUNKS):
            batch = PushBatch(outgoing, tuple(chunks[at : at + MAX_PUT_CHUNKS]), root)
            outgoing.batches.append(batch)
            if not link.tell(lambda batch=batch: link.begin(batch)):  # type: ignore[misc]
                self.counts["chunks_dropped"] += batch.drop_from(0)
                return False
        return True

    def wants(self, chunks: Sequence[ChunkRef]) -> bool:
        """Whether some of these chunks are on their way to a peer: then each group of layers should be noted."""
        with self._lock:
            batches = [batch for _, outgoing in self._transfers.values() for batch in outgoing.batches]
        keys = {chunk.key for chunk in chunks}
        return any(chunk.key in keys for batch in batches for chunk in batch.chunks)

    def noted(self, chunks: Sequence[ChunkRef], layers: range) -> None:
        """Checksums of some layers of these chunks are in the own pool's index: send them where they are awaited."""
        keys = [chunk.key for chunk in chunks]
        for link in self._open_links():
            if not link.tell(lambda link=link: link.note(keys, layers)):  # type: ignore[misc]
                self.counts["notes_dropped"] += 1  # `flush` finds them

    def lost(self, chunks: Sequence[ChunkRef]) -> None:
        """These chunks are not saved: whoever awaits them is told."""
        keys = [chunk.key for chunk in chunks]
        for link in self._open_links():
            link.tell(lambda link=link: link.lose(keys), always=True)  # type: ignore[misc]

    def flush(self, transfer: str, deadline_s: float) -> int:
        """Wait until everything of a transfer is with the peer or dropped; what is not by the deadline is dropped. The
        tokens from the beginning of the prompt that are there. Forgets the transfer."""
        end = time.monotonic() + deadline_s
        with self._lock:
            known = self._transfers.get(transfer_name(transfer))
        if known is None:
            return 0
        _, outgoing = known
        self.push_on(transfer)
        with outgoing.changed:
            outgoing.changed.wait_for(lambda: outgoing.is_settled, max(0.0, end - time.monotonic()))
        return self.end(transfer)

    def push_on(self, transfer: str, changed: Callable[[], None] | None = None) -> bool:
        """Send whatever the own pool has of a transfer by now, noted or not. Whether all of it is with the peer or
        dropped; `changed` is called, by a thread that must not wait, when more of it may be."""
        with self._lock:
            known = self._transfers.get(transfer_name(transfer))
        if known is None:
            return True
        link, outgoing = known
        outgoing.used_s = time.monotonic()
        outgoing.on_change = changed or outgoing.on_change
        if not outgoing.is_settled:
            link.tell(lambda: link.finish(outgoing), always=True)
        return outgoing.is_settled

    def end(self, transfer: str) -> int:
        """Forget a transfer: what is not with the peer is dropped. The tokens from its beginning that are there."""
        with self._lock:
            known = self._transfers.pop(transfer_name(transfer), None)
        if known is None:
            return 0
        link, outgoing = known
        outgoing.on_change = None
        if not outgoing.is_settled:
            link.tell(lambda: link.cancel(outgoing), always=True)
        return outgoing.sent_tokens

    def progress(self, transfer: str) -> int:
        """Tokens from the beginning of the prompt that are with the peer now."""
        with self._lock:
            known = self._transfers.get(transfer_name(transfer))
        return 0 if known is None else known[1].sent_tokens

    def cancel(self, transfer: str) -> None:
        """Drop what is left of a transfer."""
        self.end(transfer)

    # ---- the rest -----------------------------------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Figures for metrics."""
        with self._lock:
            links = list(self._links.values())
            open_now = {"peers": len(links), "transfers": len(self._transfers)}
        return {**open_now, "dead_peers": sum(link.is_dead for link in links), **self.counts}

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop all threads; peers abort what was begun. Idempotent."""
        with self._lock:
            self._is_closed = True
            links, self._links = list(self._links.values()), {}
            self._transfers.clear()
        for link in links:
            link.close(timeout_s)

    def _open_links(self) -> list[PeerLink]:
        with self._lock:
            return list(self._links.values())

    def _transfer(self, name: bytes, address: PeerAddress) -> tuple[PeerLink, PushTransfer] | None:
        known = self._transfers.get(name)
        if known is not None and known[0].address == address:
            return known
        while len(self._transfers) >= MAX_TRANSFERS:  # nobody asked for their end
            self._transfers.pop(next(iter(self._transfers)))
        link = self._links.get(address)
        if link is None:
            if len(self._links) >= MAX_PEERS:
                return None
            link = self._links[address] = PeerLink(
                address,
                self._space,
                self._shard,
                self._caller,
                self._settings,
                self.counts,
                on_device=self._on_device,
            )
        made = self._transfers[name] = link, PushTransfer(name)
        return made
