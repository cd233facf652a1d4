"""When what happens between a request and its first token, inside one vLLM process with Headwater's connector.

Methods of vLLM and of the connector's class are wrapped from outside before the engine is made, so only names of
vLLM's own interface are used. Runs in the engine's process; `timeline` makes a table of the events.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

TimelineEvent = list[Any]
"""[name, seconds since some moment, a number or None]: a list, since it travels as JSON."""

Detail = Callable[[tuple[Any, ...], Any], Any]
"""Of a call's arguments and result: the number to note, or None where the call is not worth a event."""


class Timeline:
    """Marks of one request at a time. Costs two clock readings a wrapped call."""

    def __init__(self) -> None:
        self._events: list[TimelineEvent] | None = None
        for module, owner, method, name, detail in _WATCHED:
            self._watch(getattr(import_module(module), owner), method, name, detail)

    @contextmanager
    def recording(self) -> Iterator[list[TimelineEvent]]:
        """The events of what is done inside."""
        events: list[TimelineEvent] = []
        self._events = events
        try:
            yield events
        finally:
            self._events = None

    def _watch(self, owner: type, method: str, name: str, detail: Detail) -> None:
        wrapped = getattr(owner, method, None)
        if wrapped is None:
            return  # of another version of vLLM: its line is missing in the table

        @functools.wraps(wrapped)
        def timed(*arguments: Any, **named: Any) -> Any:
            events = self._events
            if events is None:
                return wrapped(*arguments, **named)
            begin = time.perf_counter()
            result = wrapped(*arguments, **named)
            end, noted = time.perf_counter(), detail(arguments, result)
            if noted is not None:
                events.append([f"{name} begins", begin, noted])
                events.append([f"{name} ends", end, noted])
            return result

        setattr(owner, method, timed)


def _always(arguments: tuple[Any, ...], result: Any) -> int:
    return 0


def _num_matched(arguments: tuple[Any, ...], result: Any) -> int | None:
    """None, which means that the connector wants to be asked again, is -1."""
    return -1 if result[0] is None else int(result[0])


def _num_allocated(arguments: tuple[Any, ...], result: Any) -> int | None:
    return int(arguments[3]) or None if len(arguments) > 3 else 0


def _num_scheduled(arguments: tuple[Any, ...], result: Any) -> int:
    return int(result.total_num_scheduled_tokens)


def _num_executed(arguments: tuple[Any, ...], result: Any) -> int:
    return int(arguments[1].total_num_scheduled_tokens)


def _num_arrived(arguments: tuple[Any, ...], result: Any) -> int | None:
    return len(result.finished_recving or ()) or None


def _num_answered(arguments: tuple[Any, ...], result: Any) -> int | None:
    return len(result) or None


_CONNECTOR = "headwater.integrations.vllm"
_WATCHED: tuple[tuple[str, str, str, str, Detail], ...] = (
    ("vllm.v1.engine.llm_engine", "LLMEngine", "add_request", "request", _always),
    ("vllm.v1.engine.llm_engine", "LLMEngine", "step", "answer", _num_answered),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "schedule", "schedule", _num_scheduled),
    ("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "execute_model", "execute", _num_executed),
    ("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "sample_tokens", "sample", _always),
    (_CONNECTOR, "HeadwaterConnector", "on_new_request", "hash", _always),
    (_CONNECTOR, "HeadwaterConnector", "get_num_new_matched_tokens", "match", _num_matched),
    (_CONNECTOR, "HeadwaterConnector", "update_state_after_alloc", "allocation", _num_allocated),
    (_CONNECTOR, "HeadwaterConnector", "build_connector_meta", "orders", _always),
    (_CONNECTOR, "HeadwaterConnector", "start_load_kv", "load call", _always),
    (_CONNECTOR, "HeadwaterConnector", "get_transfer_results", "arrival", _num_arrived),
)
