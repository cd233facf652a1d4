"""What one host tells the others: read back as it was written, and nothing else is believed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.stores.events import EventKind
from headwater.stores.remote.announce import ENTRY_BYTES, Announcer, LogEvent, decode
from headwater.stores.remote.manifest import Names

KINDS = st.sampled_from([EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED])
NUMBERS = st.integers(0, 2**32 - 1)
KEYS = st.just(b"") | st.binary(min_size=32, max_size=32).filter(any)
TOLD = st.builds(LogEvent, KINDS, KEYS, NUMBERS, NUMBERS)
ORIGINS = st.binary(min_size=8, max_size=8)


@given(TOLD, ORIGINS)
def test_round_trip(told: LogEvent, origin: bytes) -> None:
    raw = told.encode(origin)
    assert len(raw) == ENTRY_BYTES
    assert decode(raw) == (origin, told)


@given(st.binary(max_size=2 * ENTRY_BYTES))
def test_noise_is_no_event(raw: bytes) -> None:
    assert decode(raw) is None


@given(TOLD, ORIGINS, st.integers(0, 8 * ENTRY_BYTES - 1))
def test_a_flipped_bit_is_no_event(told: LogEvent, origin: bytes, bit: int) -> None:
    raw = bytearray(told.encode(origin))
    raw[bit // 8] ^= 1 << bit % 8
    assert decode(bytes(raw)) is None


@given(TOLD, ORIGINS)
def test_a_loss_is_nothing_that_a_host_can_tell(told: LogEvent, origin: bytes) -> None:
    raw = told._replace(kind=EventKind.LOST).encode(origin)
    assert decode(raw) is None


def test_nobody_hears_itself() -> None:
    mine, other = Announcer(Names("p")), Announcer(Names("p"))
    told = [LogEvent(EventKind.STORED, bytes([n]) * 32, n, 8) for n in (1, 2)]
    values = [*mine.notice(told[:1]).values, b"noise", *other.notice(told[1:]).values]
    assert mine.foreign(values) == told[1:]
    assert other.foreign(values) == told[:1]
    assert mine.notice(told).log == "p:e"
