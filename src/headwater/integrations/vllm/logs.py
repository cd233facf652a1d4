"""What the rest of Headwater logs, in a process of vLLM: vLLM gives handlers to its own loggers alone, so lines of
other ones would come without time and level, or not at all."""

from __future__ import annotations

import copy
import logging

from headwater.integrations.vllm.declined import LOGGER

PREFIX = "Headwater: "


class _ToVllm(logging.Handler):
    """Hands records on to vLLM's loggers, and so to whatever handlers and level these have."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            handed = copy.copy(record)
            handed.msg, handed.args = PREFIX + record.getMessage(), None
            target = logging.getLogger(LOGGER)
            if target.isEnabledFor(record.levelno):
                target.handle(handed)
        except Exception:
            self.handleError(record)


def join_logs() -> None:
    """Show what Headwater's own loggers say as vLLM shows its lines. Whoever has given them handlers keeps those.
    Idempotent."""
    own = logging.getLogger("headwater")
    if own.handlers:
        return
    own.addHandler(_ToVllm())
    own.propagate = False  # else a process that has set up the root logger writes each line twice
    if own.level == logging.NOTSET:
        own.setLevel(logging.getLogger(LOGGER).getEffectiveLevel())
