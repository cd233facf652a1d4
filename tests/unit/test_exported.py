"""What an exporter shows: sums that never go down over processes that come and go, the store's own figures without
being a member of it, and a page that only those see who may."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("httpx")

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from headwater.cli import run
from headwater.connector.metrics import POOL_METRICS, Source, host_values
from headwater.connector.published import Publisher, figures
from headwater.connector.stats import TransferStats
from headwater.errors import InvalidArgumentError, UrlError
from headwater.kv.topology import whole_shard
from headwater.pool.pool import Pool, open_pool
from headwater.serve.exported import EXPORTER_METRICS, STALE_S, ExporterMetrics, Look, PoolWatch
from headwater.serve.exporter import ExporterConfig, create_app
from headwater.stores import figures as files
from headwater.stores.embedded import destroy, store_directory
from headwater.stores.embedded.peek import peek
from headwater.stores.figures import FiguresFile
from headwater.stores.url import parse_url, parse_urls

from metric_cases import TRANSFER, samples, shown_name
from support import empty_tiles, gqa, identity, local_tiles, temporary_url

LOADED = "headwater_pool_loaded_bytes_total"
LOADS = "headwater_pool_load_duration_seconds"
ENGINES = "headwater_store_engine_processes"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with temporary_url("shm", tmp_path) as made:
        yield made


def watch_of(url: str) -> PoolWatch:
    return PoolWatch(parse_urls(url))


def page(watch: PoolWatch) -> dict[str, float]:
    watch.look()
    return samples(ExporterMetrics(lambda: watch.latest).render()[0].decode())


class Process:
    """Stands for one process of an engine."""

    def __init__(self, pool: Pool, engine: str = "vllm") -> None:
        self.stats = TransferStats()
        self.publisher = Publisher(pool, engine=engine, model="m", every_s=3600)
        self.publisher.add("rank 0", lambda: figures(self.stats, Source.WORKER))

    def says(self, stats: TransferStats) -> None:
        self.stats = stats
        self.publisher.flush()


def test_the_page_has_exactly_what_is_declared(url: str) -> None:
    with open_pool(url):
        text = ExporterMetrics(watch_of(url).look).render("application/openmetrics-text")[0].decode()
    families = {family.name: family for family in parse_openmetrics(text)}
    declared = {shown_name(metric).removesuffix("_total"): metric for metric in (*EXPORTER_METRICS, *POOL_METRICS)}
    assert families.keys() == declared.keys()
    for name, metric in declared.items():
        assert (families[name].type, families[name].documentation) == (metric.kind, metric.help)


def test_a_look_from_outside_is_what_the_store_says_of_itself(url: str) -> None:
    spec, shard = gqa(), whole_shard(gqa())
    with open_pool(url) as pool:
        space = pool.space(identity(), spec, chunk_tokens=16)
        chunks = space.keys([*range(1, 49)]).chunks()
        space.write(chunks, shard, [local_tiles(spec, chunk, shard) for chunk in chunks])
        seen, store = peek(parse_url(url)), pool.stats().store
        assert seen is not None
        assert host_values(seen) == host_values(store)
        assert (seen.chunks, seen.members) == (3, 1)
        before = {path: path.stat().st_mtime_ns for path in Path(store_directory(parse_url(url))).iterdir()}
        shown = page(watch_of(url))
        assert {path: path.stat().st_mtime_ns for path in before} == before
    assert shown["headwater_store_chunks"] == 3
    assert shown["headwater_store_members"] == 1
    assert shown["headwater_store_up"] == 1
    assert shown["headwater_store_used_bytes"] == store.used_bytes


def test_sums_over_processes_that_come_and_go(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(url) as pool:
        one, before = Process(pool), Process(pool)
        one.says(replace(TransferStats(), loaded_bytes=100, load_times=TRANSFER.load_times))
        before.says(replace(TransferStats(), loaded_bytes=1))
        before.publisher.close()  # it ended before anybody looked
        watch = watch_of(url)
        assert page(watch)[LOADED] == 100
        two = Process(pool, engine="headwater")
        two.says(replace(TransferStats(), loaded_bytes=30, load_times=TRANSFER.load_times))
        shown = page(watch)
        assert shown[LOADED] == 130
        assert shown[f"{LOADS}_count"] == 4
        assert (shown[ENGINES + '{engine="headwater"}'], shown[ENGINES + '{engine="vllm"}']) == (1, 1)
        # Its last figures come with its end; they are counted once, whatever happens to the file.
        two.stats = replace(TransferStats(), loaded_bytes=50, load_times=TRANSFER.load_times)
        two.publisher.close()
        for _ in range(2):
            shown = page(watch)
            assert (shown[LOADED], shown[f"{LOADS}_count"]) == (150, 4)
            assert shown[ENGINES + '{engine="headwater"}'] == 0, "an alert needs a number"
        monkeypatch.setattr(files, "KEEP_S", -1.0)
        three = Process(pool)  # removes the files of the dead
        three.says(replace(TransferStats(), loaded_bytes=7))
        assert page(watch)[LOADED] == 157
        three.publisher.close()
        one.publisher.close()


def test_figures_that_could_not_be_read_for_a_moment_are_counted_once(url: str) -> None:
    with open_pool(url) as pool:
        alive, ended, watch = Process(pool), Process(pool), watch_of(url)
        for process in (alive, ended):
            process.says(replace(TransferStats(), loaded_bytes=100, load_times=TRANSFER.load_times))
        assert page(watch)[LOADED] == 200
        ended.publisher.close()
        before = page(watch)
        directory = store_directory(parse_url(url))
        for _ in range(2):
            os.rename(directory, f"{directory}-away")
            try:
                assert page(watch)[LOADED] == 200
            finally:
                os.rename(f"{directory}-away", directory)
            shown = page(watch)
            assert (shown[LOADED], shown[f"{LOADS}_count"]) == (200, before[f"{LOADS}_count"])
        alive.says(replace(TransferStats(), loaded_bytes=130, load_times=TRANSFER.load_times))
        assert page(watch)[LOADED] == 230
        alive.publisher.close()


def test_a_process_that_lived_between_two_looks_is_counted(url: str) -> None:
    with open_pool(url) as pool:
        watch = watch_of(url)
        assert page(watch)[LOADED] == 0
        short = Process(pool)
        short.says(replace(TransferStats(), loaded_bytes=5))
        short.publisher.close()
        assert page(watch)[LOADED] == 5


def test_one_engine_that_is_off_is_seen_beside_others(url: str) -> None:
    with open_pool(url) as pool:
        one, two = Process(pool), Process(pool)
        watch = watch_of(url)
        assert "headwater_connector_up" not in page(watch)
        one.publisher.add("scheduler", lambda: figures(one.stats, Source.SCHEDULER))
        two.publisher.add("scheduler", lambda: figures(two.stats, Source.SCHEDULER))
        one.says(replace(TransferStats(), is_up=1))
        two.says(replace(TransferStats(), is_up=1))
        assert page(watch)["headwater_connector_up"] == 1
        two.says(TransferStats())
        assert page(watch)["headwater_connector_up"] == 0
        two.publisher.close()
        assert page(watch)["headwater_connector_up"] == 1
        one.publisher.close()


def test_the_pool_may_come_late_go_and_come_again(url: str) -> None:
    watch = watch_of(url)
    directory = Path(store_directory(parse_url(url)))
    assert page(watch)["headwater_store_up"] == 0
    assert not directory.exists(), "an exporter makes no pool"
    with open_pool(url) as pool:
        process = Process(pool)
        process.says(replace(TransferStats(), loaded_bytes=5))
        assert page(watch)["headwater_store_up"] == 1
        process.publisher.close()
    destroy(parse_url(url))  # the exporter keeps nobody from it
    shown = page(watch)
    assert shown["headwater_store_up"] == 0
    assert "headwater_store_chunks" not in shown
    assert shown[LOADED] == 5
    with open_pool(url) as pool:
        process = Process(pool)
        process.says(replace(TransferStats(), loaded_bytes=2))
        shown = page(watch)
        assert (shown["headwater_store_up"], shown[LOADED]) == (1, 7)
        process.publisher.close()


def test_a_pool_deleted_by_hand_under_its_engine(url: str) -> None:
    watch = watch_of(url)
    directory = Path(store_directory(parse_url(url)))
    with open_pool(url) as pool:
        process = Process(pool)
        process.says(replace(TransferStats(), loaded_bytes=5))
        assert page(watch)[LOADED] == 5
        shutil.rmtree(directory)
        process.says(replace(TransferStats(), loaded_bytes=6))  # nobody can read that; nothing is made anew
        shown = page(watch)
        assert (shown["headwater_store_up"], shown[LOADED]) == (0, 5)
        assert not directory.exists()


def test_noise_beside_the_store_and_in_its_index(url: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = Path(store_directory(parse_url(url)))
    with open_pool(url) as pool:
        good = Process(pool)
        good.says(replace(TransferStats(), loaded_bytes=5))
        noise = FiguresFile(str(directory))
        noise.write(os.urandom(1000))
        Path(directory, "figures-0123456789abcdef").write_bytes(os.urandom(4000))
        shown = page(watch_of(url))
        assert (shown[LOADED], shown[ENGINES + '{engine="vllm"}']) == (5, 1)
        good.publisher.close()
        noise.close()
        os.chmod(directory / "index", 0o666)
        watch = watch_of(url)
        for _ in range(3):
            assert page(watch)["headwater_store_up"] == 0
        assert caplog.text.count("chmod") == 1
        os.chmod(directory / "index", 0o600)
    (directory / "index").write_bytes(os.urandom(100))
    assert peek(parse_url(url)) is None
    shutil.rmtree(directory)


def test_tiers_and_what_they_count_for_the_host(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a?capacity=8MiB,file://{tmp_path}/b?capacity=8MiB"
    spec, shard = gqa(), whole_shard(gqa())
    near, far = f'{{tier="file://{tmp_path}/a"}}', f'{{tier="file://{tmp_path}/b"}}'
    with open_pool(url) as pool:
        space = pool.space(identity(), spec, chunk_tokens=16)
        chunks = space.keys([*range(1, 49)]).chunks()
        space.write(chunks, shard, [local_tiles(spec, chunk, shard) for chunk in chunks])
        space.read(chunks, shard, [empty_tiles(spec, chunk, shard) for chunk in chunks])
        assert pool.flush()
        process = Process(pool)
        process.says(TransferStats())
        shown = page(watch_of(url))
        assert shown["headwater_tier_hits_total" + near] == 3
        assert shown["headwater_tier_stored_total" + near] == 3
        assert shown["headwater_tier_damaged_total" + near] == 0
        assert shown["headwater_tier_damaged_total" + far] == 0
        assert shown["headwater_tier_breaker_open" + far] == 0
        assert shown["headwater_tier_waiting_chunks" + far] == 0
        process.publisher.close()


def test_a_look_that_hangs_is_not_believed_for_ever() -> None:
    now_s = 100.0
    watch = PoolWatch(parse_urls("shm:///none"), clock=lambda: now_s)
    watch._look = Look(at_s=100.0, is_up=True)
    assert watch.latest.is_up
    now_s += STALE_S
    assert not watch.latest.is_up


@pytest.mark.parametrize("bad", ["memory://", "redis://cache", "peer://host:7700"])
def test_only_a_pool_of_this_host(bad: str) -> None:
    with pytest.raises(UrlError):
        watch_of(bad)


@pytest.mark.parametrize(
    "options",
    [{"host": "0.0.0.0"}, {"host": "::"}, {"api_key": ""}, {"api_key": "a\n"}, {"ssl_keyfile": "x"}],
    ids=["host", "host6", "empty", "newline", "tls"],
)
def test_unsafe_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        ExporterConfig(**options)
    ExporterConfig(host="0.0.0.0", insecure=True)
    assert "s3cret" not in repr(ExporterConfig(host="0.0.0.0", api_key="s3cret"))


def ask(config: ExporterConfig, path: str, method: str = "GET", **headers: str) -> Any:
    async def call() -> Any:
        transport = httpx.ASGITransport(create_app(PoolWatch(parse_urls("shm:///none")), config))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(call())


def test_who_may_see_the_page() -> None:
    open_one, closed = ExporterConfig(), ExporterConfig(host="0.0.0.0", api_key="k3y")
    assert ask(open_one, "/metrics").status_code == 200
    assert ask(open_one, "/metrics", host="evil.example").status_code == 403
    assert ask(open_one, "/metrics", origin="http://evil.example").status_code == 403
    assert ask(closed, "/metrics").status_code == 401
    assert ask(closed, "/metrics", authorization="Bearer no").status_code == 401
    assert ask(closed, "/metrics", authorization="Bearer k3y").status_code == 200
    assert ask(closed, "/health").json() == {"status": "ok", "pool": False}
    assert ask(open_one, "/").status_code == 404
    assert ask(open_one, "/metrics", "POST").status_code == 405


def test_a_key_that_was_mistyped_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pool", "exporter", "shm:///none", "s3cret"]) == 2
    assert "s3cret" not in capsys.readouterr().err
