"""Experts in a GGUF file under their Hugging Face names: a file stacks what a checkpoint names one by one.

An expert's matrix is a part of a stacked tensor, so that each is read, and dequantised, where it lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from headwater.errors import ModelError
from headwater.models.checkpoint.gguf_file import GGUFTensor
from headwater.models.config import ModelConfig
from headwater.models.decoder import PARTS
from headwater.models.moe import NAMES, ExpertNames

_LAYER = re.compile(r"blk\.(\d+)\.")
_TENSOR = re.compile(r"blk\.(\d+)\.(?:ffn_(gate|up|down|gate_inp)(_exps|_shexp|)\.weight|exp_probs_b\.bias)")


def expert_tensors(tensor: GGUFTensor, config: ModelConfig) -> Iterator[tuple[str, GGUFTensor]] | None:
    """What a tensor of a sparse layer becomes, by Hugging Face name; None if it is no tensor of experts. Raises
    ModelError for a stack of another number of experts."""
    if config.sparse is None:
        return None
    if (layer := _LAYER.match(tensor.name)) is not None and int(layer[1]) >= config.num_layers:
        return iter([(f"model.layers.{int(layer[1])}.{tensor.name[layer.end() :]}", tensor)])  # drafts only: not loaded
    found = _TENSOR.fullmatch(tensor.name)
    if found is None or (found[2], found[3]) in _DENSE:
        return None
    names = NAMES.get(config.family, ExpertNames())
    block = f"model.layers.{int(found[1])}.{PARTS[config.family].block}"
    match found[2], found[3]:
        case None, _:
            return iter([(f"{block}.gate.e_score_correction_bias", tensor)])
        case "gate_inp", "_shexp":  # one row, which the file may hold as a vector
            return iter([(f"{block}.{names.shared}_gate.weight", replace(tensor, shape=(1, tensor.shape[-1])))])
        case "gate_inp", _:
            return iter([(f"{block}.gate.weight", tensor)])
        case part, "_shexp":
            return iter([(f"{block}.{names.shared}.{part}_proj.weight", tensor)])
        case part, _:
            return _unstacked(tensor, config.sparse.num_experts, f"{block}.experts", getattr(names, part))


_DENSE = frozenset((part, "") for part in ("gate", "up", "down"))


def _unstacked(tensor: GGUFTensor, num_experts: int, prefix: str, part: str) -> Iterator[tuple[str, GGUFTensor]]:
    if len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
        raise ModelError(f"{tensor.name} has shape {list(tensor.shape)}; expected a stack of {num_experts} matrices")
    shape = tensor.shape[1:]
    size = prod(shape[:-1]) * tensor.row_bytes
    for expert in range(num_experts):
        own = replace(tensor, shape=shape, offset=tensor.offset + expert * size)
        yield f"{prefix}.{expert}.{part}.weight", own
