"""Where vLLM's tables of positions end. Past the end it computes with whatever lies there, which differs between
processes, and no name could say so. vLLM lets a server pass it: a key of the config (`model_max_length`) and a variable
(`VLLM_ALLOW_LONG_MAX_MODEL_LEN`) raise max_model_len, and some rope types raise it by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.integrations.vllm.declined import DeclinedError

_FROM_TRAINED_LENGTH = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Rope types whose table ends at the trained length times the factor, whatever length the config gives the model."""
_FROM_LENGTH = ("linear",)
"""Rope types whose table ends at the model's length times the factor. All others end at that length."""


def check_positions(model: Any) -> None:
    """Raise DeclinedError where a request could pass the end of a table."""
    end = min(_table_ends(model), default=None)
    if end is not None and model.max_model_len > end:
        raise DeclinedError(
            f"max_model_len is {model.max_model_len}, and vLLM's rope table ends at {end:g}; set max_model_len to that"
        )


def _table_ends(model: Any) -> list[float]:
    """The length of each table: models whose layers differ may have several."""
    length, rope = _length(model), getattr(model.hf_text_config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    ends = [_table_end(part, length) for part in parts]
    return [end for end in ends if end is not None]


def _table_end(rope: Mapping[str, Any], length: float | None) -> float | None:
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind in _FROM_TRAINED_LENGTH:
        length = rope.get("original_max_position_embeddings") or length
    if length is None or kind not in _FROM_TRAINED_LENGTH + _FROM_LENGTH or not isinstance(factor, int | float):
        return length
    return length * factor


def _length(model: Any) -> float | None:
    """How many positions the model has. Where its config gives them no name of their own, what vLLM makes of it, which
    may be that it has no end."""
    own = getattr(model.hf_text_config, "max_position_embeddings", None)
    if own is not None:
        return float(own)
    derived, _ = model.model_arch_config.derived_max_model_len_and_key
    return None if derived == float("inf") else float(derived)
