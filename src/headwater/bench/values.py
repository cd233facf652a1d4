"""KV like a model's: normal values in bfloat16, each channel with a scale of its own. Noise would not pack."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headwater.kv.spec import KVSpec


def kv_tile(spec: KVSpec, num_tokens: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """One raw tile of a bfloat16 spec."""
    planes = []
    for plane in spec.planes:
        scales = np.exp(rng.standard_normal(plane.width, np.float32))
        values = rng.standard_normal((num_tokens, plane.width), np.float32) * scales
        planes.append((values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1))
    return np.concatenate(planes)
