"""Frames between server and engine process: round trips, any cut of the stream, and garbage that must be refused."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("msgspec")

from hypothesis import given
from hypothesis import strategies as st

from headwater.engine.config import EngineConfig
from headwater.engine.params import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from headwater.errors import EngineError
from headwater.serve import messages
from headwater.serve.messages import (
    Abort,
    Failed,
    FrameReader,
    Outputs,
    Progress,
    Ready,
    Rejected,
    Shutdown,
    Start,
    StartFailed,
    Stats,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode,
)

TO_ENGINE = [
    Start(EngineConfig(model="somewhere", memory_ratio=0.5, num_pages=7)),
    Submit("1", [0, 5, 2**31], SamplingParams(max_tokens=3, stop=("a", "b"), seed=2**62, stop_token_ids=(4,))),
    Submit("2", [1], SamplingParams(), "a salt"),
    Abort("1"),
    Shutdown(),
]
FROM_ENGINE = [
    Progress(1, 2**40),
    Ready("model", 2048, 49152, [2, 0], 100, 16, 64, "cpu (as asked)", "1 + 1 = 2"),
    StartFailed("no", "ModelError"),
    Outputs(
        [
            RequestOutput("1", [7], [TokenLogprobs(7, -0.25, [(7, -0.25), (9, -math.inf)])], None, 5, 4),
            RequestOutput("2", [], None, FinishReason.ABORT, 5, 0),
        ]
    ),
    Rejected("1", "too long", "prompt", "context_length_exceeded"),
    Failed("ZeroDivisionError: x"),
    Stats(num_running=1, num_pages=10),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_round_trip_to_engine(message: messages.ToEngine) -> None:
    (body,) = FrameReader().feed(encode(message))
    assert decode_to_engine(body) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_round_trip_from_engine(message: messages.FromEngine) -> None:
    (body,) = FrameReader().feed(encode(message))
    assert decode_from_engine(body) == message


@given(st.lists(st.sampled_from(FROM_ENGINE), max_size=6), st.lists(st.integers(1, 40), max_size=60))
def test_frames_do_not_depend_on_how_the_stream_is_cut(sent: list[messages.FromEngine], cuts: list[int]) -> None:
    stream = b"".join(map(encode, sent))
    reader = FrameReader()
    bodies = []
    for cut in cuts:
        bodies += reader.feed(stream[:cut])
        stream = stream[cut:]
    bodies += reader.feed(stream)
    assert [decode_from_engine(body) for body in bodies] == sent


@given(st.binary(max_size=200))
def test_garbage_is_refused_as_an_engine_error(noise: bytes) -> None:
    for decode in (decode_to_engine, decode_from_engine):
        try:
            decode(noise)
        except EngineError:
            pass


@given(st.sampled_from(FROM_ENGINE), st.integers(0, 500), st.integers(1, 255))
def test_a_flipped_byte_is_a_message_or_an_engine_error(message: messages.FromEngine, place: int, flip: int) -> None:
    body = bytearray(encode(message)[4:])
    body[place % len(body)] ^= flip
    try:
        decoded = decode_from_engine(bytes(body))
    except EngineError:
        return
    assert isinstance(decoded, messages._Message)


@pytest.mark.parametrize(
    "header", [b"\0\0\0\0", b"\xff\xff\xff\xff", (messages.MAX_FRAME_BYTES + 1).to_bytes(4, "little")]
)
def test_a_length_that_cannot_be_is_refused_before_anything_is_kept(header: bytes) -> None:
    with pytest.raises(EngineError, match="announces"):
        FrameReader().feed(header)


def test_the_two_directions_are_not_mixed_up() -> None:
    with pytest.raises(EngineError):
        decode_from_engine(encode(Shutdown())[4:])
    with pytest.raises(EngineError):
        decode_to_engine(encode(Stats())[4:])


def test_bad_sampling_parameters_do_not_pass_the_wire() -> None:
    frame = encode(Submit("1", [1], SamplingParams(max_tokens=77)))
    assert frame.count(bytes([77])) == 1
    with pytest.raises(EngineError, match="max_tokens"):
        decode_to_engine(frame[4:].replace(bytes([77]), bytes([0])))


def test_a_message_too_large_for_a_frame_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 100)
    with pytest.raises(EngineError, match="a frame holds 100"):
        encode(Failed("x" * 100))
