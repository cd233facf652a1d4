"""Which weights a vLLM server runs: the name that the reference engine gives to the same files, so that both share."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from headwater.errors import HeadwaterError
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.options import Options
from headwater.kv.checkpoint import digest_checkpoint

_RUN_AS_STORED = ("auto", "safetensors", "pt", "hf", "gguf", "runai_streamer", "fastsafetensors", "instanttensor")
"""Load formats that read the checkpoint and change nothing."""


def name_weights(config: Any, options: Options) -> str:
    """The weights' name, as `Identity.weights` wants it. Reads every byte of them once; digests are cached.

    Random weights are another model in every server, and are named after it. Raises DeclinedError.
    """
    load_format = config.load_config.load_format
    if load_format == "dummy":
        return "sha256:" + hashlib.sha256(server_name(config)).hexdigest()
    if load_format not in _RUN_AS_STORED:
        raise DeclinedError(f"load format {load_format!r} may load other weights than the checkpoint holds")
    try:
        return digest_checkpoint(local_path(config.model_config), sample=options.sample_weights)
    except HeadwaterError as error:
        raise DeclinedError(f"the weights cannot be named: {error}") from error


def server_name(config: Any) -> bytes:
    # The engine id may be chosen by people; the instance id is random in every start.
    return f"{config.kv_transfer_config.engine_id}\0{config.instance_id}".encode()


def local_path(model: Any) -> Path:
    """Where the weights lie: a local path, or the snapshot that vLLM downloaded."""
    if os.path.exists(model.model):
        return Path(model.model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    if not isinstance(found, str):
        raise DeclinedError(f"the files of {model.model!r} were not found on this machine")
    return Path(found).parent
