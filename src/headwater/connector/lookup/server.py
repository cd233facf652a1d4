"""The worker's side of look-ups: a thread that owns a socket and answers for one space."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from headwater.connector.lookup import wire
from headwater.connector.lookup.base import import_zmq
from headwater.connector.lookup.life import is_locked, life_file
from headwater.connector.lookup.wire import Frame, Op
from headwater.errors import HeadwaterError, InvalidArgumentError, StoreError
from headwater.kv.hashing import KEY_BYTES, ChunkRef
from headwater.pool.space import Match, Space

log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""How often the server looks for clients that have died."""
MAX_CLIENTS = 256
MAX_LEASES = 4096
"""Of one client."""
_POLL_MS = 100


class LookupServer:
    """Answers for one space, in a thread of its own, until closed. `address` is where."""

    def __init__(self, space: Space) -> None:
        self._zmq = zmq = import_zmq()
        self._space = space
        self._root = space.root().key
        self._leases: dict[bytes, set[bytes]] = {}
        """By client: the ids of the requests that have one."""
        self.num_answered = 0
        self.num_refused = 0
        """Frames that could not be understood, or asked for what cannot be."""
        self._folder = Path(tempfile.mkdtemp(prefix="headwater-lookup-"))  # with mode 0700
        self.address = f"ipc://{self._folder / 'socket'}"
        self._context = zmq.Context(io_threads=1)
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
            self._socket.bind(self.address)
        except BaseException:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-lookup", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and release all leases. Idempotent."""
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)
        for client in list(self._leases):
            self._forget(client)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        next_sweep = time.monotonic() + SWEEP_S
        while not self._stopping.is_set():
            if self._socket.poll(_POLL_MS):
                self._serve_one()
            if time.monotonic() >= next_sweep:
                self._sweep()
                next_sweep = time.monotonic() + SWEEP_S

    def _serve_one(self) -> None:
        zmq = self._zmq
        sender, data = self._socket.recv(), b""
        num_frames = 0
        while self._socket.getsockopt(zmq.RCVMORE):  # one by one: a message of many frames is not kept
            data, num_frames = self._socket.recv(), num_frames + 1
        if num_frames != 1:
            data = b""
        with contextlib.suppress(zmq.Again):  # a client that does not read loses its answers
            self._socket.send_multipart([sender, self._answer(data)], zmq.NOBLOCK)

    def _answer(self, data: bytes) -> bytes:
        frame = Frame(Op.ERROR, bytes(wire.CLIENT_BYTES), 0, b"")
        try:
            frame = wire.decode(data)
            answer = wire.encode(frame._replace(body=self._do(frame)))
            self.num_answered += 1
            return answer
        except HeadwaterError as error:
            reason = str(error)
        except Exception as error:  # a question must not be the end of the server
            log.exception("a look-up failed")
            reason = f"{type(error).__name__}"
        self.num_refused += 1
        body = reason.encode("utf-8", errors="replace")[: wire.MAX_TEXT_BYTES]
        return wire.encode(frame._replace(op=Op.ERROR, body=body))

    def _do(self, frame: Frame) -> bytes:
        op, client, _, body = frame
        match op:
            case Op.HELLO:
                return wire.encode_numbers(self._space.chunk_tokens) + self._root
            case Op.RUN:
                root, *keys = wire.split_keys(body) or [b""]
                if root != self._root or len(keys) > wire.MAX_KEYS:
                    raise InvalidArgumentError("these keys are of another space, or too many")
                run = self._space.run(root, keys)
                return wire.encode_numbers(run.length, *run.tails[: wire.MAX_TAILS])
            case Op.EXISTS:
                names = wire.split_keys(body, each=2)
                chunks = [self._ref(key, parent) for parent, key in zip(names[::2], names[1::2], strict=True)]
                return bytes(self._space.exists(chunks))
            case Op.LEASE:
                return bytes([self._lease(client, body[:KEY_BYTES], wire.check_id(body[KEY_BYTES:]))])
            case Op.RELEASE:
                self._release(client, wire.check_id(body))
                return b""
            case _:
                raise InvalidArgumentError(f"{op.name} is no question")

    def _ref(self, key: bytes, parent: bytes) -> ChunkRef:
        """A chunk of which only the name is known."""
        return ChunkRef(key, parent, 0, 0, 1, self._root)

    def _lease(self, client: bytes, key: bytes, request_id: bytes) -> bool:
        held = self._leases.get(client, set())
        if len(held) >= MAX_LEASES and request_id not in held:
            raise InvalidArgumentError(f"a client may hold {MAX_LEASES} leases")
        if client not in self._leases:
            if len(self._leases) >= MAX_CLIENTS:
                raise InvalidArgumentError(f"{MAX_CLIENTS} clients hold leases")
            if not is_locked(self._life(client)):
                raise InvalidArgumentError("a client must hold its lock, or nobody would notice its death")
        taken = self._space.lease(Match((self._ref(key, self._root),)), _lease_name(client, request_id))
        if taken.held:
            self._leases.setdefault(client, set()).add(request_id)
        return taken.held

    def _release(self, client: bytes, request_id: bytes) -> None:
        held = self._leases.get(client, set())
        held.discard(request_id)
        if not held:
            self._leases.pop(client, None)
        self._space.release(_lease_name(client, request_id))

    def _sweep(self) -> None:
        for client in list(self._leases):
            if not is_locked(self._life(client)):
                log.warning("a scheduler died and left %d leases; they are released", len(self._leases[client]))
                self._forget(client)

    def _forget(self, client: bytes) -> None:
        for request_id in self._leases.pop(client, set()):
            try:
                self._space.release(_lease_name(client, request_id))
            except StoreError:
                pass  # closed: its leases are gone as well
        self._life(client).unlink(missing_ok=True)

    def _life(self, client: bytes) -> Path:
        return life_file(self._folder, client)


def _lease_name(client: bytes, request_id: bytes) -> str:
    return f"{client.hex()}:{request_id.hex()}"
