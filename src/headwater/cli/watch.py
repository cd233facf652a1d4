"""`headwater pool watch`: a pool as it works, full screen in a terminal, block by block or as JSON elsewhere."""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headwater.cli.output import console
from headwater.cli.watch_screen import draw_block, draw_screen
from headwater.errors import UrlError
from headwater.stores.config import find_pool
from headwater.stores.url import DEFAULT_URL
from headwater.watch import PoolHistory, Watcher

_POLL_S = 0.2
"""How soon a key and a new size of the window are noticed."""
_QUIT = (b"q", b"Q", b"\x03", b"\x04")
"""Keys that end it."""


def watch_pool(url: str | None, interval_s: float, seconds: float | None, as_json: bool) -> None:
    """Look again and again, for so many seconds or until q or Ctrl-C. A pool that is not there is waited for."""
    target = DEFAULT_URL if url is None else url
    if find_pool(target).urls[0].scheme == "memory":
        raise UrlError(
            f"{target} is private to the process that made it; only pools that others can open can be watched"
        )
    watcher, history = Watcher(target), PoolHistory()
    end = None if seconds is None else time.monotonic() + seconds
    try:
        if as_json:
            _print_json(watcher, history, interval_s, end)
        elif sys.stdout.isatty():
            _show_screen(watcher, history, interval_s, end)
        else:
            _print_blocks(watcher, history, interval_s, end)
    finally:
        watcher.close()


def _looks(watcher: Watcher, history: PoolHistory, interval_s: float, end: float | None) -> Iterator[dict[str, Any]]:
    """Looks with `rates`, one after another; of events only those that are new."""
    seen = 0
    while True:
        started = time.monotonic()
        look = watcher.look()
        fresh = [entry for entry in look["events"] if entry["sequence"] > seen]
        seen = fresh[-1]["sequence"] if fresh else seen
        yield {**look, "events": fresh, "rates": history.add(look)}
        left = interval_s - (time.monotonic() - started)
        if end is not None and time.monotonic() + left >= end:
            return
        time.sleep(max(0.0, left))


def _print_json(watcher: Watcher, history: PoolHistory, interval_s: float, end: float | None) -> None:
    for look in _looks(watcher, history, interval_s, end):
        print(json.dumps(look), flush=True)


def _print_blocks(watcher: Watcher, history: PoolHistory, interval_s: float, end: float | None) -> None:
    out = console()
    for look in _looks(watcher, history, interval_s, end):
        out.print(draw_block(look, history.points, out.width))
        sys.stdout.flush()


def _show_screen(watcher: Watcher, history: PoolHistory, interval_s: float, end: float | None) -> None:
    from rich.live import Live

    out = console()
    with _keys() as pressed, Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while end is None or time.monotonic() < end:
            until = time.monotonic() + interval_s
            look = watcher.look()
            history.add(look)
            size = None
            while True:
                if out.size != size:
                    size = out.size
                    live.update(draw_screen(look, history.points, size.width, size.height), refresh=True)
                left = min(until, end or until) - time.monotonic()
                if left <= 0:
                    break
                if pressed(min(left, _POLL_S)):
                    return


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so long for a key, and says whether it is one that ends the watch."""
    if not sys.stdin.isatty():

        def wait(timeout_s: float) -> bool:
            time.sleep(timeout_s)
            return False

        yield wait
        return
    import os
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(timeout_s: float) -> bool:
        ready, _, _ = select.select([fd], [], [], timeout_s)
        if not ready:
            return False
        typed = os.read(fd, 1024)
        return not typed or any(key in typed for key in _QUIT)  # nothing at all: the terminal is gone

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
