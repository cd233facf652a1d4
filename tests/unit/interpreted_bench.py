"""The GPU's part of `headwater bench engine` on a CPU, its kernels in Triton's interpreter; started by
test_bench_engine_device.py.

Not collected by itself: TRITON_INTERPRET must be set before Triton is first imported, so it needs its own process.
"""

from dataclasses import replace

import torch

from headwater.bench import engine

torch.set_num_threads(1)


def test_every_figure_of_a_gpu_is_measured():
    told = []
    report = engine.run(replace(engine.QUICK, cpu=None), told.append, device="cpu")
    reasons = {name: why for name, why in report.items() if name.endswith("_reason") and name != "grouped_vllm_reason"}
    assert reasons == {"gpu_reason": None}
    assert all(report[name] > 0 for name in engine.DEVICE_FIGURES), report
    assert all(any(line.startswith(f"{name}: ") for line in told) for name in engine.DEVICE_FIGURES)
    assert {bar["verdict"] for name, bar in report["bars"].items() if not name.startswith("cpu")} == {
        "not judged: too small a run"
    }
    assert (report["moe_decode_b1_touched"], report["moe_decode_touched"]) == (4, 4)
    assert report["moe_decode_one_row_bytes"] > 0
    assert report["mla_token_bytes"] == 2 * (32 + 16) * 4
