"""How a vLLM server runs its weights: rope, quantization and every other setting that changes what it computes, in the
words of the reference engine where that runs the model too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwater.errors import ModelError
from headwater.integrations.vllm.declined import DeclinedError
from headwater.models.config_hf import config_from_hf
from headwater.models.fields import read_json

_NAMES_OF_FILES = ("_name_or_path", "transformers_version")
"""What a config says of itself: where it lies, and who wrote it."""


def name_quantization(model: Any) -> str:
    """How weights are quantised as they are loaded; what the checkpoint itself says of it is among its bytes."""
    name, given = str(model.quantization or "none"), model.quantization_config
    if given is None:
        return name
    try:
        text = json.dumps(given if isinstance(given, dict) else asdict(given), sort_keys=True, default=str)
    except TypeError as error:
        raise DeclinedError(f"this quantization config cannot be named: {error}") from error
    if " at 0x" in text:
        raise DeclinedError("this quantization config cannot be named: it has parts that only this process knows")
    return f"{name}+{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def name_rope(model: Any) -> Mapping[str, Any]:
    """Rope as the reference engine would name it; `name_settings` names all of the config of models it does not run.

    Overrides of the config on the command line may change activations in any way, so they count as they are.
    """
    try:
        rope: dict[str, Any] = json.loads(json.dumps(asdict(config_from_hf(model.hf_text_config.to_dict()).rope)))
    except ModelError:
        rope = {"architectures": list(model.hf_config.architectures or ())}
    if model.hf_overrides:
        rope["overrides"] = hashlib.sha256(repr(model.hf_overrides).encode()).hexdigest()
    return rope


def name_settings(model: Any, local_path: Callable[[Any], Path]) -> Mapping[str, Any]:
    """The other settings as the reference engine would name them; of models that it does not run, the whole file of
    their config, of which nobody here knows what changes activations.

    The file: vLLM changes the config of some models while it builds them, in its workers and not in its scheduler.
    A model that is one file has its config among the bytes of its weights.
    """
    try:
        return config_from_hf(model.hf_text_config.to_dict()).settings
    except ModelError:
        given = getattr(model, "hf_config_path", None)
        path = Path(given) if given else local_path(model)
        if path.is_file() and not given:
            return {}
        known = {name: value for name, value in read_json(path / "config.json").items() if name not in _NAMES_OF_FILES}
        return {"config": hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()}
