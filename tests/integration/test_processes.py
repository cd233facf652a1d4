"""Several processes on one store, killed and stopped at the worst moments."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard, Topology, whole_shard
from headwater.pool import open_pool
from headwater.stores.base import Loan, Status
from headwater.stores.embedded import janitor, store_directory
from headwater.stores.url import parse_size, parse_url

from harness import CHAOS_TOPOLOGIES, CHUNK, SPEC, Child, open_space, prompt, read_all
from support import empty_tiles, identity, local_tiles, temporary_url, wait_until

pytestmark = pytest.mark.slow
SHARD = whole_shard(SPEC)


def write(space, number: int, topology: Topology | None = None, deadline_s: float | None = None):  # type: ignore[no-untyped-def]
    chunks = space.keys(prompt(number)).chunks()
    statuses = []
    for shard in (topology or Topology()).shards(SPEC):
        statuses += space.write(chunks, shard, [local_tiles(SPEC, c, shard) for c in chunks], deadline_s=deadline_s)
    return statuses


def disk_usage(url: str) -> int:
    """Bytes that the store's files occupy, as `du` counts them."""
    total = 0
    for path in Path(store_directory(parse_url(url))).iterdir():
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


@pytest.mark.parametrize(("scheme", "seconds"), [("shm", 20), ("file", 12)])
def test_eight_processes_killed_and_stopped_at_random(scheme: str, seconds: int, tmp_path: Path) -> None:
    """Right bytes only, within the cap at every moment, and a clean store in the end. A minute of it with
    HEADWATER_ALL_ROWS."""
    seconds = 60 if os.environ.get("HEADWATER_ALL_ROWS") else seconds
    universe, capacity = 60, "2MiB"
    rnd = random.Random(4)
    with temporary_url(scheme, tmp_path, f"capacity={capacity}&deadline=0.5") as url:
        seed = 0
        children = [Child("chaos", url, seed := seed + 1, universe) for _ in range(8)]
        kills = stops = 0
        try:
            for child in children:
                child.expect("ready")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                assert disk_usage(url) <= parse_size(capacity)
                place = rnd.randrange(len(children))
                child = children[place]
                code = child.process.poll()
                assert code is None, f"a child ended by itself with {code} (2: damage, 3: wrong bytes)"
                if rnd.random() < 0.4:
                    child.__exit__()
                    children[place] = Child("chaos", url, seed := seed + 1, universe)
                    kills += 1
                else:
                    child.signal(signal.SIGSTOP)
                    time.sleep(rnd.random() * 0.1)
                    child.signal(signal.SIGCONT)
                    stops += 1
                time.sleep(rnd.random() * 0.1)
        finally:
            for child in children:
                child.__exit__()
        assert min(kills, stops) > 10, f"{kills} kills and {stops} stops are no test"
        with open_pool(url) as pool:
            report = pool.verify()
            stats = pool.stats().store
            assert report.clean, report
            assert report.chunks > 10
            assert stats.damaged == 0
            assert stats.pending_bytes == 0, "a dead writer's reservation was left behind"
            assert stats.evicted > 0, "the store was never full"
            extents = sum(info.num_bytes for info in pool.scan())
            assert extents <= stats.used_bytes <= stats.data_bytes
            assert disk_usage(url) <= parse_size(capacity)
            space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
            for number in range(universe):
                for topology in CHAOS_TOPOLOGIES:
                    read_all(space, number, topology)


