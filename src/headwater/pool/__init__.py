"""What the pool does: match, lease, read and write KV by content, for a rank of any topology."""

from __future__ import annotations

from headwater.pool.buffers import RawBuffer
from headwater.pool.match import Match
from headwater.pool.pool import Pool, PoolStats, open_pool
from headwater.pool.space import Space

__all__ = ["Match", "Pool", "PoolStats", "RawBuffer", "Space", "open_pool"]
