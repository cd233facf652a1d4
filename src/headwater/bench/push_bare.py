"""The other end of the bare sockets that a push is measured against: private memory, `recvmsg_into`, one byte back.

A process of its own, as a receiver is; its arguments are the number of pieces, their size and the address to listen on,
and it prints its port.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

import numpy as np

PIECES_A_CALL = 512


def shuffled(num_pieces: int, piece_bytes: int, seed: int) -> list[memoryview]:
    """Private memory, touched before, as pieces in a random order."""
    memory = np.random.default_rng(seed).integers(0, 256, num_pieces * piece_bytes, np.uint8)
    order = np.random.default_rng(seed).permutation(num_pieces)
    return [memory.data[i * piece_bytes : (i + 1) * piece_bytes] for i in order.tolist()]


def send_all(sock: socket.socket, pieces: Sequence[memoryview]) -> None:
    """All pieces, as many a call as the kernel takes."""
    todo, first = list(pieces), 0
    while first < len(todo):
        sent = sock.sendmsg(todo[first : first + PIECES_A_CALL])
        first, rest = _advance(todo, first, sent)
        if rest:
            todo[first] = todo[first][rest:]


def receive_all(sock: socket.socket, pieces: Sequence[memoryview]) -> bool:
    """The same on the other end; False where the connection ended."""
    todo, first = list(pieces), 0
    while first < len(todo):
        got = sock.recvmsg_into(todo[first : first + PIECES_A_CALL], 0, socket.MSG_WAITALL)[0]
        if not got:
            return False
        first, rest = _advance(todo, first, got)
        if rest:
            todo[first] = todo[first][rest:]
    return True


def _advance(todo: Sequence[memoryview], first: int, moved: int) -> tuple[int, int]:
    while first < len(todo) and moved >= len(todo[first]):
        moved -= len(todo[first])
        first += 1
    return first, moved


def main() -> None:
    """Receive rounds until the caller is gone."""
    num_pieces, piece_bytes = int(sys.argv[1]), int(sys.argv[2])
    pieces = shuffled(num_pieces, piece_bytes, 2)
    with socket.create_server((sys.argv[3], 0)) as server:
        print(server.getsockname()[1], flush=True)
        sock, _ = server.accept()
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while receive_all(sock, pieces):
            sock.sendall(b"!")


if __name__ == "__main__":
    main()
