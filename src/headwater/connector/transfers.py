"""`kv_transfer_params`: what a request says about KV that another server sends, and what a scheduler side makes of it.

Nothing depends on it for correctness. Without it, or where it is wrong, a request finds what is there and computes the
rest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.errors import InvalidArgumentError
from headwater.kv.hashing import ChunkRef
from headwater.peers.address import parse_address

PARAMETER = "kv_transfer_params"
KEY = "headwater"
"""Our one key in it: others may be another connector's."""
DEFAULT_WAIT_S, DEFAULT_START_S, MAX_WAIT_S = 30.0, 2.0, 3600.0
MAX_TEXT = 256


@dataclass(frozen=True, kw_only=True)
class TransferParams:
    """What our key holds."""

    id: str = ""
    """The same at both servers; for logs."""
    push_to: str = ""
    """To a server that computes a prompt: send its KV to this peer, HOST:PORT."""
    wait_s: float = DEFAULT_WAIT_S
    """To a server that gets the KV: how long it may take to come."""
    start_s: float = DEFAULT_START_S
    """How long nothing may be announced before the request goes on without."""

    @property
    def is_expected(self) -> bool:
        """Whether KV of this request is said to come from elsewhere."""
        return bool(self.id) and not self.push_to and self.wait_s > 0


def parse_transfer(params: object) -> TransferParams | None:
    """Read a request's `kv_transfer_params`; None where it has nothing for us. Keys that are not known are ignored;
    values of a wrong type raise InvalidArgumentError, which names them."""
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise InvalidArgumentError(f"{PARAMETER}: expected an object")
    ours = params.get(KEY)
    if ours is None:
        return None
    where = f"{PARAMETER}.{KEY}"
    if not isinstance(ours, Mapping):
        raise InvalidArgumentError(f"{where}: expected an object")
    push_to = _text(ours, "push_to", where)
    if push_to:
        try:
            parse_address(push_to)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{where}.push_to: {error}") from None
    return TransferParams(
        id=_text(ours, "transfer", where),
        push_to=push_to,
        wait_s=_seconds(ours, "wait_s", where, DEFAULT_WAIT_S),
        start_s=_seconds(ours, "start_s", where, DEFAULT_START_S),
    )


def _text(fields: Mapping[Any, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise InvalidArgumentError(f"{where}.{name}: expected a string of 1 to {MAX_TEXT} characters")
    return value


def _seconds(fields: Mapping[Any, Any], name: str, where: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_WAIT_S:
        raise InvalidArgumentError(f"{where}.{name}: expected a number of seconds from 0 to {MAX_WAIT_S:.0f}")
    return float(value)


@dataclass(eq=False)
class Expected:
    """KV that one request expects."""

    transfer: TransferParams
    chunks: tuple[ChunkRef, ...]
    """All that may come: the prompt's chunks, and its tail if that is worth it."""
    asked_s: float = field(default_factory=time.monotonic)
    num_first: int = -1
    """Of these: how many were there when it was looked for first."""
    is_over: bool = False
    """Nothing more is expected."""
    _num_seen: int = -1
    _grown_s: float = 0.0

    def look(self, num_chunks: int) -> None:
        """So many of them are there now."""
        if self.num_first < 0:
            self.num_first = num_chunks
        if num_chunks > self._num_seen:
            self._num_seen, self._grown_s = num_chunks, time.monotonic()

    @property
    def num_tokens(self) -> int:
        """Of the prompt: how many tokens the chunks hold."""
        return self.chunks[-1].first_token + self.chunks[-1].num_tokens if self.chunks else 0

    @property
    def left_s(self) -> float:
        """How long it may still take."""
        return max(0.0, self.asked_s + self.transfer.wait_s - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether nothing more has come for as long as it may take until something is announced."""
        return time.monotonic() >= max(self.asked_s, self._grown_s) + self.transfer.start_s
