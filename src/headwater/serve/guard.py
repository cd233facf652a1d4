"""Who may talk to a server: those who bring its key; or, where it asks for none, programs of this machine, but not the
web pages in its browsers.

A page can send requests to a loopback address: under a name of its own that it points there (DNS rebinding), or as a
form's POST, which needs no permission. So the name in `Host` must be a loopback one, a page must be of this machine,
and a POST must say that it is JSON, which a form cannot.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.errors import RequestError
from headwater.serve.addresses import is_loopback
from headwater.serve.errors import shown

_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z._-]+))(?::(?P<port>[0-9]{1,5}))?")

Refuse = Callable[[RequestError, Scope, Receive, Send], Awaitable[None]]


def require_json(app: ASGIApp, refuse: Refuse) -> ASGIApp:
    """Refuse a POST whose content type is not JSON, or that is compressed."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            given = _header(scope, b"content-type")
            kind = given.partition(";")[0].strip().lower()
            if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                text = f"the content type is {shown(given)}; expected application/json"
                await refuse(RequestError(text, code="unsupported_media_type"), scope, receive, send)
                return
            coding = _header(scope, b"content-encoding")
            if coding.strip().lower() not in ("", "identity"):
                text = f"the content encoding is {shown(coding)}; send the body as it is"
                await refuse(RequestError(text, code="unsupported_media_type"), scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def require_key(app: ASGIApp, api_key: str, refuse: Refuse, is_for: Callable[[str], bool]) -> ASGIApp:
    """Refuse, before anything is read, whoever does not bring the key; for the paths that `is_for` says."""
    expected = f"Bearer {api_key}".encode()

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_for(scope["path"]):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, expected):
                error = RequestError("the API key is missing or wrong", code="invalid_api_key")
                await refuse(error, scope, receive, send)
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
            if is_local and host and not is_known(_hostname(host)):
                text = (
                    f"the request is for the host {shown(host)}; without an API key this server answers only to "
                    "localhost and loopback addresses"
                )
                await refuse(RequestError(text, code="host_not_allowed"), scope, receive, send)
                return
            if origin and not (_is_same(origin, host) or is_known(_origin_hostname(origin))):
                text = f"the web page {shown(origin)} may not use this server; it asks for no API key"
                await refuse(RequestError(text, code="origin_not_allowed"), scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def _header(scope: Scope, name: bytes) -> str:
    """All values of a header: two are as good as a wrong one."""
    return ",".join(value.decode("latin-1") for key, value in scope["headers"] if key == name)


def _hostname(host: str) -> str:
    """The name in a `Host` of nothing but a name or address and a port; else nothing."""
    found = _HOST.fullmatch(host)
    if found is None or (found["port"] and not 0 < int(found["port"]) < 1 << 16):
        return ""
    return (found["address"] or found["name"]).lower().removesuffix(".")


def _origin_hostname(origin: str) -> str:
    """The name in an `Origin` of a page; nothing if it has none."""
    scheme, _, host = origin.partition("://")
    return _hostname(host) if scheme in ("http", "https") else ""


def _is_same(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and bool(rest) and rest.lower() == host.lower()
