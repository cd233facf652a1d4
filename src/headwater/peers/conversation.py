"""A link's session with its peer: connections, requests that were asked, and their answers.

For one thread, the link's. What is asked and what is done with the answers is `link`'s business.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

from headwater.errors import PeerTimeoutError, WireError
from headwater.peers.address import PeerAddress
from headwater.peers.caller import LinkSettings, PeerCaller
from headwater.peers.carriers import tcp
from headwater.peers.extra_connections import ExtraConnections
from headwater.peers.hello import MAX_LINK_CONNECTIONS, CarrierBit
from headwater.peers.wire import Type, encode_frame
from headwater.peers.writing import RemoteWriter, open_writer

Answered = Callable[[bytes], None]


class Conversation:
    """See the module. Any call that speaks or listens may raise PeerError; `disconnect` follows then."""

    def __init__(self, address: PeerAddress, caller: PeerCaller, settings: LinkSettings) -> None:
        self._address = address
        self._caller = caller
        self._settings = settings
        self.connection: tcp.Connection | None = None
        self.extra = ExtraConnections()
        self.writer: RemoteWriter | None = None
        """Where the peer is written to; None where everything goes over the connection."""
        self.encodings = 0
        """Of the tiles that the peer takes: see `Welcome.encodings`."""
        self.silence_s = 5.0
        """A peer that hears nothing for so long gives up."""
        self.num_failures = 0
        """Since the last answer; counted by the link."""
        self._last_sent_s = 0.0
        self._number = 0
        self._unanswered: dict[int, tuple[Answered, int]] = {}
        """Requests without an answer, by number, each with the bytes of its data."""
        self._waiting_since_s = 0.0
        """Since when the peer owes an answer: its last one, or the first request after that."""
        self._answers: deque[tuple[Answered, bytes]] = deque()
        """Answers that have come, in their order."""

    @property
    def awaits(self) -> bool:
        """Whether an answer is missing."""
        return bool(self._unanswered)

    def next_number(self) -> int:
        """A number that no request has had."""
        self._number += 1
        return self._number

    def connect(self) -> bool:
        """Whether there was no connection and there is one now. Half a second more with a carrier of its own."""
        if self.connection is not None:
            return False
        session, writer = secrets.token_bytes(16), open_writer(self._settings)
        offer = 0 if writer is None else CarrierBit.NIXL
        try:
            self.connection, welcome = self._caller.call(self._address, session, self._settings, carriers=offer)
            self.writer = writer if welcome.carrier == CarrierBit.NIXL else None
        finally:
            if writer is not None and self.writer is None:
                writer.close()
        for number in range(1, min(self._settings.connections, MAX_LINK_CONNECTIONS) if self.writer is None else 1):
            self.extra.add(self._caller.call(self._address, session, self._settings, number)[0])
        self.silence_s, self.encodings = max(0.2, welcome.silence_ms / 1000), welcome.encodings
        self._last_sent_s = time.monotonic()
        return True

    def request(
        self,
        kind: Type,
        meta: bytes,
        answered: Answered,
        pieces: Sequence[memoryview] = (),
        data_bytes: int = 0,
    ) -> int:
        """Send a frame, of which `answered` is told the answer later; its number."""
        assert self.connection is not None
        number = self.next_number() & 0xFFFFFFFF
        if not self._unanswered:
            self._waiting_since_s = time.monotonic()
        self._unanswered[number] = answered, data_bytes
        frame = encode_frame(kind, meta, data_bytes=data_bytes, number=number)
        self.connection.send(frame, self.deadline(data_bytes), pieces)
        self._last_sent_s = time.monotonic()
        return number

    def await_answer(self, answered: Answered) -> bytes:
        """The answer of which `answered` would be told, before those that came in front of it are looked at."""
        assert self.connection is not None
        deadline = self.deadline(0)
        while True:
            self.collect()
            for entry in self._answers:
                if entry[0] is answered:
                    self._answers.remove(entry)
                    return entry[1]
            if not self.connection.is_readable(max(0.0, deadline - time.monotonic())):
                raise PeerTimeoutError("the peer did not answer in time")

    def stay_heard(self) -> None:
        """Say something now and then, so that the peer does not take a pause for the end."""
        if self.connection is not None and time.monotonic() - self._last_sent_s > self.silence_s / 4:
            self.request(Type.PING, b"", lambda body: None)

    def deadline(self, data_bytes: int) -> float:
        """For a frame with so many bytes of data."""
        return time.monotonic() + self._settings.io_s + data_bytes / 10e6

    def hear(self) -> None:
        """Take the answers that have come, and do what follows from them."""
        self.collect()
        while self._answers:
            answered, body = self._answers.popleft()
            answered(body)
            self.collect()

    def add_answers(self, answers: Sequence[tuple[Answered, bytes]]) -> None:
        """Answers that came over other connections."""
        self._answers.extend(answers)

    def collect(self) -> None:
        """Take the answers that have come, to be looked at later: they must not pile up in the kernel."""
        while self.connection is not None and self.connection.is_readable():
            header, body = self.connection.receive(time.monotonic() + self._settings.io_s)
            asked = self._unanswered.pop(header.number, None)
            if header.type != Type.ANSWER or header.data_bytes or asked is None:
                raise WireError(f"unexpected {header.type.name} frame")
            self.num_failures, self._waiting_since_s = 0, time.monotonic()
            self._answers.append((asked[0], body))

    def check_answers(self) -> None:
        """Raise PeerTimeoutError where an answer is overdue."""
        data_s = sum([size for _, size in self._unanswered.values()]) / 10e6
        if self._unanswered and time.monotonic() - self._waiting_since_s > self._settings.io_s + data_s:
            raise PeerTimeoutError("the peer did not answer in time")

    def disconnect(self) -> None:
        """End the session. Idempotent."""
        connection, self.connection = self.connection, None
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close()  # before the connection: its end says that nothing is on its way
        self.extra.close()
        self._unanswered.clear()
        self._answers.clear()
        if connection is not None:
            connection.close()
