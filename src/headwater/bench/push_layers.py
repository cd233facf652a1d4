"""A prompt's KV on its way to another process's cache while its layers are computed, and all of it afterwards.

This process is prefill: it computes layers (matrix products on one core), saves each into its own pool as an engine
does, and pushes. Another process is decode: its load follows the push into its own paged cache. Both ways run in turns
with a step that saves and does not push, so the figures are

    push_layerwise_ratio   from the end of the last layer's products until everything is in decode's cache: pushed
                           layer by layer, over pushed in bulk from the end of the step on
    step_cost              the step with a layer-wise push over the step without one
    stopped_step_cost      the same to a peer that is stopped (SIGSTOP) when the step begins, over a live connection
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from headwater.bench.measure import Note, Rounds, Timed, take_turns
from headwater.bench.push_case import IDENTITY, START_S, PushCase, bench_pool, bench_process, bench_receiver
from headwater.errors import StoreError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import whole_shard
from headwater.peers.sender import PeerSender
from headwater.pool.pool import Pool

if TYPE_CHECKING:
    from headwater.bench.push_decode import BenchCache
    from headwater.transfer.save import Saver

FIGURES = ("push_layerwise_ratio", "push_layerwise_noise", "step_cost", "stopped_step_cost", "step_noise")
_PRODUCT = 384
"""Rows of the matrices: small enough that a layer's time can be chosen, large enough to leave the interpreter alone."""


@dataclass(frozen=True)
class LayersCase:
    """What is pushed, and how long a layer is computed: longer than its bytes need, as in any prefill worth pushing."""

    push: PushCase = PushCase("layers", 256, 128, 16, 8)  # noqa: RUF009 (frozen)
    layer_s: float = 0.03


def bench_layers(case: LayersCase, rounds: int, note: Note) -> dict[str, Any]:
    """The figures, or null and why; no rounds: there is no time left."""
    reason = None if find_spec("torch") else "torch is not installed"
    if not rounds:
        reason = "there was no time left"
    if reason is not None:
        note(f"no layer-wise push: {reason}")
        return dict.fromkeys(FIGURES) | {"push_layerwise_reason": reason}
    note(f"{case.push.num_bytes >> 20} MiB in {case.push.num_layers} layers of {case.layer_s * 1e3:.0f} ms")
    with contextlib.ExitStack() as stack:
        prefill = _Prefill(stack, case)
        runs: dict[str, Timed] = {way: lambda way=way: prefill.run(way) for way in _WAYS}  # type: ignore[misc]
        handover = take_turns(runs, rounds)
    steps = Rounds({way: seconds[1:] for way, seconds in prefill.steps.items()})  # the first one warmed up
    return {
        "push_layerwise_ratio": handover.ratio("layers", "bulk"),
        "push_layerwise_noise": max(handover.spread("layers"), handover.spread("bulk")),
        "step_cost": steps.ratio("layers", "none"),
        "stopped_step_cost": steps.ratio("stopped", "none"),
        "step_noise": steps.noise("none", "none again"),
        "push_layerwise_ms": handover.time("layers") * 1e3,
        "push_bulk_ms": handover.time("bulk") * 1e3,
        "step_ms": steps.time("none") * 1e3,
        "push_layerwise_bytes": case.push.num_bytes,
        "push_layerwise_reason": None,
    }


_WAYS = ("none", "bulk", "layers", "stopped", "none again")


