"""What a request's KV depends on besides its tokens: tenant, adapter, images, prompt embeddings.

Each becomes part of the chunk keys, so requests that differ in any of them never meet. What cannot be named with
certainty makes a request private: it is served without the pool.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from headwater.connector.tracker import Inputs
from headwater.errors import HeadwaterError, WeightsChangedError
from headwater.integrations.vllm.before import START_MARGIN_NS, process_start_ns
from headwater.integrations.vllm.declined import LOGGER
from headwater.kv.checkpoint import digest_checkpoint
from headwater.kv.files import FileState, NamedFile, last_change, take_states
from headwater.kv.hashing import Extra
from headwater.pool.tenants import tenant_of

_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_ROOM_FOR_ADAPTERS = frozenset(
    {"max_lora_rank", "max_loras", "max_cpu_loras", "max_lora_cls_labels", "specialize_active_lora"}
)
log = logging.getLogger(LOGGER)


class _Adapter(NamedTuple):
    """An adapter when it was first asked for. No digest: nobody knows what vLLM runs under this id."""

    path: str
    states: tuple[FileState, ...]
    digest: bytes | None


class Adapters:
    """Digests of the LoRA adapters in use. An adapter's name and path say nothing: its weights and its config do.

    vLLM loads an adapter when it is told to, or when the first request needs it, and again after it had to make room;
    it says so to nobody. So an adapter is named only if its files have not changed since before the server started:
    whenever they were loaded, it was these. Once they change, requests with its id are private until a restart, since
    some may still run with the old weights. (One that is loaded anew has a new id, and files younger than the server.)
    """

    def __init__(self, *, rules: str = "", started_ns: int | None = None) -> None:
        """`rules`: what of the server's settings changes what an adapter does, from `adapter_rules`."""
        self._rules = rules
        self._started_ns = process_start_ns() if started_ns is None else started_ns
        self._known: dict[int, _Adapter] = {}

    def digest(self, lora: Any) -> bytes:
        """SHA-256 over the adapter's weights and config. They are read once; later calls look only at their state.

        Raises HeadwaterError or OSError where they are not to be found, or may not be what runs.
        """
        path = _adapter_path(lora.lora_path)
        states = take_states(_adapter_files(path))
        known = self._known.get(lora.lora_int_id)
        if known is None:
            known = self._known[lora.lora_int_id] = self._first(lora, path, states)
        if known.digest is not None and (known.path, known.states) != (lora.lora_path, states):
            known = self._known[lora.lora_int_id] = known._replace(digest=None)
            log.warning("Headwater: the adapter %s was changed; restart to share its KV", lora.lora_path)
        if known.digest is None:
            raise WeightsChangedError(f"the adapter {lora.lora_path!r} changed after the server started")
        return known.digest

    def _first(self, lora: Any, path: Path, states: tuple[FileState, ...]) -> _Adapter:
        if last_change(states)[1] >= self._started_ns - START_MARGIN_NS:
            log.warning(
                "Headwater: the adapter %s is younger than this server, so its requests are served without the pool; "
                "restart to share its KV",
                lora.lora_path,
            )
            return _Adapter(lora.lora_path, states, None)
        names = [state.name for state in states]
        content = digest_checkpoint(path, files=names, before=states)
        text = f"headwater adapter v2\0{content}\0{bool(getattr(lora, 'is_3d_lora_weight', False))}\0{self._rules}"
        return _Adapter(lora.lora_path, states, hashlib.sha256(text.encode()).digest())


def adapter_rules(lora_config: Any | None) -> str:
    """What vLLM's settings make of an adapter: their precision, the modules they apply to. Everything counts but what
    says only how many adapters there are room for."""
    settings = vars(lora_config) if lora_config is not None else {}
    return repr(sorted((name, str(value)) for name, value in settings.items() if name not in _ROOM_FOR_ADAPTERS))


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


def _adapter_path(given: str) -> Path:
    """As vLLM understands it. Adapters of the hub are private: which revision vLLM fetched, it does not say."""
    return Path(os.path.expanduser(given)).absolute()


def _adapter_files(path: Path) -> list[NamedFile]:
    """Its config, since the same weights with another rank or alpha are another adapter, and its weights: vLLM takes
    the first kind that is there, and tensors of two kinds are never mixed."""
    weights = next((name for name in _ADAPTER_WEIGHTS if (path / name).is_file()), _ADAPTER_WEIGHTS[0])
    return [NamedFile(name, path / name) for name in ("adapter_config.json", weights)]


def _embeds_digest(request: Any) -> bytes:
    import torch

    embeds = request.prompt_embeds.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{embeds.dtype} {tuple(embeds.shape)} {request.prompt_is_token_ids}".encode())
    digest.update(memoryview(embeds.view(torch.uint8).numpy()).cast("B"))
    return digest.digest()
