"""What a request's KV depends on besides its tokens: tenant, adapter, images, prompt embeddings.

Each becomes part of the chunk keys, so requests that differ in any of them never meet. What cannot be named with
certainty makes a request private: it is served without the pool.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

from headwater.connector.tracker import Inputs
from headwater.errors import HeadwaterError
from headwater.kv.checkpoint import digest_checkpoint
from headwater.kv.hashing import Extra
from headwater.pool.tenants import tenant_of

_ADAPTER_CONFIGS = ("adapter_config.json",)


class Adapters:
    """Digests of the LoRA adapters in use. An adapter's name and path say nothing: its weights and its config do."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], bytes] = {}

    def digest(self, lora: Any) -> bytes:
        """SHA-256 over the adapter's weights and config. They are read once for each load of the adapter, about when
        vLLM reads them itself. Raises HeadwaterError or OSError where they are not to be found."""
        key = (lora.lora_int_id, lora.lora_path)
        if key not in self._digests or lora.load_inplace:
            self._digests[key] = _adapter_digest(Path(lora.lora_path))
        return self._digests[key]


def request_inputs(request: Any, adapters: Adapters) -> Inputs | None:
    """The inputs of a vLLM request; None where one of them has no certain name.

    Nor has a session that takes further input while it runs: vLLM takes tokens of it back.
    """
    if request.resumable:
        return None
    adapter = b""
    if request.lora_request is not None:
        try:
            adapter = adapters.digest(request.lora_request)
        except (HeadwaterError, OSError):
            return None
    extras = []
    for feature in request.mm_features:
        if not feature.identifier:
            return None
        digest = hashlib.sha256(feature.identifier.encode()).digest()
        position = feature.mm_position
        extras.append(Extra(f"mm.{feature.modality}"[:64], digest, position.offset, position.length))
    if request.prompt_embeds is not None:
        extras.append(Extra("embeds", _embeds_digest(request), 0, request.num_prompt_tokens))
    return Inputs(tenant_of(request.cache_salt), adapter, tuple(extras))


def _adapter_digest(path: Path) -> bytes:
    digest = hashlib.sha256(b"headwater adapter\0" + digest_checkpoint(path).encode())
    for name in _ADAPTER_CONFIGS:  # the same weights with another rank or alpha are another adapter
        data = (path / name).read_bytes() if (path / name).is_file() else b""
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.digest()


def _embeds_digest(request: Any) -> bytes:
    import torch

    embeds = request.prompt_embeds.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{embeds.dtype} {tuple(embeds.shape)} {request.prompt_is_token_ids}".encode())
    digest.update(memoryview(embeds.view(torch.uint8).numpy()).cast("B"))
    return digest.digest()
