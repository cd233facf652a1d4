"""Store URLs: the one place where they are parsed. What is shown of them goes through `headwater.redaction`.

memory://?capacity=2GiB
shm:///headwater?capacity=8GiB
file:///var/lib/headwater?capacity=200GiB&index=2GiB
redis://user:password@host:6379/0?ttl=86400            rediss:// for TLS
mooncake://master:50051?protocol=tcp&segment=4GiB
peer://host:7700?secret_file=/run/secrets/headwater-peers   the pool of another host, to read from

Several, separated by commas and fastest first, are tiers.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from headwater.errors import UrlError
from headwater.redaction import HIDDEN, redact, show_option, show_value

EMBEDDED = ("memory", "shm", "file")
REMOTE = ("redis", "rediss", "mooncake", "peer")
SCHEMES = (*EMBEDDED, *REMOTE)
DEFAULT_URL = "shm:///headwater"
DEFAULT_PORTS = {"redis": 6379, "rediss": 6379, "mooncake": 50051, "peer": 7700}
WRITE_MODES = ("back", "through", "demote")
PACKINGS = ("auto", "on", "off")

_COMMON = ("deadline", "write", "packing")
_OVER_NETWORK = ("lookup", "piece", "prefix")
OPTIONS = {
    **dict.fromkeys(EMBEDDED, ("capacity", "index", "segment", "policy", *_COMMON)),
    **dict.fromkeys(("redis", "rediss"), ("ttl", "connections", "password_file", "ca", *_OVER_NETWORK, *_COMMON)),
    "mooncake": (
        *("protocol", "device", "segment", "buffer", "replicas", "prefer", "metadata", "host", "pin", "metrics"),
        *_OVER_NETWORK,
        *_COMMON,
    ),
    "peer": ("secret_file", "tls", "ca", "cert", "key", "connections", "lookup", "deadline"),
}
"""What a URL of each scheme may say."""
_SIZES = ("capacity", "index", "segment", "buffer", "piece")
_SECONDS = ("deadline", "lookup", "pin")
_COUNTS = ("connections", "replicas")
_MAY_BE_ZERO = ("mooncake", "segment")
"""A Mooncake client without a segment only uses what others give."""

_COMMA = re.compile(rf",\s*(?=(?:{'|'.join(SCHEMES)})://)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter + "ib": 1 << (10 * _power), _letter + "b": 10 ** (3 * _power)}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """`8GiB`, `512 MiB`, `1.5GB` or a bare number of bytes → bytes."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or len(text) > 32:
        raise UrlError(f"{show_value(text)[:32]!r} is not a size; write it like 8GiB, 512MiB or 1000000")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_size(num_bytes: float) -> str:
    """Bytes in binary units for people: `8.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


@dataclass(frozen=True, repr=False)
class StoreUrl:
    """A parsed URL. `options` holds the raw text of each option; readers ask for them by type.

    Its text never contains the account: it is what logs, statistics and errors show.
    """

    scheme: str
    path: str
    options: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))
    host: str = ""
    port: int = 0
    user: str = ""
    password: str = ""

    @property
    def is_remote(self) -> bool:
        """Whether it names a server, and not memory or files of this host."""
        return self.scheme in REMOTE

    @property
    def is_read_only(self) -> bool:
        """Whether nothing is ever copied to it: another host's pool is filled by its own engines, and by pushes."""
        return self.scheme == "peer"

    @property
    def packing(self) -> str:
        """Whether new chunks are stored packed: one of `PACKINGS`."""
        return self.options.get("packing", "auto")

    def size(self, name: str) -> int | None:
        """A size option, or None where the URL does not give it."""
        text = self.options.get(name)
        return None if text is None else parse_size(text)

    def seconds(self, name: str, default: float) -> float:
        """A positive number of seconds."""
        text = self.options.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value <= 86400 * 365:
            raise UrlError(f"option {name}={show_value(text)[:32]!r} must be a positive number of seconds")
        return value

    def count(self, name: str, default: int) -> int:
        """A whole number of at least one."""
        text = self.options.get(name)
        if text is None:
            return default
        if not text.isdecimal() or not 0 < int(text) <= 1024:
            raise UrlError(f"option {name}={show_value(text)[:32]!r} must be a whole number from 1 to 1024")
        return int(text)

    def port_option(self, name: str, default: int) -> int:
        """The number of a port."""
        text = self.options.get(name)
        if text is None:
            return default
        if not text.isdecimal() or not 0 < int(text) < 65536:
            raise UrlError(f"option {name}={show_value(text)[:32]!r} must be a port, from 1 to 65535")
        return int(text)

    def __str__(self) -> str:
        query = "&".join(show_option(name, value) for name, value in self.options.items())
        place = f"[{self.host}]" if ":" in self.host else self.host
        place += f":{self.port}" if self.port else ""
        place = f"{HIDDEN}@{place}" if self.user or self.password else place
        return f"{self.scheme}://{place}{quote(self.path)}" + (f"?{query}" if query else "")

    def __repr__(self) -> str:
        return f"StoreUrl({str(self)!r})"


