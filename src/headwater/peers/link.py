"""One rank's connection to one peer, and the thread that serves it.

The thread sleeps until something is told to it or the peer answers. It lends tiles out of the own pool, sends them from
where they lie, and lets go of the loan when the kernel has them. Nothing is queued but names of chunks, so a peer that
is slow costs no memory; one that stops costs this thread one deadline, and the engine nothing.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from headwater.errors import HeadwaterError, PeerError, PeerGoneError, PeerRefusedError, PeerTimeoutError, WireError
from headwater.kv.topology import Shard
from headwater.peers.address import PeerAddress
from headwater.peers.caller import LinkSettings, PeerCaller
from headwater.peers.conversation import Conversation
from headwater.peers.outgoing import (
    PushBatch,
    PushTransfer,
    Sent,
    announced_encodings,
    consecutive,
    settle_put,
)
from headwater.peers.tiles import Held, Layout, alike, layouts_of, pieces_of
from headwater.peers.wire import Data, Put, Refusal, Stop, Type, encode_frame
from headwater.peers.write_queue import WriteQueue
from headwater.pool.space import Space
from headwater.stores.base import Loan, Status

log = logging.getLogger("headwater")

_FRAME_BYTES = 64 << 20
"""Of one data frame, about: what the peer notes and shows at a time, where the saver's groups are not smaller."""
_WRITE_BYTES = 128 << 20
"""The same of a one-sided write, which costs a question before it."""
_DIVIDED_BYTES = 8 << 20
"""From how much on a group of layers is divided among connections."""
_PATIENCE_S = 60.0
"""A transfer that nothing happens to for so long is dropped."""

Task = Callable[[], None]


