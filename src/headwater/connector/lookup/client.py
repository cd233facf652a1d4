"""The scheduler's side of look-ups: what a space offers, asked of a server in another process.

A scheduler must not wait: every question has a deadline, and what is not answered in time is not there.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from headwater.connector.lookup import wire
from headwater.connector.lookup.base import import_zmq
from headwater.connector.lookup.life import check_folder, hold_life, life_file
from headwater.connector.lookup.wire import Frame, Op
from headwater.errors import InvalidArgumentError, StoreError
from headwater.kv.hashing import KEY_BYTES, ChunkKeys, ChunkRef, Tokens
from headwater.pool.space import Match, RequestLease

log = logging.getLogger(__name__)

DEADLINE_S = 0.1
"""All requests of an engine wait while one of them is looked up; an answer takes a few tenths of a millisecond."""
RETRY_S = 1.0
"""After a late answer nothing is asked for so long."""
HELLO_S = 10.0


class LookupClient:
    """The space of a `LookupServer`, for one thread of another process. Close it, or die: each ends its leases.

    Nothing here raises for a server that is slow or gone: the pool then has nothing, and that is counted.
    """

    def __init__(self, address: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Raises StoreError where nobody answers, or somebody who does not speak this version."""
        self._zmq = import_zmq()
        self._address, self._deadline_s = address, deadline_s
        self._name = secrets.token_bytes(wire.CLIENT_BYTES)
        self._number = 0
        self._retry_at = 0.0
        self._leased: set[str] = set()
        """Requests that have a lease, or may have one."""
        self._unreleased: set[str] = set()
        """Of those: whose release the server has not confirmed."""
        self.num_late = 0
        self.num_skipped = 0
        """Questions that were not asked, soon after a late answer."""
        self.num_errors = 0
        self._is_closed = False
        self._folder = check_folder(address)
        self._life = hold_life(self._folder, self._name)
        self._context = self._zmq.Context(io_threads=1)
        self._socket: Any = None
        try:
            body = self._ask(Op.HELLO, b"", HELLO_S)
            if body is None or len(body) != 4 + KEY_BYTES:
                raise StoreError(f"nobody answers look-ups at {address}, or not in version {wire.VERSION}")
            (self._chunk_tokens,) = wire.decode_numbers(body[:4], at_most=1)
            self._root = body[4:]
        except BaseException:
            self.close()
            raise

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a complete chunk."""
        return self._chunk_tokens

    @property
    def lookup_s(self) -> float:
        """Questions have their own, short deadline, so nobody else need guard against them."""
        return 0.0

    def keys(self, tokens: Tokens = ()) -> ChunkKeys:
        """The chunk keys of a prompt. Nobody is asked."""
        return ChunkKeys(self._root, self._chunk_tokens, tokens)

    def match(self, keys: ChunkKeys, *, max_tokens: int | None = None) -> Match:
        """The longest run of complete chunks from the start, then the longest tail that fits; two questions at most."""
        limit = keys.num_tokens if max_tokens is None else min(max_tokens, keys.num_tokens)
        full = keys.full[: min(limit // self._chunk_tokens, wire.MAX_KEYS)]
        body = self._ask(Op.RUN, keys.root + b"".join(full))
        if body is None:
            return Match(())
        try:
            length, *tails = wire.decode_numbers(body, at_most=1 + wire.MAX_TAILS)
        except InvalidArgumentError:
            return self._nonsense()
        if length > len(full):
            return self._nonsense()
        chunks = keys.refs(length)
        room = min(limit - length * self._chunk_tokens, self._chunk_tokens - 1)
        refs = [keys.tail_ref(length, size) for size in sorted(set(tails), reverse=True) if 0 < size <= room]
        chunks += [ref for ref, there in zip(refs, self.exists(refs), strict=True) if there][:1]
        return Match(tuple(chunks))

    def exists(self, chunks: Sequence[ChunkRef]) -> list[bool]:
        """Whether each chunk can be found now."""
        found: list[bool] = []
        for first in range(0, len(chunks), wire.MAX_KEYS):
            some = chunks[first : first + wire.MAX_KEYS]
            body = self._ask(Op.EXISTS, b"".join(chunk.parent + chunk.key for chunk in some))
            if body is not None and len(body) != len(some):
                self.num_errors += 1
                body = None
            found += [False] * len(some) if body is None else map(bool, body)
        return found

    def lease(self, match: Match, request_id: str) -> RequestLease:
        """Keep a match from eviction until released, or until this process ends."""
        held = False
        if match.chunks:
            question = match.chunks[-1].key + wire.encode_id(request_id)
            self._leased.add(request_id)
            self._unreleased.discard(request_id)
            held = self._ask(Op.LEASE, question) == b"\1"
        return RequestLease(match, lambda: self.release(request_id), held)

    def release(self, request_id: str) -> None:
        """End a request's lease, if it may have one. Where the server does not answer, it is told later."""
        if request_id in self._leased:
            self._unreleased.add(request_id)
            self._tell_released()

    def close(self) -> None:
        """End all leases, and hang up. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._drop_socket()
        self._context.destroy(linger=0)
        # The server finds no lock, and releases what is left.
        life_file(self._folder, self._name).unlink(missing_ok=True)
        os.close(self._life)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _nonsense(self) -> Match:
        self.num_errors += 1
        return Match(())

    def _tell_released(self) -> None:
        for request_id in list(self._unreleased):
            if self._exchange(Op.RELEASE, wire.encode_id(request_id), self._deadline_s) is None:
                return
            self._unreleased.discard(request_id)
            self._leased.discard(request_id)

    def _ask(self, op: Op, body: bytes, deadline_s: float | None = None) -> bytes | None:
        """The body of the answer; None where there is none in time, or an error."""
        if self._unreleased:
            self._tell_released()
        return self._exchange(op, body, self._deadline_s if deadline_s is None else deadline_s)

    def _exchange(self, op: Op, body: bytes, deadline_s: float) -> bytes | None:
        zmq = self._zmq
        end = time.monotonic() + deadline_s
        if time.monotonic() < self._retry_at:
            self.num_skipped += 1
            return None
        self._number += 1
        socket = self._socket or self._connect()
        try:
            socket.send(wire.encode(Frame(op, self._name, self._number, body)), zmq.NOBLOCK)
            while socket.poll(max(0.0, 1000 * (end - time.monotonic()))):
                try:
                    answer = wire.decode(socket.recv(zmq.NOBLOCK))
                except InvalidArgumentError:
                    break
                if answer.number == self._number:
                    if answer.op == op:
                        return answer.body
                    self.num_errors += 1
                    log.warning(
                        "a look-up was refused: %s", answer.body[: wire.MAX_TEXT_BYTES].decode(errors="replace")
                    )
                    return None
        except zmq.ZMQError as error:
            log.warning("a look-up could not be sent: %s", error)
        self.num_late += 1
        self._retry_at = time.monotonic() + RETRY_S
        self._drop_socket()  # with a new one, no late answer is taken for another question's
        return None

    def _connect(self) -> Any:
        zmq = self._zmq
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        self._socket.connect(self._address)
        return self._socket

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
