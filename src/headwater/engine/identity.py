"""Which weights this engine runs, and how: what it must agree on with others before they share KV."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from typing import Any

from headwater.errors import ModelError, WeightsChangedError
from headwater.kv.identity import Identity, canonical_rope, canonical_settings
from headwater.models.checkpoint import Checkpoint
from headwater.models.config import ModelConfig

PRECISION_VARIABLES: tuple[str, ...] = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
PRECISION_VARIABLES += ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
"""Some container images set them."""


def engine_identity(checkpoint: Checkpoint, dtype: str, load_format: str, device_kind: str = "cpu") -> Identity:
    """The identity of a checkpoint as run by this engine, all of whose ranks have loaded it. Reads every byte of the
    weights once; digests are cached. Raises WeightsChangedError if files changed since the checkpoint was opened.

    Float32 that is multiplied with less, as TF32 on a GPU say, is another precision, and counts.

    Random weights have no file; they are named by their config, from which they are made, and by the kind of device
    that made them: generators of different devices give different numbers.
    """
    rope = canonical_rope(json.loads(json.dumps(asdict(checkpoint.config.rope))))
    settings = canonical_settings({**checkpoint.config.settings, **_precision(checkpoint.config, dtype)})
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


def _precision(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """What lets products of float32 be rounded to less: variables of CUDA, oneDNN and torch, or a setting of torch.
    A router's products are float32 in every dtype, and close scores decide."""
    import torch

    is_set = any(os.environ.get(name, "0").upper() not in ("", "0", "STRICT") for name in PRECISION_VARIABLES)
    is_reduced = is_set or torch.get_float32_matmul_precision() != "highest"
    has_any = dtype == "float32" or config.sparse is not None
    return {"float32_products": "reduced"} if has_any and is_reduced else {}
