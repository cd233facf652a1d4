"""`headwater bench transfer`: a GPU's paged cache to the pool and back, against the bus itself; and packing.

One run measures both sides in turns and reports ratios, with the noise beside them. Without a GPU the figures are null
and the report says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headwater.bench.measure import Note, machine
from headwater.bench.store import Bar
from headwater.bench.transfer_gpu import TransferBench, bench_transfer
from headwater.bench.transfer_packed import bench_packed
from headwater.bench.transfer_packing import bench_packing

QUICK = TransferBench(
    num_layers=2,
    head_dim=16,
    num_tokens=2048,
    staging_bytes=1 << 20,
    pairs=2,
    num_products=4,
    product_size=64,
    naive_copies=50,
    is_quick=True,
)
"""Everything once and small: whether it runs, not how fast."""

BARS = (
    Bar("save_ratio", True, 0.9, "save_noise"),
    Bar("load_ratio", True, 0.9, "load_noise"),
    Bar("save_ratio_tp8", True, 0.85, "save_noise_tp8"),
    Bar("load_ratio_tp8", True, 0.85, "load_noise_tp8"),
    Bar("equal_topology_ratio", True, 0.97, "equal_topology_noise"),
    Bar("pack_gbps", True, 1200, None),
    Bar("unpack_gbps", True, 2100, None),
    Bar("interference", False, 1.02, "interference_noise"),
    Bar("interference_switch_interval_left_alone", False, 1.05, "interference_noise"),
    Bar("packed_load_vs_bus", True, 1.25, "packed_load_noise"),
    Bar("packed_save_vs_bus", True, 1.25, "packed_save_noise"),
    Bar("packed_share", False, 0.76, None),
    Bar("packed_interference", False, 1.03, "packed_interference_noise"),
)
FIGURES = (*(bar.figure for bar in BARS), "save_fixed_ms", "load_fixed_ms", "pack_copy_ratio", "unpack_copy_ratio")


def run(bench: TransferBench, note: Note = lambda text: None, device: str = "cuda") -> dict[str, Any]:
    """Measure everything; plain data for JSON. Half a minute on an H200, and a few times the KV's bytes."""
    import torch

    report: dict[str, Any] = {"bench": "transfer", "machine": machine() | {"torch": _version("torch")}}
    report |= dict.fromkeys(FIGURES)
    if device == "cuda" and not torch.cuda.is_available():
        report |= {"gpu": None, "gpu_reason": "no CUDA device found"}
    else:
        report |= {"gpu": torch.cuda.get_device_name() if device == "cuda" else device, "gpu_reason": None}
        for measure in (bench_transfer, bench_packed, bench_packing):
            report |= measure(bench, note, torch.device(device))
    report["bars"] = {bar.figure: {"limit": bar.limit, "verdict": _verdict(bar, report, bench)} for bar in BARS}
    return report


def _verdict(bar: Bar, report: Mapping[str, Any], bench: TransferBench) -> str:
    if report[bar.figure] is None:
        return "not measured"
    return "not judged: too small a run" if bench.is_quick else bar.judge(report)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
