"""Watching a pool: what a look says, what happened lately, history, and the terminal that shows it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headwater.cli.watch_screen import draw_block, draw_screen
from headwater.connector.metrics import Source
from headwater.connector.published import Publisher, figures
from headwater.connector.stats import TransferStats
from headwater.errors import UrlError
from headwater.kv.identity import Identity
from headwater.kv.topology import whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores import open_urls
from headwater.stores.embedded import EmbeddedStore, store_directory
from headwater.stores.events import Event, EventKind
from headwater.stores.url import parse_url
from headwater.watch import Look, PoolHistory, Watcher
from headwater.watch import watcher as watcher_module
from headwater.watch.activity import MAX_ENTRIES, Activity
from headwater.watch.processes import Processes

from support import gqa, local_tiles, temporary_url, wait_until

SRC = str(Path(__file__).resolve().parents[2] / "src")
SPEC = gqa(layers=2, heads=2, dim=8)
SHARD = whole_shard(SPEC)
EVIL = "org/\x1b[31mmodel\n<script>alert(1)</script>" + "x" * 300


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with temporary_url("shm", tmp_path, "capacity=8MiB") as made:
        yield made


def space_of(pool: Pool, label: str = "toy") -> Space:
    named = Identity(weights="sha256:" + "0" * 64, run_dtype="float16", kv_dtype="float16", label=label)
    return pool.space(named, SPEC, chunk_tokens=16)


def write(space: Space, tokens: list[int], tenant: bytes = b"") -> None:
    chunks = space.keys(tokens, tenant=tenant).chunks()
    space.write(chunks, SHARD, [local_tiles(SPEC, chunk, SHARD) for chunk in chunks])


def use(space: Space, tokens: list[int], request_id: str = "r") -> None:
    space.lease(space.match(space.keys(tokens)), request_id).release()


def kinds(look: Look) -> list[str]:
    return [entry["kind"] for entry in look["events"]]


# ---- looks ------------------------------------------------------------------------------------------------------
def test_a_save_and_a_hit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "SHARE", 0)  # however slow the machine is, it looks through the index each time
    watcher = Watcher(url)
    with open_pool(url) as pool:
        space = space_of(pool)
        first = watcher.look()
        assert (first["pool"]["state"], first["store"]["chunks"], first["prefixes"], first["events"]) == (
            "open",
            0,
            [],
            [],
        )
        write(space, list(range(40)), b"acme")
        write(space, list(range(32)))
        second = watcher.look()
        assert kinds(second) == ["saved", "saved"]
        saved = second["events"][0]
        assert (saved["num_tokens"], saved["num_chunks"], saved["model"]) == (40, 3, "toy")
        assert saved["num_bytes"] == SPEC.extent_bytes(16) * 40 // 16
        assert saved["tenant"]
        assert len(saved["key"]) == 8
        use(space, list(range(32)))
        third = watcher.look()
        assert kinds(third) == ["saved", "saved", "hit"]
        assert third["events"][-1]["num_tokens"] == 32
        assert {(row["num_tokens"], row["hits"]) for row in watcher.look()["prefixes"]} == {(40, 0), (32, 1)}
        assert sorted(row["num_tokens"] for row in third["holders"]) == [32, 40]
        pool.clear()
        cleared = watcher.look()
        assert "cleared" in kinds(cleared)
        assert cleared["prefixes"] == []
    watcher.close()
    json.dumps(third)


def test_a_pool_that_is_not_there_comes_goes_and_comes_again(url: str) -> None:
    watcher = Watcher(url)
    look = watcher.look()
    assert (look["pool"]["state"], look["store"]) == ("absent", None)
    assert not os.path.exists(store_directory(parse_url(url)))  # looking makes none
    with open_pool(url) as pool:
        write(space_of(pool), list(range(16)))
        assert watcher.look()["store"]["chunks"] == 1
    shutil.rmtree(store_directory(parse_url(url)))
    look = watcher.look()
    assert (look["pool"]["state"], look["prefixes"]) == ("absent", [])
    with open_pool(url):
        look = watcher.look()
        assert (look["pool"]["state"], look["store"]["chunks"], look["pool"]["generation"]) == ("open", 0, 2)
        write(space_of(pool := open_pool(url)), list(range(16)))
        pool.close()
        assert watcher.look()["store"]["chunks"] == 1
    shutil.rmtree(store_directory(parse_url(url)))
    with open_pool(url):  # between two looks
        look = watcher.look()
        assert (look["store"]["chunks"], look["prefixes"], look["pool"]["generation"]) == (0, [], 3)
    watcher.close()


def test_a_pool_that_cannot_be_read_is_said_to_be(url: str) -> None:
    directory = Path(store_directory(parse_url(url)))
    with open_pool(url):
        pass
    watcher = Watcher(url)
    index = (directory / "index").read_bytes()
    (directory / "index").write_bytes(b"noise" * 1000)
    look = watcher.look()
    assert look["pool"]["state"] == "unreadable"
    assert look["pool"]["why"]
    (directory / "index").write_bytes(index)
    wait_until(lambda: watcher.look()["pool"]["state"] == "open")
    watcher.close()


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_pool_that_is_damaged_beyond_reading_is_let_go(url: str, is_cut_off: bool) -> None:
    """Otherwise no engine could make a new one until the watch ends, and a look into what was cut off is a SIGBUS."""
    index = Path(store_directory(parse_url(url))) / "index"
    with open_pool(url) as pool:
        write(space_of(pool), list(range(16)))
    watcher = Watcher(url)
    assert watcher.look()["pool"]["state"] == "open"
    if is_cut_off:
        os.truncate(index, 4096)
    else:
        with index.open("r+b") as file:
            file.write(b"noise" * (index.stat().st_size // 5))
    assert watcher.look()["pool"]["state"] == "unreadable"
    with open_pool(url):
        look = watcher.look()
    assert (look["pool"]["state"], look["store"]["chunks"]) == ("open", 0)
    watcher.close()


def test_looks_change_nothing_though_the_clock_was_set_back(url: str) -> None:
    index = Path(store_directory(parse_url(url))) / "index"
    with open_pool(url) as pool:
        write(space_of(pool), list(range(64)))
        watcher = Watcher(url)
        assert watcher.look()["store"]["chunks"] == 4
        assert isinstance(pool.first_tier, EmbeddedStore)
        inside = pool.first_tier._core.index
        inside.touch_all(inside.used_heads().cell, time.time_ns() + 10**15)
        before, watcher._surveyed_at = index.read_bytes(), -1e9
        look = watcher.look()
        assert look["prefixes"][0]["last_used_s"] <= time.time()
        assert index.read_bytes() == before
        watcher.close()


def test_a_remote_pool_that_does_not_answer_is_not_an_empty_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    watcher = Watcher(f"redis://me:secret@127.0.0.1:{port}/0")
    for _ in range(5):
        look = watcher.look()
        assert (look["pool"]["state"], look["store"]) == ("unreadable", None)
        assert "does not answer" in look["pool"]["why"]
        assert "secret" not in json.dumps(look)
    watcher.close()


def test_no_pool_and_a_private_one() -> None:
    assert Watcher(None).look()["pool"]["state"] == "none"
    values = {"headwater_store_capacity_bytes": {"": 100.0}, "headwater_store_used_bytes": {"": 7.0}}
    look = Watcher("memory://", own=lambda: (values, {})).look()
    assert (look["pool"]["state"], look["store"]["used_bytes"]) == ("private", 7)
    assert Watcher("memory://", own=lambda: ({}, {})).look()["store"] is None
    with pytest.raises(UrlError):
        Watcher("nonsense://x")


def test_processes_come_and_go_and_their_sums_stay(url: str) -> None:
    with open_pool(url) as pool:
        watcher = Watcher(url)
        assert watcher.look()["processes"] == []
        stats = TransferStats(num_asked_tokens=100, num_matched_tokens=60)
        publisher = Publisher(pool, engine="vllm", model=EVIL)
        publisher.add("scheduler", lambda: figures(stats, Source.SCHEDULER))
        publisher.flush()
        look = watcher.look()
        (process,) = look["processes"]
        assert (process["engine"], process["role"], process["pid"]) == ("vllm", "scheduler", os.getpid())
        assert process["model"].isprintable()
        assert len(process["model"]) <= 80
        assert kinds(look) == ["attached"]
        publisher.close()
        look = watcher.look()
        assert look["processes"] == []
        assert kinds(look) == ["attached", "left"]
        assert (look["totals"]["asked_tokens"], look["totals"]["matched_tokens"]) == (100, 60)
        watcher.close()


def test_an_engine_that_publishes_is_not_counted_twice_while_its_pool_is_away(url: str) -> None:
    stats, directory = TransferStats(num_asked_tokens=100), store_directory(parse_url(url))
    with open_pool(url) as pool:
        publisher = Publisher(pool, engine="headwater", model="toy")
        publisher.add("scheduler", lambda: figures(stats, Source.SCHEDULER))
        publisher.flush()
        watcher = Watcher(url, own=lambda: figures(stats, Source.SCHEDULER))
        assert watcher.look()["totals"]["asked_tokens"] == 100
        os.rename(directory, f"{directory}-away")
        try:
            look = watcher.look()
        finally:
            os.rename(f"{directory}-away", directory)
        assert (look["pool"]["state"], look["totals"]["asked_tokens"]) == ("absent", 100)
        assert watcher.look()["totals"]["asked_tokens"] == 100
        watcher.close()
        publisher.close()


def test_a_pool_that_is_replaced_while_it_is_opened_is_found(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(url) as pool:
        write(space_of(pool), list(range(16)))

    def open_and_replace(*args: Any, **options: Any) -> Any:
        opened = open_urls(*args, **options)
        shutil.rmtree(store_directory(parse_url(url)))
        open_pool(url).close()
        return opened

    monkeypatch.setattr(watcher_module, "open_urls", open_and_replace)
    watcher = Watcher(url)
    assert watcher.look()["store"]["chunks"] == 1
    monkeypatch.undo()
    assert watcher.look()["store"]["chunks"] == 0
    watcher.close()


def test_tiers_are_those_that_engines_publish(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "SHARE", 0)
    with temporary_url("file", tmp_path, "capacity=8MiB") as below, open_pool(f"{url},{below}") as pool:
        names = [text.partition("?")[0] for text in (url, below)]
        publisher = Publisher(pool, engine="vllm", model="toy")
        publisher.add("rank 0", lambda: figures(TransferStats(), Source.WORKER))
        space, watcher = space_of(pool), Watcher(f"{url},{below}")
        assert [tier["name"] for tier in watcher.look()["tiers"]] == names
        write(space, list(range(48)))
        assert pool.flush()
        chunks = space.match(space.keys(range(48))).chunks
        with open_pool(url) as first:
            first.clear()
        statuses = space.read(chunks, SHARD, [space.empty(chunk, SHARD) for chunk in chunks], keep=False)
        assert {status.name for status in statuses} == {"OK"}
        publisher.flush()
        look = watcher.look()
        front, back = look["tiers"]
        assert (front["name"], back["name"]) == tuple(names)
        assert back["hits"] >= 1
        assert back["stored"] == 3
        assert not back["is_breaker_open"]
        history = PoolHistory()
        history.add(look)
        out = Console(file=io.StringIO(), width=200)
        out.print(draw_screen(look, history.points, 200, 40))
        assert names[1] in out.file.getvalue()  # type: ignore[attr-defined]
        publisher.close()
        watcher.close()


def test_an_open_breaker_is_told(url: str) -> None:
    activity, processes = Activity(), Processes()
    for is_open in (0.0, 1.0, 1.0, 0.0):
        values = {"headwater_tier_breaker_open": {"redis://cache:6379": is_open}}
        processes.look(None, (values, {}), activity)
    assert [(entry.kind, entry.text) for entry in activity.entries] == [("breaker", "opened"), ("breaker", "closed")]


def test_the_index_is_not_looked_through_all_the_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(url) as pool:
        space, watcher = space_of(pool), Watcher(url)
        watcher.look()
        num_looks = 0
        surveyor: Any = watcher._surveyor
        refresh = surveyor.refresh

        def counted() -> None:
            nonlocal num_looks
            num_looks += 1
            refresh()

        monkeypatch.setattr(surveyor, "refresh", counted)
        for _ in range(20):
            watcher.look()
        assert num_looks == 0  # nothing has happened
        watcher._survey_cost_s = 1000.0
        write(space, list(range(16)))
        for _ in range(20):
            watcher.look()
        assert num_looks == 0  # something has, but the last time took long
        watcher._survey_cost_s = 0.0
        watcher.look()
        assert num_looks == 1
        watcher.close()


# ---- what happened ----------------------------------------------------------------------------------------------
def stored(number: int, kind: EventKind = EventKind.STORED, key: int = 1) -> Event:
    return Event(1, kind, "shm", bytes([key]) * 32, number, 16, time.time_ns())


def test_chunks_of_one_save_are_one_entry() -> None:
    activity = Activity()
    events = [stored(0), stored(1), stored(2), stored(0, key=2), *[stored(n, EventKind.REMOVED) for n in (5, 1, 9)]]
    activity.add_events([*events, stored(1)], lambda key: None, "shm")
    found = [(entry.kind, entry.num_chunks, entry.num_tokens) for entry in activity.entries]
    assert found == [("saved", 3, 48), ("saved", 1, 16), ("removed", 3, 48), ("saved", 1, 16)]


def test_what_is_stored_in_a_lower_tier_is_a_copy_and_no_second_save() -> None:
    activity = Activity()
    copies = [event._replace(tier="redis") for event in (stored(0), stored(1))]
    activity.add_events([stored(0), stored(1), *copies], lambda key: None, "shm")
    assert [(entry.kind, entry.tier, entry.num_chunks) for entry in activity.entries] == [
        ("saved", "shm", 2),
        ("copied", "redis", 2),
    ]
    lines = shown(made_look(1e9, events=[asdict(entry) for entry in activity.entries]))
    assert any("save   32 tokens" in line for line in lines)
    assert any("copy   → redis  32 tokens" in line for line in lines)


def shown(look: Look) -> list[str]:
    out = Console(file=io.StringIO(), width=140, color_system=None)
    return ["".join(part.text for part in line) for line in out.render_lines(draw_block(look, [], 140), pad=False)]


def test_tokens_that_the_pool_had_and_that_were_loaded_are_told_apart() -> None:
    found = {"asked_tokens": 1300.0, "matched_tokens": 1203.0}
    (line,) = [line for line in shown(made_look(1e9, **found, late_fetches=1.0)) if line.startswith("hit rate")]
    assert "93%  1,203 of 1,300 tokens in all, 0 loaded" in line
    (line,) = [line for line in shown(made_look(1e9, **found, loaded_tokens=1203.0)) if line.startswith("hit rate")]
    assert line.rstrip().endswith("1,203 of 1,300 tokens in all")
    assert any("0 chunks, 1 late" in line for line in shown(made_look(1e9, **found, late_fetches=1.0)))


def test_one_is_not_many() -> None:
    look = made_look(1e9, tiers=[tier(1, 1) | {"breaker_trips": 1.0, "fetched": 1.0}])
    (line,) = [text for text in shown(look) if text.startswith("tier")]
    assert "1 chunk fetched, 0 waiting, 1 trip" in line
    assert "trips" not in line


@pytest.mark.parametrize("kind", [EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED])
def test_what_an_event_calls_its_tier_can_be_printed(kind: EventKind) -> None:
    activity = Activity()
    activity.add_events([Event(1, kind, "\x1b[31m\n", b"k" * 32, 0, 4)], lambda key: None, "shm")
    assert activity.entries[0].tier == "\ufffd[31m\ufffd"


def test_the_list_is_bounded_and_lost_events_are_told() -> None:
    activity = Activity()
    activity.add_events([stored(0, key=number % 200 + 1) for number in range(1000)], lambda key: None, "shm")
    assert len(activity.entries) == MAX_ENTRIES
    activity.add_events([Event(1, EventKind.LOST, "")], lambda key: None, "shm")
    assert activity.entries[-1].kind == "lost"
    assert [entry.sequence for entry in activity.entries][-1] == 1001


# ---- history ----------------------------------------------------------------------------------------------------
def made_look(time_s: float, **changes: Any) -> Look:
    names = ("asked_tokens", "matched_tokens", "loaded_tokens", "loaded_bytes", "saved_bytes", "loads", "saves")
    names += ("dropped_chunks", "failed_loads", "late_fetches")
    fields = ("used_bytes", "data_bytes", "chunks", "evicted", "damaged", "members")
    return {
        "time_s": time_s,
        "pool": {"urls": ["shm:///x"], "state": "open", "why": "", "generation": changes.get("generation", 1)},
        "store": {name: changes.get(name, 0) for name in fields},
        "totals": {name: changes.get(name, 0.0) for name in names},
        "tiers": changes.get("tiers", []),
        "processes": [],
        "prefixes": changes.get("prefixes", []),
        "holders": [],
        "events": changes.get("events", []),
    }


def test_rates_are_of_the_last_seconds() -> None:
    history = PoolHistory(max_points=20)
    assert history.add(made_look(100.0))["hit_rate"] is None
    point = history.add(made_look(102.0, asked_tokens=100.0, matched_tokens=50.0, loaded_bytes=4096.0, evicted=8))
    assert (point["hit_rate"], point["out_bytes_s"], point["in_bytes_s"], point["evicted_s"]) == (0.5, 2048.0, 0.0, 4.0)
    point = history.add(made_look(140.0, asked_tokens=100.0, matched_tokens=50.0))
    assert point["hit_rate"] is None  # nobody has asked for half a minute
    assert history.add(made_look(141.0, generation=2))["evicted_s"] == 0.0
    assert [point["number"] for point in history.since(2)] == [3, 4]
    for number in range(100):
        history.add(made_look(200.0 + number))
    assert len(history.points) == 20


def tier(hits: float, misses: float) -> dict[str, Any]:
    rest = dict.fromkeys(("hit_bytes", "fetched", "stored", "stored_bytes", "failed", "breaker_trips", "waiting"), 0.0)
    return {"name": "redis://cache:6379", "is_breaker_open": True, "hits": hits, "misses": misses, **rest}


def test_a_clock_that_is_set_back_is_no_burst() -> None:
    history = PoolHistory()
    history.add(made_look(1000.0, loaded_bytes=0.0))
    history.add(made_look(1002.0, loaded_bytes=4096.0))
    assert history.add(made_look(900.0, loaded_bytes=8192.0))["out_bytes_s"] == 0.0
    assert [point["time_s"] for point in history.points] == [900.0]  # no other one is before now
    assert history.add(made_look(902.0, loaded_bytes=8192.0 + 2048.0))["out_bytes_s"] == 1024.0


def test_each_tier_has_a_rate() -> None:
    history = PoolHistory()
    history.add(made_look(100.0, tiers=[tier(10, 10)]))
    point = history.add(made_look(101.0, tiers=[tier(13, 11)]))
    assert point["tier_rates"] == {"redis://cache:6379": 0.75}


# ---- the terminal -----------------------------------------------------------------------------------------------
PREFIX = {"key": "0123abcd", "model": "模型" * 30, "tenant": EVIL, "first_token": 10**6, "num_tokens": 10**9}
PREFIX |= {"num_chunks": 9, "num_bytes": 10**13, "branches": 3, "hits": 10**9, "last_used_s": 1.0}
ENTRY = {"sequence": 1, "time_s": 1e9, "key": "0123abcd", "tier": "shm", "model": "模型" * 30, "tenant": EVIL}
ENTRY |= {"num_chunks": 2, "num_tokens": 10**6, "num_bytes": 10**9, "count": 7, "text": EVIL}
ALL_KINDS = ("saved", "copied", "hit", "removed", "cleared", "lost", "attached", "left", "breaker")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (109, 30), (110, 24), (200, 60), (40, 12)])
@pytest.mark.parametrize("num_rows", [0, 1, 36])
@pytest.mark.parametrize("num_tiers", [0, 2])
def test_the_screen_fits(width: int, height: int, num_rows: int, num_tiers: int) -> None:
    events = [{**ENTRY, "kind": kind} for kind in ALL_KINDS for _ in range(num_rows)]
    sizes: dict[str, Any] = {"used_bytes": 3 << 40, "data_bytes": 4 << 40, "chunks": 10**7, "evicted": 10**9}
    look = made_look(1e9, prefixes=[PREFIX] * num_rows, events=events, tiers=[tier(1e6, 1e6)] * num_tiers, **sizes)
    history = PoolHistory()
    for number in range(300):
        history.add({**look, "time_s": 1e9 + number})
    out = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    lines = out.render_lines(draw_screen(look, history.points, width, height), pad=False)
    assert len(lines) <= height
    text = ["".join(segment.text for segment in line) for line in lines]
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)
    assert "fill" in text[2]
    assert not any("\x1b" in line for line in text)
    assert height < 15 or any("activity" in line for line in text)
    out.print(draw_block(look, history.points, width))


class Terminal:
    """`headwater pool watch` in a terminal of its own."""

    def __init__(self, *args: str, size: tuple[int, int] = (24, 80)) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.before = termios.tcgetattr(inner)
        environment = os.environ | {"PYTHONPATH": SRC, "TERM": "xterm-256color"}
        command = [sys.executable, "-m", "headwater", "pool", "watch", *args]
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True, close_fds=True
        )
        self._inner = inner
        self.shown = ""

    def shows(self, text: str) -> bool:
        """Whether that was shown so far."""
        while select.select([self._fd], [], [], 0)[0]:
            self.shown += os.read(self._fd, 65536).decode("utf-8", "replace")
        return text in self.shown

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def end(self) -> int:
        """Wait for its end, reading meanwhile; how it ended."""
        wait_until(lambda: self.shows("") and self.process.poll() is not None, what="the end")
        code = self.process.wait()
        self.shows("")
        assert termios.tcgetattr(self._inner)[3] == self.before[3]  # echo and lines as before
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)
        os.close(self._inner)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["q", "interrupt"])
def test_the_terminal_shows_a_pool_as_it_comes_and_works(url: str, key: str) -> None:
    terminal = Terminal(url, "--interval", "0.1")
    try:
        wait_until(lambda: terminal.shows("There is no pool here yet"), what="it waits")
        with open_pool(url) as pool:
            space = space_of(pool, "org/toy")
            wait_until(lambda: terminal.shows("Nothing is stored yet"), what="the pool is seen")
            write(space, list(range(64)))
            wait_until(lambda: terminal.shows("64 tokens, "), what="a save")
            use(space, list(range(64)))
            wait_until(lambda: terminal.shows("64 tokens loaded"), what="a hit")
            terminal.press("x")  # means nothing
            assert terminal.process.poll() is None
            if key == "q":
                terminal.press("q")
            else:
                terminal.process.send_signal(signal.SIGINT)
            assert terminal.end() == (0 if key == "q" else 130)
            assert "\x1b[?1049l" in terminal.shown  # the window shows again what it did before
            assert "Traceback" not in terminal.shown
    finally:
        terminal.close()


@pytest.mark.slow
def test_a_pipe_gets_blocks_or_json(url: str) -> None:
    with open_pool(url) as pool:
        write(space_of(pool), list(np.arange(48).tolist()))
        command = [sys.executable, "-m", "headwater", "pool", "watch", url, "--interval", "0.1", "--seconds", "0.3"]
        environment = os.environ | {"PYTHONPATH": SRC}
        plain = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        assert "\x1b" not in plain.stdout
        assert "1 process" in plain.stdout
        assert " 48 " in plain.stdout
        found = subprocess.run(
            [*command, "--json"], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        looks = [json.loads(line) for line in found.stdout.splitlines()]
        assert looks[0]["store"]["chunks"] == 3
        assert looks[0]["rates"]["number"] == 1
    refused = subprocess.run([*command[:5], "memory://"], env=environment, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    assert "private" in refused.stderr
