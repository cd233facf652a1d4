"""How a vLLM server runs its weights: in the words of the reference engine where that knows every key of the
configuration, and otherwise as a digest of the whole configuration and of vLLM's options.

The digest is made from files, options, and the config as vLLM held it when it was noted (`before`): whatever led vLLM
to read it from elsewhere counts. vLLM changes the config of some models while it builds them, in its workers and not in
its scheduler, and all of them must find one name.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ModelError
from headwater.integrations.vllm.before import held_config
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.flags import counted_flags
from headwater.integrations.vllm.positions import check_positions
from headwater.integrations.vllm.searched import SEARCHED
from headwater.integrations.vllm.weights import config_folder, list_code, local_path
from headwater.models.config import FAMILIES, ModelConfig
from headwater.models.config_hf import config_from_hf
from headwater.models.config_keys import HARMLESS
from headwater.models.fields import read_json

_WRITER = ("_name_or_path", "transformers_version")
"""Keys that say where a config lies and who wrote it, in any model."""

_SET_BY_VLLM = {"qwen2_moe": frozenset({"disable_sliding_window"})}
"""Options that vLLM sets by itself, by family of the reference engine: the config of this one has a window of 0 where
it uses none, and vLLM takes it out. Models that the reference engine runs use none: the option changes nothing."""

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

    Raises DeclinedError where vLLM could read past the end of its rope table, or reads another config than it seems.
    """
    check_class(config.model_config)
    _check_one_config(config.model_config)
    check_positions(config.model_config)
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
    if held := {key: value for key, value in held_config(config).items() if key not in _harmless(model)}:
        whole["held"] = held
    return {"config": _digest(whole, "configuration")}


def _harmless(model: Any) -> Collection[str]:
    """Keys of a config that change nothing in this model."""
    is_text = model.architecture in SEARCHED and getattr(model, "multimodal_config", None) is None
    return HARMLESS if is_text else _WRITER


def _check_one_config(model: Any) -> None:
    """Raise DeclinedError where config.json names others: which of them is read depends on the version of
    transformers."""
    path = (config_folder(model) or local_path(model)) / "config.json"
    if path.is_file() and "configuration_files" in read_json(path):
        raise DeclinedError(f"{str(path)!r} names configuration_files, one of which transformers reads in its place")


def _as_reference(config: Any) -> ModelConfig | None:
    """The model as the reference engine understands it, where that knows every key of its config and vLLM runs the
    class of that name with no option that changes numbers.

    The config is the one in memory, with every override in it: what vLLM does to it in workers changes none of it.
    """
    model = config.model_config
    hf = model.hf_config
    if model.quantization is not None or getattr(model, "multimodal_config", None) is not None:
        return None
    if getattr(model, "runner_type", "generate") != "generate":
        return None
    flags = counted_flags(config)
    values = hf.to_dict()
    if model.hf_text_config is not hf and model.hf_text_config.to_dict() != values:
        return None
    if "auto_map" in values and _remote_code(model):
        return None
    try:
        known = config_from_hf(_before_workers(values))
    except ModelError:
        return None
    if flags.keys() - _SET_BY_VLLM.get(known.family, frozenset()):
        return None
    return known if model.architecture == FAMILIES[known.family].architecture else None


def _before_workers(values: dict[str, Any]) -> dict[str, Any]:
    """A config as it was before vLLM built a model with latent attention: it calls YaRN by another name there."""
    rope = values.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.get("rope_type") == "deepseek_yarn":
        return values | {"rope_parameters": {**rope, "rope_type": "yarn"}}
    return values


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
    return found | _mistral_files(model, other or path)


