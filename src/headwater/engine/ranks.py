"""Tensor parallelism as real processes: rank 0 is the engine itself, the others are children that follow it.

Rank 0 schedules and tells the others, over a socket pair each; what they compute together goes over
torch.distributed (NCCL between GPUs, gloo between CPUs). A child ends when its socket closes, whatever else happens.
The ranks find each other through a file that only they have open, and listen on the loopback interface alone.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headwater.connector.arrivals import OnEnd
from headwater.connector.metrics import Source
from headwater.connector.orders import StepOrders, StepReport
from headwater.connector.published import Publisher, figures
from headwater.connector.push_desk import OnPushed
from headwater.connector.wire import orders_from_wire, orders_to_wire, report_from_wire, report_to_wire
from headwater.engine.batch import StepInput
from headwater.engine.config import EngineConfig
from headwater.engine.device import DevicePlacement, choose_placement
from headwater.engine.sizing import MemoryReport
from headwater.engine.wire import Message, receive, send
from headwater.errors import EngineDeadError, EngineError, HeadwaterError
from headwater.kv.identity import Identity
from headwater.models.config import ModelConfig
from headwater.models.parallel import ALONE, Ranks, TensorParallel
from headwater.pool.pool import open_pool

if TYPE_CHECKING:
    from headwater.engine.runner import Runner
    from headwater.models.checkpoint import Checkpoint

_dist: Any = torch.distributed  # its classes are made in C++, and half of them are unknown to type checkers
ENGINE = "headwater"
"""What this engine's processes call themselves where they publish figures."""
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others inside a step before it gives up; a dead one is noticed at once."""
EXIT_WAIT_S = 5.0
DYING_WAIT_S = 1.0
"""How long a rank that is failing may take to say why."""
NUM_INPUT_ARRAYS = len(StepInput.__slots__)


class RankGroup:
    """The other ranks, as rank 0 sees them. With one rank there are none, and every method does nothing."""

    def __init__(self, config: EngineConfig, placement: DevicePlacement, model: ModelConfig) -> None:
        """`model` is what rank 0 runs: random weights are made from it on every rank."""
        self._report = StepReport()
        """What the other ranks have said, and nobody has asked for yet."""
        self._children: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self.ranks = ALONE
        """Rank 0's place in every group."""
        size = config.tensor_parallel_size
        if size == 1:
            return
        fd, prefix = _meeting_file(), secrets.token_hex(8)
        try:
            for rank in range(1, size):
                child = _spawn(fd)
                self._children.append(child)
                fields = {"config": asdict(config), "rank": rank, "size": size, "meeting": [fd, prefix]}
                fields["model"] = asdict(model)
                send(child[1], "start", fields)
            for _, sock in self._children:
                self._expect(sock, "joined")  # one that dies before would leave the rest waiting in the group
            group = _make_group(_meet(fd, prefix, size), 0, size, placement.device)
            self.ranks = Ranks(tp=TensorParallel(0, size, group))
        except BaseException:
            self.close()
            raise

    def reports(self) -> list[MemoryReport]:
        """What the other ranks measured while loading, in order; waits for them."""
        return [MemoryReport(**self._expect(sock, "loaded").fields) for _, sock in self._children]

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Tell the others how large their caches are. Does not wait: capturing graphs needs all ranks at once."""
        for _, sock in self._children:
            send(sock, "allocate", {"num_pages": num_pages, "max_model_len": max_model_len})

    def wait_ready(self) -> None:
        """Wait until all caches are there."""
        for _, sock in self._children:
            self._expect(sock, "ready")

    def step(self, step: StepInput | None, orders: StepOrders, share_samples: bool) -> None:
        """Start a step on the other ranks, or only carry out its orders: one message to each. With `share_samples` they
        wait for rank 0's tokens at its end."""
        if not self._children or (step is None and orders.is_empty):
            return
        fields: dict[str, Any] = {"share_samples": share_samples, "computes": step is not None}
        arrays = [] if step is None else [getattr(step, name) for name in StepInput.__slots__]
        if not orders.is_empty:
            fields["orders"], more = orders_to_wire(orders)
            arrays += more
        for _, sock in self._children:
            send(sock, "step", fields, arrays)

    def connect(self, identity: dict[str, Any], group: int) -> None:
        """Have the other ranks open the pool, as members of one writer group."""
        for _, sock in self._children:
            send(sock, "connect", {"identity": identity, "group": group})
        for _, sock in self._children:
            self._expect(sock, "connected")

    def take_report(self) -> StepReport:
        """What the other ranks have said since the last call. Does not wait."""
        for _, sock in self._children:
            while select.select([sock], [], [], 0)[0]:
                self._add(self._expect(sock, "report"))
        report, self._report = self._report, StepReport()
        return report

    def start_drain(self, timeout_s: float) -> None:
        """Have the other ranks finish their saves."""
        for _, sock in self._children:
            send(sock, "drain", {"timeout_s": timeout_s})

    def wait_drained(self) -> list[bool]:
        """Whether each of the other ranks did. What they report meanwhile is kept for `take_report`."""
        return [bool(self._expect(sock, "drained").fields["done"]) for _, sock in self._children]

    def why_dead(self) -> str | None:
        """What a rank that has failed said last, or how it exited; None while all are alive."""
        for rank, (process, sock) in enumerate(self._children, 1):
            sock.settimeout(DYING_WAIT_S)
            try:
                while (message := receive(sock)).kind != "failed":
                    pass
                return f"rank {rank} failed: {message.fields.get('error', 'without a word')}"
            except EngineError:  # silent, or gone
                if process.poll() is not None:
                    return f"rank {rank} exited with status {process.returncode}"
            finally:
                sock.settimeout(None)
        return None

    def check_alive(self) -> None:
        """Raise EngineDeadError if one of the other ranks is gone. Cheap: asked while there is nothing to do."""
        if any(process.poll() is not None for process, _ in self._children):
            raise EngineDeadError(self.why_dead() or "a rank is gone")

    def close(self) -> None:
        """End the other ranks: close their sockets, wait, and kill what is left. A second call changes nothing."""
        children, self._children = self._children, []
        for _, sock in children:
            sock.close()
        for process, _ in children:
            try:
                process.wait(EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _expect(self, sock: socket.socket, kind: str) -> Message:
        while (message := receive(sock)).kind != kind:
            if message.kind != "report":
                raise EngineDeadError(f"a rank failed: {message.fields.get('error', message.kind)}")
            self._add(message)
        return message

    def _add(self, message: Message) -> None:
        self._report = self._report.merged(report_from_wire(message.fields))


def run_rank(sock: socket.socket) -> None:
    """The life of a rank other than 0. Returns when rank 0 closes the socket."""
    start = receive(sock)
    config = EngineConfig(**start.fields["config"])
    rank, size = int(start.fields["rank"]), int(start.fields["size"])
    try:
        placement = choose_placement(config)
        set_num_threads(config, placement)
        fd, prefix = start.fields["meeting"]
        store = _meet(int(fd), str(prefix), size)
        send(sock, "joined")
        ranks = Ranks(tp=TensorParallel(rank, size, _make_group(store, rank, size, placement.device)))
        from headwater.engine.runner import Runner

        runner = Runner(_open(config, start.fields["model"]), ranks, config, placement)
        send(sock, "loaded", runner.report._asdict())
        _follow(sock, runner, config)
    except EngineDeadError:
        return  # rank 0 is gone, or has closed us: both are the end
    except Exception as error:
        with suppress(EngineDeadError):
            send(sock, "failed", {"error": f"{type(error).__name__}: {error}"})
        if isinstance(error, HeadwaterError):
            sys.exit(1)  # rank 0 says what it was; nobody needs to hear it once per rank
        raise


def _open(config: EngineConfig, model: dict[str, Any]) -> Checkpoint:
    """The checkpoint that rank 0 runs. Its files are compared before their KV gets a name; random weights have none, so
    the config that names them is the one that rank 0 has read."""
    from headwater.models.checkpoint import open_checkpoint
    from headwater.models.checkpoint.dummy import DummyCheckpoint

    if config.load_format == "dummy":
        return DummyCheckpoint(ModelConfig.from_fields(model), Path(config.model), config.model)
    return open_checkpoint(config.model, config.load_format)


def set_num_threads(config: EngineConfig, placement: DevicePlacement) -> None:
    """Give this rank its part of the cores; on a GPU the host has little to compute."""
    if placement.device.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(config.num_threads or max(1, cores // config.tensor_parallel_size))


def _follow(sock: socket.socket, runner: Runner, config: EngineConfig) -> None:
    previous: torch.Tensor | None = None
    publishers: list[Publisher] = []
    lock = threading.Lock()  # loads end in a thread of their own, and say so on the same socket

    def tell(kind: str, fields: dict[str, Any]) -> None:
        with lock:
            send(sock, kind, fields)

    def load_ended(request_id: str, num_chunks: int) -> None:
        with suppress(EngineDeadError):
            tell("report", report_to_wire(StepReport(ended={request_id: (num_chunks,)})))

    def push_ended(request_id: str, num_tokens: int) -> None:
        with suppress(EngineDeadError):
            tell("report", report_to_wire(StepReport(pushed={request_id: (num_tokens,)})))

    try:
        while True:
            message = receive(sock)
            if message.kind == "step":
                step, orders = _read_step(message)
                runner.step(step, orders, previous)
                if step is not None and message.fields["share_samples"] and len(step.sample_rows):
                    previous = torch.empty(len(step.sample_rows), dtype=torch.int64, device=runner.device)
                    runner.ranks.tp.broadcast(previous)
                if runner.pool is not None and (report := runner.pool.take_report()):
                    tell("report", report_to_wire(report))
            elif message.kind == "allocate":
                runner.allocate(int(message.fields["num_pages"]), int(message.fields["max_model_len"]))
                tell("ready", {})
            elif message.kind == "connect":
                publishers.append(_connect(message, runner, config, load_ended, push_ended))
                tell("connected", {})
            elif message.kind == "drain" and runner.pool is not None:
                tell("drained", {"done": runner.pool.drain(float(message.fields["timeout_s"]))})
            else:
                raise EngineError(f"rank 0 sent {message.kind!r}, which this rank does not expect")
    finally:
        if runner.pool is not None:
            runner.pool.close()
        for publisher in publishers:
            publisher.close()


def _read_step(message: Message) -> tuple[StepInput | None, StepOrders]:
    """What to compute, if anything, and what to do with it."""
    computes, fields = bool(message.fields["computes"]), message.fields.get("orders")
    inputs, arrays = (message.arrays[:NUM_INPUT_ARRAYS], message.arrays[NUM_INPUT_ARRAYS:])
    if not computes:
        inputs, arrays = [], message.arrays
    orders = StepOrders() if fields is None else orders_from_wire(fields, arrays)
    return StepInput(*inputs) if computes else None, orders


def _connect(message: Message, runner: Runner, config: EngineConfig, on_end: OnEnd, on_pushed: OnPushed) -> Publisher:
    connector, group = config.connector, int(message.fields["group"])
    assert connector is not None, "connected without a pool"
    pool = open_pool(connector.pool, group=group)
    identity = Identity.from_canonical(message.fields["identity"])
    runner.connect(pool.space(identity, runner.spec), connector, on_end, group, on_pushed)
    side = runner.pool
    assert side is not None
    publisher = Publisher(pool, engine=ENGINE, model=identity.label)
    publisher.add(f"rank {runner.ranks.tp.rank}", lambda: figures(side.stats(), Source.WORKER))
    return publisher


@cache
def _meeting_file() -> int:
    """Where the ranks of all engines of this process tell each other their addresses: memory that has no name, so that
    nobody else can read it or write to it. It stays open: torch opens it again by its number, also from destructors."""
    return os.memfd_create("headwater-ranks")


def _meet(fd: int, prefix: str, size: int) -> Any:
    """What torch calls a store, without a server. (`TCPStore` listens on every interface, and asks nobody who he is.)
    Each engine has a prefix of its own."""
    return _dist.PrefixStore(prefix, _dist.FileStore(f"/proc/self/fd/{fd}", size))


def _spawn(meeting_fd: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: what lies in the directory we were started from must not be imported instead of the real thing.
        command = [sys.executable, "-P", "-m", "headwater.engine.rank", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno(), meeting_fd], stdin=subprocess.DEVNULL)
    return process, ours


def _make_group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """A process group of its own, without torch's global one: several engines may live in one process."""
    if device.type == "cuda":
        # All ranks are on this host. NCCL reads this when a process makes its first group, and listens where it says.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        return _dist.ProcessGroupNCCL(store, rank, size)
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = COLLECTIVE_TIMEOUT
    return _dist.ProcessGroupGloo(store, rank, size, options)
