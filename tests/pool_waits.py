"""Waiting for what engines do in the background: tests ask the pool itself, and never count on it being done by now."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headwater.errors import StoreError
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space

from support import WAIT_S

Whose = Callable[[Identity], bool]


def wait_saved(
    pool_url: str,
    wanted: Sequence[tuple[Sequence[int], int]],
    *,
    whose: Whose = lambda identity: True,
    tenant: bytes = b"",
    adapter: bytes = b"",
    timeout_s: float = WAIT_S,
) -> None:
    """Wait until a server that comes now would find of each prompt at least so many tokens in the pool's first tier.

    `wanted` is (prompt, number of tokens). The KV may be that of any model whose identity `whose` accepts.
    """
    end, found = time.monotonic() + timeout_s, list[int]()
    with _open(pool_url.partition(",")[0], end) as pool:
        while True:
            found = [_most(pool, tokens, whose, tenant, adapter) for tokens, _ in wanted]
            if all(num >= enough for num, (_, enough) in zip(found, wanted, strict=True)):
                return
            needed = [enough for _, enough in wanted]
            assert time.monotonic() < end, f"of {needed} tokens, {found} were in the pool after {timeout_s} s"
            time.sleep(0.05)


def _open(url: str, end: float) -> Pool:
    while True:
        try:
            return open_pool(url, create=False)
        except StoreError:
            assert time.monotonic() < end, f"nobody has made {url}"
            time.sleep(0.05)


def _most(pool: Pool, tokens: Sequence[int], whose: Whose, tenant: bytes, adapter: bytes) -> int:
    found = [0]
    for space in spaces(pool):
        if whose(space.identity):
            found.append(space.match(space.keys(tokens, tenant=tenant, adapter=adapter)).num_tokens)
    return max(found)


def spaces(pool: Pool) -> list[Space]:
    """Every space that has chunks."""
    described = {repr((info.space, info.root["chunk_tokens"])): (info.space, info.root) for info in pool.scan()}
    return [
        pool.space(
            Identity.from_canonical(space["identity"]),
            KVSpec.from_canonical(space["spec"]),
            chunk_tokens=root["chunk_tokens"],
        )
        for space, root in described.values()
    ]
