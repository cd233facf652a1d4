"""Store URLs: the one place where they are parsed.

memory://?capacity=2GiB
shm:///headwater?capacity=8GiB
file:///var/lib/headwater?capacity=200GiB&index=2GiB
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from headwater.errors import UrlError

SCHEMES = ("memory", "shm", "file")
DEFAULT_URL = "shm:///headwater"

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter + "ib": 1 << (10 * _power), _letter + "b": 10 ** (3 * _power)}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """`8GiB`, `512 MiB`, `1.5GB` or a bare number of bytes → bytes."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or len(text) > 32:
        raise UrlError(f"{text[:32]!r} is not a size; write it like 8GiB, 512MiB or 1000000")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_size(num_bytes: float) -> str:
    """Bytes in binary units for people: `8.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


@dataclass(frozen=True)
class StoreUrl:
    """A parsed URL. `options` holds the raw text of each option; readers ask for them by type."""

    scheme: str
    path: str
    options: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))

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
        if not 0 < value < 86400:
            raise UrlError(f"option {name}={text!r} must be a positive number of seconds")
        return value

    def __str__(self) -> str:
        query = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.scheme}://{quote(self.path)}" + (f"?{query}" if query else "")


_OPTIONS = ("capacity", "index", "segment", "policy", "deadline")


def parse_url(text: str) -> StoreUrl:
    """Parse and check a URL. Raises UrlError naming what was wrong and what is possible."""
    if not isinstance(text, str) or len(text) > 4096 or not text.isprintable():
        raise UrlError("a store URL is a string of at most 4096 printable characters")
    try:
        parts = urlsplit(text)
        path = unquote(parts.path, errors="strict")
    except ValueError as error:
        raise UrlError(f"{text!r} is not a URL: {error}") from error
    if not path.isprintable():
        raise UrlError(f"{text!r} has control characters in its path")
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UrlError(f"unknown store scheme {parts.scheme!r} in {text!r}; known are {known}")
    if parts.netloc and parts.scheme == "memory":
        raise UrlError(f"memory:// has no name, got {text!r}")
    if parts.netloc:
        raise UrlError(f"{text!r} names a host; write three slashes, as in {parts.scheme}:///{parts.netloc}…")
    if parts.fragment:
        raise UrlError(f"{text!r} has a fragment (#…), which means nothing here")
    _check_path(parts.scheme, path, text)
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise UrlError(f"unknown option {name!r} in {text!r}; known are {', '.join(_OPTIONS)}")
        if name in options:
            raise UrlError(f"option {name!r} is given twice in {text!r}")
        options[name] = value
    url = StoreUrl(parts.scheme, path, MappingProxyType(options))
    for name in ("capacity", "index", "segment"):
        if url.size(name) == 0:
            raise UrlError(f"option {name} in {text!r} must be more than zero")
    url.seconds("deadline", 1.0)
    return url


def _check_path(scheme: str, path: str, text: str) -> None:
    if scheme == "memory" and path not in ("", "/"):
        raise UrlError(f"memory:// has no path, got {text!r}")
    if scheme == "shm" and not re.fullmatch(r"/[A-Za-z0-9][A-Za-z0-9._-]{0,127}", path):
        raise UrlError(f"{text!r}: expected shm:///NAME, NAME being letters, digits, '.', '_' and '-'")
    if scheme == "file" and (not path.startswith("/") or posixpath.normpath("/" + path.lstrip("/")) == "/"):
        raise UrlError(f"{text!r}: expected file:///absolute/directory")