class PeerLink:
    """See the module. `tell` may be called from any thread and never waits."""

    def __init__(
        self,
        address: PeerAddress,
        space: Space,
        shard: Shard,
        caller: PeerCaller,
        settings: LinkSettings,
        counts: Counter[str],
        *,
        on_device: bool = False,
    ) -> None:
        self.address = address
        self._space = space
        self._shard = shard
        self._on_device = on_device
        self._mine = replace(shard, replicas=1, replica=0)
        """All that this rank has, whichever of its replicas sends it."""
        self._caller = caller
        self._settings = settings
        self._counts = counts
        self.dead_until = 0.0
        self._inbox: deque[Task] = deque()
        self._talk = Conversation(address, caller, settings)
        self._writes = WriteQueue(self._talk, counts, self._while_writing)
        self._batches: list[PushBatch] = []
        self._by_key: dict[bytes, list[tuple[PushBatch, int]]] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="headwater-push", daemon=True)
        self._thread.start()

    # ---- from other threads -------------------------------------------------------------------------------------
    @property
    def is_dead(self) -> bool:
        """Whether the peer failed a moment ago: pushes to it are dropped at once."""
        return time.monotonic() < self.dead_until

    def tell(self, what: Task, *, always: bool = False) -> bool:
        """Have something done by the thread, in its turn; False where it has too much before it."""
        with self._lock:
            if self._is_closing or (len(self._inbox) >= self._settings.max_queued and not always):
                return False
            self._inbox.append(what)
            os.eventfd_write(self._wakeup, 1)
        return True

    def close(self, timeout_s: float) -> None:
        """Stop; open batches are dropped, and the peer aborts them. Idempotent."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                os.eventfd_write(self._wakeup, 1)
        connection, writer = self._talk.connection, self._talk.writer
        self._thread.join(timeout_s)
        # Not under a write: to the peer, the end of the connection means that none is on its way.
        if self._thread.is_alive() and connection is not None and writer is None:
            connection.shut()
            self._thread.join(timeout_s)

    # ---- the thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._is_closing:
                try:
                    self._wait()
                    self._step()
                except PeerError as error:
                    self._fail(error)
                except HeadwaterError as error:
                    self._fail(PeerError(str(error)))
                except Exception as error:
                    log.exception("a push to %s failed", self.address)
                    self._fail(PeerError(str(error)))
        finally:
            self._drop_all()
            self._talk.disconnect()
            with self._lock:
                self._is_closing = True
                os.close(self._wakeup)

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        if self._talk.connection is not None:
            if self._talk.connection.has_buffered:
                return
            poller.register(self._talk.connection.fileno(), select.POLLIN)
        wait_s = min(self._talk.silence_s / 4, 1.0) if self._batches or self._talk.awaits else 10.0
        due_s = min([batch.ask_at_s for batch in self._batches if not batch.number], default=math.inf)
        wait_s = max(0.0, min(wait_s, due_s - time.monotonic()))
        if not self._inbox:
            poller.poll(wait_s * 1000)
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return

    def _step(self) -> None:
        while self._inbox and not self._is_closing:
            self._inbox.popleft()()
            self._talk.hear()
        self._talk.hear()
        if self._is_closing:
            return
        now = time.monotonic()
        for batch in [b for b in self._batches if now - b.transfer.used_s > _PATIENCE_S]:
            self._counts["chunks_stale"] += batch.drop_from(0)
            self._finish(batch)
        for batch in [b for b in self._batches if not b.number and b.ask_at_s <= now]:
            self._ask(batch)
        self._talk.check_answers()
        if self._batches:
            self._talk.stay_heard()

    # ---- what is told -------------------------------------------------------------------------------------------
    def begin(self, batch: PushBatch) -> None:
        """Announce a batch to the peer."""
        if self.is_dead or batch.transfer.is_cancelled:
            self._counts["chunks_dropped"] += batch.drop_from(0)
            batch.transfer.tell()
            return
        self._follow(batch)
        self._ask(batch)
        # Before the peer has answered, where little is wasted should it have them: a write asks first, in any case.
        size = self._space.spec.extent_bytes(sum([chunk.num_tokens for chunk in batch.chunks]))
        if self._talk.writer is not None or size <= self._settings.eager_bytes:
            self._send_present(batch)

    def note(self, keys: Sequence[bytes], layers: range) -> None:
        """Layers of some chunks are in the own pool now."""
        touched: dict[PushBatch, list[int]] = {}
        for key in keys:
            for batch, i in self._by_key.get(key, ()):
                batch.ready[i].update(layers)
                touched.setdefault(batch, []).append(i)
        for batch, numbers in touched.items():
            batch.transfer.used_s = time.monotonic()
            if batch.is_announced:
                self._send_ready(batch, numbers)

    def lose(self, keys: Sequence[bytes]) -> None:
        """Some chunks will not be in the own pool, or not be complete."""
        for key in keys:
            for batch, i in list(self._by_key.get(key, ())):
                if not batch.states[i].is_final:
                    self._give_up(batch, i, "chunks_unsaved")

    def finish(self, transfer: PushTransfer) -> None:
        """Send whatever the own pool has of a transfer, noted here or not."""
        for batch in [b for b in self._batches if b.transfer is transfer]:
            if batch.is_announced:
                self._send_present(batch)

    def cancel(self, transfer: PushTransfer) -> None:
        """Drop what is left of a transfer."""
        transfer.is_cancelled = True
        for batch in [b for b in self._batches if b.transfer is transfer]:
            self._counts["chunks_cancelled"] += batch.drop_from(0)
            self._finish(batch)

    # ---- sending ------------------------------------------------------------------------------------------------
    def _follow(self, batch: PushBatch) -> None:
        self._batches.append(batch)
        for i, chunk in enumerate(batch.chunks):
            self._by_key.setdefault(chunk.key, []).append((batch, i))

    def _ask(self, batch: PushBatch) -> None:
        self._connect()
        chunks, takes = batch.chunks, self._talk.encodings
        batch.encodings = announced_encodings(self._space, self._mine, chunks, takes, on_device=self._on_device)
        self._counts["chunks_unreadable"] += batch.drop_from(len(batch.encodings))
        if not batch.encodings:
            self._finish(batch)
            return
        chunks = chunks[: len(batch.encodings)]
        batch.number = self._talk.next_number()
        batch.num_tries += 1
        put = Put(batch.number, batch.transfer.name, chunks, self._shard, batch.root_payload, batch.encodings)

        def answered(body: bytes) -> None:
            if len(body) != len(chunks) or max(body) > max(Status):
                raise WireError("an answer that does not fit its put")
            num_refused, again = settle_put(batch, [Status(code) for code in body])
            self._counts["chunks_refused"] += num_refused
            self._counts["chunks_there"] += batch.states.count(Sent.THERE)
            batch.is_announced = True
            if again is not None:
                self._put_again(batch, again, is_early=True)
            self._send_present(batch)

        self._talk.request(Type.PUT, put.encode(), answered)

    def _put_again(self, batch: PushBatch, first: int, *, is_early: bool = False) -> None:
        """Chunks from one on are not stored as they were announced, or it is too early for the peer to say whether it
        wants them: take that back, and announce them once more with the next step."""
        moved = batch.move_from(first, is_early=is_early)
        self._counts["chunks_moved"] += len(moved.chunks)
        self._counts["chunks_dropped"] += moved.states.count(Sent.DROPPED)
        self._abort(batch, first)
        if moved.is_open:
            self._follow(moved)
        if not batch.is_open:
            self._finish(batch)

    def _abort(self, batch: PushBatch, first: int) -> None:
        """Tell the peer that chunks from one on do not come."""
        if batch.number and self._talk.connection is not None:
            gone = Stop(batch.number, range(first, len(batch.encodings)))
            self._talk.request(Type.ABORT, gone.encode(), lambda body: None)

    def _send_present(self, batch: PushBatch) -> None:
        """Send what is in the own pool already, whether it was noted here or not."""
        wanted = [i for i, state in enumerate(batch.states) if not state.is_final and not self._is_sent(batch, i)]
        if wanted:
            loan = self._space.lend([batch.chunks[i] for i in wanted], self._mine)
            held = Held(loan, {number: row for row, number in enumerate(wanted)}, self._mine.layers)
            try:
                for i, place in zip(wanted, held.loan.places, strict=True):
                    if place is not None:
                        batch.ready[i].update(self._mine.layers)
                self._send_ready(batch, wanted, held)
            finally:
                held.loan.release()
        self._settle(batch, wanted)

    def _is_sent(self, batch: PushBatch, i: int) -> bool:
        return len(batch.sent[i]) == len(self._mine.layers)

    def _send_ready(self, batch: PushBatch, numbers: Sequence[int], held: Held | None = None) -> None:
        """Send the layers of some chunks that are ready and were not sent, in groups. `held`: a loan of all layers."""
        runs: dict[range, list[int]] = {}
        for i in numbers:
            if not batch.states[i].is_final:
                for run in consecutive(batch.ready[i] - batch.sent[i], self._mine.layers):
                    runs.setdefault(run, []).append(i)
                batch.ready[i].clear()
        for run, some in runs.items():
            layer_bytes = len(self._mine.heads) * self._space.spec.tile_bytes(self._space.chunk_tokens) * len(some)
            step = max(1, self._frame_bytes // layer_bytes)
            for first in range(run.start, run.stop, step):
                self._send_layers(batch, some, range(first, min(first + step, run.stop)), held)
        self._writes.finish()

    @property
    def _frame_bytes(self) -> int:
        return _FRAME_BYTES if self._talk.writer is None else _WRITE_BYTES

    def _send_layers(self, batch: PushBatch, wanted: Sequence[int], layers: range, held: Held | None) -> None:
        """Send a group of layers of some chunks. A chunk that is not in the own pool any more is given up."""
        todo = [i for i in wanted if not batch.states[i].is_final]
        chunks, encodings = [batch.chunks[i] for i in todo], [batch.encodings[i] for i in todo]
        layouts = layouts_of(self._space.spec, self._shard, chunks, encodings, layers)
        for group in alike(layouts).values():
            layout = layouts[group[0]]
            numbers = [todo[at] for at in group if not batch.states[todo[at]].is_final]
            if not layout.num_tiles or not numbers:
                continue
            if held is not None and held.has(numbers):
                self._send_lent(batch, numbers, layers, layout, held.part(numbers, layout.shard.layers))
                continue
            loan = self._space.lend([batch.chunks[i] for i in numbers], layout.shard)
            try:
                self._send_lent(batch, numbers, layers, layout, loan)
                self._writes.finish()
            finally:
                loan.release()

    def _send_lent(self, batch: PushBatch, numbers: Sequence[int], layers: range, layout: Layout, loan: Loan) -> None:
        """Send lent tiles in frames, over all connections; what could not be lent is given up, and what is stored in
        another way than was announced is announced once more."""
        sums, ends = loan.sums, list[int]()
        for row, (number, place) in enumerate(zip(numbers, loan.places, strict=True)):
            if place is None or loan.encodings[row] != batch.encodings[number]:
                ends.append(row)
        stop = ends[0] if ends else len(numbers)
        found = [(row, place) for row, place in enumerate(loan.places[:stop]) if place is not None]
        most = max(1, self._frame_bytes // layout.num_bytes)
        if self._talk.extra.is_open and len(found) * layout.num_bytes >= _DIVIDED_BYTES:
            most = min(most, -(-len(found) // (self._talk.extra.count + 1)))
        try:
            for at in range(0, len(found), most):
                some = found[at : at + most]
                rows = [row for row, _ in some]
                sent = [numbers[row] for row in rows]
                if self._talk.writer is not None:
                    data = Data(batch.number, layers, sent, sums[rows])
                    answered = partial(self._acknowledge, batch, sent, layers)
                    self._writes.write(data, [place for _, place in some], layout, answered)
                    self._note_sent(batch, sent, layers)
                    continue
                pieces = [piece for _, place in some for piece in pieces_of(place, layout)]
                self._send_data(batch, sent, layers, pieces, sums[rows], layout.num_bytes, at // most)
        finally:
            answers = self._talk.extra.finish()  # the loan ends after this
        self._talk.add_answers(answers)
        if ends and loan.places[stop] is None:
            self._give_up(batch, numbers[stop], "chunks_evicted")
        elif ends:
            self._put_again(batch, numbers[stop])

    def _send_data(
        self,
        batch: PushBatch,
        numbers: Sequence[int],
        layers: range,
        pieces: Sequence[memoryview],
        sums: npt.NDArray[np.uint64],
        chunk_bytes: int,
        turn: int,
    ) -> None:
        meta, size = Data(batch.number, layers, numbers, sums).encode(), chunk_bytes * len(numbers)
        answered = partial(self._acknowledge, batch, numbers, layers)
        # Not before the peer has answered the put: connections overtake each other.
        if batch.is_announced and self._talk.extra.takes(turn):
            frame = encode_frame(Type.DATA, meta, data_bytes=size)
            self._talk.extra.send(turn, frame, pieces, self._talk.deadline(size), answered)
            self._counts["extra_connection_bytes"] += size
        else:
            self._talk.request(Type.DATA, meta, answered, pieces, size)
        self._counts["bytes"] += size
        self._note_sent(batch, numbers, layers)

    def _while_writing(self) -> None:
        if self._is_closing:
            raise PeerError("this link is being closed")
        self._talk.stay_heard()

    def _note_sent(self, batch: PushBatch, numbers: Sequence[int], layers: range) -> None:
        for i in numbers:
            batch.sent[i].update(layers)
        self._talk.collect()  # answers must not pile up in the kernel

    def _acknowledge(self, batch: PushBatch, numbers: Sequence[int], layers: range, body: bytes) -> None:
        """The peer's answer to a group of layers: one status a chunk."""
        if len(body) != len(numbers):
            raise WireError("an answer that does not fit its data")
        lost = [i for i, code in zip(numbers, body, strict=True) if code and batch.states[i] == Sent.WANTED]
        for i in numbers:
            batch.acked[i].update(layers)
        if lost:
            self._counts["chunks_lost"] += batch.drop_from(min(lost))
        self._settle(batch, numbers)

    def _settle(self, batch: PushBatch, numbers: Sequence[int]) -> None:
        """Chunks whose layers were all acknowledged are done; a batch whose chunks all are is over."""
        for i in numbers:
            if batch.states[i] != Sent.WANTED:
                continue
            mine = self._shard.owned(batch.chunks[i].number)[0].layers
            if batch.acked[i].issuperset(mine):
                batch.states[i] = Sent.DONE
                self._counts["chunks_sent"] += 1
        if not batch.is_open:
            self._finish(batch)

    def _give_up(self, batch: PushBatch, first: int, why: str) -> None:
        self._counts[why] += batch.drop_from(first)
        if batch.is_announced and batch.is_open:
            self._abort(batch, first)
        if not batch.is_open:
            self._finish(batch)

    def _finish(self, batch: PushBatch) -> None:
        if batch not in self._batches:
            return
        self._forget(batch)
        if self._talk.connection is not None and batch.number:
            self._talk.request(Type.END, Stop(batch.number).encode(), lambda body: None)

    def _forget(self, batch: PushBatch) -> None:
        self._batches.remove(batch)
        for chunk in batch.chunks:
            left = [entry for entry in self._by_key.get(chunk.key, ()) if entry[0] is not batch]
            if left:
                self._by_key[chunk.key] = left
            else:
                self._by_key.pop(chunk.key, None)
        batch.transfer.tell()

    # ---- the connection -----------------------------------------------------------------------------------------
    def _connect(self) -> None:
        if self._talk.connection is None and self.is_dead:
            raise PeerError(f"{self.address} failed a moment ago")
        if self._talk.connect():
            self._counts["connected"] += 1
            carrier = "TCP" if self._talk.writer is None else "NIXL"
            log.info("pushes to %s go over %s", self.address, carrier)

    def _fail(self, error: PeerError) -> None:
        """The connection is of no use any more. Where it merely ended (the peer was restarted, most likely), everything
        is put once more over a new one; otherwise it is dropped, and the peer left alone for a while."""
        was_silent = isinstance(error, PeerRefusedError) and error.code == Refusal.SILENCE  # this process was stopped
        self._writes.forget()
        has_ended = self._talk.connection is not None and (was_silent or isinstance(error, PeerGoneError))
        self._talk.disconnect()
        if has_ended and not self._batches:
            return
        if has_ended:
            for batch in [b for b in self._batches if b.num_tries > 1]:
                self._counts["chunks_dropped"] += batch.drop_from(0)
                self._forget(batch)
            try:
                for batch in list(self._batches):
                    batch.again()
                    self._ask(batch)
                self._counts["reconnected"] += 1
                return
            except PeerError as other:
                error = other
                self._talk.disconnect()
        is_late = isinstance(error, PeerTimeoutError)
        self._talk.num_failures += 1
        self._counts["timeouts" if is_late else "failures"] += 1
        self.dead_until = time.monotonic() + self._settings.dead_s * (
            1 << min(3, self._talk.num_failures) if is_late else 1
        )
        log.warning("pushes to %s are dropped until it answers again: %s", self.address, error)
        self._drop_all()

    def _drop_all(self) -> None:
        for batch in list(self._batches):
            self._counts["chunks_dropped"] += batch.drop_from(0)
            self._forget(batch)
