"""Who may talk to a server that asks for no key: programs of this machine, but not the web pages in its browsers.

A page can send requests to a loopback address: under a name of its own that it points there (DNS rebinding), or as a
form's POST, which needs no permission. So the name in `Host` must be a loopback one, a page must be of this machine,
and a POST must say that it is JSON, which a form cannot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.errors import RequestError
from headwater.serve.addresses import is_loopback
from headwater.serve.errors import shown

Refuse = Callable[[RequestError, Scope, Receive, Send], Awaitable[None]]


def require_json(app: ASGIApp, refuse: Refuse) -> ASGIApp:
    """Refuse a POST whose content type is not JSON."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            given = _header(scope, b"content-type")
            kind = given.partition(";")[0].strip().lower()
            if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                text = f"the content type is {shown(given)}; expected application/json"
                await refuse(RequestError(text, code="unsupported_media_type"), scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def keep_pages_out(app: ASGIApp, bound_to: str, refuse: Refuse) -> ASGIApp:
    """Refuse requests that foreign web pages send. For servers that ask for no key; `bound_to` is their address."""
    known = frozenset({bound_to.lower()})
    is_local = is_loopback(bound_to)

    def is_known(name: str) -> bool:
        return name in known or is_loopback(name)

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host, origin = _header(scope, b"host"), _header(scope, b"origin")
            # Browsers always send a Host. Under which names a server of a network is known, nobody told us.
            if is_local and host and not is_known(_hostname(f"//{host}")):
                text = (
                    f"the request is for the host {shown(host)}; without an API key this server answers only to "
                    "localhost and loopback addresses"
                )
                await refuse(RequestError(text, code="host_not_allowed"), scope, receive, send)
                return
            if origin and not (_is_same(origin, host) or is_known(_hostname(origin))):
                text = f"the web page {shown(origin)} may not use this server; it asks for no API key"
                await refuse(RequestError(text, code="origin_not_allowed"), scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def _header(scope: Scope, name: bytes) -> str:
    """All values of a header: two are as good as a wrong one."""
    return ",".join(value.decode("latin-1") for key, value in scope["headers"] if key == name)


def _hostname(url: str) -> str:
    """The name in a URL of nothing but scheme, name and port; else nothing."""
    try:
        parts = urlsplit(url)
        is_plain = parts.port != 0 and not set("@, ") & set(parts.netloc) and not (parts.path or parts.query)
        return (parts.hostname or "").removesuffix(".") if is_plain else ""
    except ValueError:
        return ""


def _is_same(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and bool(rest) and rest.lower() == host.lower()
