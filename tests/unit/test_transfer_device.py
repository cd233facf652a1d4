"""The GPU's saver and loader on a CPU, where every lane is the caller's: everything but streams and registration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the transfer needs torch")

from headwater.transfer import device_ring
from transfer_pool_cases import EXTENT, check_bounds, check_damage, check_load, check_save

MAPPED = "memory://?capacity=32MiB"


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("ring", [2 * EXTENT // 8, 64 * EXTENT])
def test_saves_and_loads(tp: int, ring: int) -> None:
    check_save(MAPPED, "cpu", tp, ring)
    check_load(MAPPED, "cpu", tp, ring)


def test_stores_that_are_not_mapped(tmp_path: Path) -> None:
    check_save(f"file://{tmp_path}/a?capacity=32MiB", "cpu", 2, 4 * EXTENT)
    check_load(f"file://{tmp_path}/b?capacity=32MiB", "cpu", 2, 4 * EXTENT)


def test_damage() -> None:
    check_damage(MAPPED, "cpu")


def test_bounds() -> None:
    check_bounds(MAPPED, "cpu")


def test_without_registration_other_ranks_tiles_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.transfer.registered.Registered.ensure", lambda self, view: False)
    check_save(MAPPED, "cpu", 2, 8 * EXTENT)
    check_load(MAPPED, "cpu", 2, 8 * EXTENT)


def test_no_copy_crosses_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments may be neighbours in memory, but each is registered by itself."""
    calls: list[set[int]] = []
    plain = device_ring.copy_pieces

    def spy(targets: list[Any], sources: list[Any]) -> None:
        calls.append({id(_base(side)) for side in (*targets, *sources) if isinstance(side, np.ndarray)})
        plain(targets, sources)

    monkeypatch.setattr(device_ring, "copy_pieces", spy)
    check_save(f"memory://?capacity=32MiB&segment={3 * EXTENT}", "cpu", 1, 64 * EXTENT)
    assert len(calls) > 3
    assert {len(segments) for segments in calls} == {1}


def _base(array: Any) -> Any:
    while isinstance(array.base, np.ndarray) or not isinstance(array, np.ndarray):
        array = array.base
    return array