def split_urls(text: str) -> list[str]:
    """The URLs of a list of tiers. A comma separates where one of our schemes follows it."""
    return [part.strip() for part in re.split(_COMMA, text)]


def parse_urls(text: str) -> tuple[StoreUrl, ...]:
    """Parse tiers, fastest first. Raises UrlError for what cannot be, also for an order that cannot."""
    if not isinstance(text, str) or len(text) > 16384:
        raise UrlError("store URLs are a string of at most 16384 printable characters")
    return check_order(tuple(parse_url(part) for part in split_urls(text)))


def check_order(urls: tuple[StoreUrl, ...]) -> tuple[StoreUrl, ...]:
    """The same tiers, if they can be used in this order. Raises UrlError."""
    for faster, slower in pairwise(urls):
        if faster.is_remote and not slower.is_remote:
            raise UrlError(f"{slower} comes after {faster}; write tiers fastest first, and local before remote")
        if slower.scheme == "memory":
            raise UrlError(f"{slower} can only be the first tier: it is private to a process")
    if len({(url.scheme, url.host, url.port, url.path) for url in urls}) < len(urls):
        raise UrlError(f"the same store is given twice: {', '.join(map(str, urls))}")
    return urls


def first_tier(urls: Sequence[StoreUrl]) -> StoreUrl:
    """Where engines write. Raises UrlError where that is not on this host: their ranks fill chunks there together."""
    if urls[0].is_remote:
        raise UrlError(f"{urls[0]} cannot be the first tier; put one of this host before it, such as shm:///headwater")
    return urls[0]


def parse_url(text: str) -> StoreUrl:
    """Parse and check one URL. Raises UrlError naming what was wrong and what is possible, and never a password."""
    if not isinstance(text, str) or len(text) > 4096 or not text.isprintable():
        raise UrlError("a store URL is a string of at most 4096 printable characters")
    shown = redact(text)
    found = _split(text)
    if found is None:
        raise UrlError(f"{shown!r} is not a URL")
    parts, path = found
    if not path.isprintable():
        raise UrlError(f"{shown!r} has control characters in its path")
    if parts.scheme not in SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UrlError(f"unknown store scheme {_said(parts.scheme, shown)} in {shown!r}; known are {schemes}")
    if parts.fragment:
        raise UrlError(f"{shown!r} has a fragment (#…), which means nothing here")
    options: dict[str, str] = {}
    problems: list[str] = []
    known = OPTIONS[parts.scheme]
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if parts.scheme == "peer" and name == "write":
            problems.append(f"option write in {shown!r}: the pool of another host is only read; leave it out")
        elif name not in known:
            problems.append(f"unknown option {_said(name, shown)} in {shown!r}; known are {', '.join(known)}")
        if name in options:
            problems.append(f"option {_said(name, shown)} is given twice in {shown!r}")
        options[name] = value
    if parts.scheme in REMOTE:
        url = _parse_remote(parts, path, MappingProxyType(options), shown)
    else:
        _check_local(parts, path, shown)
        url = StoreUrl(parts.scheme, path, MappingProxyType(options))
    problems += _option_problems(url, shown)
    if problems:
        raise UrlError("; ".join(problems))
    return url


def _split(text: str) -> tuple[SplitResult, str] | None:
    """The parts and the path without quotes; None for what is no URL. Python's own words about it are dropped here,
    before anything is raised: they quote the URL, and stay with an exception as its context."""
    try:
        parts = urlsplit(text)
        return parts, unquote(parts.path, errors="strict")
    except ValueError:
        return None


def _said(piece: str, shown: str) -> str:
    """A piece of a URL in quotes, if it is among what is shown of the URL anyway."""
    return repr(piece if piece.lower() in shown.lower() else HIDDEN)


