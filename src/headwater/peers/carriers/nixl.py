"""One-sided writes by NIXL (UCX): a sender writes into extents that the receiver's process has registered.

NIXL cannot call a write back: it lands after its handle was released, and in memory that was deregistered meanwhile.
What ends it is the end of an agent, on either side: its queue pairs and connections go with it. So both ends have one
agent a session, and `close` is the proof that nothing of this agent leaves or lands any more. One way is left: within a
host the sender's process copies into the other one by itself. A receiver therefore also waits for the sender's word, or
its end, before it reuses an extent (see `peers.exposing`).

There is no progress thread, which would take a core: whoever awaits a write calls `progress` or `is_done`.
"""

from __future__ import annotations

import gc
import importlib
import logging
import secrets
import weakref
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.errors import PeerError, PeerGoneError

log = logging.getLogger("headwater")

MAX_METADATA = 1 << 20
_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
"""The package of all builds, or one of them alone."""

Segment = npt.NDArray[np.uint8]
Regions = npt.NDArray[np.uint64]
"""Rows of (address, bytes, 0)."""


@lru_cache(maxsize=1)
def _api() -> Any | str:
    """NIXL's module, or why there is none."""
    reasons: list[str] = []
    for name in _MODULES:
        try:
            api = importlib.import_module(name)
        except Exception as error:  # a library of its own that is missing, too
            reasons.append(f"{name}: {error}")
            continue
        logger = logging.getLogger("nixl")  # NIXL logs to stdout, which belongs to our JSON
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.WARNING)
        return api
    return "NIXL cannot be imported (pip install 'headwater[nixl]'): " + "; ".join(reasons)


def why_not() -> str | None:
    """Why NIXL cannot be used here; None where it can be imported. Imports it: 0.1 s once."""
    found = _api()
    return found if isinstance(found, str) else None


class Agent:
    """One session's end of NIXL. For one thread, but for `close`, which any thread may call, once it is idle."""

    def __init__(self) -> None:
        """Half a second, without the interpreter's lock. Raises PeerError where there is no NIXL, or no UCX in it."""
        api = _api()
        if isinstance(api, str):
            raise PeerError(api)
        # Unique to this incarnation: a peer refuses a second agent of a name that it has met.
        name = f"headwater-{secrets.token_hex(12)}"
        config = api.nixl_agent_config(
            backends=["UCX"], enable_prog_thread=False, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        try:
            self._agent: Any = api.nixl_agent(name, config)
        except Exception as error:
            raise PeerError(f"NIXL did not start: {error}") from error
        self._handles: dict[int, Any] = {}
        """Of writes, by their numbers. Nobody else keeps one, or an agent: whoever does keeps it alive."""
        self._num_writes = 0
        self._segments: dict[int, Segment] = {}

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._agent is None

    def register(self, segment: Segment) -> bool:
        """Make a segment of a mapped store one that is written from or to; False where it is already."""
        address = segment.ctypes.data
        if address in self._segments:
            return False
        self._do("register_memory", [(address, segment.nbytes, 0, "")], "DRAM")
        self._segments[address] = segment
        return True

    def metadata(self) -> bytes:
        """What the other side must know to write to what is registered here."""
        return bytes(self._do("get_agent_metadata"))

    def meet(self, metadata: bytes) -> str:
        """Take another agent's metadata, also further ones of the same; its name."""
        name = self._do("add_remote_agent", metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def write(self, peer: str, local: Regions, remote: Regions) -> Write:
        """Begin to write regions into those of a peer. The local ones may be reused when it is done, or after
        `close`."""
        descs = [self._do("get_xfer_descs", regions, "DRAM") for regions in (local, remote)]
        self._num_writes += 1
        number = self._num_writes
        self._handles[number] = self._do("initialize_xfer", "WRITE", *descs, peer)
        return Write(self, number, self._do("transfer", write=number))

    def state(self, number: int) -> str:
        """Of a write: DONE or PROC. Raises PeerGoneError where it failed."""
        return str(self._do("check_xfer_state", write=number))

    def release(self, number: int) -> None:
        """Forget a write that is done."""
        self._do("release_xfer_handle", write=number)
        self._handles.pop(number, None)

    def progress(self) -> None:
        """Take what has come: without this, writes of peers over TCP do not get on."""
        self._do("get_new_notifs")

    def close(self) -> None:
        """End the agent and all of its connections: nothing of it leaves or lands from now on. Idempotent."""
        if self._agent is None:
            return
        ended = weakref.ref(self._agent.agent)
        self._handles.clear()
        self._agent = None  # the last reference: its end is that of its queue pairs
        if ended() is not None:
            gc.collect()
        if ended() is not None:
            log.error("a NIXL agent is still referred to after its end: writes may be on their way; please report it")
        self._segments.clear()

    def _do(self, verb: str, *arguments: Any, write: int = 0) -> Any:
        agent, failure = self._agent, "the agent was closed"
        if agent is not None:
            try:
                if write:
                    arguments = (self._handles[write],)
                return getattr(agent, verb)(*arguments)
            except Exception as error:
                failure = str(error) or type(error).__name__
        # A traceback keeps the variables of its frames: nothing of NIXL's may be among them.
        del agent, arguments
        raise PeerGoneError(f"NIXL: {verb} failed: {failure}")


class Write:
    """A write that was begun."""

    def __init__(self, agent: Agent, number: int, state: str) -> None:
        self._agent = agent
        self._number = number
        self._state = state

    def is_done(self) -> bool:
        """Whether all of it is at the peer; makes it get on. Raises PeerGoneError where it failed: then only the
        agent's end says that nothing of it is on its way."""
        if self._state == "PROC":
            self._state = self._agent.state(self._number)
        if self._state == "DONE":
            self._agent.release(self._number)
            self._state = "OVER"
        if self._state not in ("PROC", "OVER"):
            raise PeerGoneError("NIXL: a write failed")
        return self._state == "OVER"
