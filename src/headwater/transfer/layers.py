"""Layers in groups: a transfer that goes layer by layer moves several at once, so that its pieces stay large."""

from __future__ import annotations

from itertools import pairwise

MAX_GROUPS = 16
"""More would only cost the host time: with sixteen, all but a sixteenth of a save hides behind the computation."""
MAX_LOAD_GROUPS = 8
"""A load shares the interpreter with the thread that launches the step which waits for it, so it has fewer."""

GROUP_BYTES = {"cpu": 8 << 20, "cuda": 32 << 20}
"""By mover: how large a group should be. On a CPU it is worth a call into the pool from this size on; on a GPU copies
must be large, or the host cannot issue them as fast as the bus moves them."""


def layers_before(layers: range, group: range) -> range | None:
    """What has left before a group of these layers; None for the first one."""
    return layers[: layers.index(group[0])] if group[0] != layers[0] else None


def layer_groups(layers: range, layer_bytes: int, min_bytes: int, most: int = MAX_GROUPS) -> list[range]:
    """Consecutive layers, in order, as evenly divided as may be, so that a group has at least `min_bytes`."""
    wanted = max(1, len(layers) * layer_bytes // max(min_bytes, 1))
    count = min(len(layers), most, wanted)
    bounds = [len(layers) * i // count for i in range(count + 1)]
    return [layers[start:stop] for start, stop in pairwise(bounds)]
