"""The pool fails while requests run: deleted, full of noise, silent, or its writer killed. Answers stay right and come.

A request waits for the pool no longer than its deadlines say, and then computes what it has not got. A silent pool is
silent for far longer than any of these tests may take, so waiting for it is noticed on the slowest machine.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from headwater.connector import lookups
from headwater.engine import executor
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.errors import ModelError
from headwater.models.catalog import find_in_catalog
from headwater.models.checkpoint import open_checkpoint
from headwater.pool import Pool, open_pool
from headwater.stores import open_store
from headwater.stores.embedded import destroy, store_directory
from headwater.stores.url import parse_url
from headwater.transfer.load import GRACE_S
from headwater.transfer.save import Saver
from headwater.transfer.save_job import SaveRequest

from engine_models import Comparison, Reference
from harness import Child
from pool_cases import (
    Oracle,
    check_tokens,
    generate,
    make_oracle,
    nothing_left,
    small_config,
)
from pool_waits import wait_saved
from support import WAIT_S, wait_until

pytestmark = pytest.mark.slow

LOAD_DEADLINE_S = 2.0
SILENCE_S = 3600.0
TOGETHER = 1.75
"""Deadlines that each of three requests may wait where all wait at once. One after another they would wait for two."""
NUM_SAID = 12
totals = Comparison()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory)


@pytest.fixture
def pool_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name = f"headwater-test-{secrets.token_hex(6)}"
    url = f"shm:///{name}?capacity=64MiB" if request.param == "shm" else f"file://{tmp_path}/{name}?capacity=64MiB"
    yield url
    destroy(parse_url(url))


@pytest.fixture(autouse=True)
def _short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this module wait two seconds for their KV instead of five."""
    usual = EngineConfig.connector.fget  # type: ignore[attr-defined]

    def connector(config: EngineConfig) -> Any:
        made = usual(config)
        return made and replace(made, load_deadline_s=LOAD_DEADLINE_S)

    monkeypatch.setattr(EngineConfig, "connector", property(connector))


def on_a_pool(cases: str, *names: str) -> pytest.MarkDecorator:
    """Each case in words: where the pool is, how the engine loads, and what else the test wants to know."""
    rows = [tuple(case.split()) for case in cases.split(";")]
    ids = [" ".join(row) for row in rows]
    return pytest.mark.parametrize(("pool_url", "load", *names), rows, indirect=["pool_url"], ids=ids)


def pool_files(url: str) -> list[Path]:
    return sorted(Path(store_directory(parse_url(url))).iterdir())


def fill(engine: Engine, references: list[Reference]) -> None:
    """Ask everything once, so that the pool has it and the engine itself forgets it."""
    generate(engine, references)
    assert engine.drain_saves(WAIT_S)
    engine.reset_prefix_cache()


def check_no_leases(url: str) -> None:
    with open_pool(url) as pool:
        wait_until(lambda: not any(chunk.leased for chunk in pool.scan()), what="all leases are released")
        wait_until(lambda: pool.stats().store.pending_bytes == 0, what="nothing is pending")


# Files


@on_a_pool("shm async; shm layerwise; shm blocking; file async")
def test_the_files_are_deleted(load: str, pool_url: str, oracle: Oracle) -> None:
    path, references = oracle(4)
    with nothing_left(), Engine(small_config(path, pool=pool_url, pool_load=load)) as engine:
        fill(engine, references)
        steps = chain(repeat(lambda: None, 3), [lambda: shutil.rmtree(store_directory(parse_url(pool_url)))])
        got, _ = generate(engine, references, steps)
        check_tokens(f"{load}, deleted", references, got, totals)
        engine.reset_prefix_cache()
        got, _ = generate(engine, references)
        check_tokens(f"{load}, after", references, got, totals)
        # Whoever comes now makes a new pool, while the old one's users go on with theirs.
        with Engine(small_config(path, pool=pool_url, pool_load=load)) as other:
            fill(other, references)
            got, cached = generate(other, references)
            check_tokens(f"{load}, new", references, got, totals)
            assert cached[0] >= 512
        check_no_leases(pool_url)


