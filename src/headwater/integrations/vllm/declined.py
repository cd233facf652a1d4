"""Why the connector is switched off: for a model, a layout or a pool that it cannot serve with certainty."""

from __future__ import annotations

from headwater.errors import EngineConfigError

LOGGER = "vllm.headwater"
"""Below vLLM's own logger, which has handlers. `logs` sends there what Headwater's other loggers say."""


class DeclinedError(EngineConfigError):
    """This server runs without the pool; the message says why. vLLM itself goes on."""
