"""Which weights this engine runs, and how: what it must agree on with others before they share KV."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from headwater.errors import ModelError, WeightsChangedError
from headwater.kv.identity import Identity, canonical_rope, canonical_settings
from headwater.models.checkpoint import Checkpoint


def engine_identity(checkpoint: Checkpoint, dtype: str, load_format: str, device_kind: str = "cpu") -> Identity:
    """The identity of a checkpoint as run by this engine, all of whose ranks have loaded it. Reads every byte of the
    weights once; digests are cached. Raises WeightsChangedError if files changed since the checkpoint was opened.

    Random weights have no file; they are named by their config, from which they are made, and by the kind of device
    that made them: generators of different devices give different numbers.
    """
    rope = canonical_rope(json.loads(json.dumps(asdict(checkpoint.config.rope))))
    settings = canonical_settings(checkpoint.config.settings)
    if load_format == "dummy":
        config = json.dumps(
            checkpoint.config.flat() | {"rope": asdict(checkpoint.config.rope)}, sort_keys=True, default=str
        )
        made_on = f"headwater random weights v2\0{device_kind}\0{config}"
        weights = f"sha256:{hashlib.sha256(made_on.encode()).hexdigest()}"
        return Identity(
            weights=weights, run_dtype=dtype, kv_dtype=dtype, rope=rope, settings=settings, label=checkpoint.label
        )
    try:
        files = checkpoint.weight_files()
    except ModelError as error:  # it said so when it was loaded
        raise WeightsChangedError(f"{error}; the files changed while they were loaded, restart the server") from error
    return Identity.from_checkpoint(
        checkpoint.path,
        files=files,
        before=checkpoint.opened,
        run_dtype=dtype,
        kv_dtype=dtype,
        rope=rope,
        settings=settings,
    )
