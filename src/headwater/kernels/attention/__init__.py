"""Paged attention: the interface is in `base`, one file per backend, and this registry creates them by name.

A backend's module is imported only when it is created, so that a machine without Triton (or, later, FlashInfer or
FlashAttention) can still use the others. To add one: write the class, and register a creator here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from headwater.errors import EngineConfigError
from headwater.kernels.attention.base import AttentionBackend, AttentionBatch
from headwater.kernels.dispatch import triton_missing_reason

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "AttentionBatch",
    "attention_backend_names",
    "create_attention_backend",
    "register_attention_backend",
]


class BackendCreator(Protocol):
    """Imports the backend and makes one for `device`; raises EngineConfigError where it cannot run."""

    def __call__(self, device: torch.device) -> AttentionBackend: ...


ATTENTION_BACKENDS: dict[str, BackendCreator] = {}


def register_attention_backend(name: str) -> Callable[[BackendCreator], BackendCreator]:
    """Decorator that enters a creator into the registry; a name is given once."""

    def register(creator: BackendCreator) -> BackendCreator:
        if name == "auto" or name in ATTENTION_BACKENDS:
            raise EngineConfigError(f"attention backend {name!r} is already registered; choose another name")
        ATTENTION_BACKENDS[name] = creator
        return creator

    return register


def attention_backend_names() -> tuple[str, ...]:
    """Every name that `create_attention_backend` takes, for command-line choices."""
    return ("auto", *ATTENTION_BACKENDS)


def create_attention_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """A backend by name; "auto" is "triton" on CUDA and "cpu" on the CPU.

    Raises EngineConfigError for an unknown name, and for a backend that cannot run on this device or machine.
    """
    device = torch.device(device)
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
    creator = ATTENTION_BACKENDS.get(name)
    if creator is None:
        known = ", ".join(attention_backend_names())
        raise EngineConfigError(f"unknown attention backend {name!r}; known are: {known}")
    return creator(device)


@register_attention_backend("reference")
def _create_reference(device: torch.device) -> AttentionBackend:
    from headwater.kernels.attention.reference import ReferenceAttention

    return ReferenceAttention()


@register_attention_backend("cpu")
def _create_cpu(device: torch.device) -> AttentionBackend:
    if device.type != "cpu":
        raise EngineConfigError(f'attention backend "cpu" runs on the CPU, not on {device}; use "auto" or "triton"')
    from headwater.kernels.attention.cpu import CpuAttention

    return CpuAttention()


@register_attention_backend("triton")
def _create_triton(device: torch.device) -> AttentionBackend:
    missing = triton_missing_reason()
    if missing is not None:
        raise EngineConfigError(f'attention backend "triton" cannot be used: {missing}; use "reference" or "cpu"')
    from headwater.kernels.attention.triton_backend import TritonAttention, interpreted

    if device.type != "cuda" and not interpreted():
        raise EngineConfigError(f'attention backend "triton" needs a CUDA device, not {device}; use "auto" or "cpu"')
    return TritonAttention(device)
