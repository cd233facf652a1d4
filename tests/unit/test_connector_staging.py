"""How much memory lies between a cache and the pool."""

from __future__ import annotations

import pytest
import torch

from headwater.connector.config import ConnectorConfig
from headwater.connector.staging import ring_bytes, staging_bytes, with_staging

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("step", "free", "rings"),
    [
        (GIB, 14 * GIB, (512 * MIB, GIB * 5 // 4)),
        (GIB, 2 * GIB, (512 * MIB, 512 * MIB)),
        (GIB, 4 * GIB, (512 * MIB, GIB)),
        (4 * GIB, 60 * GIB, (GIB, 2 * GIB)),
        (MIB, 60 * GIB, (512 * MIB, 512 * MIB)),
        (16 * GIB, 0, (2 * GIB, 512 * MIB)),
    ],
)
def test_on_a_gpu_saves_get_a_whole_step_if_there_is_memory(
    monkeypatch: pytest.MonkeyPatch, step: int, free: int, rings: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 141 * GIB))
    made = with_staging(ConnectorConfig(pool="memory://"), step, torch.device("cuda"))
    assert ring_bytes(made, "cuda") == rings
    assert sum(rings) < staging_bytes(made, "cuda") <= sum(rings) * 17 // 16


@pytest.mark.parametrize(("step", "ring"), [(MIB, 256 * MIB), (GIB, GIB), (9 * GIB, 2 * GIB)])
def test_on_a_cpu_both_get_a_whole_step(step: int, ring: int) -> None:
    made = with_staging(ConnectorConfig(pool="memory://"), step, torch.device("cpu"))
    assert ring_bytes(made, "cpu") == (ring, ring)
    assert staging_bytes(made, "cpu") == 2 * ring


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_asked_for_is_what_both_get(device: str) -> None:
    made = with_staging(ConnectorConfig(pool="memory://", staging_bytes=7 * MIB), GIB, torch.device(device))
    assert ring_bytes(made, device) == (7 * MIB, 7 * MIB)


def test_nothing_without_a_pool() -> None:
    assert staging_bytes(None, "cuda") == 0
