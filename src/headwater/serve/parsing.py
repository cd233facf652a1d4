"""HTTP/1.1 as h11 reads it, with bounds on what makes its parser slow: chunks, header fields, the size of a head.

h11 takes some 20 µs for a chunk and 4 µs for a field, so a megabyte of either would hold the event loop for seconds.
"""

from __future__ import annotations

import re

import h11

from headwater.errors import RequestError

MAX_FIELDS = 100
MAX_HEAD_BYTES = 1 << 14
MAX_TRAILER_BYTES = 1 << 10
"""Of what follows the last chunk, or of the line that begins one."""
FREE_CHUNKS = 512
MIN_CHUNK_BYTES = 1 << 10
"""A body of more chunks than FREE_CHUNKS must have so many bytes in each, on average."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")


class BoundedParser(h11.Connection):
    """The server's side of a connection. `refusal` says why `next_event` raised RemoteProtocolError."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.refusal: RequestError | None = None
        self.is_chunked = False
        self._num_chunks = 0
        self._num_body_bytes = 0

    @property
    def reads_unasked(self) -> bool:
        """Whether the rest of a body is being read whose request was answered already."""
        return self.our_state is h11.DONE and self.their_state is h11.SEND_BODY

    @property
    def _is_between_chunks(self) -> bool:
        """Where h11 needs more data and has some, since it takes whatever it has of a chunk."""
        return self.is_chunked and self.their_state is h11.SEND_BODY

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11's. Raises h11.RemoteProtocolError for what is malformed or beyond a bound."""
        try:
            if self.their_state is h11.IDLE:
                self._check_head()
            event = super().next_event()
            self._check_event(event)
        except h11.RemoteProtocolError as error:
            self.refusal = self.refusal or _refusal(error)
            raise
        return event

    def _check_head(self) -> None:
        """Look at the head before h11 does."""
        data, _ = self.trailing_data
        if len(data) <= MAX_HEAD_BYTES and data.count(b"\n") <= MAX_FIELDS:
            return
        end = _END_OF_HEAD.search(data)
        size = end.end() if end else len(data)
        # The request line and the empty one are no fields.
        if size > MAX_HEAD_BYTES or data.count(b"\n", 0, size) > MAX_FIELDS + 2:
            text = f"the request has more than {MAX_FIELDS} header fields or {MAX_HEAD_BYTES} bytes of them"
            self._refuse(RequestError(text, code="headers_too_large"))

    def _check_event(self, event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]) -> None:
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            self.is_chunked = b"transfer-encoding" in names
            if self.is_chunked and b"content-length" in names:
                # Two programs that disagree on which one counts disagree on where the next request begins.
                text = "the request has both a transfer-encoding and a content-length"
                self._refuse(RequestError(text, code="invalid_http"))
            self._num_chunks = self._num_body_bytes = 0
        elif isinstance(event, h11.Data) and self.is_chunked:
            self._num_chunks += event.chunk_start
            self._num_body_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS and self._num_body_bytes < self._num_chunks * MIN_CHUNK_BYTES:
                text = (
                    f"the body has more than {FREE_CHUNKS} chunks of less than {MIN_CHUNK_BYTES} bytes on average; "
                    "send larger ones, or a content-length"
                )
                self._refuse(RequestError(text, code="request_too_large"))
        elif event is h11.NEED_DATA and self._is_between_chunks and len(self.trailing_data[0]) > MAX_TRAILER_BYTES:
            text = f"a chunk's size or the trailers have more than {MAX_TRAILER_BYTES} bytes"
            self._refuse(RequestError(text, code="headers_too_large"))

    def _refuse(self, refusal: RequestError) -> None:
        self.refusal = refusal
        raise h11.RemoteProtocolError(str(refusal))


def _refusal(error: h11.RemoteProtocolError) -> RequestError:
    if error.error_status_hint == 431:
        return RequestError(f"the headers have more than {MAX_HEAD_BYTES} bytes", code="headers_too_large")
    return RequestError("this is not a valid HTTP/1.1 request", code="invalid_http")
