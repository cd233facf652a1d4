"""Signs of life of the engine process: a thread that tells the server, also during a long step, whether it still moves.

A step that takes a minute moves through a model, or computes; one that hangs waits at one place. So the thread looks
where the main thread is and how much it has computed, and says how long neither has changed. An endless loop that
computes cannot be told from work.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

HEARTBEAT_S = 0.25
WORK_S = 0.05
"""Time on a processor that counts as work. A thread that waits, even by looking again and again, takes less."""


class Heart:
    """Beats inside its `with` block, for the thread that made it. `send` gets how long that thread has stood still.

    Where the thread waits for a GPU it also takes time on a processor: `computes` must be False there.
    """

    def __init__(self, send: Callable[[float], None], *, computes: bool = True) -> None:
        self._send = send
        self._thread_id = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread_id) if computes else None
        self._num_turns = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()

    def turn(self) -> None:
        """The main loop has come round: a sign of life, wherever it is next seen."""
        self._num_turns += 1

    def _beat(self) -> None:
        seen: object = None
        worked_s, since_s = 0.0, time.monotonic()
        while not self._stopping.wait(HEARTBEAT_S):
            place = (self._num_turns, _place(sys._current_frames().get(self._thread_id)))
            now_worked_s = 0.0 if self._clock is None else time.clock_gettime(self._clock)
            if place != seen or now_worked_s - worked_s >= WORK_S:
                seen, worked_s, since_s = place, now_worked_s, time.monotonic()
            try:
                self._send(time.monotonic() - since_s)
            except OSError:  # the server is gone
                return


def _place(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    """Where a thread is: each call on its stack, and the instruction that it has reached."""
    place = []
    while frame is not None:
        place.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(place)
