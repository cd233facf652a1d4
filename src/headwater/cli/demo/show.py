"""The demo's outcome for people: a table, a line about the pool, and what to try next."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from headwater.cli.demo.cache import SPEC
from headwater.cli.demo.run import Outcome, ServerResult
from headwater.cli.output import plural, table
from headwater.stores.url import format_size

if TYPE_CHECKING:
    from rich.console import Console

_NEXT = ("stats", "ls", "verify")


def show(outcome: Outcome, out: Console) -> None:
    """Print it."""
    if outcome.note:
        out.print(f"{outcome.note}\n")
    out.print(f"A model of {SPEC}; {plural(outcome.num_tokens, 'token')} of its KV in {outcome.url}\n")
    rows = table("role", "topology", ">block", ">ranks", ">tokens", ">moved", ">time", ">bytes wrong")
    for result in outcome.results:
        rows.add_row(*_cells(result))
    out.print(rows)
    store = outcome.store
    used = f"{format_size(store.used_bytes)} of {format_size(store.data_bytes)}"
    out.print(f"\npool: {plural(store.chunks, 'chunk')}, {used}")
    if outcome.correct:
        out.print("Every byte that was read is the byte that was written, and no reader knew who wrote it.\n")
    else:
        out.print("WRONG: a reader did not find the whole prompt, or found other bytes than were written.\n")
    if outcome.kept:
        url = shlex.quote(outcome.url)
        clear = "clear --remove" if outcome.is_own else "clear --identity headwater-demo"
        out.print("Try next:", *(f"headwater pool {verb} {url}" for verb in (*_NEXT, clear)), sep="\n  ")
    else:
        out.print("The pool is gone again. To keep one and look at it: headwater pool demo --keep")


def _cells(result: ServerResult) -> tuple[str, ...]:
    topology = result.server.topology
    shape = (result.server.role, f"TP={topology.tp} × PP={topology.num_stages}", str(topology.block_size))
    moved = (f"{result.num_tokens:,}", format_size(result.num_bytes), f"{result.seconds * 1000:.0f} ms")
    return (*shape, str(len(result.reports)), *moved, f"{result.wrong_bytes:,}" if result.reads else "–")
