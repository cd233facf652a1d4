"""How `headwater pool watch` looks: figures with small charts, the largest prefixes, and what happened lately.

Everything fits the window: rows are left out, never wrapped. Below 110 columns one part stands above the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwater.cli.output import age, one_line, plural
from headwater.stores.url import format_size

WIDE = 110
_BARS = "▁▂▃▄▅▆▇█"
_BLOCK_ROWS = 5
_STYLES = {
    "hit": "green",
    "saved": "blue",
    "copied": "blue",
    "removed": "yellow",
    "cleared": "yellow",
    "lost": "red",
    "breaker": "red",
}
_WORDS = {
    "saved": "save",
    "copied": "copy",
    "removed": "remove",
    "cleared": "clear",
    "lost": "gap",
    "attached": "join",
    "left": "leave",
}
_WAITING = {
    "absent": "There is no pool here yet. Waiting for one: any engine that uses it makes it.",
    "unreadable": "The pool cannot be read. Trying again.",
}
Points = Sequence[dict[str, Any]]


def draw_screen(look: dict[str, Any], points: Points, width: int, height: int) -> RenderableType:
    """The whole window."""
    lines: list[RenderableType] = [_title(look, width), Text()]
    if look["store"] is None:
        lines += [Text(_WAITING.get(look["pool"]["state"], "")), _cut(look["pool"]["why"], width, "dim")]
        return Group(*lines, Text(), Text("q ends", "dim"))
    figures = _figures(look, points, width)
    lines += [*figures, Text()]
    room = height - len(figures) - 4  # the title, two empty lines, and the last line stays free
    events = look["events"][::-1]
    if room < 6:  # a small window: what happens, as far as there is room for it
        rest = [_activity(events, width, room - 1)] if room > 1 else []
        return Group(*lines[: height - 1 - len(rest)], *rest)
    if width >= WIDE:
        sides = Table.grid(padding=(0, 3, 0, 0), expand=True)
        sides.add_column(ratio=3, no_wrap=True)
        sides.add_column(ratio=2, no_wrap=True)
        half = (width - 3) * 3 // 5
        sides.add_row(_prefixes(look, half, room - 1), _activity(events, width - 3 - half, room - 1))
        return Group(*lines, sides)
    upper = max(min(room - 3, len(look["prefixes"]) + 1, room // 2 + 1), 2)
    lower = room - upper - 1
    return Group(*lines, _prefixes(look, width, upper - 1), Text(), _activity(events, width, lower - 1))


def draw_block(look: dict[str, Any], points: Points, width: int) -> RenderableType:
    """One look for a pipe or a log."""
    if look["store"] is None:
        return Group(_title(look, width), Text(_WAITING.get(look["pool"]["state"], "") or look["pool"]["why"]), Text())
    events, width = look["events"][::-1], min(width, WIDE)
    parts = [_title(look, width), *_figures(look, points, width), _prefixes(look, width, _BLOCK_ROWS)]
    return Group(*parts, *([_activity(events, width, _BLOCK_ROWS)] if events else []), Text())


def _title(look: dict[str, Any], width: int) -> Text:
    title = Text("Headwater  ", "bold")
    title.append(one_line(", ".join(look["pool"]["urls"])), "cyan")
    if look["store"] is not None:
        servers = sum("scheduler" in process["role"] for process in look["processes"])
        open_by = _processes(look["store"]["members"])
        title.append(f"  {plural(servers, 'server')}, {open_by}", "dim")
    title.append(time.strftime("  %H:%M:%S", time.localtime(look["time_s"])), "dim")
    title.truncate(width, overflow="ellipsis")
    return title


def _processes(count: int) -> str:
    return f"{count:,} process" + ("" if count == 1 else "es")


def _figures(look: dict[str, Any], points: Points, width: int) -> list[RenderableType]:
    store, totals = look["store"], look["totals"]
    share = store["used_bytes"] / max(store["data_bytes"], 1)
    size, last = format_size, points[-1] if points else {}
    chart = max(10, min(40, width // 4))
    asked = totals["asked_tokens"]
    rate = last.get("hit_rate")
    rate = totals["matched_tokens"] / asked if rate is None and asked else rate
    wrong = (
        *(("damaged", store["damaged"]), ("dropped", totals["dropped_chunks"]), ("failed", totals["failed_loads"])),
        ("late", totals["late_fetches"]),
    )
    loaded = f", {totals['loaded_tokens']:,.0f} loaded" if totals["loaded_tokens"] != totals["matched_tokens"] else ""
    bad = "".join(f", {count:,.0f} {name}" for name, count in wrong if count)
    rows = [
        ("fill", _gauge(share, chart), f"{share:.0%}", f"{size(store['used_bytes'])} of {size(store['data_bytes'])}, "
         f"{plural(store['chunks'], 'chunk')}", "cyan"),
        ("hit rate", _spark([p["hit_rate"] for p in points], chart, 1.0), "–" if rate is None else f"{rate:.0%}",
         f"{totals['matched_tokens']:,.0f} of {asked:,.0f} tokens in all{loaded}", "green"),
        ("loaded", _spark([p["out_bytes_s"] for p in points], chart), f"{size(int(last.get('out_bytes_s', 0)))}/s",
         f"{size(int(totals['loaded_bytes']))} in {plural(int(totals['loads']), 'load')}", "green"),
        ("saved", _spark([p["in_bytes_s"] for p in points], chart), f"{size(int(last.get('in_bytes_s', 0)))}/s",
         f"{size(int(totals['saved_bytes']))} in {plural(int(totals['saves']), 'save')}", "blue"),
        ("evicted", _spark([p["evicted_s"] for p in points], chart), f"{last.get('evicted_s', 0):.1f}/s",
         f"{plural(store['evicted'], 'chunk')}{bad}", "yellow"),
    ]  # fmt: skip
    lines: list[RenderableType] = []
    for name, drawn, value, note, style in rows:
        line = Text(f"{name:<9}")
        line.append(drawn, style).append(f" {value:>11}  ", "bold").append(note, "dim")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines + [_tier(tier, width) for tier in look["tiers"]]


def _tier(tier: dict[str, Any], width: int) -> Text:
    line = Text(f"{'tier':<9}").append(one_line(tier["name"]), "cyan")
    state = ("breaker open", "bold red") if tier["is_breaker_open"] else ("in use", "green")
    asked = tier["hits"] + tier["misses"]
    rate = f"{tier['hits'] / asked:.0%} of {asked:,.0f} reads hit" if asked else "no reads"
    line.append("  ").append(*state).append(f"  {rate}, {format_size(int(tier['hit_bytes']))} read", "dim")
    waiting, trips = f"{tier['waiting']:,.0f} waiting", plural(int(tier["breaker_trips"]), "trip")
    line.append(f", {plural(int(tier['fetched']), 'chunk')} fetched, {waiting}, {trips}", "dim")
    line.truncate(width, overflow="ellipsis")
    return line


def _prefixes(look: dict[str, Any], width: int, num_rows: int) -> RenderableType:
    rows = look["prefixes"][: max(num_rows, 0)]
    if not rows:
        return _cut("Nothing is stored yet.", width, "dim")
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, width=width)
    has_tenant = any(row["tenant"] for row in rows)
    for name in ("prefix", ">tokens", ">size", ">hits", ">last used", "model", *(["tenant"] if has_tenant else [])):
        right = name.startswith(">")
        made.add_column(
            name.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=True,
            overflow="ellipsis",
            header_style="dim",
            ratio=None if right or name == "prefix" else 1,
        )
    for row in rows:
        tokens = f"{row['first_token']:,}–{row['num_tokens']:,}" if row["first_token"] else f"{row['num_tokens']:,}"
        used = age(int(row["last_used_s"] * 1e9))
        cells = [row["key"], tokens, format_size(row["num_bytes"]), f"{row['hits']:,}", used, row["model"] or "–"]
        made.add_row(*(Text(one_line(cell)) for cell in [*cells, *([row["tenant"] or "–"] if has_tenant else [])]))
    return made


def _activity(events: Sequence[dict[str, Any]], width: int, num_rows: int) -> RenderableType:
    lines = [Text("activity", "dim")]
    for entry in events[: max(num_rows, 0)]:
        when = time.strftime("%H:%M:%S ", time.localtime(entry["time_s"]))
        line = Text(when, "dim").append(
            f"{_WORDS.get(entry['kind'], entry['kind']):<6} ", _STYLES.get(entry["kind"], "")
        )
        line.append(one_line(_sentence(entry).rstrip()))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if not events:
        lines.append(_cut("Loads and saves show up here as they happen.", width, "dim"))
    return Group(*lines)


def _sentence(entry: dict[str, Any]) -> str:
    about = " ".join(filter(None, [entry["key"], entry["model"], entry["tenant"] and f"tenant {entry['tenant']}"]))
    match entry["kind"]:
        case "saved" | "copied":
            size = f", {format_size(entry['num_bytes'])}" if entry["num_bytes"] else ""
            where = f"→ {entry['tier']}  " if entry["kind"] == "copied" else ""
            return f"{where}{entry['num_tokens']:,} tokens{size}  {about}"
        case "hit":
            by = f" by {entry['count']:,} requests" if entry["count"] > 1 else ""
            return f"{entry['num_tokens']:,} tokens loaded{by}  {about}"
        case "removed":
            return f"{plural(entry['num_chunks'], 'chunk')} removed  {entry['key']}"
        case "cleared":
            return "chunks were cleared"
        case "lost":
            return "events came too fast to list them all"
        case "breaker":
            return f"{entry['tier']}: breaker {entry['text']}"
    return f"{entry['text']}  {about}"


def _gauge(share: float, width: int) -> str:
    filled = min(width, round(share * width))
    return "█" * filled + "░" * (width - filled)


def _spark(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """The newest values as bars, right-aligned; a space where there is none."""
    shown = values[-width:]
    most = max([value for value in shown if value is not None], default=0.0) if top is None else top
    bars = [" " if v is None else _BARS[min(int(v / most * 8), 7)] if most > 0 else _BARS[0] for v in shown]
    return "".join(bars).rjust(width)


def _cut(text: str, width: int, style: str = "") -> Text:
    line = Text(one_line(text), style)
    line.truncate(width, overflow="ellipsis")
    return line
