"""Entry point of a tensor-parallel rank other than 0: `python -m headwater.engine.rank FD`. Not for people."""

from __future__ import annotations

import signal
import socket
import sys

from headwater.logs import set_up_logs


def main() -> None:
    """Follow rank 0 over the socket whose descriptor is the only argument."""
    # Ctrl-C reaches the whole process group; only rank 0 decides what it means, and closes our socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up_logs("rank")
    from headwater.engine.ranks import run_rank

    with socket.socket(fileno=int(sys.argv[1])) as sock:
        run_rank(sock)


if __name__ == "__main__":
    main()
