"""Prefill in one engine, decode in another with a pool of its own: each step pushes the KV that it computes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from headwater.connector.transfers import TransferParams
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import RequestOutput, SamplingParams
from headwater.peers.address import PeerAddress
from headwater.peers.link import PeerLink
from headwater.peers.receiver import Receiver
from headwater.pool.pool import Pool, open_pool

from engine_models import save_random_checkpoint
from support import WAIT_S, temporary_url, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHUNK = 256
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_checkpoint("llama", tmp_path_factory.mktemp("model"), seed=1)


@contextmanager
def two_pools(tmp_path: Path) -> Iterator[tuple[str, str]]:
    with (
        temporary_url("shm", tmp_path, "capacity=64MiB") as prefill,
        temporary_url("shm", tmp_path, "capacity=64MiB") as decode,
    ):
        yield prefill, decode


@contextmanager
def receiver_of(url: str) -> Iterator[tuple[Receiver, Pool]]:
    with open_pool(url) as pool:
        receiver = Receiver(pool, PeerAddress("127.0.0.1", 0))
        receiver.start()
        try:
            yield receiver, pool
        finally:
            receiver.close()


def config_of(model: Path, pool: str | None, **more: object) -> EngineConfig:
    config = EngineConfig(
        model=str(model), device="cpu", num_threads=1, num_pages=96, max_model_len=1536, pool=pool, pool_group_bytes=1
    )
    return replace(config, **more)  # type: ignore[arg-type]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [3 + (i * 7 + seed * 13) % 500 for i in range(num_tokens)]


def run(engine: Engine, *, until: Callable[[], bool] | None = None) -> list[RequestOutput]:
    """All outputs until nothing is left to do, or until a condition holds."""
    outputs, end = list[RequestOutput](), time.monotonic() + WAIT_S
    while engine.has_work and not (until is not None and until()):
        assert time.monotonic() < end, "it does not end"
        outputs += engine.step()
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def alone(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    with Engine(config_of(model, None)) as engine:
        found = []
        for prompt in prompts:
            engine.add("r", prompt, GREEDY)
            found.append(tokens_of(run(engine)))
        return found


def push(address: object, name: str = "0f") -> TransferParams:
    return TransferParams(id=name, push_to=str(address))


SAMPLE = [("llama", 2, 1), ("qwen3", 4, 1), ("deepseek_v2", 2, 1)]
"""Other ranks at both ends; four ranks of two KV heads are replicas, which divide layers among themselves, and so are
all ranks of a model with latent attention."""
ROWS = [
    ("llama", 1, 1), ("llama", 1, 2), ("llama", 3, 2), ("qwen3", 1, 4), ("qwen3", 4, 2), ("qwen3", 2, 4),
    ("qwen3", 8, 1), ("qwen3", 1, 8), ("deepseek_v2", 1, 2), ("deepseek_v2", 4, 1),
]  # fmt: skip
ROWS = SAMPLE + (ROWS if os.environ.get("HEADWATER_ALL_ROWS") else [])


@pytest.mark.parametrize(("family", "prefill_tp", "decode_tp"), ROWS)
def test_decode_loads_all_that_prefill_computed(family: str, prefill_tp: int, decode_tp: int, tmp_path: Path) -> None:
    """Prompts around a chunk's length, in small steps, other block size and ranks at both ends: the same tokens, and
    all that is worth loading is loaded."""
    model = save_random_checkpoint(family, tmp_path / "model", seed=1)
    sizes = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17]
    prompts = [prompt_of(size, seed) for seed, size in enumerate(sizes)]
    wanted = alone(model, prompts)
    sendable = [0, CHUNK - 1, CHUNK, CHUNK, 3 * CHUNK]
    with two_pools(tmp_path) as (prefill_url, decode_url), receiver_of(decode_url) as (receiver, pool):
        with Engine(config_of(model, prefill_url, tensor_parallel_size=prefill_tp, max_batched_tokens=128)) as engine:
            for number, (prompt, num_sent) in enumerate(zip(prompts, sendable, strict=True)):
                engine.add("r", prompt, ONE, transfer=push(receiver.address, f"{number:04x}"))
                (output,) = run(engine)
                assert output.num_sent_tokens == num_sent
                assert len(output.token_ids) == 1
            stats = engine.stats().pool
            assert stats.num_push_drops == 0
        assert pool.stats().store.pending_bytes == 0
        with open_pool(prefill_url) as saved:
            one_copy = sum(chunk.num_bytes for chunk in saved.scan())
        assert receiver.stats()["bytes"] == one_copy > 0, "every byte is sent once, replicas or not"
        decode = config_of(model, decode_url, tensor_parallel_size=decode_tp, page_size=32, num_pages=64)
        with Engine(decode) as engine:
            for prompt, tokens, num_sent in zip(prompts, wanted, sendable, strict=True):
                engine.add("r", prompt, GREEDY, transfer=TransferParams(id="0f"))
                outputs = run(engine)
                assert tokens_of(outputs) == tokens
                assert outputs[-1].num_cached_tokens == min(num_sent, len(prompt) - 1)
        wait_until(lambda: receiver.stats()["sessions"] == 0, WAIT_S)


def test_what_prefill_has_already_is_sent_too(model: Path, tmp_path: Path) -> None:
    """The second request finds its prompt in the engine's cache and in its pool: nothing is computed but one token, and
    all of it is sent. A third one finds that the peer has it."""
    prompt = prompt_of(2 * CHUNK + 40)
    with (
        two_pools(tmp_path) as (prefill_url, decode_url),
        receiver_of(decode_url) as (receiver, _),
        Engine(config_of(model, prefill_url)) as engine,
    ):
        engine.add("first", prompt, ONE)
        (output,) = run(engine)
        assert output.num_sent_tokens is None
        assert engine.drain_saves(WAIT_S)
        for _ in range(2):
            engine.add("second", prompt, ONE, transfer=push(receiver.address))
            (output,) = run(engine)
            assert output.num_cached_tokens >= 2 * CHUNK
            assert output.num_sent_tokens == len(prompt)
        assert receiver.stats()["chunks_stored"] == 3


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_prompt_whose_beginning_decode_has_is_completed(page_size: int, model: Path, tmp_path: Path) -> None:
    """Decode has computed two chunks of it for somebody else; the rest is pushed, and nothing is sent twice."""
    prompt = prompt_of(4 * CHUNK + 60)
    (wanted,) = alone(model, [prompt])
    with (
        two_pools(tmp_path) as (prefill_url, decode_url),
        receiver_of(decode_url) as (receiver, pool),
        Engine(config_of(model, decode_url, page_size=page_size, num_pages=1536 // page_size)) as engine,
    ):
        engine.add("before", prompt[: 2 * CHUNK], ONE)
        run(engine)
        assert engine.drain_saves(WAIT_S)
        assert pool.stats().store.chunks == 2
        size = sum(chunk.num_bytes for chunk in pool.scan()) // (2 * CHUNK)
        with Engine(config_of(model, prefill_url, max_batched_tokens=128)) as prefill:
            prefill.add("r", prompt, ONE, transfer=push(receiver.address))
            (output,) = run(prefill)
            assert output.num_sent_tokens == len(prompt)
        assert receiver.stats()["chunks_exists"] == 2
        assert receiver.stats()["bytes"] == size * (len(prompt) - 2 * CHUNK)
        engine.add("r", prompt, GREEDY, transfer=TransferParams(id="0f"))
        outputs = run(engine)
        assert tokens_of(outputs) == wanted
        assert outputs[-1].num_cached_tokens == len(prompt) - 1


def test_prefill_that_is_preempted_sends_all_of_it(model: Path, tmp_path: Path) -> None:
    """Two prompts that do not fit together, and grow: one loses its pages in the middle."""
    prompts = [prompt_of(2 * CHUNK + 100, seed) for seed in range(2)]
    grows = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    with two_pools(tmp_path) as (prefill_url, decode_url), receiver_of(decode_url) as (receiver, _):
        config = config_of(model, prefill_url, num_pages=80, max_model_len=1024, max_batched_tokens=64)
        with Engine(config) as engine:
            for number, prompt in enumerate(prompts):
                engine.add(f"{number}", prompt, grows, transfer=push(receiver.address, f"{number:04x}"))
            ends = [output for output in run(engine) if output.finish_reason is not None]
            assert engine.stats().num_preemptions
            assert [output.num_sent_tokens for output in ends] == [len(prompts[0])] * 2


def test_decode_places_a_group_of_layers_before_the_next_is_sent(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer is sent before the second is computed, and then the sender is held back: decode has that layer in
    its pages, and waits for the rest."""
    prompt = prompt_of(2 * CHUNK)
    go_on, layers_sent = threading.Event(), list[range]()
    send = PeerLink._send_layers

    def held_back(link: PeerLink, batch: object, wanted: object, layers: range, *more: object) -> None:
        if layers.start:
            assert go_on.wait(WAIT_S)
        layers_sent.append(layers)
        send(link, batch, wanted, layers, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(PeerLink, "_send_layers", held_back)
    (wanted,) = alone(model, [prompt])
    with (
        two_pools(tmp_path) as (prefill_url, decode_url),
        receiver_of(decode_url) as (receiver, pool),
        Engine(config_of(model, prefill_url)) as prefill,
        Engine(config_of(model, decode_url, page_size=32)) as decode,
    ):
        prefill.add("r", prompt, ONE, transfer=push(receiver.address))
        decode.add("r", prompt, GREEDY, transfer=TransferParams(id="0f", wait_s=WAIT_S, start_s=WAIT_S))
        worker = prefill._executor._runner.pool  # type: ignore[attr-defined]
        after_layer = worker.after_layer

        def slow_layer(layer: int) -> None:
            after_layer(layer)
            if not layer:  # it is sent before the next one is computed
                wait_until(lambda: bool(layers_sent), WAIT_S)

        monkeypatch.setattr(worker, "after_layer", slow_layer)
        prefill.step()
        assert not prefill._requests, "the prompt is computed, and its answer waits for the push"
        cache = decode._executor._runner.cache  # type: ignore[attr-defined]
        assert cache is not None

        def filled(layer: int) -> bool:
            decode.step()
            return bool(cache.planes(layer)[0].any())

        wait_until(lambda: filled(0), WAIT_S)
        assert layers_sent == [range(1)]
        assert not filled(1)
        assert pool.stats().store.pending_bytes > 0
        go_on.set()
        (output,) = run(prefill)
        assert output.num_sent_tokens == len(prompt)
        outputs = run(decode)
        assert tokens_of(outputs) == wanted
        assert outputs[-1].num_cached_tokens == len(prompt) - 1
        assert decode.stats().pool.num_followed == 1


def test_a_peer_that_is_not_there_costs_the_answer_little(model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(CHUNK)
    with two_pools(tmp_path) as (prefill_url, _), Engine(config_of(model, prefill_url)) as engine:
        engine.add("r", prompt, ONE, transfer=push("127.0.0.1:9"))
        before = time.monotonic()
        (output,) = run(engine)
        assert output.num_sent_tokens == 0
        assert time.monotonic() - before < 5.0, "a refused connection was waited for"
        assert engine.stats().pool.num_push_drops == 1


def test_a_prefill_that_is_aborted_leaves_nothing_pending(model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(3 * CHUNK)
    with (
        two_pools(tmp_path) as (prefill_url, decode_url),
        receiver_of(decode_url) as (receiver, pool),
        Engine(config_of(model, prefill_url, max_batched_tokens=CHUNK)) as engine,
    ):
        engine.add("r", prompt, ONE, transfer=push(receiver.address))
        engine.step()
        engine.abort("r")
        run(engine)
        wait_until(lambda: pool.stats().store.pending_bytes == 0, WAIT_S)
        engine.check_integrity()
        engine.add("r", prompt, ONE, transfer=push(receiver.address))
        (output,) = run(engine)
        assert output.num_sent_tokens == len(prompt)