def _mistral_files(model: Any, folder: Path) -> dict[str, str]:
    """Whether vLLM takes params.json for the config: it does where weights in Mistral's format lie beside it, even if
    it loads others. Of a model of the hub, vLLM asks the hub."""
    if not (folder / "params.json").is_file() or getattr(model, "config_format", "auto") != "auto":
        return {}
    if not os.path.exists(getattr(model, "hf_config_path", None) or model.model):
        raise DeclinedError("vLLM asks the hub which of two configs to read; choose one with --config-format")
    return {"consolidated": str(any(folder.glob("consolidated*.safetensors")))}


def _json_digests(model: Any, directory: Path) -> Iterator[tuple[str, str]]:
    """(name, digest) of each file that vLLM may read, a config without the keys that change nothing."""
    for path in sorted(directory.glob("*.json")):
        name = path.name
        if not _is_read(model, name):
            continue
        if name == "config.json":
            harmless = _harmless(model)
            yield name, _digest({key: value for key, value in read_json(path).items() if key not in harmless}, name)
        else:
            yield name, _file_digest(path)


def _remote_code(model: Any) -> dict[str, str]:
    """Digests of the code below the weights, where a config refers to any and vLLM may run it: code of the model, and
    of the processors of its images."""
    if not getattr(model, "trust_remote_code", False):
        return {}
    folders = [path for path in (local_path(model), config_folder(model)) if path is not None and path.is_dir()]
    maps = [getattr(model.hf_config, "auto_map", None)]
    for path in (path for folder in folders for path in folder.glob("*.json")):
        if _is_read(model, path.name):
            maps += _auto_maps(path)
    if not any(maps):
        return {}
    if getattr(model, "code_revision", None):
        raise DeclinedError("the model's code is of another revision (code_revision) than its files")
    if "--" in json.dumps(maps, default=str) or not folders:
        raise DeclinedError("the model's code lies in another repository (auto_map), and may change there")
    found = {f"{number}/{name}": path for number, folder in enumerate(folders) for name, path in _code(folder)}
    return {name: _file_digest(path) for name, path in sorted(found.items())}


def check_running_code(model: Any) -> None:
    """Raise DeclinedError where code runs that is not the model's as it was named. For workers: transformers imports
    code from copies that it made once."""
    named = set(_remote_code(model).values())
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or os.devnull)
        runs = bool(named) and name.startswith("transformers_modules.") and path.is_file() and path.stat().st_size > 0
        if runs and _file_digest(path) not in named:
            raise DeclinedError(f"{str(path)!r} runs, and is not among the model's files; delete it and restart")


def _code(folder: Path) -> Iterator[tuple[str, Path]]:
    """Python files, and the JSON files of packages; those beside the weights count or not as configs."""
    for name, path in list_code(folder).items():
        if name.endswith(".py") or "/" in name:
            yield name, path


def _auto_maps(path: Path) -> list[Any]:
    """What a JSON file says of code, if anything."""
    try:
        values = json.loads(path.read_bytes())
    except ValueError:
        return []  # nor can vLLM read it
    except OSError as error:
        raise DeclinedError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    return [values["auto_map"]] if isinstance(values, Mapping) and values.get("auto_map") else []


def _is_read(model: Any, name: str) -> bool:
    """Whether a JSON file beside the weights may change what is computed. Processors of images read the tokenizer's
    config, which for text alone decides about tokens."""
    if name.endswith(".index.json"):
        return False
    if getattr(model, "multimodal_config", None) is not None:
        return name not in _NEVER_READ or name == "tokenizer_config.json"
    if model.architecture in SEARCHED:
        return name in _READ_FOR_TEXT or "quant" in name
    return name not in _NEVER_READ


def check_class(model: Any) -> None:
    """Raise DeclinedError where a plugin runs a class of its own under the name of this architecture."""
    from vllm import ModelRegistry

    entry = ModelRegistry.models.get(model.architecture)
    found = getattr(entry, "module_name", None) or getattr(getattr(entry, "model_cls", None), "__module__", None)
    if entry is not None and not str(found).startswith("vllm.model_executor.models."):
        raise DeclinedError(f"{model.architecture} is not vLLM's own class, but one of {found}, which has no name")


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
