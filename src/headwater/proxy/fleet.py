"""The servers behind a proxy: which of them answer, which are drained, and what they say of themselves.

A server is down when it refuses connections or fails two checks in a row, and up again after one good check. A request
that fails otherwise has it checked at once: the request itself may be the reason. A server that was down has probably
lost its cache, so what was sent to it is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

import msgspec

from headwater.proxy.choice import Router, ServerCandidate
from headwater.proxy.config import ProxyConfig, ServerSpec
from headwater.proxy.upstream import Upstream, UpstreamError

MAX_FAILURES = 2
SUSPECT_S = 0.02
"""Two checks of a server are at least so far apart."""
MAX_HEALTH_BYTES = 1 << 16

log = logging.getLogger("headwater.proxy")


class ServerRole(StrEnum):
    """What a server is used for."""

    PREFILL = "prefill"
    DECODE = "decode"


class FleetServer(ServerCandidate):
    """One server: its connections, its state and its load."""

    def __init__(self, spec: ServerSpec, role: ServerRole, router: Router, config: ProxyConfig) -> None:
        super().__init__(spec.url, router, weight=spec.weight)
        self.spec = spec
        self.role = role
        self.upstream = Upstream(spec.url, connect_timeout_s=config.connect_timeout_s, ca_file=config.upstream_ca)
        self.peer = spec.peer
        self.is_up = True
        self.is_draining = False
        self.went_down = asyncio.Event()
        """Set while it is down."""
        self.on_return: Callable[[], None] = lambda: None
        self._num_failures = 0
        self._is_suspect = asyncio.Event()

    @property
    def is_usable(self) -> bool:
        """Whether it may get new requests."""
        return self.is_up and not self.is_draining

    def note_failure(self, error: UpstreamError) -> None:
        """A request got no reply."""
        if error.gone:
            self._note_failed_check(error)
        else:
            self._is_suspect.set()

    async def wait_suspect(self, limit_s: float) -> None:
        """Wait for the time of the next check: at once if a request failed."""
        await asyncio.sleep(min(limit_s, SUSPECT_S))
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, limit_s - SUSPECT_S)):
                await self._is_suspect.wait()
        self._is_suspect.clear()

    def _note_failed_check(self, error: UpstreamError) -> None:
        self._num_failures += 1
        if self.is_up and (error.gone or self._num_failures >= MAX_FAILURES):
            log.warning("%s is down: %s", self.name, error)
            self.is_up = False
            self.went_down.set()

    def note_success(self) -> None:
        """A check got a good reply."""
        self._num_failures = 0
        if not self.is_up:
            log.warning("%s is up again", self.name)
            self.is_up = True
            self.went_down.clear()
            self.forget()
            self.on_return()

    async def check(self, timeout_s: float) -> None:
        """Ask for its health once. Raises nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self.upstream.request("GET", "/health")
                try:
                    body = await reply.read_all(MAX_HEALTH_BYTES)
                finally:
                    reply.close()
        except TimeoutError:
            self._note_failed_check(UpstreamError(f"its health check took longer than {timeout_s:g} s"))
        except UpstreamError as error:
            self._note_failed_check(error)
        else:
            if reply.status >= 500:
                self._note_failed_check(UpstreamError(f"its health check has status {reply.status}"))
                return
            self.note_success()
            if self.spec.peer is None:
                self.peer = _peer_of(body)

    def as_json(self) -> dict[str, Any]:
        """For /health."""
        return {
            "server": self.name,
            "role": self.role.value,
            "up": self.is_up,
            "draining": self.is_draining,
            "peer": self.peer,
            "weight": self.weight,
            "in_flight": self.num_in_flight,
            "queued_tokens": self.queued_tokens,
        }


class Fleet:
    """All servers, and the tasks that watch them."""

    def __init__(self, servers: Sequence[FleetServer], config: ProxyConfig) -> None:
        self.servers = list(servers)
        self._config = config
        self._watching: list[asyncio.Task[None]] = []

    def of(self, role: ServerRole) -> list[FleetServer]:
        """The servers of a role that may get requests."""
        return [server for server in self.servers if server.role is role and server.is_usable]

    def last_resort(self, role: ServerRole) -> list[FleetServer]:
        """Servers that seem to be down or are drained: better asked than nobody. Drained ones come last."""
        others = [server for server in self.servers if server.role is role and not server.is_usable]
        return sorted(others, key=lambda server: server.is_draining)

    def find(self, name: str) -> list[FleetServer]:
        """The servers of a URL: one that is used for both roles is there twice."""
        return [server for server in self.servers if server.name == name.rstrip("/").removesuffix("/v1")]

    async def start(self) -> None:
        """Check all servers once, then again and again."""
        await asyncio.gather(*(server.check(self._config.health_timeout_s) for server in self.servers))
        self._watching = [asyncio.create_task(self._watch(server)) for server in self.servers]

    async def close(self) -> None:
        """Stop watching and close idle connections."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for server in self.servers:
            server.upstream.close()

    async def _watch(self, server: FleetServer) -> None:
        while True:
            await server.wait_suspect(self._config.health_interval_s)
            server.upstream.prune()
            await server.check(self._config.health_timeout_s)


def _peer_of(body: bytes) -> str | None:
    """The address of a Headwater server's receiver, as its health says it."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    peer = said.get("peer") if isinstance(said, dict) else None
    return peer if isinstance(peer, str) and 0 < len(peer) < 256 else None
