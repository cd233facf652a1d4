"""What a long command is doing, and for how long: a live line on a terminal, plain lines with times elsewhere.

Everything goes to stderr. The clock starts when a `Steps` is made, so make it before anything slow is imported.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

_REDRAW_S = 0.2
_REMIND_S = 10.0
"""So often a step that goes on says so where there is no terminal."""
_CLEAR = "\r\x1b[K"


class Steps:
    """The steps of one command, one after another. Call it with what begins now; that ends the step before.

    It has a thread, which lives until `close`. Closing is idempotent and prints nothing that misleads: a step during
    which an error came is left as it was.
    """

    def __init__(self, out: TextIO | None = None, *, live: bool | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._live = self._out.isatty() if live is None else live
        self._started_s = time.monotonic()
        self._text, self._began_s, self._remind_s = "", self._started_s, self._started_s + _REMIND_S
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_telling, name="steps", daemon=True)
        self._thread.start()

    @property
    def elapsed_s(self) -> float:
        """Since the beginning of the command."""
        return time.monotonic() - self._started_s

    def __call__(self, text: str) -> None:
        """Begin a step."""
        with self._lock:
            self._finish()
            self._text, self._began_s = text, time.monotonic()
            self._remind_s = self._began_s + _REMIND_S
            if self._live:
                self._draw()
            else:
                self._print(text)

    def done(self) -> None:
        """The last step has ended well."""
        with self._lock:
            self._finish()

    def close(self) -> None:
        """Stop telling, and leave the terminal with an empty line."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            if self._live:
                self._write(_CLEAR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.done()
        self.close()

    def _keep_telling(self) -> None:
        while not self._closed.wait(_REDRAW_S):
            with self._lock:
                if self._text and self._live:
                    self._draw()
                elif self._text and time.monotonic() > self._remind_s:
                    self._remind_s += _REMIND_S
                    self._print("  … still at it")

    def _finish(self) -> None:
        if self._text and self._live:
            took_s = time.monotonic() - self._began_s
            self._write(f"{_CLEAR}[{self.elapsed_s:6.1f} s] {self._text}: {took_s:.1f} s\n")
        self._text = ""

    def _draw(self) -> None:
        """The step's line, cut to the terminal: one that wrapped could not be drawn over."""
        columns = shutil.get_terminal_size().columns
        took = f"{time.monotonic() - self._began_s:.0f} s"
        head = f"[{self.elapsed_s:6.1f} s] {self._text}"
        self._write(f"{_CLEAR}{head[: max(0, columns - len(took) - 3)]}, {took}")

    def _print(self, text: str) -> None:
        self._write(f"[{self.elapsed_s:6.1f} s] {text}\n")

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            pass  # nobody looks any more; the command goes on
