"""A worker of vLLM that is on another host if it is not the first: its shared memory is a directory of its own."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from headwater.stores import embedded


class Worker(CPUWorker):  # type: ignore[misc]
    """See the module."""

    def __init__(self, *args: Any, rank: int, **settings: Any) -> None:
        if rank:
            embedded.SHM_ROOT = os.environ["HEADWATER_TEST_ELSEWHERE"]
        super().__init__(*args, rank=rank, **settings)
