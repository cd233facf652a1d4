"""Whether a checkpoint says once, and completely, what each of vLLM's parameters is.

Where two tensors are for one parameter, the one that is read last wins, and which that is depends on options of the
loader and on threads. Where a part of a fused parameter is missing, vLLM runs with whatever lies in memory. Neither has
a name; the reference engine refuses both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from headwater.errors import ModelError
from headwater.integrations.vllm.declined import DeclinedError

_FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Parameters that vLLM makes of several tensors, in any class; further ones are in its class."""
_APART: dict[str, str] = {"qkv_proj": "kv_a_proj_with_mqa", "fused_qkv_a_proj": "q_proj"}
"""Tensors beside which a parameter is not fused: latent attention has no keys by head, and its queries may have no
latent."""
_WHOLE = ("weight", "qweight", "weight_packed")
"""Tensors of which no part may be missing. Scales need not be there for each part."""
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.+)")
_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale")
"""They are for quantised KV, which is not shared, and vLLM knows them by several names."""


def check_tensors(files: Sequence[Path], model_class: type, *, is_regular: bool) -> None:
    """Raise DeclinedError where a parameter is there twice, or in part. Reads the headers of the files.

    `is_regular`: a class of which it is known that each part of a fused parameter has a bias, or none has, and that all
    layers with experts have as many.
    """
    names = _names(files)
    _check_renamed(names, getattr(model_class, "hf_to_vllm_mapper", None))
    fused = _FUSED | {name: tuple(parts) for name, parts in _packed(model_class).items() if len(parts) > 1}
    _check_fused(names, fused, (*_WHOLE, "bias") if is_regular else _WHOLE)
    counts = _count_experts(names)
    if is_regular and len(set(counts.values())) > 1:
        raise DeclinedError(f"{min(counts, key=lambda layer: counts[layer])} has fewer experts than other layers")


def _names(files: Sequence[Path]) -> set[str]:
    holders: dict[str, Path] = {}
    for file in files:
        for name in _names_in(file):
            if name in holders:
                raise DeclinedError(
                    f"{name} is in {holders[name].name} and in {file.name}, and which of the two runs depends on how "
                    "they are loaded; write the checkpoint again, each tensor once"
                )
            holders[name] = file
    return set(holders)


def _names_in(file: Path) -> Iterable[str]:
    try:
        if file.suffix == ".safetensors":
            from headwater.models.checkpoint.safetensors import read_tensor_names

            return read_tensor_names(file)
        import torch

        return [str(name) for name in torch.load(file, map_location="meta", weights_only=True)]
    except ModelError as error:
        raise DeclinedError(f"the weights cannot be named: {error}") from error
    except Exception as error:  # whatever a pickle may raise
        raise DeclinedError(f"{file.name} does not say which tensors it holds: {error}") from error


def _check_renamed(names: set[str], mapper: Any) -> None:
    """vLLM gives tensors other names as it loads them: two must not become one."""
    rename = getattr(mapper, "_map_name_with_shard", None)
    if rename is None:
        return
    found: dict[tuple[str, str], str] = {}
    for name in sorted(names):
        renamed = None if name.endswith(_SCALES) else rename(name)
        if renamed is not None and (other := found.setdefault((renamed[0], str(renamed[1])), name)) != name:
            raise _twice(other, name)


def _check_fused(names: set[str], fused: Mapping[str, Sequence[str]], whole: Sequence[str]) -> None:
    plain = {_EXPERT.sub(r"\1\3", name): name for name in sorted(names)}
    for name in sorted(names):
        parent, module, last = ("", *name.rsplit(".", 2))[-3:]
        for whole_name, parts in fused.items():
            siblings = [f"{parent}.{part}.{last}" for part in parts]
            if whole_name in _APART and f"{parent}.{_APART[whole_name]}.{last}" in names:
                continue
            if module == whole_name and (found := [plain[part] for part in siblings if part in plain]):
                raise _twice(name, found[0])
            if module not in parts or last not in whole:
                continue
            if absent := [part for part in siblings if part not in names]:
                raise DeclinedError(f"the checkpoint has {name} and no {absent[0]}; is it complete?")


def _count_experts(names: set[str]) -> dict[str, int]:
    """How many experts each layer has. Each must be there, once: vLLM keeps those of a layer in one parameter, and
    takes it for loaded if one of them is."""
    experts = sorted((match[1], int(match[2]), match[3]) for match in map(_EXPERT.fullmatch, names) if match)
    counts: dict[str, int] = {}
    for layer, found in groupby(experts, lambda entry: entry[0]):
        parts: dict[int, set[str]] = {}
        for _, number, part in found:
            parts.setdefault(number, set()).add(part)
            if layer + part in names:
                raise _twice(layer + part, f"{layer}{number}.{part}")
        counts[layer] = max(parts) + 1
        every = {part for some in parts.values() for part in some if part.endswith(_WHOLE)}
        for number in range(counts[layer]):
            if lacking := sorted(every - parts.get(number, set())):
                raise DeclinedError(f"the checkpoint has no {layer}{number}.{lacking[0]}; is it complete?")
    return counts


def _packed(model_class: type) -> Mapping[str, Sequence[str]]:
    found = getattr(model_class, "packed_modules_mapping", None)
    return found if isinstance(found, Mapping) else {}


def _twice(one: str, other: str) -> DeclinedError:
    return DeclinedError(
        f"{one} and {other} are for one parameter of vLLM, and which of the two runs depends on how they are loaded; "
        "write the checkpoint again, each tensor once"
    )
