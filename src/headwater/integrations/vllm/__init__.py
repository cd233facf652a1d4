"""Headwater in vLLM: `--kv-transfer-config` with `"kv_connector_module_path": "headwater.integrations.vllm"`.

Only what vLLM asks for by name is here, and it is imported when it is asked for: the package needs vLLM, and whoever
only looks at Headwater's modules may not have it. docs/vllm.md is the manual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.integrations.vllm.connector import HeadwaterConnector

__all__ = ["HeadwaterConnector"]


def __getattr__(name: str) -> Any:
    if name == "HeadwaterConnector":
        from headwater.integrations.vllm.before import note_files
        from headwater.integrations.vllm.connector import HeadwaterConnector

        note_files()  # the one moment before the model is loaded at which vLLM calls us
        return HeadwaterConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
