"""Looking at a pool without changing it: figures, listings, and the full check (which does remove what is damaged)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, TypeVar

from rich.table import Table

from headwater.cli.listing import RootRow, Selection, by_root, chunk_as_dict, spec_of, weights_of
from headwater.cli.output import HUMAN_ROWS, age, console, one_line, plural, print_json, progress, table
from headwater.cli.target import open_existing, open_own, unreachable
from headwater.errors import BackendError
from headwater.stores.stats import ChunkInfo, StoreStats
from headwater.stores.url import format_size

Row = TypeVar("Row")


def show_stats(url: str | None, as_json: bool) -> None:
    """`headwater pool stats`."""
    away = unreachable(url)
    with closing(open_existing(url)) as store:
        stats = store.stats()
    if away and not stats.tiers:
        raise BackendError(*away.values())
    if as_json:
        print_json({**asdict(stats), "unreachable": away})
        return
    rows = table("", "", "")
    rows.columns[1].justify = "right"
    for row in _stats_rows(stats):
        rows.add_row(*row)
    console().print(stats.url, rows, sep="\n")
    if stats.tiers:
        tiers = table("tier", "written", "answers", "events of")
        for tier in stats.tiers:
            whose = {"fleet": "all hosts", "none": "none"}.get(tier.events, "this host")
            tiers.add_row(tier.url, tier.write, away.get(tier.url, "yes"), whose)
        console().print(tiers)


def _stats_rows(s: StoreStats) -> list[tuple[str, str, str]]:
    size = format_size
    return [
        ("capacity", size(s.capacity_bytes), "data and index together"),
        ("used", size(s.used_bytes), f"{s.used_bytes / max(s.data_bytes, 1):.1%} of {size(s.data_bytes)}"),
        ("chunks", f"{s.chunks:,}", "that can be found"),
        ("pending", size(s.pending_bytes), "being written"),
        (
            "index",
            size(s.index_used_bytes),
            f"{s.index_used_bytes / max(s.index_bytes, 1):.1%} of {size(s.index_bytes)}",
        ),
        ("processes", f"{s.members - 1:,}", "that have it open, not counting this one"),
        ("stored", f"{s.stored:,}", f"chunks since it was created, {size(s.stored_bytes)}"),
        ("packed", f"{s.packed_share:.1%}", f"of {size(s.stored_raw_bytes)} of KV, what it takes as it is stored"),
        ("evicted", f"{s.evicted:,}", "chunks, to free space"),
        ("damaged", f"{s.damaged:,}", "chunks, detected and removed"),
        ("aborted", f"{s.aborted:,}", "chunks whose write was aborted"),
        ("rebuilds", f"{s.rebuilds:,}", "of the index, after a crash or damage"),
    ]


# ---- listings ---------------------------------------------------------------------------------------------------
def list_roots(url: str | None, selected: Selection, limit: int | None, as_json: bool) -> None:
    """`headwater pool ls`."""
    name, chunks = _scan(url, selected)
    rows = by_root(chunks)
    if as_json:
        print_json({"url": name, "roots": [row.as_dict() for row in rows[:limit]], "total": len(rows)})
    else:
        _print_rows(name, rows, limit, _root_table)


def list_chunks(url: str | None, selected: Selection, limit: int | None, as_json: bool) -> None:
    """`headwater pool ls --chunks`."""
    name, chunks = _scan(url, selected)
    rows = sorted(chunks, key=lambda chunk: (-chunk.last_used_ns, chunk.number))
    if as_json:
        print_json({"url": name, "chunks": [chunk_as_dict(row) for row in rows[:limit]], "total": len(rows)})
    else:
        _print_rows(name, rows, limit, _chunk_table)


def _scan(url: str | None, selected: Selection) -> tuple[str, list[ChunkInfo]]:
    with closing(open_existing(url)) as store:
        return store.stats().name, [chunk for chunk in store.scan() if selected(chunk.space, chunk.root)]


def _print_rows(name: str, rows: list[Row], limit: int | None, draw: Callable[[list[Row]], Table]) -> None:
    shown = rows[: HUMAN_ROWS if limit is None else limit]
    if not rows:
        print(f"{name} holds nothing to list")
    if shown:
        console().print(draw(shown))
    if len(shown) < len(rows):
        print(f"… and {len(rows) - len(shown):,} more (--limit {len(rows)} shows all)")


def _root_table(rows: list[RootRow]) -> Table:
    owners = _owner_columns([row.root for row in rows])
    counters = (">chunks", ">tokens", ">bytes", ">pinned", ">leased", ">last used")
    made = table("model", "weights", "spec", *owners, *counters)
    for row in rows:
        digits = one_line(weights_of(row.space).rpartition(":")[2][:8] or "–")
        names = (_named(row.root, "label"), digits, spec_of(row.space), *(_named(row.root, owner) for owner in owners))
        counts = (f"{row.chunks:,}", f"{row.tokens:,}", format_size(row.bytes), f"{row.pinned:,}", f"{row.leased:,}")
        made.add_row(*names, *counts, age(row.last_used_ns))
    return made


def _chunk_table(rows: list[ChunkInfo]) -> Table:
    owners = _owner_columns([chunk.root for chunk in rows])
    made = table("key", "model", *owners, ">chunk", ">tokens", ">bytes", ">hits", "state", ">last used")
    for chunk in rows:
        flags = {"tail": chunk.is_tail, "pinned": chunk.pinned, "leased": chunk.leased}
        names = (chunk.key.hex()[:16], _named(chunk.root, "label"), *(_named(chunk.root, owner) for owner in owners))
        counts = (f"{chunk.number:,}", f"{chunk.num_tokens:,}", format_size(chunk.num_bytes), f"{chunk.hits:,}")
        made.add_row(*names, *counts, ", ".join(name for name in flags if flags[name]), age(chunk.last_used_ns))
    return made


def _owner_columns(roots: Sequence[dict[str, Any]]) -> list[str]:
    """Tenant and adapter, where any row has one: most pools have neither, and terminals are narrow."""
    return [name for name in ("tenant", "adapter") if any(root.get(name) for root in roots)]


def _named(root: dict[str, Any], name: str) -> str:
    return one_line(root.get(name) or "–")[: 12 if name == "adapter" else None]


# ---- checking ---------------------------------------------------------------------------------------------------
def verify_pool(url: str | None, as_json: bool) -> bool:
    """`headwater pool verify`: whether all was well."""
    started_s = time.monotonic()
    with closing(open_own(url)) as store, progress("verifying") as advance:
        name = store.stats().name
        report = store.verify(advance)
    if as_json:
        seconds = round(time.monotonic() - started_s, 3)
        print_json({"url": name, "clean": report.clean, **asdict(report), "seconds": seconds})
        return report.clean
    verified = f"{plural(report.chunks, 'chunk')}, {plural(report.tiles, 'tile')}, {format_size(report.bytes)}"
    print(f"{name}: {verified} verified")
    if report.damaged:
        lost = f", removed with {plural(report.lost, 'chunk')} that continued it" if report.lost else ", removed"
        print(f"damaged: {plural(report.damaged, 'chunk')}{lost}")
    for problem in report.problems:
        print(f"problem: {one_line(problem)}")
    for tier in report.unchecked:
        print(f"not checked: {one_line(tier)}")
    print("clean" if report.clean else "not clean")
    return report.clean
