"""Several stores as one pool. `open_tiers` is the factory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from headwater.stores.embedded import open_embedded
from headwater.stores.embedded.journal import CURSOR_PREFIX
from headwater.stores.remote import open_remote, open_source
from headwater.stores.tiers.lower import LocalTier, LowerTier, RemoteTier, SourceTier
from headwater.stores.tiers.ownership import Ownership, SoleOwnership
from headwater.stores.tiers.store import TieredStore
from headwater.stores.url import StoreUrl, first_tier


def open_tiers(urls: Sequence[StoreUrl], group: int | None = None, *, create: bool = True) -> TieredStore:
    """Open all tiers. Those of this host must be there or be made; remote ones may be down, and are used when they
    are up."""
    front, rest = open_embedded(first_tier(urls), group, create=create), urls[1:]
    opened: list[LowerTier] = []
    try:
        for url in rest:
            if url.is_read_only:
                opened.append(SourceTier(url, open_source(url)))
            elif url.is_remote:
                opened.append(RemoteTier(url, open_remote(url)))
            else:
                opened.append(LocalTier(url, open_embedded(url, group, create=create)))
        # Who only looks at a pool that exists neither copies nor gives memory.
        copied = [url for url in rest if not url.is_read_only]
        return TieredStore(front, opened, _ownership(front.directory, copied) if create and copied else None)
    except BaseException:
        for tier in opened:
            tier.store.close()
        front.close()
        raise


def _ownership(directory: str | None, rest: Sequence[StoreUrl]) -> Ownership | SoleOwnership:
    """Copying to other tiers is another's business: one file for each combination."""
    if directory is None:
        return SoleOwnership()
    places = "\n".join(f"{u.scheme} {u.host} {u.port} {u.path} {u.options.get('prefix', '')}" for u in rest)
    return Ownership(os.path.join(directory, CURSOR_PREFIX + hashlib.sha256(places.encode()).hexdigest()[:16]))
