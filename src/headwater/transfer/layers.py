"""Layers in groups: a transfer that goes layer by layer moves several at once, so that its pieces stay large."""

from __future__ import annotations

from itertools import pairwise

MAX_GROUPS = 16
"""More would only cost the host time: with sixteen, all but a sixteenth of a transfer hides behind the computation."""

GROUP_BYTES = {"cpu": 8 << 20, "cuda": 32 << 20}
"""By mover: how large a group is at least. On a CPU it is worth a call into the pool from this size on; on a GPU copies
must be large, or the host cannot issue them as fast as the bus moves them."""

LOAD_GROUP_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""The same for loads. On a GPU the thread that launches a group launches the step that waits for it, too: a group takes
it a millisecond, as long as the bus needs for 50 MiB."""

MAX_LOAD_GROUPS = {"cpu": 8, "cuda": 16}
"""On a CPU a load's threads and the step that waits for it share the cores, so it has fewer."""

ENOUGH_GROUPS = 4
"""For a save on a GPU: it hides behind the computation but for a quarter, which nobody waits for, and whoever launches
the next step shares the interpreter with the thread that stores each group."""


def save_group_bytes(total_bytes: int, ring_bytes: int, least_bytes: int) -> int:
    """How large a group of a save on a GPU should be: a ring holds three, so that it fills while it empties."""
    return max(least_bytes, min(total_bytes // ENOUGH_GROUPS, ring_bytes // 3))


def layers_before(layers: range, group: range) -> range | None:
    """What has left before a group of these layers; None for the first one."""
    return layers[: layers.index(group[0])] if group[0] != layers[0] else None


def layer_groups(layers: range, layer_bytes: int, min_bytes: int, most: int = MAX_GROUPS) -> list[range]:
    """Consecutive layers, in order, as evenly divided as may be, so that a group has at least `min_bytes`."""
    wanted = max(1, len(layers) * layer_bytes // max(min_bytes, 1))
    count = min(len(layers), most, wanted)
    bounds = [len(layers) * i // count for i in range(count + 1)]
    return [layers[start:stop] for start, stop in pairwise(bounds)]
