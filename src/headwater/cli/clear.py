"""Removing: chunks from a pool, or the pool itself. Nothing goes that was not asked about, unless `--yes` was said."""

from __future__ import annotations

import os
import sys
from contextlib import closing

import typer

from headwater.cli.listing import Selection, by_root, check_unambiguous
from headwater.cli.output import one_line, plural, print_json, progress
from headwater.cli.target import find_existing, open_own
from headwater.errors import InvalidArgumentError
from headwater.stores.embedded import destroy, store_directory
from headwater.stores.url import format_size


def forget(url: str | None, selected: Selection, yes: bool, as_json: bool) -> None:
    """`headwater pool clear`."""
    with closing(open_own(url)) as store:
        before = store.stats()
        rows = [row for row in by_root(store.scan()) if selected(row.space, row.root)]
        check_unambiguous(selected, rows)
        if rows:
            what = f"{plural(sum(row.chunks for row in rows), 'chunk')} ({format_size(sum(row.bytes for row in rows))})"
            models = ", ".join(sorted({one_line(row.root.get("label") or "unnamed") for row in rows}))
            _confirm(f"Remove {what} of {models} from {before.name}?", yes)
        with progress("clearing") as advance:
            # Without rows nobody was asked, and what appeared meanwhile is not what was meant.
            removed = store.clear(None if selected.is_everything else selected, advance) if rows or yes else 0
        freed = max(0, before.used_bytes - store.stats().used_bytes)
    if as_json:
        print_json({"url": before.name, "removed_chunks": removed, "freed_bytes": freed, "removed_pool": False})
    elif removed:
        where = f" in {before.url}" if before.tiers else ""
        print(f"{before.name}: removed {plural(removed, 'chunk')}, {format_size(freed)} freed{where}")
    else:
        matches = "" if selected.is_everything else "; no chunk matches --tenant and --identity"
        print(f"{before.name}: nothing to remove{matches}")


def delete_pool(url: str | None, yes: bool, as_json: bool) -> None:
    """`headwater pool clear --remove`. Works on a pool that cannot be read, too."""
    found = find_existing(url)
    directory = store_directory(found)
    taken = sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory))
    _confirm(f"Delete {found} ({directory}, {format_size(taken)})?", yes)
    destroy(found)
    if as_json:
        print_json({"url": str(found), "removed_chunks": None, "freed_bytes": taken, "removed_pool": True})
    else:
        print(f"{found}: deleted, {format_size(taken)} freed")


def _confirm(question: str, yes: bool) -> None:
    """Ask before what cannot be undone; without a terminal to ask on, only `--yes` will do."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgumentError("nothing was removed: there is no terminal to ask for confirmation; pass --yes")
    if not typer.confirm(question, err=True):
        raise InvalidArgumentError("nothing was removed: not confirmed")
