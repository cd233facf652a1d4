"""Headwater: one KV cache under every LLM engine.

    import headwater as hw

    pool = hw.open_pool("shm:///headwater?capacity=8GiB")
    space = pool.space(identity, spec)
    hit = space.match(space.keys(tokens))

Names are imported on first use, so that `import headwater` costs milliseconds and no numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.lazy import names_on_demand

if TYPE_CHECKING:
    from headwater.engine.config import EngineConfig
    from headwater.engine.engine import Engine, EngineStats
    from headwater.engine.params import FinishReason, RequestOutput, SamplingParams
    from headwater.errors import (
        BackendError,
        BufferMismatchError,
        CapacityError,
        ConfigError,
        DeadlineError,
        EngineConfigError,
        EngineDeadError,
        EngineError,
        FormatVersionError,
        HeadwaterError,
        IdentityError,
        InvalidArgumentError,
        MemoryBudgetError,
        ModelError,
        PeerError,
        PeerGoneError,
        PeerRefusedError,
        PeerTimeoutError,
        RequestError,
        SettingsMismatchError,
        SpecError,
        SpecMismatchError,
        StoreClosedError,
        StoreDamagedError,
        StoreError,
        StorePermissionError,
        TokenError,
        TopologyError,
        UrlError,
        WeightsChangedError,
        WireError,
    )
    from headwater.kv.checkpoint import digest_checkpoint
    from headwater.kv.hashing import ChunkKeys, ChunkRef, Extra
    from headwater.kv.identity import Identity
    from headwater.kv.spec import KVSpec, Plane
    from headwater.kv.topology import Shard, Split, Topology, whole_shard
    from headwater.pool.buffers import RawBuffer
    from headwater.pool.match import Match, RequestLease
    from headwater.pool.pool import Pool, PoolStats, open_pool
    from headwater.pool.space import Space
    from headwater.stores.base import Piece, Status
    from headwater.stores.stats import ChunkInfo, StoreStats, VerifyReport

__version__ = "0.1.0"

_HOMES = {
    "headwater.engine.config": "EngineConfig",
    "headwater.engine.engine": "Engine EngineStats",
    "headwater.engine.params": "FinishReason RequestOutput SamplingParams",
    "headwater.errors": (
        "BackendError BufferMismatchError CapacityError ConfigError DeadlineError EngineConfigError EngineDeadError "
        "EngineError FormatVersionError HeadwaterError IdentityError InvalidArgumentError MemoryBudgetError ModelError "
        "PeerError PeerGoneError PeerRefusedError PeerTimeoutError RequestError SettingsMismatchError SpecError "
        "SpecMismatchError StoreClosedError StoreDamagedError "
        "StoreError StorePermissionError TokenError TopologyError UrlError WeightsChangedError WireError"
    ),
    "headwater.kv.checkpoint": "digest_checkpoint",
    "headwater.kv.hashing": "ChunkKeys ChunkRef Extra",
    "headwater.kv.identity": "Identity",
    "headwater.kv.spec": "KVSpec Plane",
    "headwater.kv.topology": "Shard Split Topology whole_shard",
    "headwater.pool.buffers": "RawBuffer",
    "headwater.pool.pool": "Pool PoolStats open_pool",
    "headwater.pool.match": "Match RequestLease",
    "headwater.pool.space": "Space",
    "headwater.stores.base": "Piece Status",
    "headwater.stores.stats": "ChunkInfo StoreStats VerifyReport",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "BackendError",
    "BufferMismatchError",
    "CapacityError",
    "ChunkInfo",
    "ChunkKeys",
    "ChunkRef",
    "ConfigError",
    "DeadlineError",
    "Engine",
    "EngineConfig",
    "EngineConfigError",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "Extra",
    "FinishReason",
    "FormatVersionError",
    "HeadwaterError",
    "Identity",
    "IdentityError",
    "InvalidArgumentError",
    "KVSpec",
    "Match",
    "MemoryBudgetError",
    "ModelError",
    "PeerError",
    "PeerGoneError",
    "PeerRefusedError",
    "PeerTimeoutError",
    "Piece",
    "Plane",
    "Pool",
    "PoolStats",
    "RawBuffer",
    "RequestError",
    "RequestLease",
    "RequestOutput",
    "SamplingParams",
    "SettingsMismatchError",
    "Shard",
    "Space",
    "SpecError",
    "SpecMismatchError",
    "Split",
    "Status",
    "StoreClosedError",
    "StoreDamagedError",
    "StoreError",
    "StorePermissionError",
    "StoreStats",
    "TokenError",
    "Topology",
    "TopologyError",
    "UrlError",
    "VerifyReport",
    "WeightsChangedError",
    "WireError",
    "__version__",
    "digest_checkpoint",
    "open_pool",
    "whole_shard",
]


__getattr__ = names_on_demand(__name__, _HOME_OF)


def __dir__() -> list[str]:
    return __all__
