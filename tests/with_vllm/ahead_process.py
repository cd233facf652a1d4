"""An engine on a CPU that schedules steps ahead, as vLLM does on a GPU by default, in one process with its driver.

vLLM's CPU platform switches that off; what its model runner needs for it are streams and events, which do nothing here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from headwater.bench.vllm_process import Commands, serve


class _Nothing:
    """A stream, or an event, of a device on which every call has ended when it returns."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


@contextmanager
def _no_stream(stream: Any) -> Any:
    yield


def schedule_ahead() -> None:
    """Let vLLM's CPU platform schedule steps ahead."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def update_and_schedule_ahead(cls: Any, config: Any) -> None:
        update(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(update_and_schedule_ahead)
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[misc, assignment]
    torch.cuda.current_stream = _Nothing  # type: ignore[assignment]
    torch.cuda.stream = _no_stream  # type: ignore[assignment]


class Ahead(Commands):
    """An engine that is driven step by step, too."""

    def __init__(self, settings: dict[str, Any]) -> None:
        schedule_ahead()
        super().__init__(settings)
        self.core = self.llm.llm_engine.engine_core.engine_core
        assert self.core.batch_queue_size == 2

    def facts(self) -> dict[str, Any]:
        """What the scheduler side does."""
        connector = self.core.scheduler.connector
        return {"batches": self.core.batch_queue_size, "in_step": connector._steps.side.loads_in_step}


if __name__ == "__main__":
    serve(Ahead)
