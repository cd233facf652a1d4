"""What every command prints with: tables for people, one JSON object for programs, progress for the patient.

Results go to stdout; progress, questions and errors to stderr. What comes out of a store is shown, never interpreted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headwater.logs import is_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HUMAN_ROWS = 100
"""Rows that a listing shows when nobody says how many."""

_PIPE_WIDTH = 240
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def print_json(data: Mapping[str, Any]) -> None:
    """One object on one line: the last line of stdout."""
    print(json.dumps(data), flush=True)


def console() -> Console:
    """Stdout for people. A pipe has no width, so tables are not cut to fit one."""
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def table(*columns: str) -> Table:
    """A plain table. Columns whose names begin with `>` hold numbers: aligned right and never broken."""
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(columns))
    for column in columns:
        if column.startswith(">"):
            made.add_column(column.removeprefix(">"), justify="right", no_wrap=True)
        else:
            made.add_column(column, overflow="fold", min_width=len(column))
    return made


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, fed with (done, total); nothing at all where stderr is no terminal."""
    if not sys.stderr.isatty() or is_json():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def one_line(text: object) -> str:
    """Text from elsewhere, safe for a terminal: no line breaks, no escape sequences."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def age(when_ns: int) -> str:
    """How long ago, in the largest unit that fits."""
    seconds = max(0, time.time_ns() - when_ns) / 1e9
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"


def plural(count: int, noun: str) -> str:
    """`1 chunk`, `2,000 chunks`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
