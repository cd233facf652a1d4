"""How a vLLM server runs its weights: in the words of the reference engine where that knows every key of the
configuration, and otherwise as a digest of the whole configuration and of vLLM's options.

The digest is made from files and options. vLLM changes the config of some models while it builds them, in its workers
and not in its scheduler, and all of them must find one name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ModelError
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.flags import counted_flags
from headwater.integrations.vllm.weights import config_folder, local_path
from headwater.models.config import FAMILIES, ModelConfig
from headwater.models.config_hf import config_from_hf
from headwater.models.config_keys import HARMLESS
from headwater.models.fields import read_json

_WRITER = ("_name_or_path", "transformers_version")
"""Keys that say where a config lies and who wrote it, in any model."""

SEARCHED = frozenset(
    {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "OlmoeForCausalLM",
        "Glm4MoeForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
    }
)
"""Classes of vLLM in which `make test-identity` has changed every key: those in `HARMLESS` and vLLM's max_model_len
change no number there (but in a rope type that reads it)."""

_READ_FOR_TEXT = ("config.json", "params.json", "sparse_attention_config.json", "torchao_config.json")
"""Beside these vLLM reads files whose names say that they describe a quantization."""

_NEVER_READ = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "generation_config.json",
    "chat_template.json",
)
"""Files that decide about tokens, and how they are drawn; not about what is computed from them."""


def name_quantization(model: Any) -> str:
    """How weights are quantised as they are loaded; what the checkpoint itself says of it is in `name_settings`."""
    name, given = str(model.quantization or "none"), model.quantization_config
    return name if given is None else f"{name}+{_digest(given, 'quantization config')[:32]}"


def name_rope(config: Any) -> Mapping[str, Any]:
    """Rope as the reference engine would name it; `name_settings` names all of the config of models it does not run.

    Raises DeclinedError where vLLM would read past the end of its rope table.
    """
    _check_rope_table(config.model_config)
    known = _as_reference(config)
    if known is None:
        return {"architecture": str(config.model_config.architecture)}
    rope: dict[str, Any] = json.loads(json.dumps(asdict(known.rope)))
    return rope


def name_settings(config: Any) -> Mapping[str, Any]:
    """The other settings as the reference engine would name them, or a digest of everything that may count.

    Reads the model's JSON files. Raises DeclinedError where something that counts cannot be named.
    """
    known = _as_reference(config)
    if known is not None:
        return known.settings
    model = config.model_config
    whole = {
        "architecture": str(model.architecture),
        "task": [str(getattr(model, "runner_type", "generate")), str(getattr(model, "convert_type", "none"))],
        "overrides": model.hf_overrides or {},
        "flags": counted_flags(config),
        "files": _files(model),
        "code": _remote_code(model),
        "max_model_len": model.max_model_len if _reads_length(model) else None,
    }
    return {"config": _digest(whole, "configuration")}


def _check_rope_table(model: Any) -> None:
    """vLLM's table of a YaRN model ends at the trained length times the factor, wherever the model's own length ends.
    It computes with whatever lies behind it, which differs between processes."""
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        trained, factor = part.get("original_max_position_embeddings"), part.get("factor")
        if (
            str(part.get("rope_type")).endswith("yarn")
            and trained
            and factor
            and model.max_model_len > trained * factor
        ):
            raise DeclinedError(
                f"max_model_len is {model.max_model_len}, and vLLM's rope table ends at {trained * factor:g} (YaRN)"
            )


def _as_reference(config: Any) -> ModelConfig | None:
    """The model as the reference engine understands it, where that knows every key of its config and vLLM runs the
    class of that name with no option that changes numbers.

    The config is the one in memory, with every override in it: what vLLM does to it in workers changes none of it.
    """
    model = config.model_config
    hf = model.hf_config
    if model.quantization is not None or getattr(model, "multimodal_config", None) is not None:
        return None
    if getattr(model, "runner_type", "generate") != "generate" or counted_flags(config):
        return None
    values = hf.to_dict()
    if model.hf_text_config is not hf and model.hf_text_config.to_dict() != values:
        return None
    try:
        known = config_from_hf(values)
    except ModelError:
        return None
    return known if model.architecture == FAMILIES[known.family].architecture else None


def _files(model: Any) -> dict[str, str]:
    """Digests of the JSON files beside the weights, and of those that `hf_config_path` names. A model that is one file
    has its config among the bytes of its weights."""
    found: dict[str, str] = {}
    path = local_path(model)
    if path.is_dir():
        found |= {f"model/{name}": digest for name, digest in _json_digests(model, path)}
    other = config_folder(model)
    if other is not None:
        found |= {f"config/{name}": digest for name, digest in _json_digests(model, other)}
    return found


def _json_digests(model: Any, directory: Path) -> Iterator[tuple[str, str]]:
    """(name, digest) of each file that vLLM may read, a config without the keys that change nothing."""
    is_text = model.architecture in SEARCHED and getattr(model, "multimodal_config", None) is None
    for path in sorted(directory.glob("*.json")):
        name = path.name
        if is_text and name not in _READ_FOR_TEXT and "quant" not in name:
            continue
        if name in _NEVER_READ or name.endswith(".index.json"):
            continue
        if name == "config.json":
            harmless = HARMLESS if is_text else _WRITER
            yield name, _digest({key: value for key, value in read_json(path).items() if key not in harmless}, name)
        else:
            yield name, _file_digest(path)


def _remote_code(model: Any) -> dict[str, str]:
    """Digests of the Python files beside the weights, where the config refers to any and vLLM may run them."""
    auto_map = getattr(model.hf_config, "auto_map", None)
    if not auto_map or not getattr(model, "trust_remote_code", False):
        return {}
    path = local_path(model)
    if "--" in json.dumps(auto_map, default=str) or not path.is_dir():
        raise DeclinedError("the model's code lies in another repository (auto_map), and may change there")
    return {file.name: _file_digest(file) for file in sorted(path.glob("*.py"))}


def _reads_length(model: Any) -> bool:
    """Whether vLLM's max_model_len may change numbers: it chooses between the two tables of `longrope`."""
    return model.architecture not in SEARCHED or "longrope" in json.dumps(model.hf_config.to_dict(), default=str)


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DeclinedError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def _digest(value: Any, what: str) -> str:
    try:
        text = json.dumps(value, sort_keys=True, default=_plain)
    except (TypeError, ValueError) as error:
        raise DeclinedError(f"this {what} cannot be named: {error}") from error
    if " at 0x" in text:
        raise DeclinedError(f"this {what} cannot be named: it has parts that only this process knows")
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """JSON for what vLLM's options hold; objects that print as nothing but themselves are found by `_digest`."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
