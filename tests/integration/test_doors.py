"""No process of Headwater listens where it was not asked to: `serve` opens its host and port, everything else loopback.

The listening sockets of whole process trees are read from /proc, while the processes work.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("httpx")

import httpx

from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.errors import ModelError
from headwater.models.catalog import find_in_catalog
from headwater.pool import open_pool
from headwater.stores.embedded import destroy
from headwater.stores.remote import open_remote
from headwater.stores.url import parse_url

from engine_models import save_random_checkpoint
from listening import Door, doors
from servers import mooncake_master, redis_server
from support import WAIT_S, temporary_url, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SRC = Path(__file__).parents[2] / "src"
KEY = secrets.token_hex()


@contextmanager
def served(*options: str) -> Iterator[tuple[int, int]]:
    """The process id and the port of a server that has answered a request."""
    try:
        find_in_catalog("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    engine = ("--device", "cpu", "--num-pages", "64", "--max-model-len", "1024", "--num-threads", "1")
    path = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", *engine, *options]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = next(filter(None, (re.search(r"ready\s+(http://\S+:(\d+))/v1", line) for line in process.stdout)))
            body = {"model": "smollm2", "prompt": "one two three " * 120, "max_tokens": 4}
            headers = {"authorization": f"Bearer {KEY}"}
            httpx.post(f"{found[1]}/v1/completions", json=body, timeout=300, headers=headers).raise_for_status()
            httpx.get(f"{found[1]}/metrics", timeout=300, headers=headers).raise_for_status()
            yield process.pid, int(found[2])
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(WAIT_S)
            finally:
                process.kill()


def beyond_loopback(found: list[Door]) -> list[Door]:
    return [door for door in found if not door.is_local]


def test_the_ranks_of_an_engine_listen_on_loopback_only(tmp_path: Path) -> None:
    before = set(doors(os.getpid()))
    model = save_random_checkpoint("llama", tmp_path)
    config = EngineConfig(
        model=str(model), device="cpu", tensor_parallel_size=2, num_threads=1, num_pages=64, max_model_len=64
    )
    with Engine(config) as engine:
        engine.add("r", [1, 2, 3], SamplingParams(max_tokens=2))
        while engine.has_work:
            engine.step()
        found = [door for door in doors(os.getpid()) if door not in before]
    assert {door.pid for door in found} > {os.getpid()}, "the ranks were not seen: this test tested nothing"
    assert not beyond_loopback(found)
    # gloo's own, one a rank. A rendezvous over TCP would be one more, which obeys every user of the host.
    assert len(found) == 2


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_server_listens_where_it_was_asked_to(num_ranks: int, tmp_path: Path) -> None:
    with redis_server() as redis, temporary_url("shm", tmp_path, "capacity=256MiB") as url:
        tiers = f"{url},redis://127.0.0.1:{redis.port}/0"
        with served("--pool", tiers, "--tensor-parallel-size", str(num_ranks)) as (pid, port):
            found = doors(pid)
        destroy(parse_url(url))
    assert ("127.0.0.1", port) in {(door.address, door.port) for door in found}
    assert not beyond_loopback(found)
    assert len(found) == (1 if num_ranks == 1 else 1 + num_ranks)


def test_a_server_for_everybody_opens_one_port() -> None:
    with served("--host", "0.0.0.0", "--api-key", KEY, "--no-pool") as (pid, port):
        assert [(door.protocol, door.address, door.port) for door in doors(pid)] == [("tcp", "0.0.0.0", port)]


@pytest.mark.parametrize("scheme", ["memory", "shm", "file"])
def test_pools_lookups_and_events_open_nothing(scheme: str, tmp_path: Path) -> None:
    before = doors(os.getpid())
    with (
        redis_server() as redis,
        temporary_url(scheme, tmp_path) as url,
        open_pool(f"{url},redis://127.0.0.1:{redis.port}/0") as pool,
    ):
        pool.stats()
        pool.follow()
        assert [door for door in doors(os.getpid()) if door.pid == os.getpid() and door not in before] == []


def test_a_mooncake_client_opens_two_ports_of_its_own() -> None:
    """Its transfer engine serves memory to other hosts. Mooncake chooses the address, not Headwater."""
    with mooncake_master() as master:
        before = doors(os.getpid())
        store = open_remote(parse_url(f"mooncake://127.0.0.1:{master.port}?deadline=10&buffer=16MiB&segment=32MiB"))
        try:
            store.contribute()
            store.ping()
            wait_until(lambda: store._client._near is not None, what="the memory is given")  # type: ignore[attr-defined]
            found = [door for door in doors(os.getpid()) if door.pid == os.getpid() and door not in before]
            # The docs say so (operations.md, "Ports"): the handshake and the transport, on every interface.
            assert {door.protocol[:3] for door in found} == {"tcp"}
            assert len(found) == 2
        finally:
            store.close()
