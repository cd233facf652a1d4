"""`headwater bench vllm --device cuda`: real vLLM on a GPU, with Headwater and with other connectors.

`run` starts the engines, `merge` computes the figures from results that earlier runs kept.
"""

from __future__ import annotations

from headwater.bench.vllm_gpu.plan import PARTS, QUICK, SIDES, TRIAL, GpuPlan
from headwater.bench.vllm_gpu.run import merge, run

__all__ = ["PARTS", "QUICK", "SIDES", "TRIAL", "GpuPlan", "merge", "run"]
