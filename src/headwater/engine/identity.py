"""Which weights this engine runs, and how: what it must agree on with others before they share KV."""

from __future__ import annotations

import json
from dataclasses import asdict

import xxhash

from headwater.kv.identity import Identity, canonical_rope, canonical_settings
from headwater.models.checkpoint import Checkpoint


def engine_identity(checkpoint: Checkpoint, dtype: str, load_format: str) -> Identity:
    """The identity of a checkpoint as run by this engine. Reads every byte of the weights once; digests are cached.

    Random weights have no file; they are named by their config, from which they are made.
    """
    rope = canonical_rope(json.loads(json.dumps(asdict(checkpoint.config.rope))))
    settings = canonical_settings(checkpoint.config.settings)
    if load_format == "dummy":
        config = json.dumps(asdict(checkpoint.config), sort_keys=True, default=str)
        weights = f"xxh3-128:{xxhash.xxh3_128_hexdigest(b'headwater random weights' + config.encode())}"
        return Identity(
            weights=weights, run_dtype=dtype, kv_dtype=dtype, rope=rope, settings=settings, label=checkpoint.label
        )
    return Identity.from_checkpoint(checkpoint.path, run_dtype=dtype, kv_dtype=dtype, rope=rope, settings=settings)
