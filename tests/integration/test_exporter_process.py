"""`headwater pool exporter` beside real engines: their figures arrive, one is killed, the pool goes and comes again."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("prometheus_client")

from headwater.connector.published import published
from headwater.stores.embedded import destroy, store_directory
from headwater.stores.url import parse_url

from engine_models import save_random_checkpoint
from exporter_process import ExporterProcess
from listening import doors
from support import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROMPT = [3 + i % 90 for i in range(520)]
ENGINES = 'headwater_store_engine_processes{engine="headwater"}'


class EngineProcess:
    """One server of `host_engine`."""

    def __init__(self, model: Path, url: str, tp: int = 1) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, str(ROOT / "tests/integration/host_engine.py"), str(model), url, str(tp)]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._hear() == "ready"

    def ask(self, verb: str, *words: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *words]) + "\n")
        self.process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_checkpoint("llama", tmp_path_factory.mktemp("exporter") / "secret-path" / "my-model")


@pytest.fixture
def url() -> Iterator[str]:
    made = f"shm:///hwtest-{os.getpid()}-{secrets.token_hex(4)}?capacity=64MiB"
    yield made
    shutil.rmtree(store_directory(parse_url(made)), ignore_errors=True)


def test_two_engines_and_an_exporter_beside_them(model: Path, url: str) -> None:
    bare = url.partition("?")[0]
    exporter = ExporterProcess(bare)
    engines = []
    try:
        assert exporter.said["pool_is_up"] is False
        assert exporter.page()["headwater_store_up"] == 0
        one = EngineProcess(model, url)
        engines.append(one)
        one.ask("answer", PROMPT, 2)
        assert one.ask("saved", 60)
        # The engine does nothing from here on: a thread brings the last figures.
        wait_until(lambda: exporter.page()["headwater_pool_saved_bytes_total"] > 0, what="saved bytes")
        two = EngineProcess(model, url, tp=2)
        engines.append(two)
        assert two.ask("answer", PROMPT, 2)["cached"] == 512
        wait_until(lambda: exporter.page()["headwater_pool_loaded_tokens_total"] == 512, what="loaded tokens")
        wait_until(lambda: exporter.page()["headwater_pool_load_duration_seconds_count"] == 2, what="both ranks' loads")
        page = exporter.page()
        assert page[ENGINES] == 3  # one of the first, two ranks of the second
        assert page["headwater_store_members"] == 3  # the exporter is none
        assert page["headwater_pool_asked_tokens_total"] >= 2 * 512
        assert page["headwater_pool_loaded_bytes_total"] > 0
        assert page["headwater_store_chunks"] >= 2
        records = published(store_directory(parse_url(url)))
        assert sorted(record.role for record in records) == ["rank 1", "scheduler, rank 0", "scheduler, rank 0"]
        assert {record.model for record in records} == {"my-model"}
        assert "secret-path" not in exporter.http.get("/metrics").text
        (door,) = doors(exporter.process.pid)
        assert door.address == "127.0.0.1"

        before = exporter.page()
        two.kill()
        wait_until(lambda: exporter.page()[ENGINES] == 1, what="the death of the second")
        after = exporter.page()
        for name, value in before.items():
            if "_total" in name or "_bucket" in name or name.endswith(("_count", "_sum")):
                assert after[name] >= value, f"{name} went down"
        noise = Path(store_directory(parse_url(url)), "figures-00000000deadbeef")
        noise.write_bytes(os.urandom(100_000))
        one.ask("forget")
        assert one.ask("answer", PROMPT, 2)["cached"] == 512
        wait_until(lambda: exporter.page()["headwater_pool_loaded_tokens_total"] == 1024, what="later loads")
        one.close()
        wait_until(lambda: exporter.page()[ENGINES] == 0, what="the end of the first")
        destroy(parse_url(url))  # although the exporter runs
        wait_until(lambda: exporter.page()["headwater_store_up"] == 0, what="a removed pool")
        three = EngineProcess(model, url)
        engines.append(three)
        wait_until(lambda: exporter.page()["headwater_store_up"] == 1, what="a new pool")
        three.ask("answer", PROMPT, 2)
        wait_until(lambda: exporter.page()["headwater_pool_asked_tokens_total"] >= 4 * 512, what="its figures")
        assert exporter.page()["headwater_pool_loaded_tokens_total"] == 1024  # the new pool is empty
        assert exporter.http.get("/health").json() == {"status": "ok", "pool": True}
        assert exporter.stop() == 0
    finally:
        for engine in engines:
            engine.close()
        said = exporter.close()
    assert said == ""


def test_an_exporter_for_others_asks_for_a_key(url: str) -> None:
    with pytest.raises(AssertionError, match="can be reached from other machines"):
        ExporterProcess(url, "--host", "0.0.0.0")
    with pytest.raises(AssertionError, match="of this host"):
        ExporterProcess("redis://cache")


def test_an_exporter_loads_no_engine() -> None:
    heavy = ("headwater.engine", "headwater.models", "torch", "transformers")
    code = f"import sys, headwater.serve.exporter; print([m for m in sys.modules if m.startswith({heavy})])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
