"""What a request's KV depends on besides its tokens: tenant, adapter, images, prompt embeddings.

Each becomes part of the chunk keys, so requests that differ in any of them never meet. What cannot be named with
certainty makes a request private: it is served without the pool.
"""

from __future__ import annotations

import hashlib
from typing import Any

from headwater.connector.tracker import Inputs
from headwater.errors import HeadwaterError
from headwater.integrations.vllm.adapters import Adapters
from headwater.kv.hashing import Extra
from headwater.pool.tenants import tenant_of


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


def _embeds_digest(request: Any) -> bytes:
    import torch

    embeds = request.prompt_embeds.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{embeds.dtype} {tuple(embeds.shape)} {request.prompt_is_token_ids}".encode())
    digest.update(memoryview(embeds.view(torch.uint8).numpy()).cast("B"))
    return digest.digest()
