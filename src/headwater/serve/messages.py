"""What the server and the engine process say to each other: typed messages in bounded, length-prefixed frames.

Frames are msgpack and are decoded into these types or refused; nothing is ever unpickled. Sockets are
not touched here: the two ends do it differently (`worker` blocks, `client` is asyncio).
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from headwater.connector.stats import Distribution
from headwater.connector.transfers import TransferParams
from headwater.engine.config import EngineConfig
from headwater.engine.params import RequestOutput, SamplingParams
from headwater.errors import EngineError

MAX_FRAME_BYTES = 64 << 20
"""A million token ids are 5 MiB; whatever announces more than this is not one of our frames."""
READ_BYTES = 1 << 16

_LENGTH = struct.Struct("<I")
_T = TypeVar("_T")


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message; its tag is the name of its class."""


class Start(_Message, frozen=True):
    """First message to the engine process: the engine to build."""

    config: EngineConfig


class Submit(_Message, frozen=True):
    """A request. Its outputs follow until one has a finish reason, or until `Rejected`."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    transfer: TransferParams | None = None


class Abort(_Message, frozen=True):
    """The request is not wanted any more. Nothing follows for it but what is already on the way."""

    request_id: str


class Shutdown(_Message, frozen=True):
    """Close the engine and exit."""


class Progress(_Message, frozen=True):
    """Bytes of weights loaded so far."""

    done_bytes: int
    total_bytes: int


class Ready(_Message, frozen=True):
    """The engine is built; these are its facts."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_pages: int
    page_size: int
    max_num_seqs: int
    placement: str
    """Device and precision, and why these."""
    sizing: str
    """How the number of pages came about."""
    pool_declined: str = ""
    """Why there is no pool, where one was asked for."""


class StartFailed(_Message, frozen=True):
    """The engine could not be built. `kind` is the class of the error; the process exits."""

    message: str
    kind: str


class Outputs(_Message, frozen=True):
    """What one step gave, in the engine's order."""

    outputs: list[RequestOutput]


class Rejected(_Message, frozen=True):
    """The engine refused a request; no output was or will be sent for it."""

    request_id: str
    message: str
    param: str | None
    code: str | None


class Failed(_Message, frozen=True):
    """The engine broke in the middle of its work; the process exits."""

    message: str


class Heartbeat(_Message, frozen=True):
    """The engine process lives; its main thread has been at the same place for so long (0: it moves)."""

    still_s: float


class Stats(_Message, frozen=True):
    """A snapshot of the engine. Counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_used_pages: int = 0
    """Pages that belong to running requests."""
    num_cached_pages: int = 0
    """Pages that only the prefix cache keeps; they are given up when room is needed."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    expert_rows: dict[int, list[int]] = {}
    """Rows that went to each expert, by sparse layer; empty for a dense model."""
    pool: dict[str, dict[str, float]] = {}
    """What is known of the pool, by metric and tier (`connector.metrics.Values`)."""
    pool_times: dict[str, Distribution] = {}
    """Its histograms, by metric."""


ToEngine = Start | Submit | Abort | Shutdown
FromEngine = Progress | Ready | StartFailed | Outputs | Rejected | Failed | Heartbeat | Stats

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as one frame. Raises EngineError if it is too large for one."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise EngineError(f"{type(message).__name__} is {len(body)} bytes; a frame holds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_to_engine(body: bytes) -> ToEngine:
    """The message in a frame that the server sent. Raises EngineError for anything else."""
    return _decode(_to_engine, body)


def decode_from_engine(body: bytes) -> FromEngine:
    """The message in a frame that the engine process sent. Raises EngineError for anything else."""
    return _decode(_from_engine, body)


class FrameReader:
    """Cuts a stream of bytes into frames. Holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies of the frames that `data` completes. Raises EngineError at a frame that cannot be ours."""
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if not 0 < size <= MAX_FRAME_BYTES:
                raise EngineError(f"a frame announces {size} bytes; expected 1 to {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def _decode(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise EngineError(f"a frame of {len(body)} bytes holds a malformed message: {error}") from error
