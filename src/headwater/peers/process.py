"""A receiver as a child: `python -m headwater.peers.process`, started by a server for its pool.

Settings come as one line of JSON on stdin, so that no URL or path is in the process list. Figures go to stdout, a line
of JSON now and then; the first one says where it listens. The end of stdin, or SIGTERM, is the end of the process.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from typing import Any

from headwater.errors import HeadwaterError, PeerError
from headwater.logs import set_up_logs
from headwater.peers.address import parse_address
from headwater.peers.options import PeerOptions
from headwater.peers.receiver import Receiver
from headwater.pool.pool import open_pool

TELL_S = 0.5
COMMAND = (sys.executable, "-P", "-m", "headwater.peers.process")
"""-P: what lies in the current directory must not be imported in place of a package."""


@dataclass(frozen=True)
class ReceiverSpec:
    """What a child needs to know."""

    pool: str
    listen: str
    options: PeerOptions = PeerOptions()  # noqa: RUF009 (frozen)

    def line(self) -> bytes:
        """For the child's stdin."""
        return json.dumps([self.pool, self.listen, asdict(self.options)]).encode() + b"\n"

    @classmethod
    def of(cls, line: str) -> ReceiverSpec:
        """Read what `line` wrote."""
        pool, listen, options = json.loads(line)
        return cls(pool, listen, PeerOptions(**options))


def main() -> int:
    """Receive until stdin ends. The exit status is 1 where it could not begin; the reason is on stdout."""
    set_up_logs("receiver", text="%(levelname)s receiver: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the server, which then tells us
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    spec = ReceiverSpec.of(sys.stdin.readline())
    threading.Thread(target=_wait_for_end, args=(stop,), name="headwater-parent", daemon=True).start()
    try:
        settings = spec.options.receiver_settings()
        with open_pool(spec.pool) as pool:
            receiver = Receiver(pool, parse_address(spec.listen), settings)
            receiver.start()
            try:
                _tell(receiver.stats())
                while not stop.wait(TELL_S):
                    _tell(receiver.stats())
            finally:
                receiver.close()
    except HeadwaterError as error:
        _tell({"error": str(error)})
        return 1
    except BrokenPipeError:
        return 1
    return 0


def _wait_for_end(stop: threading.Event) -> None:
    while sys.stdin.readline():
        pass
    stop.set()


def _tell(fields: dict[str, Any]) -> None:
    print(json.dumps(fields), flush=True)


class ReceiverChild:
    """A receiver in a process of its own, kept alive by a thread: restarted where it dies, on the same port."""

    def __init__(self, spec: ReceiverSpec, *, restart_s: float = 0.25) -> None:
        self._spec = spec
        self._restart_s = restart_s
        self.stats: dict[str, Any] = {}
        """What it said last."""
        self.num_restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._first = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="headwater-receiver", daemon=True)

    @property
    def address(self) -> str:
        """Where it listens; empty while it does not."""
        return str(self.stats.get("address", ""))

    @property
    def pid(self) -> int | None:
        """Of the process that receives now."""
        return None if self._process is None else self._process.pid

    def start(self, timeout_s: float = 60.0) -> None:
        """Wait until it listens. Raises PeerError, saying why, where it cannot."""
        self._thread.start()
        self._first.wait(timeout_s)
        if not self.address:
            self.close()
            raise PeerError(f"no receiver: {self.stats.get('error', 'it did not begin to listen')}")

    def close(self, timeout_s: float = 5.0) -> None:
        """End it, and wait for that. Idempotent."""
        self._stop.set()
        process = self._process
        if process is not None:
            try:
                if process.stdin is not None:
                    process.stdin.close()
                process.wait(timeout_s)
            except (OSError, subprocess.TimeoutExpired):
                process.kill()
                process.wait()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _keep(self) -> None:
        listen = self._spec.listen
        while not self._stop.is_set():
            code = self._run(replace(self._spec, listen=listen))
            self._first.set()
            if not self.address and not self.num_restarts:
                return  # it could not begin at all
            listen = self.address or listen  # a port that was chosen for us stays the same
            if not self._stop.wait(self._restart_s):
                self.num_restarts += 1
                # Who stops all processes of a server stops this one, too, and the server a moment later.
                level = logging.WARNING if code else logging.INFO
                logging.getLogger("headwater").log(level, "the receiver of peers has ended and is started again")

    def _run(self, spec: ReceiverSpec) -> int:
        """Until it ends; its exit status."""
        with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            self._process = process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(spec.line())
                process.stdin.flush()
                if self._stop.is_set():
                    process.stdin.close()
                for line in process.stdout:
                    told = json.loads(line)
                    self.stats = told if "error" not in told or not self.address else self.stats
                    self._first.set()
            except (OSError, ValueError):
                process.kill()
        return process.returncode


if __name__ == "__main__":
    sys.exit(main())
