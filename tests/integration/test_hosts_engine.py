"""An engine on one host, another on a second: what the first computed the second loads, and both say the same tokens.

Also when the network goes in the middle of loads and saves: a request then takes at most its load's deadline longer.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

pytest.importorskip("transformers")

from engine_models import VOCAB, Comparison, greedy_reference, load_transformers, save_random_checkpoint
from netns import Daemon, Host, Peer, hosts
from support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.fleet]

PORT = 6398
NUM_TOKENS = 12
EACH = 4
"""Chunks of a prompt of 550 tokens and its answer: two whole ones, the prompt's tail and the answer's."""
LOAD_DEADLINE_S, COMPUTE_S = 5.0, 60.0
"""The connector's own deadline for one load, and what a busy small machine may need for a prompt."""


@contextlib.contextmanager
def engine_on(host: Host, model: Path, remote: str, tp: int) -> Iterator[Peer]:
    local = f"shm:///hwtest-{os.getpid()}-{secrets.token_hex(4)}?capacity=64MiB"
    peer = Peer(host, str(model), f"{local},{remote}", str(tp), script="host_engine")
    try:
        yield peer
    finally:
        peer.close()
        destroy(parse_url(local))


def test_same_tokens_on_another_host_and_through_a_partition(tmp_path_factory: pytest.TempPathFactory) -> None:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.skip("no redis-server or valkey-server on the PATH")
    path = save_random_checkpoint("llama", tmp_path_factory.mktemp("model"), seed=4, num_key_value_heads=4)
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(550)] for _ in range(4)]
    model = load_transformers(path)
    truth = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    seen = Comparison()

    def ask(peer: Peer, number: int) -> int:
        said = peer.ask("answer", prompts[number], NUM_TOKENS)
        seen.add(f"prompt {number}", truth[number], said["tokens"])
        assert not seen.wrong
        return int(said["cached"])

    with hosts(3) as (store, one, two):
        fixed = ["--port", str(PORT), "--bind", store.address, "--protected-mode", "no", "--save", ""]
        daemon = Daemon(store, [binary, *fixed], PORT)
        daemon.start()
        remote = f"redis://{store.address}:{PORT}?lookup=1"
        try:
            with engine_on(one, path, remote, 1) as a, engine_on(two, path, remote, 2) as b:
                for number in (0, 1):
                    assert ask(a, number) == 0
                assert a.ask("saved", 30)
                wait_until(lambda: _in_redis(store) == 2 * EACH, 60, "two prompts below")
                assert ask(b, 0) >= 512  # two chunks of 256, computed on another host by another topology
                two.unplug()
                start = time.monotonic()
                for number in (1, 2):
                    ask(b, number)
                assert time.monotonic() - start < 2 * (LOAD_DEADLINE_S + COMPUTE_S)
                two.plug()
                b.ask("saved", 30)
                wait_until(lambda: _in_redis(store) == 3 * EACH, 60, "what was computed meanwhile arrives")
                assert a.ask("forget")
                assert ask(a, 2) >= 512
                daemon.kill()
                ask(a, 3)
        finally:
            daemon.kill()


def _in_redis(host: Host) -> int:
    """Chunks that the server has."""
    ask = f"import redis; print(len(redis.Redis('{host.address}', {PORT}).keys('hw:m:*')))"
    return int(subprocess.run(host.command([sys.executable, "-c", ask]), capture_output=True, check=True).stdout)