@pytest.mark.parametrize("ranks", [1, 2])
@on_a_pool("shm async")
def test_a_step_that_is_interrupted_before_it_begins(
    load: str, pool_url: str, ranks: int, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are the next prompt's, whose KV must not be stored as its own."""
    path, references = oracle(4)
    config = small_config(path, pool=pool_url, pool_load=load, tensor_parallel_size=ranks)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with Engine(config) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(executor.Executor, "launch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                generate(engine, references[:1])
        engine.abort("0")
        for which in (references[2:], references[:1]):
            fill(engine, which)
        for which in (references[2:], references[:1]):
            got, cached = generate(engine, which)
            check_tokens("after an interruption", which, got, totals)
            assert cached[0] >= 256
            engine.reset_prefix_cache()
    check_no_leases(pool_url)


@pytest.mark.parametrize("ranks", [1, 2])
@on_a_pool("shm async; shm layerwise")
def test_chunks_that_find_no_room_in_staging_are_saved_later(
    load: str, pool_url: str, ranks: int, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is larger than staging does not break the chain for good."""
    path, references = oracle(4)
    config = small_config(path, pool=pool_url, pool_load=load, tensor_parallel_size=ranks, prefix_cache="naive")
    usual = EngineConfig.connector.fget  # type: ignore[attr-defined]
    # On rank 0 there is room for two chunks at a time, and the step completes four.
    monkeypatch.setattr(EngineConfig, "connector", property(lambda self: replace(usual(self), staging_bytes=1)))
    real, dropped = Saver._save, list[str]()

    def save(self: Saver, group: Sequence[SaveRequest]) -> None:
        """The first time nothing leaves the staging in time."""
        if dropped:
            real(self, group)
        for each in group if not dropped else ():
            self._drop(each.chunks, [each.name] * len(each.chunks))
        dropped.append("once")

    monkeypatch.setattr(Saver, "_save", save)
    with Engine(config) as engine:
        got, _ = generate(engine, references)
        check_tokens("little room", references, got, totals)
        assert engine.drain_saves(10.0)
        assert engine.stats().pool.num_dropped > 0, "there was room: this test tested nothing"
        # On a busy machine some chunks may be dropped each time: then the next request that computes them saves them.
        for _ in range(6):
            got, cached = generate(engine, references)
            check_tokens("found again", references, got, totals)
            assert engine.drain_saves(60.0)
            if cached == [512, 302, 256]:
                break
        assert cached == [512, 302, 256]
    check_no_leases(pool_url)


@contextmanager
def vandal(files: list[Path], seed: int) -> Iterator[None]:
    """Writes random pages of noise into these files, until the end."""
    over = threading.Event()

    def work() -> None:
        rng = random.Random(seed)
        opened = [path.open("r+b", buffering=0) for path in files]
        while not over.wait(0.002):
            file = rng.choice(opened)
            file.seek(rng.randrange(0, os.fstat(file.fileno()).st_size, 4096))
            file.write(rng.randbytes(4096))
        for file in opened:
            file.close()

    thread = threading.Thread(target=work, name="vandal")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@on_a_pool(
    """shm async data; shm layerwise data; shm blocking data; shm layerwise index; shm async members; shm blocking all;
    file layerwise data; file async all""",
    "kind",
)
def test_the_files_are_overwritten_with_noise(kind: str, load: str, pool_url: str, oracle: Oracle) -> None:
    path, references = oracle(4)
    with nothing_left(), Engine(small_config(path, pool=pool_url, pool_load=load)) as engine:
        fill(engine, references)
        chosen = [file for file in pool_files(pool_url) if kind == "all" or file.name.startswith(kind)]
        with vandal(chosen, seed=len(kind)):
            for turn in range(2):
                got, _ = generate(engine, references)
                check_tokens(f"{kind}, {load}, turn {turn}", references, got, totals)
                engine.reset_prefix_cache()
        for file in chosen:
            with file.open("r+b", buffering=0) as opened:
                opened.write(random.Random(1).randbytes(file.stat().st_size))
        got, cached = generate(engine, references)
        check_tokens(f"{kind}, {load}, all of it", references, got, totals)
        if kind == "data":
            assert cached == [0, 0, 0]
            assert engine.stats().pool.num_damaged > 0
        assert engine.drain_saves(WAIT_S)


@on_a_pool("shm async; shm layerwise; shm blocking")
def test_one_tile_of_a_middle_layer_and_chunk_is_damaged(load: str, pool_url: str, oracle: Oracle) -> None:
    """What lies before it is used, it is counted, and it is computed and saved again."""
    path, references = oracle(4)
    first = references[:1]
    with nothing_left(), Engine(small_config(path, pool=pool_url, pool_load=load, prefix_cache="naive")) as engine:
        fill(engine, first)
        with open_pool(pool_url) as pool:
            extents = sorted((chunk.number, chunk.num_bytes) for chunk in pool.scan())
            assert [number for number, _ in extents] == [0, 1, 2]
            data = next(file for file in pool_files(pool_url) if file.name.startswith("data"))
            with data.open("r+b", buffering=0) as file:
                # Extents lie one after another; the middle of the middle one is a tile of the middle layer.
                file.seek(extents[0][1] + extents[1][1] // 2)
                file.write(b"\xff\x00\xff\x00")
            got, cached = generate(engine, first)
            check_tokens(load, first, got, totals)
            assert cached == [256]
            assert engine.stats().pool.num_damaged == 1
            assert pool.stats().store.damaged == 1
            assert engine.drain_saves(WAIT_S)
            got, cached = generate(engine, first)
            check_tokens(f"{load}, again", first, got, totals)
            assert cached == [512]
            assert engine.stats().pool.num_damaged == 1
            assert pool.verify().clean
    check_no_leases(pool_url)


# Silence


class SilentStore:
    """A store that answers some calls only when it is told that the test is over (or after an hour)."""

    lookup_s = 0.2
    mapped = None

    def __init__(self, inner: Any, over: threading.Event) -> None:
        self._inner = inner
        self.over = over
        self.silent: set[str] = set()
        self.num_silent = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        if not callable(call) or name not in self.silent:
            return call

        def late(*args: Any, **options: Any) -> Any:
            self.num_silent += 1
            self.over.wait(SILENCE_S)
            return call(*args, **options)

        return late


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set when a silence ends, at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def silent_stores(over: threading.Event, monkeypatch: pytest.MonkeyPatch) -> list[SilentStore]:
    """Engines open their pools on stores that can be made to fall silent."""
    opened: list[SilentStore] = []

    def open_silent(url: str, *, group: int | None = None) -> Pool:
        opened.append(SilentStore(open_store(url, group), over))
        return Pool(opened[-1])

    monkeypatch.setattr(executor, "open_pool", open_silent)
    return opened


LOOKUPS = {"run", "exists", "lease", "touch"}
SILENT = {
    "look-ups": (LOOKUPS, 2 * SilentStore.lookup_s + lookups.GRACE_S, [0, 0, 0]),
    "reads": ({"read", "read_shard"}, LOAD_DEADLINE_S + GRACE_S, [0, 0, 0]),
    "writes": ({"write"}, 0.0, [512, 256, 0]),
    "everything": ({*LOOKUPS, "read", "read_shard", "write"}, 2 * SilentStore.lookup_s + lookups.GRACE_S, [0, 0, 0]),
}
"""What does not answer, how long that may keep all requests together, and what of each prompt is found."""


@on_a_pool(
    """shm async reads; shm layerwise reads; shm blocking reads; shm async look-ups; shm blocking look-ups;
    shm layerwise writes; shm async everything""",
    "what",
)
def test_the_store_does_not_answer(
    what: str, load: str, pool_url: str, oracle: Oracle, silent_stores: list[SilentStore]
) -> None:
    path, references = oracle(4)
    calls, deadline_s, expected = SILENT[what]

    def run(engine: Engine) -> None:
        fill(engine, references[:1])
        (store,) = silent_stores
        store.silent = calls
        begin = time.monotonic()
        got, cached = generate(engine, references)
        took_s = time.monotonic() - begin
        check_tokens(f"{what}, {load}", references, got, totals)
        assert cached == expected
        assert store.num_silent > 0, "nobody asked"
        assert took_s < WAIT_S
        if load == "blocking":  # all in one step, which waits for one deadline
            assert engine.stats().pool.wait_seconds < TOGETHER * len(references) * deadline_s
        # A store that is well again is used again.
        store.silent = set()
        store.over.set()
        wait_until(lambda: generate(engine, references)[1] == [512, 302, 256], what="a hit")
        assert engine.drain_saves(WAIT_S)

    with nothing_left():
        config = small_config(path, pool=pool_url, pool_load=load, prefix_cache="naive")
        with closing(Engine(config)) as engine:
            run(engine)
        del engine
    check_no_leases(pool_url)


@on_a_pool("file async; file layerwise; file blocking")
def test_the_disk_hangs(
    load: str, pool_url: str, oracle: Oracle, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`preadv` and `pwritev` do not return: requests cost one deadline together, later ones nothing."""
    path, references = oracle(4)
    real_read, real_write = os.preadv, os.pwritev

    def read(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError  # not in the page cache
        over.wait(SILENCE_S)
        return real_read(fd, buffers, offset, flags)

    def write(*args: Any) -> int:
        over.wait(SILENCE_S)
        return real_write(*args)

    with nothing_left(), Engine(small_config(path, pool=pool_url, pool_load=load, prefix_cache="naive")) as engine:
        fill(engine, references)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", read)
            patch.setattr(os, "pwritev", write)
            for most in (TOGETHER, 0.9):
                begin, waited_s = time.monotonic(), engine.stats().pool.wait_seconds
                got, cached = generate(engine, references)
                took_s = time.monotonic() - begin
                waited_s = engine.stats().pool.wait_seconds - waited_s
                check_tokens(f"disk, {load}", references, got, totals)
                assert cached == [0, 0, 0]
                assert took_s < WAIT_S
                if load == "blocking":  # all in one step, which waits for one deadline
                    assert waited_s < most * len(references) * (LOAD_DEADLINE_S + GRACE_S)
            over.set()
        wait_until(lambda: generate(engine, references)[1] == [512, 302, 256], what="a hit")
        assert engine.stats().pool.num_damaged == 0, "late is not damaged"
    check_no_leases(pool_url)


@on_a_pool("shm async; shm layerwise; shm blocking; file async")
def test_a_process_is_stopped_while_it_holds_the_write_lock(load: str, pool_url: str, oracle: Oracle) -> None:
    """Nobody can write. What is there is still read, and what cannot be saved is dropped."""
    path, references = oracle(4)
    with nothing_left(), Engine(small_config(path, pool=pool_url, pool_load=load, prefix_cache="naive")) as engine:
        fill(engine, references[:1])
        with Child("stop_inside_transaction", pool_url) as child:
            child.expect("ready")
            child.wait_stopped()
            begin = time.monotonic()
            got, cached = generate(engine, references)
            took_s = time.monotonic() - begin
            check_tokens(f"stopped, {load}", references, got, totals)
            assert cached == [512, 256, 0]
            assert took_s < WAIT_S
            child.signal(signal.SIGCONT)
            child.expect("woken")
            assert engine.drain_saves(WAIT_S)

        def third_is_there() -> bool:
            found = generate(engine, references)[1]
            assert engine.drain_saves(WAIT_S)
            return found == [512, 302, 256]

        wait_until(third_is_there, what="the third prompt's chunk")
    check_no_leases(pool_url)


# Death


class Server:
    """`headwater serve` as a process."""

    def __init__(self, model: str, pool: str) -> None:
        source = str(Path(__file__).parents[2] / "src")
        options = ["--model", model, "--pool", pool, "--port", "0", "--device", "cpu", "--num-threads", "1"]
        options += ["--max-model-len", "800", "--num-pages", "60"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater", "serve", *options],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"ready\s+(http://\S+)/v1", line):
                self.url = found[1]
                return
        raise AssertionError("no server")

    def engine_pid(self) -> int:
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def ask(self, prompt: list[int]) -> tuple[str, int]:
        """(text, cached tokens)."""
        import httpx

        fields = {"prompt": prompt, "max_tokens": NUM_SAID, "temperature": 0}
        reply = httpx.post(f"{self.url}/v1/completions", json=fields, timeout=WAIT_S)
        body = reply.raise_for_status().json()
        return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

    def ask_until_it_dies(self, asked: list[list[int]]) -> None:
        """Ask one prompt after another, and note them."""
        import httpx

        rng = random.Random(3)
        try:
            while True:
                asked.append([rng.randrange(1000, 20000) for _ in range(600)])
                self.ask(asked[-1])
        except httpx.HTTPError:
            return

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@on_a_pool("shm async")
def test_a_server_is_killed_in_the_middle_of_a_save(pool_url: str, load: str) -> None:
    pytest.importorskip("httpx")
    try:
        find_in_catalog("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    url = pool_url.replace("64MiB", "512MiB")
    asked: list[list[int]] = []
    with open_pool(url) as pool:

        def is_caught() -> bool:
            """Stopped at the first sight of bytes that are not visible; woken again where they have become so."""
            if not pool.stats().store.pending_bytes:
                return False
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
            if pool.stats().store.pending_bytes:
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        with Server("smollm2", url) as doomed:
            asking = threading.Thread(target=doomed.ask_until_it_dies, args=(asked,), name="asking")
            asking.start()
            pid = doomed.engine_pid()
            wait_until(is_caught, what="a server is stopped in the middle of a save")
            os.kill(pid, signal.SIGKILL)
            os.kill(doomed.process.pid, signal.SIGKILL)
            asking.join()
        prompt = asked[-1]
        with Server("smollm2", url) as other:
            assert pool.stats().store.pending_bytes == 0, "a dead server's bytes are pending"
            text, _ = other.ask(prompt)
            wait_saved(url, [(prompt, len(prompt))])
        tokens, _ = _ask_engine(prompt)
        assert text == open_checkpoint("smollm2").load_tokenizer().decode(tokens)
        assert _ask_engine(prompt, pool=url) == (tokens, 599), "what the second server saved, the tail included"
        report = pool.verify()
        assert report.clean, report
        assert not any(chunk.leased for chunk in pool.scan())


def _ask_engine(prompt: list[int], **settings: Any) -> tuple[list[int], int]:
    """(tokens, cached tokens) of an engine in this process."""
    config = EngineConfig(model="smollm2", device="cpu", max_model_len=800, num_pages=60, num_threads=1, **settings)
    tokens: list[int] = []
    cached = 0
    with Engine(config) as engine:
        engine.add("plain", prompt, SamplingParams(temperature=0.0, max_tokens=NUM_SAID))
        while engine.has_work:
            for output in engine.step():
                tokens += output.token_ids
                cached = output.num_cached_tokens
    return tokens, cached
