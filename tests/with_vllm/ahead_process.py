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
        core = self.llm.llm_engine.engine_core.engine_core
        assert core.batch_queue_size == 2, "vLLM does not schedule ahead"
        self.side = core.scheduler.connector._steps.side
        self.modes: list[str] = []
        order = self.side.order

        def order_and_note(*args: Any, **options: Any) -> Any:
            orders = order(*args, **options)
            self.modes += [load.mode for load in orders.loads]
            return orders

        self.side.order = order_and_note

    def take_modes(self) -> list[str]:
        """How requests waited for their loads since the last call."""
        modes, self.modes = self.modes, []
        return modes

    def leftovers(self) -> list[int]:
        """Requests and blocks that the scheduler side still thinks of."""
        return [len(self.side._tracked), len(self.side._uncertain._blocks), len(self.side._held)]

    def play(self, script: list[list[Any]]) -> dict[str, list[int]]:
        """["add", name, prompt, number of tokens], ["step", count] and ["abort", name], in this order, and then steps
        to the end; the tokens of each request."""
        from vllm import SamplingParams

        said: dict[str, list[int]] = {}
        engine = self.llm.llm_engine

        def step() -> None:
            for output in engine.step():
                said[output.request_id] = list(output.outputs[0].token_ids)

        for what, *arguments in script:
            if what == "add":
                name, prompt, count = arguments
                params = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
            elif what == "abort":
                engine.abort_request(arguments)
            else:
                for _ in range(arguments[0]):
                    step()
        while engine.has_unfinished_requests():
            step()
        return said


if __name__ == "__main__":
    serve(Ahead)
