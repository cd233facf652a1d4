"""A small proxy that stands between a client and a real server and does what networks do."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NO_LINGER = struct.pack("ii", 1, 0)


class FaultProxy:
    """Forwards connections to a port. What goes wrong is set while it runs:

    delay_s   every answer comes so much later
    stalled   nothing is forwarded any more, in either direction; connections stay open
    one_way   what the client says arrives, answers do not (a half-open connection)
    cut_after the connection is reset after so many bytes of answers
    stall_after  `stalled` after so many bytes of answers
    garbage   answers are replaced by noise
    flip_after  one bit of the answers is flipped after so many bytes
    flip_question_after  the same of what the client says
    refusing  new connections are closed at once
    """

    def __init__(self, port: int, host: str = "127.0.0.1", listen: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._server = socket.create_server((listen, 0))
        self.port = int(self._server.getsockname()[1])
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._closed = False
        self.delay_s = 0.0
        self.stalled = self.one_way = self.garbage = self.refusing = False
        self.cut_after: int | None = None
        self.flip_after: int | None = None
        self.flip_question_after: int | None = None
        self.stall_after: int | None = None
        self.num_bytes = {True: 0, False: 0}
        """That were forwarded: of what clients said (True), and of the answers."""
        threading.Thread(target=self._accept, name="fault-proxy", daemon=True).start()

    def heal(self) -> None:
        """Be a good network again. Connections that were hurt are gone."""
        self.delay_s, self.cut_after, self.stall_after, self.flip_after = 0.0, None, None, None
        self.flip_question_after = None
        self.stalled = self.one_way = self.garbage = self.refusing = False
        self.reset()

    def reset(self) -> None:
        """Reset every connection."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                _reset(sock)

    def close(self) -> None:
        """End it."""
        self._closed = True
        self._server.close()
        self.reset()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self.refusing:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            with self._lock:
                self._pairs.append((client, server))
            threading.Thread(target=self._forward, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, False), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_question: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                while self.stalled or (self.one_way and not is_question):
                    if self._closed or source.fileno() < 0:
                        return
                    time.sleep(0.005)
                if not is_question:
                    data = self._spoil(data, source, target)
                elif self.flip_question_after is not None:
                    at, self.flip_question_after = self.flip_question_after, self.flip_question_after - len(data)
                    if at < len(data):
                        self.flip_question_after = None
                        data = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
                target.sendall(data)
                with self._lock:
                    self.num_bytes[is_question] += len(data)
        except OSError:
            pass
        finally:
            for sock in (source, target):
                # Closed alone, a socket that the other thread reads from would stay open, and its far end wait.
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def _spoil(self, data: bytes, source: socket.socket, target: socket.socket) -> bytes:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.garbage:
            return bytes(255 - byte for byte in data)
        if self.flip_after is not None:
            at, self.flip_after = self.flip_after, self.flip_after - len(data)
            if at < len(data):
                self.flip_after = None
                data = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
        if self.stall_after is not None:
            self.stall_after -= len(data)
            if self.stall_after <= 0:
                self.stalled, self.stall_after = True, None
        if self.cut_after is not None:
            self.cut_after -= len(data)
            if self.cut_after <= 0:
                self.cut_after = None
                _reset(target)
                raise OSError("cut")
        return data


def _reset(sock: socket.socket) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()


@contextmanager
def fault_proxy(port: int, host: str = "127.0.0.1", listen: str = "127.0.0.1") -> Iterator[FaultProxy]:
    """A proxy for the time of a `with`."""
    proxy = FaultProxy(port, host, listen)
    try:
        yield proxy
    finally:
        proxy.close()
