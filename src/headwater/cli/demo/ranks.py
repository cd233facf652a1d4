"""What one rank of an engine does with the pool: `save` what it computed, `load` what somebody else did.

This is the library's API in use. Neither function knows the other's topology or block size, and neither is told
what the other did: the prompt's tokens are all they have in common.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headwater.cli.demo.cache import IDENTITY, SPEC, PagedCache, make_prompt
from headwater.errors import StoreError
from headwater.kv.topology import Shard, Topology
from headwater.pool import open_pool
from headwater.stores.base import Status

_DEADLINE_S = 10.0
"""An engine would rather compute than wait this long; a demo on a busy laptop would rather wait."""


@dataclass(frozen=True)
class Rank:
    """One process of one server. `group` is what the processes of that server have in common."""

    url: str
    group: int
    topology: Topology
    pp_rank: int
    tp_rank: int
    num_tokens: int

    @property
    def shard(self) -> Shard:
        """The layers and heads it holds."""
        return self.topology.shard(SPEC, pp_rank=self.pp_rank, tp_rank=self.tp_rank)

    def make_cache(self) -> PagedCache:
        """Its own paged cache, with blocks in its own order."""
        seed = self.pp_rank * self.topology.tp + self.tp_rank
        return PagedCache(self.shard, self.topology.block_size, self.num_tokens, seed)


class Report(NamedTuple):
    """What one rank did. Times are of the clock that all processes of a machine share."""

    num_tokens: int
    num_bytes: int
    started_s: float
    ended_s: float
    wrong_bytes: int


def save(rank: Rank, wait_for_others: Callable[[], object]) -> Report:
    """Compute the prompt's KV, then write this rank's part of it."""
    shard, cache, num_bytes = rank.shard, rank.make_cache(), 0
    cache.compute()
    with open_pool(rank.url, group=rank.group) as pool:
        space = pool.space(IDENTITY, SPEC)
        chunks = space.keys(make_prompt(rank.num_tokens)).chunks()
        wait_for_others()
        started_s = time.monotonic()
        for chunk in chunks:
            tiles = cache.gather(chunk.first_token, chunk.num_tokens)
            status = space.write([chunk], shard, [tiles], deadline_s=_DEADLINE_S)[0]
            if not status.stored:
                raise StoreError(f"chunk {chunk.number} could not be written: {status.name}")
            num_bytes += tiles.nbytes if status == Status.OK else 0  # EXISTS: somebody wrote it before
            # An engine's ranks prefill in step. The chunk can be found once the last of them has written its part.
            wait_for_others()
        return Report(rank.num_tokens, num_bytes, started_s, time.monotonic(), 0)


def load(rank: Rank, wait_for_others: Callable[[], object]) -> Report:
    """Find the prompt's KV, bring this rank's part of it into the paged cache, and compare every byte."""
    shard, cache, num_bytes = rank.shard, rank.make_cache(), 0
    with open_pool(rank.url, group=rank.group) as pool:
        space = pool.space(IDENTITY, SPEC)
        keys = space.keys(make_prompt(rank.num_tokens))
        wait_for_others()
        started_s = time.monotonic()
        match = space.match(keys)
        with space.lease(match, request_id="demo"):
            shapes = [shard.local_shape(SPEC, chunk.first_token, chunk.num_tokens) for chunk in match.chunks]
            buffers = [np.empty(shape, np.uint8) for shape in shapes]
            statuses = space.read(match.chunks, shard, buffers, deadline_s=_DEADLINE_S)
        for chunk, status, tiles in zip(match.chunks, statuses, buffers, strict=True):
            if status == Status.OK:  # an engine computes the rest itself; here what is missing is wrong
                cache.scatter(chunk.first_token, chunk.num_tokens, tiles)
                num_bytes += tiles.nbytes
        ended_s = time.monotonic()
    return Report(match.num_tokens, num_bytes, started_s, ended_s, cache.count_wrong_bytes())
