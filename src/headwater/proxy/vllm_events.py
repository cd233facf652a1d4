"""vLLM's KV events (`--kv-events-config`): ZMQ messages of msgpack, numbered, and repeated on request.

vLLM's block hashes mean nothing outside of its process, but its events tell the tokens of each block: the router chains
keys of its own over them. Without a replay address a gap cannot be filled, and what is known of the server is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from headwater.errors import BackendError, HeadwaterError
from headwater.kv.hashing import ChunkKeys
from headwater.proxy.follow import SourceEvent, SourceKind
from headwater.proxy.keys import Scheme, TokenScheme

QUIET_S = 0.5
"""After so long without a message, the server is asked whether one was missed."""
REPLAY_S = 5.0
MAX_MESSAGE_BYTES = 64 << 20
MAX_BLOCKS = 1 << 22
END = (-1).to_bytes(8, "big", signed=True)
# fmt: off
_STORED = [
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx",
]
# fmt: on
_REMOVED = ["type", "block_hashes", "medium", "group_idx"]
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ["type"]}

_schemes: dict[int, TokenScheme] = {}


class VllmSource:
    """The events of one vLLM server."""

    def __init__(self, address: str, replay: str | None = None) -> None:
        self.name = address
        self._replay_address = replay
        self._blocks = BlockNames()
        self._context: Any = None
        self._socket: Any = None
        self._last: _Batch | None = None
        self._has_restarted = False

    @property
    def scheme(self) -> Scheme | None:
        return self._blocks.scheme

    async def open(self) -> None:
        zmq = _zmq()
        self._context = zmq.asyncio.Context()
        self._socket = self._connect(zmq.SUB, self.name)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")

    async def listing(self) -> Mapping[str, Iterable[bytes]]:
        """What the repeated events add up to; nothing where they are not repeated."""
        self._blocks.clear()
        if self._replay_address is not None:
            self._last = None
            for batch in await self._replay(0):
                self._last = batch
                self._blocks.take(batch)
        return self._blocks.listing()

    async def next(self) -> Sequence[SourceEvent]:
        if self._has_restarted:
            self._has_restarted = False
            return self._lost()
        try:
            async with asyncio.timeout(QUIET_S):
                frames = await self._socket.recv_multipart()
        except TimeoutError:
            return await self._missed()
        if len(frames) != 3 or len(frames[1]) != 8:
            raise BackendError(f"a message of {len(frames)} frames is not a KV event of vLLM")
        batch = _Batch(int.from_bytes(frames[1], "big"), frames[2])
        last = self._last
        # After events were repeated, some come once more; after a restart, the server counts from 0 again.
        if last is not None and batch.number <= last.number and batch.time_s <= last.time_s:
            return []
        is_next = batch.number == (0 if last is None else last.number + 1)
        if not is_next and self._replay_address is not None:
            return self._lost()
        self._last = batch
        if is_next:
            return self._blocks.take(batch)
        self._blocks.clear()
        return [SourceEvent(SourceKind.CLEARED), *self._blocks.take(batch)]

    def restarted(self) -> None:
        self._has_restarted = True

    def close(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)
        self._context = self._socket = None

    def _lost(self) -> Sequence[SourceEvent]:
        """Everything anew, from the repeated events where there are any."""
        self._blocks.clear()
        self._last = None
        return [SourceEvent(SourceKind.CLEARED), SourceEvent(SourceKind.LOST)]

    async def _missed(self) -> Sequence[SourceEvent]:
        """Ask for the last batch and those after it. If the last one is not what it was, the server is another."""
        if self._replay_address is None:
            return []
        batches = await self._replay(0 if self._last is None else self._last.number)
        if self._last is not None and (not batches or batches.pop(0) != self._last):
            return self._lost()
        found: list[SourceEvent] = []
        for batch in batches:
            self._last = batch
            found += self._blocks.take(batch)
        return found

    async def _replay(self, first: int) -> list[_Batch]:
        """The batches from that number on that the server still has."""
        socket = self._connect(_zmq().DEALER, self._replay_address)
        found: list[_Batch] = []
        try:
            async with asyncio.timeout(REPLAY_S):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 3 or frames[-2] == END:
                        return found
                    found.append(_Batch(int.from_bytes(frames[-2], "big"), frames[-1]))
        except TimeoutError:
            raise BackendError(f"{self._replay_address} replayed no events within {REPLAY_S:g} s") from None
        finally:
            socket.close(linger=0)

    def _connect(self, kind: int, address: str | None) -> Any:
        zmq = _zmq()
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 500),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, 3000),
        ):
            socket.setsockopt(option, value)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise BackendError(f"{address} is not a ZMQ address: {error}") from error
        return socket


class _Batch:
    """A numbered message. Raises BackendError for what is none."""

    def __init__(self, number: int, payload: bytes) -> None:
        try:
            values = msgspec.msgpack.decode(payload)
            self.number, self.time_s, self.events = number, float(values[0]), list(values[1])
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise BackendError(f"a message is not a batch of KV events: {error!r}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Batch) and (self.number, self.time_s) == (other.number, other.time_s)


class BlockNames:
    """vLLM's names of blocks and the router's, for one server."""

    def __init__(self) -> None:
        self.scheme: TokenScheme | None = None
        self._held: dict[bytes | int, tuple[bytes, set[str]]] = {}

    def clear(self) -> None:
        """The server has nothing."""
        self._held.clear()

    def listing(self) -> dict[str, list[bytes]]:
        """Keys by place."""
        found: dict[str, list[bytes]] = {}
        for key, places in self._held.values():
            for place in places:
                found.setdefault(place, []).append(key)
        return found

    def take(self, batch: _Batch) -> list[SourceEvent]:
        """The events of a batch. Raises BackendError for what is none."""
        try:
            return [event for fields in batch.events for event in self._event(_named(fields))]
        except (msgspec.MsgspecError, HeadwaterError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise BackendError(f"a message is not a batch of KV events: {error!r}") from error

    def _event(self, fields: Mapping[str, Any]) -> list[SourceEvent]:
        place = str(fields.get("medium") or "")
        match fields["type"]:
            # Groups besides the first are other layers of the same tokens.
            case "BlockStored" if not fields.get("group_idx"):
                return [SourceEvent(SourceKind.STORED, self._stored(fields, place), place)]
            case "BlockRemoved" if not fields.get("group_idx"):
                return [SourceEvent(SourceKind.REMOVED, self._removed(fields["block_hashes"], place), place)]
            case "AllBlocksCleared":
                self.clear()
                return [SourceEvent(SourceKind.CLEARED)]
            case _:
                return []

    def _stored(self, fields: Mapping[str, Any], place: str) -> list[bytes]:
        size, hashes, tokens = fields["block_size"], fields["block_hashes"], fields["token_ids"]
        if self.scheme is None or self.scheme.block_tokens != size:
            self.scheme = _schemes.setdefault(size, TokenScheme(size))
        extras = fields.get("extra_keys") or [None] * len(hashes)
        lora, parent_name = fields.get("lora_name"), fields["parent_block_hash"]
        if parent_name is None:
            parent = self.scheme.root(_salt(extras[0], lora), lora)
        elif parent_name in self._held:
            parent = self._held[parent_name][0]
        else:
            return []  # its beginning was stored before we listened; a router cannot find it
        keys = []
        for number, name in enumerate(hashes):
            if digest := _other_inputs(extras[number], lora):
                parent = hashlib.sha256(parent + digest).digest()
            (parent,) = ChunkKeys(parent, size, tokens[number * size : (number + 1) * size]).full
            if len(self._held) < MAX_BLOCKS or name in self._held:
                self._held.setdefault(name, (parent, set()))[1].add(place)
                keys.append(parent)
        return keys

    def _removed(self, hashes: Sequence[bytes | int], place: str) -> list[bytes]:
        keys = []
        for name in hashes:
            if (found := self._held.get(name)) is not None:
                found[1].discard(place)
                keys.append(found[0])
                if not found[1]:
                    del self._held[name]
        return keys


def _named(fields: Any) -> Mapping[str, Any]:
    """An event by the names of its fields; older versions sent the values alone."""
    if isinstance(fields, Mapping):
        return fields
    return dict(zip(_FIELDS.get(fields[0], ["type"]), fields, strict=False))


def _salt(extra: Sequence[Any] | None, lora: str | None) -> str | None:
    texts = [item for item in extra or () if isinstance(item, str) and item != lora]
    return texts[0] if texts else None


def _other_inputs(extra: Sequence[Any] | None, lora: str | None) -> bytes:
    """Names images and other inputs of a block; empty for text alone."""
    other = [item for item in extra or () if not isinstance(item, str)]
    return hashlib.sha256(msgspec.msgpack.encode(other)).digest() if other else b""


def _zmq() -> Any:
    try:
        import zmq
        import zmq.asyncio
    except ImportError as error:
        raise BackendError("vLLM's events need the pyzmq package: pip install pyzmq") from error
    return zmq
