"""Which implementation a kernel call uses: Triton on CUDA tensors where Triton is installed, plain torch elsewhere.

The answer comes with its reason, so that a slow start can be explained. Nothing here touches a device.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from headwater.errors import InvalidArgumentError


@cache
def triton_missing_reason() -> str | None:
    """Why Triton cannot be used in this process, or None if it can. The first call imports nothing but looks it up."""
    if find_spec("triton") is None:
        return "Triton is not installed (it comes with CUDA builds of torch; `pip install triton` otherwise)"
    return None


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels on this tensor run in Triton."""
    return tensor.is_cuda and triton_missing_reason() is None


def describe_dispatch(tensor: Tensor) -> str:
    """One line for logs: what kernels on this tensor run in, and why."""
    if not tensor.is_cuda:
        return f"torch reference kernels: tensors are on {tensor.device.type}, not on CUDA"
    missing = triton_missing_reason()
    return f"torch reference kernels: {missing}" if missing else "Triton kernels"


def require(condition: bool, expected: str, **given: Any) -> None:
    """Raise InvalidArgumentError unless `condition`; tensors among `given` are shown by shape, dtype and strides.

    For the boundary of a kernel: only conditions on host data belong here (a shape, a dtype), never on a value that
    lies on the device, which would wait for it.
    """
    if not condition:
        shown = ", ".join(f"{name} {_show(value)}" for name, value in given.items())
        raise InvalidArgumentError(f"expected {expected}; got {shown}")


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} strides {value.stride()} on {value.device}"
    return repr(value)
