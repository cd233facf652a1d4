"""The page at `/`: three files without data, and `/watch.json` with what a look at the pool says.

A browser may load the files without a key; `/watch.json` asks for it like every other path. Looks are taken in a thread
of their own, at most one at a time and only while somebody asks: whoever asks meanwhile gets the last one.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.resources import files
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headwater import __version__
from headwater.errors import RequestError
from headwater.serve.messages import Stats
from headwater.watch import PoolHistory, Watcher

PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
}
DATA_PATH = "/watch.json"
FRESH_S = 1.0
"""A look this young is not taken again: ten open pages cost what one does."""
_SAFE = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_OF_PREFIXES = ("saved", "hit", "removed")
_OWN_PAGES = ("same-origin", "none")
"""What a browser says of a request that its own page, or its user, has sent."""


class Watching:
    """The page of one server. `pool` None: it has none. With `hides_prefixes` it shows sums only: where each client has
    a salt of its own, none of them shall see what the others do."""

    def __init__(
        self, pool: str | None, model: str, stats: Callable[[], Stats], *, hides_prefixes: bool = False
    ) -> None:
        self._hides_prefixes = hides_prefixes
        self._watcher = Watcher(pool, own=lambda: (stats().pool, stats().pool_times))
        self._model = model
        self._stats = stats
        self._history = PoolHistory()
        self._session = secrets.token_hex(8)
        self._look: dict[str, Any] = {}
        self._looked_at = float("-inf")
        self._looking: asyncio.Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwater-watch")
        self._pages = {
            path: (files("headwater.serve").joinpath("page", name).read_bytes(), kind)
            for path, (name, kind) in PAGE_FILES.items()
        }

    @property
    def routes(self) -> list[Route]:
        """What the page needs."""
        pages = [Route(path, self.page, methods=["GET"]) for path in PAGE_FILES]
        return [*pages, Route(DATA_PATH, self.data, methods=["GET"])]

    async def page(self, request: Request) -> Response:
        """One of the files."""
        content, kind = self._pages[request.url.path]
        headers = {**_SAFE, "content-type": kind, "content-security-policy": _POLICY, "x-frame-options": "DENY"}
        return Response(content, headers=headers)

    async def data(self, request: Request) -> Response:
        """GET /watch.json: the last look, and of history and events what comes after those the caller names."""
        if request.headers.get("sec-fetch-site", "none") not in _OWN_PAGES:
            raise RequestError("only this server's own page may ask for this", code="origin_not_allowed")
        await self._refresh()
        query = request.query_params
        is_known = query.get("session") == self._session
        since, event = (_count(query, name) if is_known else 0 for name in ("since", "event"))
        stats = self._stats()
        events = [entry for entry in self._look["events"] if entry["sequence"] > event]
        look = {**self._look, "events": events}
        if self._hides_prefixes:
            look |= {"prefixes": [], "holders": [], "events": [e for e in events if e["kind"] not in _OF_PREFIXES]}
        answer = {
            "session": self._session,
            "server": {
                "model": self._model,
                "version": __version__,
                "running": stats.num_running,
                "waiting": stats.num_waiting,
            },
            "hides_prefixes": self._hides_prefixes,
            "look": look,
            "points": self._history.since(since),
        }
        return Response(msgspec.json.encode(answer), headers={**_SAFE, "content-type": "application/json"})

    async def _refresh(self) -> None:
        """See that the look is fresh. Whoever leaves meanwhile does not end the look of the others."""
        if self._looking is None and time.monotonic() - self._looked_at >= FRESH_S:
            self._looking = asyncio.ensure_future(self._take())
        if self._looking is not None:
            await asyncio.shield(self._looking)

    async def _take(self) -> None:
        try:
            look = await asyncio.get_running_loop().run_in_executor(self._thread, self._watcher.look)
            self._history.add(look)
            self._look, self._looked_at = look, time.monotonic()
        finally:
            self._looking = None

    def close(self) -> None:
        """Let go of the pool, without waiting for a look that is under way. Idempotent."""
        with suppress(RuntimeError):  # closed before
            self._thread.submit(self._watcher.close)
        self._thread.shutdown(wait=False)


def _count(query: Mapping[str, str], name: str) -> int:
    """A number in a query; 0 for anything else."""
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0
