"""A rank's pushes: a sender that begins with the first of them, and a thread that waits for flushes to end.

The thread that runs the model only says what is to be done; nothing it calls here waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from headwater.connector.orders import FlushOrder, PushOrder
from headwater.errors import HeadwaterError
from headwater.kv.hashing import ChunkRef
from headwater.peers.sender import PeerSender

log = logging.getLogger(__name__)

OnPushed = Callable[[str, int], None]
"""Called with a request and how many of its tokens are with the peer, when its flush is over."""
_LOOK_S = 0.05
"""Chunks that another process, or another request, brings into the own pool are looked for so often."""


class PushDesk:
    """One rank's pushes, and the sink of its saver. Thread-safe."""

    def __init__(self, make_sender: Callable[[], PeerSender], on_pushed: OnPushed) -> None:
        self._make_sender = make_sender
        self._on_pushed = on_pushed
        self._sender: PeerSender | None = None
        self._is_broken = False
        self._flushes: dict[str, tuple[FlushOrder, float]] = {}
        """By request: what is to be waited for, and until when."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_news = False
        self._thread: threading.Thread | None = None

    # ---- from the thread that runs the model --------------------------------------------------------------------
    def push(self, order: PushOrder) -> None:
        """Announce chunks to their peer. They are sent as soon as the own pool has them."""
        sender = self._open()
        if sender is not None:
            try:
                sender.push(order.transfer, order.peer, order.chunks)
            except HeadwaterError as error:
                log.warning("a prompt was not pushed: %s", error)

    def flush(self, order: FlushOrder) -> None:
        """Tell when the rest of a transfer is with its peer, or dropped."""
        sender = self._sender
        if sender is None or not order.deadline_s:
            if sender is not None:
                sender.end(order.transfer)
            if order.deadline_s:
                self._on_pushed(order.request_id, 0)
            with self._changed:
                self._flushes.pop(order.request_id, None)
            return
        with self._changed:
            self._flushes[order.request_id] = order, time.monotonic() + order.deadline_s
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="headwater-flush", daemon=True)
                self._thread.start()
        self._wake()

    # ---- from the saver's thread --------------------------------------------------------------------------------
    def wants(self, chunks: Sequence[ChunkRef]) -> bool:
        """Whether some of these chunks are being pushed."""
        return self._sender is not None and self._sender.wants(chunks)

    def noted(self, chunks: Sequence[ChunkRef], layers: range) -> None:
        """The own pool has these layers."""
        if self._sender is not None:
            self._sender.noted(chunks, layers)

    def lost(self, chunks: Sequence[ChunkRef]) -> None:
        """The own pool will not have these chunks."""
        if self._sender is not None:
            self._sender.lost(chunks)

    # ---- the end ------------------------------------------------------------------------------------------------
    def stats(self) -> Counter[str]:
        """The sender's figures; all zero before the first push."""
        return Counter() if self._sender is None else Counter(self._sender.stats())

    def close(self) -> None:
        """End all pushes; open flushes are told with what there is. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._sender is not None:
            self._sender.close()

    def _open(self) -> PeerSender | None:
        if self._sender is None and not self._is_broken and not self._is_closed:
            try:
                self._sender = self._make_sender()
            except HeadwaterError as error:
                self._is_broken = True
                log.warning("pushes from this rank are off: %s", error)
        return self._sender

    def _wake(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                wait_s = _LOOK_S if self._flushes else None
                self._changed.wait_for(lambda: self._has_news or self._is_closed, wait_s)
                self._has_news = False
                waiting, is_closed = list(self._flushes.values()), self._is_closed
            for order, end in waiting:
                self._look(order, is_late=is_closed or time.monotonic() >= end)
            if is_closed:
                return

    def _look(self, order: FlushOrder, *, is_late: bool) -> None:
        sender = self._sender
        assert sender is not None
        try:
            if not sender.push_on(order.transfer, self._wake) and not is_late:
                return
            num_tokens = sender.end(order.transfer)
        except Exception:
            log.exception("finishing a push failed")
            num_tokens = 0
        with self._changed:
            is_waited_for = self._flushes.pop(order.request_id, None) is not None
        if is_waited_for:
            self._on_pushed(order.request_id, num_tokens)
