"""Prefill and decode as `headwater serve` processes with pools of their own, behind `headwater proxy`."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from roles_process import Serve, cached_of, complete, small_model, text_of

from headwater.pool.pool import open_pool

from proxy_process import ProxyProcess
from support import temporary_url, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHUNK = 256
WAIT_S = 120.0
SLOW = ["--max-batched-tokens", "8", "--max-num-seqs", "4"]
"""So that a prompt takes long enough to be killed in the middle."""


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [3 + (i * 7 + seed * 13) % 500 for i in range(num_tokens)]


class Trio:
    """Prefill with two ranks, decode with one and larger pages, and the proxy before both."""

    def __init__(self, prefill: Serve, decode: Serve, front: ProxyProcess) -> None:
        self.prefill, self.decode, self.front = prefill, decode, front

    def ask(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        return complete(self.front.url, prompt, **fields)

    def pending_bytes(self, server: Serve) -> int:
        with open_pool(server.pool) as pool:
            return pool.stats().store.pending_bytes

    def counts(self) -> Counter[str]:
        """What was pushed, dropped and received so far."""
        found = {name: self.prefill.count(name) for name in ("pool_dropped_pushes_total", "pool_pushed_bytes_total")}
        names = ("peer_received_chunks_total", "peer_restarts_total", "pool_given_up_requests_total")
        return Counter({name: int(count) for name, count in (found | {n: self.decode.count(n) for n in names}).items()})

    def check_clean(self) -> None:
        """Nothing is pending at either end, and nothing leased: all bytes come back when decode's pool is cleared."""
        for server in (self.prefill, self.decode):
            if server.process.poll() is None:
                wait_until(lambda server=server: self.pending_bytes(server) == 0, WAIT_S, "no bytes are pending")  # type: ignore[misc]
        with open_pool(self.decode.pool) as pool:
            pool.clear()
            wait_until(lambda: pool.stats().store.used_bytes == 0, WAIT_S, "all bytes are free")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@contextmanager
def started(model: Path, directory: Path) -> Iterator[Trio]:
    with ExitStack() as stack:
        pools = [stack.enter_context(temporary_url("shm", directory, "capacity=128MiB")) for _ in range(2)]
        prefill = Serve(model, pools[0], "--tensor-parallel-size", "2", "--num-pages", "192", *SLOW)
        stack.callback(prefill.close)
        listen = ["--peer-listen", "127.0.0.1:0"]
        decode = Serve(model, pools[1], "--page-size", "32", "--num-pages", "96", *listen)
        stack.callback(decode.close)
        for server in (prefill, decode):
            server.wait_ready()
        front = ProxyProcess("proxy", "--decode", decode.url, "--prefill", prefill.url)
        stack.callback(front.close)
        wait_until(lambda: decode.health().get("peer") == decode.peer, WAIT_S)
        yield Trio(prefill, decode, front)


@pytest.fixture(scope="module")
def trio(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """One for all tests that leave it whole: each asks about prompts of its own, and counts from where it began."""
    with started(model, tmp_path_factory.mktemp("pools")) as made:
        yield made


def test_answers_are_those_of_one_server_and_decode_computes_almost_nothing(trio: Trio) -> None:
    sizes = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17]
    num_loaded = [0, CHUNK - 2, CHUNK - 1, CHUNK, 3 * CHUNK]
    wait_until(lambda: trio.front.metric("headwater_proxy_server_up") == 2, WAIT_S)
    servers = (trio.front, trio.prefill, trio.decode)
    counts = trio.counts()
    trio.ask(prompt_of(CHUNK, 99))  # connections are made once
    files = [server.num_files() for server in servers]
    for seed, (size, num_cached) in enumerate(zip(sizes, num_loaded, strict=True)):
        prompt = prompt_of(size, seed)
        answer = trio.ask(prompt)
        assert cached_of(answer) == num_cached, f"of {size} tokens"
        wanted = trio.prefill.complete(prompt)  # it has computed this prompt, and answers alone
        assert text_of(answer) == text_of(wanted)
    wait_until(lambda: (trio.counts() - counts)["peer_received_chunks_total"] == 1 + (1 + 1 + 1 + 3), WAIT_S)
    counts = trio.counts() - counts
    assert counts["pool_pushed_bytes_total"] > 0
    assert counts["pool_dropped_pushes_total"] == counts["pool_given_up_requests_total"] == 0
    trio.check_clean()
    wait_until(lambda: all(now.num_files() <= old for now, old in zip(servers, files, strict=True)), WAIT_S, "files")


def test_prefill_says_how_much_it_has_sent(trio: Trio) -> None:
    prompt = prompt_of(2 * CHUNK + 40, 11)
    ours = {"headwater": {"push_to": trio.decode.peer, "transfer": "0123"}}
    answer = trio.prefill.complete(prompt, 1, kv_transfer_params=ours)
    assert answer["kv_transfer_params"] == {"headwater": {"transfer": "0123", "sent_tokens": len(prompt)}}
    assert "kv_transfer_params" not in trio.prefill.complete(prompt, 1)


def test_prefill_that_is_killed_costs_time_and_no_answer(model: Path, tmp_path: Path) -> None:
    with started(model, tmp_path) as trio:
        check_killed_prefill(trio)


def check_killed_prefill(trio: Trio) -> None:
    """kill -9 when a part has come: the same tokens, and all memory back."""
    prompt = prompt_of(7 * CHUNK, 5)
    with open_pool(trio.decode.pool) as pool:
        found = ask_aside(trio, prompt)
        wait_until(lambda: pool.stats().store.chunks >= 1, WAIT_S)
        trio.prefill.process.kill()
        answer = found()
        assert CHUNK <= cached_of(answer) < 7 * CHUNK - 1
        assert text_of(answer) == text_of(trio.decode.complete(prompt))
    trio.check_clean()
    assert text_of(trio.ask(prompt_of(300, 6))) == text_of(trio.decode.complete(prompt_of(300, 6)))


def test_a_receiver_that_is_killed_costs_time_and_no_answer(trio: Trio) -> None:
    """kill -9 of decode's receiver when a part has come. It is started again, on the same port, and receives."""
    prompt, pid, counts = prompt_of(7 * CHUNK, 8), trio.decode.receiver_pid(), trio.counts()
    with open_pool(trio.decode.pool) as pool:
        found = ask_aside(trio, prompt)
        wait_until(lambda: pool.stats().store.chunks >= 1, WAIT_S)
        os.kill(pid, signal.SIGKILL)
        answer = found()
    assert text_of(answer) == text_of(trio.decode.complete(prompt))
    wait_until(lambda: (trio.counts() - counts)["peer_restarts_total"] == 1, WAIT_S)
    assert trio.decode.health()["peer"] == trio.decode.peer
    trio.check_clean()
    later = prompt_of(3 * CHUNK, 7)
    wait_until(lambda: trio.decode.receiver_pid() != pid, WAIT_S)
    answer = trio.ask(later)
    assert text_of(answer) == text_of(trio.decode.complete(later))


def ask_aside(trio: Trio, prompt: list[int]) -> Any:
    """Ask in a thread; a function that gives the answer."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(trio.ask(prompt)))
    thread.start()

    def found() -> dict[str, Any]:
        thread.join(WAIT_S)
        assert answers, "no answer"
        return answers[0]

    return found