def _option_problems(url: StoreUrl, shown: str) -> list[str]:
    """What is wrong with the values of a URL's options, all of it."""
    problems = []
    seconds = [*_SECONDS, *(["ttl"] if url.options.get("ttl") not in (None, "0") else [])]
    checks: list[Callable[[], object]] = [
        *(partial(_check_size, url, name, shown) for name in _SIZES),
        *(partial(url.seconds, name, 1.0) for name in seconds),
        *(partial(url.count, name, 1) for name in _COUNTS),
        partial(url.port_option, "metrics", 1),
    ]
    if any("@" in value for value in url.options.values()):
        problems.append(f"an option of {shown!r} has an '@'; accounts go before the host, and commas between tiers")
        return problems
    for check in checks:
        try:
            check()
        except UrlError as error:
            problems.append(str(error))
    if url.options.get("write", "back") not in WRITE_MODES:
        problems.append(f"option write in {shown!r} must be one of {', '.join(WRITE_MODES)}")
    if url.options.get("packing", "auto") not in PACKINGS:
        problems.append(f"option packing in {shown!r} must be one of {', '.join(PACKINGS)}")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", url.options.get("prefix", "hw")):
        problems.append(f"option prefix in {shown!r} must be up to 64 letters, digits, '.', '_' and '-'")
    if url.options.get("prefer", "local") not in ("local", "any"):
        problems.append(f"option prefer in {shown!r} must be local or any")
    if url.options.get("tls", "on") not in ("on", "off"):
        problems.append(f"option tls in {shown!r} must be on or off")
    if not re.fullmatch(r"[a-z_]{1,16}", url.options.get("protocol", "tcp")):
        problems.append(f"option protocol in {shown!r} must be tcp or rdma (or what your Mooncake was built with)")
    return problems


def _check_size(url: StoreUrl, name: str, shown: str) -> None:
    if url.size(name) == 0 and (url.scheme, name) != _MAY_BE_ZERO:
        raise UrlError(f"option {name} in {shown!r} must be more than zero")


class _Authority(NamedTuple):
    host: str
    port: int | None
    user: str
    password: str


def _authority(parts: SplitResult) -> _Authority | None:
    """Who and where; None where that cannot be read. See `_split` for why nothing is raised."""
    try:
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        return _Authority(parts.hostname or "", parts.port, user, password)
    except ValueError:
        return None


def _parse_remote(parts: SplitResult, path: str, options: MappingProxyType[str, str], shown: str) -> StoreUrl:
    found = _authority(parts)
    if found is None:
        raise UrlError(
            f"{shown!r}: the port is no number from 0 to 65535; '/', '?', '#' and '@' in a password must be written as "
            "%2F, %3F, %23 and %40"
        )
    host, port, user, password = found
    port = port or (DEFAULT_PORTS[parts.scheme] if host else 0)
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,255}", host) and (host or parts.scheme != "mooncake"):
        raise UrlError(f"{shown!r}: expected {parts.scheme}://HOST:PORT")
    if parts.scheme == "mooncake":
        if path not in ("", "/") or user or password:
            raise UrlError(f"{shown!r}: expected mooncake://MASTER:PORT, without a path or an account")
    elif parts.scheme == "peer":
        if path not in ("", "/") or user or password:
            raise UrlError(f"{shown!r}: expected peer://HOST:PORT, without a path or an account; see secret_file")
    elif not re.fullmatch(r"|/[0-9]{0,5}", path):
        raise UrlError(f"{shown!r}: expected {parts.scheme}://HOST:PORT/NUMBER, NUMBER being a database")
    return StoreUrl(parts.scheme, path, options, host, port, user, password)


def _check_local(parts: SplitResult, path: str, shown: str) -> None:
    if parts.netloc and parts.scheme == "memory":
        raise UrlError(f"memory:// has no name, got {shown!r}")
    if parts.netloc:
        example = f"{parts.scheme}:///{parts.netloc}…" if parts.netloc in shown else f"{parts.scheme}:///…"
        raise UrlError(f"{shown!r} names a host; write three slashes, as in {example}")
    if parts.scheme == "file" and (re.search(r"[\s:@,;|]", parts.path) or "://" in path):
        raise UrlError(
            f"{shown!r}: expected one path; tiers are separated by commas, each with its scheme, and ' ', ':', '@', "
            "',', ';' and '|' in a path are written as %20, %3A, %40, %2C, %3B and %7C"
        )
    _check_path(parts.scheme, path, shown)


def _check_path(scheme: str, path: str, text: str) -> None:
    if scheme == "memory" and path not in ("", "/"):
        raise UrlError(f"memory:// has no path, got {text!r}")
    if scheme == "shm" and not re.fullmatch(r"/[A-Za-z0-9][A-Za-z0-9._-]{0,127}", path):
        raise UrlError(f"{text!r}: expected shm:///NAME, NAME being letters, digits, '.', '_' and '-'")
    if scheme == "file" and (not path.startswith("/") or posixpath.normpath("/" + path.lstrip("/")) == "/"):
        raise UrlError(f"{text!r}: expected file:///absolute/directory")
