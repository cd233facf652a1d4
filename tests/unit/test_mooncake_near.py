"""Memory that a process gave to a cluster: only what lies there, whole, is read there."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headwater.errors import DeadlineError
from headwater.stores.remote.base import ObjectRange
from headwater.stores.remote.mooncake_near import NearMemory

SIZE = 4096
HERE = "host:1"


@pytest.fixture
def memory() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.arange(SIZE, dtype=np.uint64).astype(np.uint8)


@pytest.fixture
def near(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> NearMemory:
    start = memory.ctypes.data
    return NearMemory(HERE, start, start + SIZE)


def replica(address: int, size: int, endpoint: str = HERE, status: str = "COMPLETE", in_memory: bool = True) -> Any:
    place = SimpleNamespace(buffer_address=address, size=size, transport_endpoint=endpoint)
    return SimpleNamespace(
        is_memory_replica=lambda: in_memory,
        status=SimpleNamespace(name=status),
        get_memory_descriptor=lambda: SimpleNamespace(buffer_descriptor=place),
    )


def span(offset: int, length: int) -> ObjectRange:
    targets = [np.zeros(length // 2, np.uint8), np.zeros(length - length // 2, np.uint8)]
    return ObjectRange("a", offset, length, targets, False)


def test_a_range_of_an_object_here(near: NearMemory, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    wanted, told = span(10, 100), list[tuple[int, range]]()
    places = near.locate({"a": [replica(memory.ctypes.data + 1000, 500)]}, [wanted])
    assert places == {0: 1010}
    near.land([wanted], places, time.monotonic() + 20, lambda number, targets: told.append((number, targets)))
    assert np.array_equal(np.concatenate(wanted.targets), memory[1010:1110])
    assert told == [(0, range(1)), (0, range(1, 2))]


@pytest.mark.parametrize(
    ("at", "size", "more"),
    [
        (0, 500, {"endpoint": "host:2"}),  # another process's, at the same address
        (0, 500, {"status": "PROCESSING"}),
        (0, 500, {"in_memory": False}),
        (0, 99, {}),  # shorter than what is wanted
        (SIZE - 50, 500, {}),  # beyond the end
        (-200, 500, {}),  # before the beginning
    ],
)
def test_what_is_not_here(
    at: int, size: int, more: dict[str, Any], near: NearMemory, memory: np.ndarray[Any, np.dtype[np.uint8]]
) -> None:
    wanted = span(10, 100)
    assert near.locate({"a": [replica(memory.ctypes.data + at, size, **more)]}, [wanted]) == {}
    assert near.locate({}, [wanted]) == {}
    good = replica(memory.ctypes.data, 500)
    assert near.locate({"a": [replica(memory.ctypes.data + at, size, **more), good]}, [wanted]) == {0: 10}


def test_a_deadline_that_has_passed(near: NearMemory) -> None:
    with pytest.raises(DeadlineError):
        near.land([span(0, 10)], {0: 0}, time.monotonic() - 1, lambda number, targets: None)
