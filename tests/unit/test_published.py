"""Figures that processes publish beside a pool: what is written is read, the dead are told from the living, noise is
left out, and a forked child keeps its hands off."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.connector import published as module
from headwater.connector import totals as totals_module
from headwater.connector.metrics import POOL_METRICS, Source
from headwater.connector.published import Publisher, all_published, decode, encode, figures, published
from headwater.connector.stats import Distribution, TransferStats
from headwater.connector.totals import Totals
from headwater.pool.pool import Pool, open_pool
from headwater.stores import figures as files
from headwater.stores.embedded import destroy
from headwater.stores.figures import SLOT_BYTES, FiguresFile, read_figures
from headwater.stores.url import parse_url

from metric_cases import TRANSFER
from support import temporary_url, wait_until

LOADED = "headwater_pool_loaded_bytes_total"
LOADS = "headwater_pool_load_duration_seconds"
ASKED = "headwater_pool_asked_tokens_total"
FAST_S = 0.01


@pytest.fixture(params=["shm", "file"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pool]:
    with temporary_url(request.param, tmp_path) as url, open_pool(url) as opened:
        yield opened


def directory_of(pool: Pool) -> str:
    assert pool.directory is not None
    return pool.directory


def figures_files(directory: str) -> list[Path]:
    return sorted(path for path in Path(directory).iterdir() if path.name.startswith("figures-"))


def test_what_is_published_is_read(pool: Pool) -> None:
    stats = TRANSFER
    publisher = Publisher(pool, engine="vllm", model="org/name", every_s=FAST_S)
    publisher.add("rank 0", lambda: figures(stats, Source.WORKER))
    publisher.add("scheduler", lambda: figures(stats, Source.SCHEDULER))
    wait_until(lambda: any(record.role == "scheduler, rank 0" for record in published(pool)), what="figures")
    wait_until(lambda: ASKED in published(pool)[0].values, what="the scheduler's figures")
    (record,) = published(directory_of(pool))
    assert (record.pid, record.engine, record.model) == (os.getpid(), "vllm", "org/name")
    assert 0 < record.started_s <= record.updated_s
    assert record.values[LOADED] == {"": 101.0}
    assert record.values[ASKED] == {"": 108.0}
    assert record.times[LOADS] == stats.load_times
    assert record.times["headwater_pool_fetch_duration_seconds"] == stats.fetch_times
    # No step follows the last one of a burst: the thread still brings what it has counted.
    stats = replace(TRANSFER, loaded_bytes=1000)
    wait_until(lambda: published(pool)[0].values[LOADED] == {"": 1000.0}, what="later figures")
    publisher.close()
    publisher.close()
    assert published(pool) == []
    (last,) = all_published(pool)
    assert not last.is_alive
    assert last.values[LOADED] == {"": 1000.0}


def test_an_idle_process_writes_nothing(pool: Pool) -> None:
    asked = threading.Semaphore(0)

    def collect() -> tuple[module.Values, dict[str, Distribution]]:
        asked.release()
        # The publishing thread's own processor time is no news.
        return figures(replace(TRANSFER, thread_seconds=time.monotonic()), Source.WORKER)

    publisher = Publisher(pool, engine="vllm", model="", every_s=FAST_S)
    publisher.add("rank 0", collect)
    wait_until(lambda: bool(published(pool)), what="figures")
    before = published(pool)[0].updated_s
    for _ in range(10):
        assert asked.acquire(timeout=60)
    assert published(pool)[0].updated_s == before
    publisher.close()


def test_counts_that_begin_anew_go_on(pool: Pool) -> None:
    """A worker side counts anew in each epoch; what is published does not."""
    now = TransferStats(loaded_bytes=10)
    publisher = Publisher(pool, engine="vllm", model="", every_s=3600)
    publisher.add("rank 0", lambda: figures(now, Source.WORKER))
    publisher.flush()
    now = TransferStats(loaded_bytes=3)
    publisher.flush()
    assert published(pool)[0].values[LOADED] == {"": 13.0}
    publisher.close()


def test_memory_has_nobody_to_publish_to() -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        publisher = Publisher(pool, engine="vllm", model="")
        publisher.add("rank 0", lambda: figures(TRANSFER, Source.WORKER))
        publisher.flush()
        assert published(pool) == []
        publisher.close()


def test_files_are_private_and_go_with_the_pool(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?capacity=8MiB"
    with open_pool(url) as pool:
        publisher = Publisher(pool, engine="vllm", model="")
        publisher.add("rank 0", lambda: figures(TRANSFER, Source.WORKER))
        publisher.flush()
        (path,) = figures_files(directory_of(pool))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_size <= 2 * SLOT_BYTES
        assert pool.verify().clean
        publisher.close()
    assert path.exists()
    with open_pool(url):  # another process opens what is there
        pass
    destroy(parse_url(url))
    assert not (tmp_path / "pool").exists()


def test_the_files_of_the_dead_are_removed_by_the_next(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    where = directory_of(pool)
    dead = FiguresFile(where)
    dead.write(b"x")
    alive = FiguresFile(where)
    alive.write(b"y")
    dead.close()
    FiguresFile(where).close()
    assert len(figures_files(where)) == 3  # an exporter may want to see its last words
    monkeypatch.setattr(files, "KEEP_S", -1.0)
    last = FiguresFile(where)
    assert {path.name for path in figures_files(where)} == {f"figures-{alive.token}", f"figures-{last.token}"}
    alive.close()
    last.close()


CHILD = """
import sys
from headwater.stores.figures import FiguresFile
file = FiguresFile(sys.argv[1])
file.write(b"of a process that is killed")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_is_dead_and_a_suspended_one_is_not(pool: Pool) -> None:
    command = [sys.executable, "-c", CHILD, directory_of(pool)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        (found,) = read_figures(directory_of(pool))
        assert found.is_alive
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    (found,) = read_figures(directory_of(pool))
    assert not found.is_alive
    assert found.payload == b"of a process that is killed"


def test_a_forked_child_neither_writes_nor_keeps_its_parents_file_alive(pool: Pool) -> None:
    file = FiguresFile(directory_of(pool))
    file.write(b"the parent's")
    wake_read, wake_write = os.pipe()
    told_read, told_write = os.pipe()
    child = os.fork()
    if not child:
        os.close(wake_write)
        os.write(told_write, b"1" if file.write(b"the child's") else b"0")
        os.read(wake_read, 1)
        os._exit(0)
    assert os.read(told_read, 1) == b"0"
    assert [(found.is_alive, found.payload) for found in read_figures(directory_of(pool))] == [(True, b"the parent's")]
    file.close()
    assert not read_figures(directory_of(pool))[0].is_alive  # although the child lives
    os.close(wake_write)
    os.waitpid(child, 0)
    for fd in (wake_read, told_read, told_write):
        os.close(fd)


def test_a_torn_slot_leaves_the_one_before(pool: Pool) -> None:
    where = directory_of(pool)
    file = FiguresFile(where)
    for payload in (b"first", b"second"):
        file.write(payload)
    path = Path(where, f"figures-{file.token}")
    with path.open("r+b") as raw:
        raw.seek(33)  # the second write is in slot 0: tear it
        raw.write(b"\xff\xff")
    assert [found.payload for found in read_figures(where)] == [b"first"]
    file.write(b"third")
    assert [found.payload for found in read_figures(where)] == [b"third"]
    file.close()


def test_a_reader_beside_a_busy_writer_sees_whole_records_in_order(pool: Pool) -> None:
    file = FiguresFile(directory_of(pool))
    file.write(bytes(8) * 5000)

    def write() -> None:
        for number in range(1, 1500):
            file.write(number.to_bytes(8, "little") * 5000)

    writer = threading.Thread(target=write)
    writer.start()
    last, num_reads = 0, 0
    while writer.is_alive():
        for found in read_figures(directory_of(pool)):
            number = int.from_bytes(found.payload[:8], "little")
            assert found.payload == found.payload[:8] * 5000
            assert number >= last
            last, num_reads = number, num_reads + 1
    writer.join()
    assert num_reads
    assert read_figures(directory_of(pool))[0].payload[:8] == (1499).to_bytes(8, "little")
    file.close()


def test_a_reader_that_was_suspended_between_the_slots_does_not_go_back(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has an old copy of one slot, and finds the other one half written."""
    file = FiguresFile(directory_of(pool))
    for number in (1, 2, 3):
        file.write(b"%d" % number)
    assert [found.payload for found in read_figures(directory_of(pool))] == [b"3"]
    real, num_reads = os.pread, 0

    def pread(fd: int, length: int, offset: int) -> bytes:
        nonlocal num_reads
        num_reads += 1
        raw = real(fd, length, offset)
        if num_reads == 1:
            file.write(b"4")  # over the 2 that this reader holds now
        return bytes(len(raw)) if num_reads == 2 else raw

    monkeypatch.setattr(os, "pread", pread)
    assert [found.payload for found in read_figures(directory_of(pool))] == [b"4"]
    file.close()


@pytest.mark.parametrize(
    "noise",
    [b"", b"x", os.urandom(3 * SLOT_BYTES), b"\0" * SLOT_BYTES, b"hwfigs1\0" + b"\xff" * 100],
    ids=["empty", "short", "random", "zeros", "huge"],
)
def test_noise_is_left_out(pool: Pool, noise: bytes) -> None:
    where = directory_of(pool)
    bad = Path(where, "figures-00112233445566aa")
    bad.write_bytes(noise)
    bad.chmod(0o600)
    Path(where, "figures-other").write_bytes(noise)
    os.symlink("/etc/passwd", Path(where, "figures-00112233445566bb"))
    os.mkfifo(Path(where, "figures-00112233445566cc"), 0o600)
    good = FiguresFile(where)
    good.write(b"{}")
    assert [found.token for found in read_figures(where)] == [good.token]
    assert all_published(pool) == []  # and a record it is not
    good.close()
    for path in Path(where).glob("figures-*"):
        path.unlink()


def test_a_file_that_others_may_write_is_not_believed(pool: Pool) -> None:
    where = directory_of(pool)
    file = FiguresFile(where)
    file.write(b"x")
    os.chmod(Path(where, f"figures-{file.token}"), 0o666)
    assert read_figures(where) == []
    os.chmod(Path(where, f"figures-{file.token}"), 0o600)
    file.close()


def test_too_much_is_refused_and_a_deleted_file_is_noticed(pool: Pool) -> None:
    file = FiguresFile(directory_of(pool))
    with pytest.raises(ValueError, match="can be published"):
        file.write(b"x" * SLOT_BYTES)
    os.unlink(Path(directory_of(pool), f"figures-{file.token}"))
    assert file.write(b"x") is False
    file.close()


def test_a_full_device_leaves_what_was_said_before(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    file = FiguresFile(directory_of(pool))
    for payload in (b"first", b"second"):
        assert file.write(payload)
    real = os.pwrite
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:36], offset))
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                file.write(b"too much")
    assert [found.payload for found in read_figures(directory_of(pool))] == [b"second"]
    assert file.write(b"third")
    assert [found.payload for found in read_figures(directory_of(pool))] == [b"third"]
    file.close()


def test_no_directory_is_nobody(tmp_path: Path) -> None:
    assert published(str(tmp_path / "none")) == []


def test_what_cannot_be_is_left_out() -> None:
    base = json.loads(encode(record()))
    base["values"] |= {
        "headwater_pool_saved_bytes_total": {"": -1},
        "headwater_pool_load_seconds_total": {"": float("nan")},
        "headwater_pool_step_seconds_total": {"": 10**400},
        "headwater_pool_asked_tokens_total": {"": True},
        "headwater_no_such_total": {"": 1},
        "headwater_peer_connections": {"": 1},
        "headwater_tier_hits_total": {"": 1, "a\n\x1b[31mtier": 2},
        LOADS: {"": 3},
        "headwater_pool_matched_tokens_total": [1],
    }
    base["times"] = {LOADS: [[1, 2], 3.0], "headwater_pool_save_duration_seconds": [[1.5] * 14, 1.0]}
    found = decode(json.dumps(base).encode(), "t", is_alive=True)
    assert found is not None
    assert found.values == {LOADED: {"": 7.0}, "headwater_tier_hits_total": {"a\ufffd\ufffd[31mtier": 2.0}}
    assert found.times == {}
    assert decode(b"[" * 60000, "t", is_alive=True) is None
    assert decode(json.dumps(base | {"version": 2}).encode(), "t", is_alive=True) is None
    assert decode(json.dumps(base | {"pid": "1"}).encode(), "t", is_alive=True) is None
    assert len((decode(json.dumps(base | {"model": "x" * 9999}).encode(), "t", is_alive=True) or found).model) == 200


def record() -> module.Published:
    return module.Published("t", True, 7, "vllm", "rank 0", "m", 1.0, 2.0, {LOADED: {"": 7.0}}, {})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
names = st.sampled_from([metric.name for metric in POOL_METRICS])


@given(st.dictionaries(names, json_values), st.dictionaries(names, json_values), json_values)
def test_nothing_that_is_json_breaks_a_reader(values: object, times: object, text: object) -> None:
    said = json.loads(encode(record())) | {"values": values, "times": times, "model": text, "role": text}
    found = decode(json.dumps(said).encode(), "t", is_alive=True)
    assert found is not None
    Totals().add("t", found.values, found.times)


@given(st.binary(max_size=200))
def test_no_bytes_break_a_reader(raw: bytes) -> None:
    assert decode(raw, "t", is_alive=True) is None


# ---- adding up --------------------------------------------------------------------------------------------------
def test_counters_outlive_their_process_and_gauges_do_not() -> None:
    waiting, hits = "headwater_tier_waiting_chunks", "headwater_tier_hits_total"
    is_open = "headwater_tier_breaker_open"
    totals = Totals()
    totals.add("a", {hits: {"t": 5.0}, waiting: {"t": 2.0}, is_open: {"t": 1.0}}, {LOADS: Distribution((1, 2), 3.0)})
    totals.add("b", {hits: {"t": 7.0}, waiting: {"t": 4.0}, is_open: {"t": 1.0}}, {LOADS: Distribution((1, 0), 1.0)})
    assert totals.values == {hits: {"t": 12.0}, waiting: {"t": 6.0}, is_open: {"t": 1.0}}
    totals.keep_only(["b"])
    assert totals.values == {hits: {"t": 12.0}, waiting: {"t": 4.0}, is_open: {"t": 1.0}}
    totals.add("b", {hits: {"t": 8.0}, waiting: {"t": 0.0}, is_open: {"t": 0.0}}, {LOADS: Distribution((2, 0), 2.5)})
    assert totals.values == {hits: {"t": 13.0}, waiting: {"t": 0.0}, is_open: {"t": 0.0}}
    assert totals.times == {LOADS: Distribution((3, 2), 5.5)}


def test_who_is_out_of_sight_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(totals_module, "MAX_UNSEEN", 2)
    totals = Totals()
    for name in "abc":
        totals.add(name, {LOADED: {"": 1.0}}, {})
        totals.keep_only([])
    assert list(totals._unseen) == ["b", "c"]
    totals.add("b", {LOADED: {"": 1.0}}, {})  # comes back, and has counted no more
    assert totals.values == {LOADED: {"": 3.0}}
    totals.end("b")
    totals.add("b", {LOADED: {"": 5.0}}, {})  # another one of that name
    assert totals.values == {LOADED: {"": 8.0}}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100), st.booleans()), max_size=30))
def test_sums_never_go_down(said: list[tuple[str, int, bool]]) -> None:
    totals, before = Totals(), 0.0
    for process, number, ends in said:
        totals.add(process, {LOADED: {"": float(number)}}, {LOADS: Distribution((number,), float(number))})
        if ends:
            totals.end(process)
        now = totals.values[LOADED][""]
        assert now >= before
        assert totals.times[LOADS].counts == (int(now),)
        before = now
