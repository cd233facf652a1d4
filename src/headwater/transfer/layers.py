"""Layers in groups: a transfer that goes layer by layer moves several at once, so that its pieces stay large."""

from __future__ import annotations

MAX_GROUPS = 16
"""More would only cost the host time: with sixteen, all but a sixteenth of a transfer hides behind the computation."""


def layer_groups(layers: range, layer_bytes: int, min_bytes: int) -> list[range]:
    """Consecutive layers, in order, as evenly divided as may be, so that a group has at least `min_bytes`."""
    wanted = max(1, len(layers) * layer_bytes // max(min_bytes, 1))
    count = min(len(layers), MAX_GROUPS, wanted)
    bounds = [len(layers) * i // count for i in range(count + 1)]
    return [layers[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
