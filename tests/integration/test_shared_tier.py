"""Prefill on one host and decode on another with no push between them: through a tier that both share, or by a pull.

Copying to a shared tier goes on in the background, so either the prefill host waits for it before it answers, or the
decode host expects the prompt in the tier before it begins. A pull needs neither: the prefill host itself is the tier.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import peer_cases as pc

pytest.importorskip("transformers")

from headwater.pool import open_pool

from engine_models import VOCAB, Comparison, greedy_reference, load_transformers, save_random_checkpoint
from netns import Peer
from pool_waits import spaces
from servers import redis_server
from support import temporary_url, wait_until

pytestmark = pytest.mark.slow

NUM_TOKENS = 8
PROMPT_TOKENS = 512 + 70


class _ThisHost:
    """Where the engines run: no namespace is needed, only pools of their own."""

    def command(self, words: list[str]) -> list[str]:
        return words


@contextlib.contextmanager
def engine(model: Path, url: str, tp: int) -> Iterator[Peer]:
    host: Any = _ThisHost()
    started = Peer(host, str(model), url, str(tp), script="host_engine")
    try:
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def shared_by(kind: str, prefill: str, folder: Path) -> Iterator[tuple[str, str]]:
    """What the prefill and the decode host have below their first tiers."""
    if kind == "redis":
        with redis_server() as server:
            below = f",redis://127.0.0.1:{server.port}?lookup=10&deadline=30"
            yield below, below
    else:
        with open_pool(prefill):  # so that there is one to be served
            receiver = pc.ReceiverProcess(prefill)
        try:
            yield "", f",peer://{receiver.address}?lookup=10&deadline=30"
        finally:
            receiver.close()


def expect(url: str, prefill: str, prompt: list[int]) -> None:
    """Wait until a pool finds the whole prompt, wherever that is."""
    with open_pool(prefill, create=False) as there, open_pool(url, create=False) as here:
        wait_until(lambda: bool(spaces(there)), what="the prefill host has begun")
        (space,) = spaces(there)
        mine = here.space(space.identity, space.spec, chunk_tokens=space.chunk_tokens)
        wait_until(lambda: mine.match(mine.keys(prompt)).num_tokens == len(prompt), what="the whole prompt is below")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_checkpoint("llama", tmp_path_factory.mktemp("model"), seed=4, num_key_value_heads=4)


@pytest.mark.parametrize(("kind", "how"), [("redis", "flush"), ("redis", "expect"), ("peer", "pull")])
def test_what_one_host_computed_the_other_decodes(kind: str, how: str, model: Path, tmp_path: Path) -> None:
    prompt = [random.Random(5).randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)]
    truth, seen = greedy_reference(load_transformers(model), prompt, NUM_TOKENS), Comparison()
    with (
        temporary_url("shm", None, "capacity=64MiB") as prefill,
        temporary_url("shm", None, "capacity=64MiB") as decode,
        shared_by(kind, prefill, tmp_path) as (below_prefill, below_decode),
        engine(model, prefill + below_prefill, 2) as p,
        engine(model, decode + below_decode, 1) as d,
    ):
        first = p.ask("answer", prompt, 1)
        assert first["cached"] == 0
        if how == "expect":
            expect(decode + below_decode, prefill, prompt)
        else:
            assert p.ask("saved", 60)
        if how == "flush":
            with open_pool(prefill + below_prefill, create=True) as pool:
                assert pool.flush(60), "everything is in the shared tier when the prefill host answers"
        said = d.ask("answer", prompt, NUM_TOKENS)
        seen.add(kind, truth, said["tokens"])
        assert not seen.wrong
        assert said["tokens"][0] == first["tokens"][0] or seen.num_ties
        assert said["cached"] == PROMPT_TOKENS - 1, "everything was loaded"
