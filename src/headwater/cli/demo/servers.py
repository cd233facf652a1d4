"""Running a server's ranks, each in a process of its own, and collecting what they report."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError

from headwater.cli.demo.ranks import Rank, Report, load, save
from headwater.errors import StoreError
from headwater.kv.topology import Topology

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WAIT_S = 60.0
_ACTIONS = {"writer": save, "reader": load}


@dataclass(frozen=True)
class Server:
    """An engine of some shape, and whether it writes or reads."""

    role: str
    topology: Topology

    def __str__(self) -> str:
        return f"{self.role} TP={self.topology.tp} × PP={self.topology.num_stages}"


def run_server(server: Server, url: str, num_tokens: int, done: Callable[[], object]) -> list[Report]:
    """Run every rank, all at once. Raises StoreError with the first thing that went wrong in any of them."""
    # Ranks are forked from a small clean process that imported numpy once; importing it in each takes seconds.
    context, topology = get_context("forkserver"), server.topology
    context.set_forkserver_preload([__name__])
    barrier = context.Barrier(topology.num_ranks)
    group = secrets.randbits(62) + 1
    running: list[tuple[ForkServerProcess, Connection]] = []
    outcomes: list[Report | str] = []
    try:
        with uninterrupted():
            for pp_rank in range(topology.num_stages):
                for tp_rank in range(topology.tp):
                    rank = Rank(url, group, topology, pp_rank, tp_rank, num_tokens)
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_run_rank, args=(server.role, rank, barrier, sender), daemon=True)
                    process.start()
                    running.append((process, receiver))
                    sender.close()
        for _, receiver in running:
            outcomes.append(_outcome(receiver))
            done()
    finally:
        for process, receiver in running:
            process.terminate()
            process.join()
            receiver.close()
    failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if failures:
        raise StoreError(f"{server}: {next(filter(None, failures), 'a rank did not come up in time')}")
    return [outcome for outcome in outcomes if isinstance(outcome, Report)]


def _run_rank(role: str, rank: Rank, barrier: Barrier, results: Connection) -> None:
    """The body of a rank's process. Sends its report, or why there is none; "" where another rank knows why."""
    try:
        results.send(_ACTIONS[role](rank, lambda: barrier.wait(_WAIT_S)))
    except BrokenBarrierError:
        results.send("")
    except Exception as error:
        results.send(f"rank pp={rank.pp_rank} tp={rank.tp_rank}: {error}")
        barrier.abort()


def _outcome(receiver: Connection) -> Report | str:
    try:
        outcome: Report | str = receiver.recv()
    except EOFError:
        return "a rank's process died"
    return outcome


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold signals back until every process that was started is known, so that it can be ended.

    What is started meanwhile never hears Ctrl-C, which a terminal sends to everyone: ending it is for this process.
    """
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda n, _: came.append(n)) for number in _SIGNALS}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited; it holds for this thread alone
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
