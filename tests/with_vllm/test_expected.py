"""Real vLLM follows KV that another process writes to its pool layer by layer, and computes what does not come."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from headwater.bench.vllm_engine import EngineProcess, engine
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import whole_shard
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.base import Status

from pool_waits import spaces
from support import WAIT_S, wait_until
from vllm_models import hit_tokens, random_tokens, settings_of, wait_for_hits, wait_for_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPT = random_tokens(1, 700, 500)
NUM_NEW = 8


class Sender(NamedTuple):
    """A process of another server that has the prompt's KV, and writes it to vLLM's pool."""

    pool: Pool
    space: Space
    chunks: list[ChunkRef]
    tiles: list[np.ndarray]

    def send(self, chunks: range, layers: range) -> None:
        """Write some layers of some chunks."""
        shard = replace(whole_shard(self.space.spec), layers=layers)
        statuses = self.space.write(
            [self.chunks[number] for number in chunks],
            shard,
            [self.tiles[number][layers.start : layers.stop] for number in chunks],
            before=range(layers.start) if layers.start else None,
            deadline_s=WAIT_S,
        )
        assert all(status.stored for status in statuses), statuses

    def age(self) -> int:
        """When the first chunk was last used."""
        return int(self.pool._store.ages([self.chunks[0].key])[0])


@pytest.fixture(scope="module", params=["async", "layerwise"])
def server(request: pytest.FixtureRequest, qwen3: Path, pool_url: str, log_file: Path) -> Iterator[EngineProcess]:
    settings = settings_of(qwen3, pool_url, extra={"load_mode": request.param})
    with engine(log_file, settings) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: EngineProcess) -> list[list[int]]:
    """What vLLM says when it computes the prompt."""
    found: list[list[int]] = server.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)["tokens"]
    return found


@pytest.fixture(scope="module")
def sender(server: EngineProcess, pool_url: str, expected: object) -> Iterator[Sender]:
    """It takes the KV that vLLM has saved, and then the pool is empty."""
    wait_for_hits(pool_url, [PROMPT])
    with open_pool(pool_url, create=False, group=4242) as pool:
        (space,) = spaces(pool)
        chunks, shard = space.keys(PROMPT).chunks(), whole_shard(space.spec)
        tiles = [space.empty(chunk, shard) for chunk in chunks]
        assert space.read(chunks, shard, tiles, deadline_s=WAIT_S) == [Status.OK] * len(chunks)
        yield Sender(pool, space, list(chunks), tiles)


@pytest.mark.parametrize("fate", ["completes", "aborts", "never comes"])
def test_what_comes_is_used_and_the_rest_computed(
    fate: str, server: EngineProcess, sender: Sender, expected: list[list[int]]
) -> None:
    sender.pool.clear()
    assert server.ask("reset")
    before = server.ask("metrics")
    num_layers, count = sender.space.spec.num_layers, len(sender.chunks)
    start_s = 1.0 if fate != "completes" else WAIT_S
    transfer: dict[str, Any] = {"headwater": {"transfer": "7", "wait_s": WAIT_S, "start_s": start_s}, "other": 1}
    if fate != "never comes":
        sender.send(range(1), range(num_layers))
        sender.send(range(1, count), range(1))
        age = sender.age()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.ask, "generate", prompts=[PROMPT], max_tokens=NUM_NEW, transfer=transfer)
        if fate != "never comes":
            wait_until(lambda: sender.age() > age)  # it loads the chunk that is complete, and follows the others
        if fate == "completes":
            for layer in range(1, num_layers):
                sender.send(range(1, count), range(layer, layer + 1))
        elif fate == "aborts":
            assert sender.space.abort(sender.chunks[1:]) == count - 1
        found = answer.result(WAIT_S)
    assert found["tokens"] == expected
    names = ("expected_requests", "followed_loads", "given_up_requests", "loaded_tokens")
    wanted = {
        "completes": (1, 1, 0, hit_tokens(PROMPT)),
        "aborts": (1, 1, 1, 256),
        "never comes": (1, 0, 1, 0),
    }[fate]

    def counted(metrics: dict[str, float]) -> tuple[float, ...]:
        return tuple(
            metrics.get(f"headwater_pool_{name}", 0) - before.get(f"headwater_pool_{name}", 0) for name in names
        )

    metrics = wait_for_metrics(server, lambda found: counted(found)[:3] == wanted[:3])
    assert counted(metrics) == wanted