def test_a_writer_killed_after_three_of_eight_heads(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url:
        space = open_space(url)
        with Child("write_heads_then_wait", url, 3) as child:
            child.expect("written")
            assert space.match(space.keys(prompt(0))).num_tokens == 0
            assert set(write(space, 0)) <= {Status.BUSY}, "its writer lives: nobody else may fill these extents"
            child.kill()
        assert space.match(space.keys(prompt(0))).num_tokens == 0
        assert set(write(space, 0)) == {Status.OK}
        assert space.match(space.keys(prompt(0))).num_tokens == len(prompt(0))
        read_all(space, 0, Topology(tp=2))
        store = space._store
        assert store.stats().pending_bytes == 0
        assert store.verify().clean
        assert store.stats().used_bytes == sum(-(-i.num_bytes // 256) * 256 for i in store.scan())
        store.close()


def test_heads_of_a_writer_that_is_not_done_are_lent_and_outlive_it(tmp_path: Path) -> None:
    """Three of eight heads, written by another process: read where they lie, also after that process was killed and
    its chunks were given to another, until the loan ends."""
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url:
        space = open_space(url)
        chunks, theirs = space.keys(prompt(0)).chunks(), Shard(range(SPEC.num_layers), range(3))
        with Child("write_heads_then_wait", url, 3) as child:
            child.expect("written")
            assert space.lend(chunks, Shard(theirs.layers, range(4))).places == [None] * len(chunks)
            loan = space.lend(chunks, theirs)
            check_loan(loan, chunks, theirs)
            child.kill()
        assert set(write(space, 0)) == {Status.OK}
        for number in range(1, 200):  # more than fits, so that every free byte is used
            write(space, number)
        assert space._store.stats().evicted > 0
        check_loan(loan, chunks, theirs)
        loan.release()
        for number in range(200):
            write(space, number)
        store = space._store
        assert store.stats().used_bytes == sum(-(-i.num_bytes // 256) * 256 for i in store.scan())
        assert store.verify().clean
        store.close()


def check_loan(loan: Loan, chunks: list[ChunkRef], shard: Shard) -> None:
    """Fail unless all of these tiles are lent, and right."""
    for chunk, place, sums in zip(chunks, loan.places, loan.sums, strict=True):
        assert place is not None
        extent = place.segment[place.offset : place.offset + SPEC.extent_bytes(chunk.num_tokens)]
        tiles = extent.reshape(SPEC.num_layers, SPEC.num_kv_heads, -1)[:, shard.heads.start : shard.heads.stop].copy()
        assert np.array_equal(tiles, local_tiles(SPEC, chunk, shard))
        assert sums.tolist() == [[checksum(tile) for tile in layer] for layer in tiles]


def test_two_groups_of_different_topology_on_the_same_chunks(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=8MiB") as url:
        space = open_space(url)
        with Child("write_everything", url, 8) as one, Child("write_everything", url, 2) as two:
            for child in (one, two):
                child.expect("ready")
            for child in (one, two):
                child.say("go")
            for child in (one, two):
                child.expect("done")
            # What one skipped as busy the other finished.
            for number in range(12):
                assert space.match(space.keys(prompt(number))).num_tokens == len(prompt(number))
                read_all(space, number, Topology(tp=4))
        assert space._store.verify().clean
        space._store.close()


def test_a_writer_stopped_past_its_reservation_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunk is given to another, its extent to nobody until it has finished; its commit is refused."""
    with temporary_url("shm", tmp_path, "capacity=2MiB") as url:
        space = open_space(url)
        store = space._store
        with Child("reserve_then_stop", url) as child:
            child.expect("reserved")
            child.wait_stopped()
            assert write(space, 1)[0] == Status.BUSY
            with monkeypatch.context() as patch:
                patch.setattr(janitor, "MAX_PENDING_NS", 0)
                assert set(write(space, 1)) == {Status.OK}
            for number in range(200):  # more than fits, so that every free byte is used
                write(space, number)
            assert store.stats().evicted > 0
            limbo = store.stats().used_bytes - sum(-(-i.num_bytes // 256) * 256 for i in store.scan())
            assert limbo == SPEC.extent_bytes(CHUNK), "the stopped writer's extent is held back"
            child.signal(signal.SIGCONT)
            child.expect("LOST")
            for number in range(200):
                read_all(space, number, Topology())
        for number in range(200):
            write(space, number)
        assert store.stats().used_bytes == sum(-(-i.num_bytes // 256) * 256 for i in store.scan())
        assert store.stats().damaged == 0
        assert store.verify().clean
        store.close()


def test_a_process_stopped_inside_a_transaction_costs_one_deadline(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url:
        space = open_space(url)
        write(space, 3)
        with Child("stop_inside_transaction", url) as child:
            child.expect("ready")
            child.wait_stopped()
            started = time.monotonic()
            assert set(write(space, 5, deadline_s=0.5)) == {Status.TIMEOUT}
            first = time.monotonic() - started
            assert first < 1.5, "the deadline of 0.5 s was not kept"
            started = time.monotonic()
            for number in (5, 6, 8):
                assert set(write(space, number, deadline_s=0.5)) == {Status.TIMEOUT}
            assert time.monotonic() - started < 0.5, "each further write paid the deadline again"
            # Reading, matching and leasing go on as if nothing were.
            assert read_all(space, 3, Topology(tp=2), "r") > 0
            # So does opening: a new process may not write, but it may read.
            with open_pool(url, group=99) as other:
                assert read_all(other.space(space.identity, SPEC, chunk_tokens=CHUNK), 3, Topology()) > 0
            child.signal(signal.SIGCONT)
            child.expect("woken")
            wait_until(lambda: set(write(space, 5)) <= {Status.OK, Status.EXISTS})
        assert space._store.verify().clean
        space._store.close()


def test_a_process_killed_inside_a_transaction_is_repaired_after(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url:
        space = open_space(url)
        write(space, 3)
        with Child("stop_inside_transaction", url) as child:
            child.expect("ready")
            child.wait_stopped()
            child.kill()
        assert set(write(space, 5)) == {Status.OK}
        assert space._store.stats().rebuilds == 1
        assert min(read_all(space, 3, Topology()), read_all(space, 5, Topology())) > 0
        assert space._store.verify().clean
        space._store.close()


def test_a_reader_killed_a_thousand_times_over(tmp_path: Path) -> None:
    """No slot, lease or room is lost, and the store goes on taking writes."""
    with temporary_url("shm", tmp_path, "capacity=2MiB") as url:
        space = open_space(url)
        write(space, 2)
        with Child("fork_readers", url, 1000) as child:
            child.expect("done")
            assert space._store.stats().members == 2
        for number in range(200):
            assert Status.FULL not in write(space, number)
        assert space.match(space.keys(prompt(2))).num_tokens < len(prompt(2)), "a dead reader's lease kept its chunk"
        assert space._store.verify().clean
        space._store.close()


def test_a_lease_held_while_everything_else_is_evicted(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=2MiB") as url:
        space = open_space(url)
        write(space, 11)
        with Child("lease_then_wait", url, 11) as child:
            child.expect(f"leased {len(prompt(11))}")
            for number in range(300, 500):
                write(space, number)
            assert space._store.stats().evicted > 100
            child.say("read")
            child.expect("read")
            assert space.match(space.keys(prompt(11))).num_tokens == len(prompt(11))
            child.kill()
        for number in range(500, 700):
            write(space, number)
        assert space.match(space.keys(prompt(11))).num_tokens < len(prompt(11))
        assert space._store.verify().clean
        space._store.close()


def test_a_forked_child_is_a_member_of_its_own(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=2MiB") as url:
        space = open_space(url)
        write(space, 1)
        pid = os.fork()
        if pid == 0:
            ok = read_all(space, 1, Topology()) > 0 and set(write(space, 2)) <= {Status.OK, Status.EXISTS}
            ok = ok and space._store.stats().members == 2
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert space._store.stats().members == 1
        assert read_all(space, 2, Topology()) > 0
        buffers = [empty_tiles(SPEC, c, SHARD) for c in space.keys(prompt(2)).chunks()]
        assert space.read(space.keys(prompt(2)).chunks(), SHARD, buffers) == [Status.OK] * len(buffers)
        assert space._store.verify().clean
        space._store.close()


def test_a_fetch_of_a_killed_process_does_not_hold_up_its_own_server(tmp_path: Path) -> None:
    """Its group lives on, in other processes: nobody but the dead one could have filled what it reserved."""
    group = 77
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url, open_pool(url, group=group) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(prompt(1)).chunks()
        with Child("reserve_alone_then_wait", url, group) as child:
            child.expect(" ".join(["OK"] * len(chunks)))
            assert {extent.status for extent in space.reserve(chunks, SHARD)} == {Status.BUSY}, "while it lives"
            child.kill()
            assert write(space, 1) == [Status.OK] * len(chunks)
        assert all(space.exists(chunks))
        assert pool.stats().store.pending_bytes == 0
        assert pool.verify().clean


def test_what_a_killed_fetch_has_reserved_is_swept(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url, open_pool(url, group=77) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        with Child("reserve_alone_then_wait", url, 77) as child:
            child.expect(" ".join(["OK"] * len(space.keys(prompt(1)).chunks())))
            core = pool._store._core  # type: ignore[attr-defined]
            assert core.transact(core.janitor.sweep, time.monotonic() + 30) == 0
            assert pool.stats().store.pending_bytes > 0
        assert core.transact(core.janitor.sweep, time.monotonic() + 30) > 0
        assert pool.stats().store.pending_bytes == 0
        assert pool.verify().clean
