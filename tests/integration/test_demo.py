"""`headwater demo`: two real servers on one pool, and nothing left of them."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from rich.console import Console

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from headwater.cli.demo import prefill_decode, two_servers
from headwater.cli.demo.live import LiveServer, Reply
from headwater.cli.demo.pace import LEAST_TOKENS, Pace, measure_pace
from headwater.errors import EngineError, InvalidArgumentError, ModelError

from support import WAIT_S, wait_until

pytestmark = pytest.mark.slow

SRC = Path(__file__).parents[2] / "src"
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))}


def leftovers(url_part: str = "headwater-demo-") -> list[str]:
    """Pools of demos, and processes that were started for one."""
    found = [name for name in os.listdir("/dev/shm") if name.startswith(url_part)]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            if url_part in command:
                found.append(f"process {entry.name}: {command}")
    return found


@pytest.fixture(autouse=True)
def _path_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers are processes: they find the package where this one did."""
    monkeypatch.setenv("PYTHONPATH", ENV["PYTHONPATH"])


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    real = two_servers.open_checkpoint

    def without_smollm2(path: Any, load_format: str = "auto") -> Any:
        if path == "smollm2":
            raise ModelError("SmolLM2 is not installed")
        return real(path, load_format)

    monkeypatch.setattr(two_servers, "open_checkpoint", without_smollm2)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """The /metrics of every server that ended, the last one first."""
    seen: list[dict[str, float]] = []

    class Watched(LiveServer):
        def close(self) -> None:
            with urlopen(f"{self._url}/metrics", timeout=WAIT_S) as reply:
                lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
            seen.append({name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)})
            super().close()

    monkeypatch.setattr(two_servers, "LiveServer", Watched)
    return seen


@pytest.mark.usefixtures("_no_model")
def test_the_second_server_finds_what_the_first_computed(pages: list[dict[str, float]]) -> None:
    before = set(leftovers())
    notes: list[str] = []
    outcome = two_servers.run_two_servers(None, 900, "cpu", notes.append)
    assert outcome.correct
    assert outcome.second.cached_tokens >= 768 > outcome.first.cached_tokens
    assert 900 <= outcome.first.prompt_tokens == outcome.second.prompt_tokens <= 900 + two_servers.ROOM_TOKENS
    assert "stands in, and talks nonsense: SmolLM2 is not installed" in outcome.note
    report = outcome.as_dict()
    assert report["saved_tokens"] == outcome.second.cached_tokens - outcome.first.cached_tokens
    assert [server["first_token_s"] > 0 for server in report["servers"]] == [True, True]
    assert len(notes) == 4
    second, first = ({name.removeprefix("headwater_pool_"): value for name, value in page.items()} for page in pages)
    assert first["saved_bytes_total"] > 0 == first["loaded_bytes_total"]
    assert second["asked_tokens_total"] >= second["matched_tokens_total"] >= 768
    assert second["loaded_tokens_total"] >= 768
    assert second["loaded_bytes_total"] > 0 < second["wait_seconds_total"]
    assert second["load_duration_seconds_count"] >= 1 > first["load_duration_seconds_count"]
    assert second["load_duration_seconds_sum"] >= second["load_seconds_total"] > 0
    assert second["step_seconds_total"] > 0 < second["thread_seconds_total"]
    for page in (first, second):
        assert page["dropped_chunks_total"] + page["damaged_chunks_total"] + page["failed_loads_total"] == 0
        assert 0 < page["headwater_store_used_bytes"] <= page["headwater_store_data_bytes"]
        assert (
            page["headwater_store_stored_total"] >= page["headwater_store_chunks"] > 0 < page["headwater_store_members"]
        )
    assert set(leftovers()) == before


@pytest.mark.usefixtures("_no_model")
def test_the_decode_server_is_spared_what_the_prefill_server_computes() -> None:
    before = set(leftovers())
    notes: list[str] = []
    outcome = prefill_decode.run_prefill_decode(None, 900, "cpu", notes.append)
    assert outcome.correct
    assert outcome.computed_alone > 768
    assert outcome.computed_through < 256
    assert outcome.as_dict()["correct"]
    assert len(notes) == 5
    text = io.StringIO()
    prefill_decode.show_handover(outcome, Console(file=text, width=140))
    assert f"was spared {outcome.computed_alone - outcome.computed_through:,} tokens" in text.getvalue()
    assert set(leftovers()) == before


@pytest.mark.usefixtures("_no_model")
def test_a_slow_machine_gets_a_short_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a length, it is chosen by what a server does in a second; here that is made to be little."""
    seen: list[Pace] = []

    def four_minutes_for_4000(server: LiveServer) -> Pace:
        seen.append(measure_pace(server))
        return Pace(prefill_tokens_per_s=16.0, decode_tokens_per_s=1.0)

    monkeypatch.setattr(two_servers, "measure_pace", four_minutes_for_4000)
    notes: list[str] = []
    outcome = two_servers.run_two_servers(None, None, "cpu", notes.append)
    assert outcome.correct
    assert LEAST_TOKENS <= outcome.first.prompt_tokens <= LEAST_TOKENS + two_servers.ROOM_TOKENS
    assert seen[0].prefill_tokens_per_s > 0 < seen[0].decode_tokens_per_s
    assert len(notes) == 5
    assert "about 600 tokens (about 60 s)" in notes[2]


def test_what_both_servers_knew_was_not_saved_by_the_second() -> None:
    first, second = Reply(8.0, 4045, 16, "yes"), Reply(0.25, 4045, 4044, "yes")
    outcome = two_servers.Outcome("model", "", "shm:///x", "question", first, second)
    assert outcome.as_dict()["saved_tokens"] == 4028
    text = io.StringIO()
    two_servers.show(outcome, Console(file=text, width=120))
    assert "computed 4,028 fewer tokens and was 32.0 times as fast" in text.getvalue()


@pytest.mark.usefixtures("_no_model")
def test_too_long_a_document_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidArgumentError, match=r"--tokens is 65,500; this model was made for 65,536"):
        two_servers.run_two_servers(None, 65_500, "cpu", lambda text: None)


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        LiveServer(["--model", "/nonexistent/model", "--no-pool"]) as server,
        pytest.raises(EngineError, match="a server did not start: no model '/nonexistent/model'"),
    ):
        server.wait_ready()


def test_ctrl_c_leaves_nothing() -> None:
    before = set(leftovers())
    command = [sys.executable, "-m", "headwater", "demo", "--device", "cpu"]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "the demo starts" in process.stderr.readline()
            line = next(line for line in process.stderr if "still at it" not in line)
            assert "two servers load" in line, line
            wait_until(lambda: sum("process" in name for name in set(leftovers()) - before) >= 2, what="both servers")
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 130
        finally:
            process.kill()
    assert set(leftovers()) == before
