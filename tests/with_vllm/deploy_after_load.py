"""A deployment at the worst moment. vLLM imports this in its workers (`worker_extension_cls`): when the weights are
loaded, and before any connector is made, other weights are renamed over them."""

from __future__ import annotations

import os
from typing import Any

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

_load_weights: Any = DefaultModelLoader.load_weights


def _load_then_deploy(self: Any, *args: Any, **kwargs: Any) -> Any:
    loaded = _load_weights(self, *args, **kwargs)
    os.replace(os.environ["TEST_NEW_WEIGHTS"], os.environ["TEST_CURRENT_WEIGHTS"])
    return loaded


DefaultModelLoader.load_weights = _load_then_deploy


class Extension:
    """vLLM asks for a class."""