class _Prefill:
    """This process: a cache, a pool, and a peer to push to."""

    def __init__(self, stack: contextlib.ExitStack, case: LayersCase) -> None:
        import torch

        from headwater.bench.push_decode import BenchCache
        from headwater.transfer.save import Saver

        self._case, push = case, case.push
        self._here, self._there = (stack.enter_context(bench_pool(push)) for _ in range(2))
        url = self._there.stats().store.url
        self._address, self._receiver = stack.enter_context(bench_receiver(url))
        command = [sys.executable, "-m", "headwater.bench.push_decode", url, json.dumps(asdict(push))]
        self._decode = stack.enter_context(bench_process(command))
        space = self._here.space(IDENTITY, push.spec, chunk_tokens=push.chunk_tokens)
        shard = whole_shard(push.spec)
        self._cache: BenchCache = BenchCache(push)
        self._cache.fill()
        self._sender = PeerSender(space, shard, server=1)
        stack.callback(self._sender.close)
        self._saver: Saver = Saver(
            space, self._cache.view, shard, staging_bytes=push.num_bytes * 2, deadline_s=START_S, sink=self._sender
        )
        stack.callback(self._saver.close)
        self._saver.wait_prepared()
        self._chunks: list[ChunkRef] = space.keys(range(push.num_chunks * push.chunk_tokens)).refs(push.num_chunks)
        self._num_tokens = len(self._chunks) * push.chunk_tokens
        self.steps: dict[str, list[float]] = {way: [] for way in _WAYS}
        threads = torch.get_num_threads()
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        self._factor = torch.rand(_PRODUCT, _PRODUCT)
        self._num_products = self._calibrate()
        self._expect("ready")

    def _calibrate(self) -> int:
        """Products that take as long as a layer should."""
        times = []
        for _ in range(40):
            began = time.perf_counter()
            self._factor @ self._factor
            times.append(time.perf_counter() - began)
        return max(1, round(self._case.layer_s / float(np.percentile(times, 25))))

    def run(self, way: str) -> float:
        """One prompt. Seconds from the end of the last layer's products until decode has everything."""
        for pool in (self._here, self._there):
            _empty(pool)
        transfer = secrets.token_hex(8)
        is_pushed = way in ("bulk", "layers")
        if is_pushed:
            self._say("load")
            self._expect("follows")
        with self._stopped() if way == "stopped" else contextlib.nullcontext():
            computed = self._step(way, transfer)
            if way == "stopped":
                self._sender.cancel(transfer)
                self._drain()
        if way == "bulk" and not self._push_all(transfer):
            raise StoreError("a push did not arrive")
        if way == "layers" and self._sender.flush(transfer, START_S) != self._num_tokens:
            raise StoreError("a push did not arrive")
        self._drain()
        return self._arrival() - computed if is_pushed else 0.0

    def _drain(self) -> None:
        if not self._saver.drain(START_S) or self._saver.num_dropped:
            raise StoreError("the prefill side could not save what it computed")

    def _step(self, way: str, transfer: str) -> float:
        """Compute and save the prompt; when the last layer's products were done."""
        began = time.monotonic()
        if way in ("layers", "stopped") and not self._sender.push(transfer, self._address, self._chunks):
            raise StoreError("the peer is left alone: a push to it would cost nothing")
        self._saver.begin("bench", self._chunks, self._cache.blocks)
        for layer in range(self._case.push.num_layers):
            for _ in range(self._num_products):
                self._factor @ self._factor
            computed = time.monotonic()
            self._saver.layer_done(layer)
        self.steps[way].append(time.monotonic() - began)
        return computed

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        """With a receiver that takes nothing. Afterwards it has heard everything, and takes pushes again."""
        os.kill(self._receiver, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._receiver, signal.SIGCONT)
        end = time.monotonic() + START_S
        while not self._push_all(secrets.token_hex(8)):
            if time.monotonic() > end:
                raise StoreError("a receiver that was stopped is not pushed to again")
            time.sleep(0.05)

    def _push_all(self, transfer: str) -> bool:
        """Whether all chunks, which are in the own pool, are with the peer."""
        self._sender.push(transfer, self._address, self._chunks)
        return self._sender.flush(transfer, START_S) == self._num_tokens

    def _arrival(self) -> float:
        """When decode had everything, by the clock that all processes of a host share."""
        arrived, count, digest = self._hear().split()
        if int(count) != len(self._chunks) or digest != self._cache.digest():
            raise StoreError(f"decode has {count} of {len(self._chunks)} chunks, or other bytes")
        return float(arrived)

    # ---- the other process --------------------------------------------------------------------------------------
    def _say(self, line: str) -> None:
        assert self._decode.stdin is not None
        self._decode.stdin.write(line + "\n")
        self._decode.stdin.flush()

    def _hear(self) -> str:
        assert self._decode.stdout is not None
        return self._decode.stdout.readline().strip()

    def _expect(self, line: str) -> None:
        if (said := self._hear()) != line:
            raise StoreError(f"the decode side said {said[:80]!r} instead of {line!r}")


def _empty(pool: Pool) -> None:
    end = time.monotonic() + START_S
    while pool.stats().store.chunks:  # a chunk that is lent goes when it is given back
        pool.clear()
        if time.monotonic() > end:
            raise StoreError("the pool of a benchmark cannot be emptied")
