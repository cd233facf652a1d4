"""What may be shown of text that holds store URLs, decided in one place for errors, logs, metrics and commands.

A password that should have been quoted may contain anything, and a mistyped URL may have it anywhere. So nothing here
searches for secrets: only what is known to be none is shown, and nothing that follows anything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"

_AT = re.compile(r"@|%(?:25)*40")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BARE_SCHEME = re.compile(r"(?i:memory|shm|file|rediss?|mooncake|peer):")
_PLACE = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]*\])(?::[0-9]{1,5})?|")
_PATH = re.compile(r"[\w./ ~+-]*")
_NAME = re.compile(r"[A-Za-z_]{1,32}")
_VALUE = re.compile(r"(?:[\w./ +-]|:(?=[0-9]|//[\w.-]*(?::[0-9]|/|$)))*")
_ASSIGNMENT = re.compile(r"(?:[?#&;]|%3[Ff]).*(?:[=:]|%3[Dd])")
_OPTION = re.compile(r"-{0,2}[a-z-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SUSPECT = re.compile(r"@|%(?:25)*40|[:=/]|%3[AaDd]")

_EMBEDDED = ("capacity", "index", "segment", "policy")
_NETWORK = ("ttl", "connections", "password_file", "ca", "lookup", "piece", "prefix", "protocol", "device", "buffer")
_MOONCAKE = ("replicas", "prefer", "metadata", "host", "pin", "metrics")
_PEER = ("secret_file", "tls", "cert", "key")
VALUES_SHOWN = frozenset((*_EMBEDDED, *_NETWORK, *_MOONCAKE, *_PEER, "deadline", "write", "packing"))
"""The options whose values are no secrets. Those of unknown ones may be: `?password=…`."""


def redact(text: str) -> str:
    """What may be shown of one URL, however malformed: scheme, host, path and known options, as far as nothing strange
    comes before them. Everything up to the last `@` is an account."""
    text = text.strip()
    scheme = _SCHEME.match(text)
    if last := max((found.end() for found in _AT.finditer(text)), default=0):
        known = scheme[0] if scheme and _BARE_SCHEME.match(text) else ""
        # An `@` may also belong to the value of an option, and then a piece of the value follows it.
        return known + HIDDEN + ("" if _ASSIGNMENT.search(text[:last]) else "@" + _rest(text[last:]))
    if scheme:
        return scheme[0] + _rest(text[scheme.end() :])
    place = re.split(r"[?#&;]", text)[0]
    if ":" in place or not _PATH.fullmatch(place):
        bare = _BARE_SCHEME.match(text)
        return f"{bare[0]}{HIDDEN}" if bare else HIDDEN
    return _rest(text)


def redact_words(text: str, args: Iterable[str] = ()) -> str:
    """What may be shown of a sentence in which URLs may stand. Words that hold no `@`, `:`, `=` or `/` are kept.

    `args` are what it may quote: a URL with a space in it cannot be recognised otherwise.
    """
    for arg in sorted((arg for arg in args if redact(arg) != arg), key=len, reverse=True):
        # An option may be quoted without its value, and a value without its option.
        parts = [part for part in arg.split("=", 1) if part and part != arg]
        pieces = [(part, HIDDEN) for part in parts if _SUSPECT.search(part) or not _OPTION.fullmatch(part)]
        for piece, shown in [(arg, redact(arg)), *pieces]:
            for quoted in (piece, repr(piece)[1:-1], _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", piece)):
                text = text.replace(quoted, shown)
    return " ".join(_redact_word(word) for word in text.split(" "))


def show_value(value: str) -> str:
    """What may be shown of the value of an option that is no secret: a number, a name, a path, a host and its port."""
    return value if _VALUE.fullmatch(value) else HIDDEN


def show_option(name: str, value: str) -> str:
    """`name=value`, or `name=***` where the value may be a secret."""
    return f"{name}={show_value(value) if name in VALUES_SHOWN else HIDDEN}"


def _redact_word(word: str) -> str:
    if not _SUSPECT.search(word) or word.rstrip(":").isalpha():
        return word
    core = word.strip("'\"().,;:")
    start = word.find(core)
    return word[:start] + redact(core) + word[start + len(core) :]


def _rest(text: str) -> str:
    """Host, path and options; where one of them is not as it should be, nothing from there on."""
    place, *options = re.split(r"([?#&;])", text)
    host, slash, path = place.partition("/")
    if not _PLACE.fullmatch(host):
        return HIDDEN
    if not _PATH.fullmatch(path):
        return f"{host}{slash}{HIDDEN}"
    shown = host + slash + path
    for mark, option in zip(options[::2], options[1::2], strict=True):
        name, equals, value = option.partition("=")
        if option and not (name in VALUES_SHOWN or (equals and _NAME.fullmatch(name))):
            return f"{shown}{mark}{HIDDEN}"
        shown += mark + (show_option(name, value) if equals else option)
        if equals and shown.endswith(HIDDEN):
            break
    return shown
