"""Which weights a vLLM server runs: the name that the reference engine gives to the same files, so that both share.

The files are those that vLLM's own loader chooses, and `before` proves that they are what was loaded.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from headwater.errors import HeadwaterError
from headwater.integrations.vllm.before import check_after, check_before, noted
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.options import Options
from headwater.integrations.vllm.searched import SEARCHED
from headwater.integrations.vllm.tensors import check_tensors
from headwater.kv.checkpoint import digest_checkpoint
from headwater.kv.files import FileState, NamedFile, take_states

_BY_DEFAULT_LOADER = ("auto", "safetensors", "pt", "hf", "fastsafetensors", "instanttensor")
_BY_STREAMER = ("runai_streamer",)
"""Load formats that read the checkpoint and change nothing."""

_MODELS = "vllm.model_executor.models."
_AFTER_THE_MODEL = frozenset({_MODELS + "adapters"})
"""Modules whose files count for what is made of the last layer only."""
_READS: tuple[str, ...] = ("self.secondary_weights", "get_hf_file_bytes", "hf_hub_download", "snapshot_download")
_READS += ("load_file(", "safe_open(", "torch.load(", "_weights_iterator(")
"""What the code of a model has in it that loads from further places."""

MAX_CODE_FILES = 4096
"""Directories with more configs and code than this are no model's."""


class LoadedFiles(NamedTuple):
    """Where the weights lie, and the files of them that are loaded, by their names in that directory."""

    folder: Path
    names: list[str]
    config_folder: Path | None = None
    """Where the configs lie, if not beside the weights."""

    def states(self) -> tuple[FileState, ...]:
        """As they are now, with every config and every piece of code. Raises IdentityError."""
        files = {NamedFile(name, self.folder / name) for name in self.names}
        for prefix, folder in (("", self.folder), ("config/", self.config_folder)):
            found = list_code(folder) if folder else {}
            files |= {NamedFile(prefix + name, path) for name, path in found.items() if path.stat().st_size}
        return take_states(files)


def list_code(folder: Path) -> dict[str, Path]:
    """Every JSON and Python file below a directory, by name: code may lie in packages. Raises DeclinedError."""
    found: dict[str, Path] = {}
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        paths = [Path(here, name) for name in names if name.endswith((".json", ".py"))]
        found |= {path.relative_to(folder).as_posix(): path for path in paths}
        if any(Path(here, name).is_symlink() for name in folders):
            raise DeclinedError(f"{here!r} has links to directories, and code may lie behind them")
        if len(found) > MAX_CODE_FILES:
            raise DeclinedError(f"{str(folder)!r} holds more than {MAX_CODE_FILES} JSON and Python files")
    return found


def name_weights(config: Any, options: Options) -> str:
    """The weights' name, as `Identity.weights` wants it. Reads every byte of them once; digests are cached.

    Random weights are named after the server, and so are never shared. vLLM makes them with one seed, but tensor by
    tensor on each rank, so that they depend on the device, the parallel layout, and how layers are fused and
    quantised; integers among them are not set at all. Raises DeclinedError.
    """
    if config.load_config.load_format == "dummy":
        return "sha256:" + hashlib.sha256(b"headwater vllm random weights\0" + server_name(config)).hexdigest()
    loaded = loaded_files(config)
    try:
        before = noted(config)
        if before is None:
            before = loaded.states()
            check_before(before, config)
        name = digest_checkpoint(loaded.folder, files=loaded.names, before=before, sample=options.sample_weights)
        check_after(before, loaded.states(), config)
        return name
    except HeadwaterError as error:
        raise DeclinedError(f"the weights cannot be named: {error}") from error


def loaded_files(config: Any) -> LoadedFiles:
    """The files that vLLM loads, as its loader chooses them. Raises DeclinedError where that is not certain."""
    load_format, path = config.load_config.load_format, local_path(config.model_config, config.load_config.download_dir)
    if getattr(config.model_config, "model_weights", ""):
        raise DeclinedError("the weights come from an object store, and not from files of this machine")
    if path.is_file():
        if load_format not in ("auto", "gguf") or path.suffix != ".gguf":
            raise DeclinedError(f"load format {load_format!r} of a single file is not known")
        return LoadedFiles(path, [""], config_folder(config.model_config))
    if load_format not in _BY_DEFAULT_LOADER + _BY_STREAMER:
        raise DeclinedError(f"load format {load_format!r} may load other weights than the checkpoint holds")
    is_remote = not os.path.exists(config.model_config.model)
    if is_remote and load_format == "auto" and any(path.glob("consolidated*.safetensors")):
        raise DeclinedError(
            "vLLM asks the hub which of two sets of weights to load; choose one with --load-format, or pass a directory"
        )
    try:
        files = _chosen_files(config.load_config, str(path))
    except Exception as error:  # of a method that is not part of vLLM's interface
        raise DeclinedError(f"vLLM does not say which files it loads: {type(error).__name__}: {error}") from error
    names = sorted(os.path.relpath(file, path) for file in files)
    if any(name.startswith("..") for name in names):
        raise DeclinedError(f"the weights do not lie in {str(path)!r}")
    # An index chooses among files, and the reference engine takes from it which tensor lies where.
    if all(name.endswith(".safetensors") for name in names):
        prefix = "consolidated" if names[0].startswith("consolidated") else "model"
        index = f"{prefix}.safetensors.index.json"
        names += [index] * (path / index).is_file()
    return LoadedFiles(path, names, config_folder(config.model_config))


def model_class(model: Any) -> type:
    """The class that vLLM runs. For workers: they have imported it already. Raises DeclinedError."""
    from vllm.model_executor.model_loader import get_model_cls

    try:
        found: type = get_model_cls(model)
        return found
    except Exception as error:
        raise DeclinedError(f"the class of this model cannot be looked at: {error}") from error


def check_sources(model: Any) -> None:
    """Raise DeclinedError for a model whose class loads from further places, or chooses files itself. For workers."""
    import inspect

    found = model_class(model)
    try:
        own = [part for part in found.__mro__ if part.__module__.startswith("vllm.")]
        sources = "".join(map(inspect.getsource, own))
        sources += "".join(inspect.getsource(sys.modules[name]) for name in sorted(_modules(own)))
    except Exception as error:
        raise DeclinedError(f"the class of this model cannot be looked at: {error}") from error
    if any(sign in sources for sign in _READS) or getattr(found, "allow_patterns_overrides", None) is not None:
        raise DeclinedError(f"{found.__name__} loads weights from further places, which are not named yet")


def _modules(parts: Iterable[type]) -> set[str]:
    """The modules of models that these classes are made of: their own, and those that these import from."""
    found: set[str] = set()
    todo = {part.__module__ for part in parts}
    while todo:
        name = todo.pop()
        if name.startswith(_MODELS) and name not in found | _AFTER_THE_MODEL:
            found.add(name)
            todo |= {str(getattr(value, "__module__", "")) for value in vars(sys.modules[name]).values()}
    return found


def check_loaded_tensors(config: Any) -> None:
    """Raise DeclinedError for weights of which vLLM may load others in each start. For workers."""
    if config.load_config.load_format == "dummy":
        return
    extra = config.load_config.model_loader_extra_config
    if isinstance(extra, Mapping) and extra.get("enable_weights_track") is False:
        raise DeclinedError("enable_weights_track is off, so vLLM runs with weights that no file holds")
    loaded = loaded_files(config)
    files = [loaded.folder / name for name in loaded.names if name and not name.endswith(".json")]
    model = config.model_config
    check_tensors(files, model_class(model), is_regular=model.architecture in SEARCHED)


def server_name(config: Any) -> bytes:
    """What no other server has."""
    # The engine id may be chosen by people; the instance id is new in every start.
    return f"{config.kv_transfer_config.engine_id}\0{config.instance_id}".encode()


def local_path(model: Any, download_dir: str | None = None) -> Path:
    """Where the model lies: a local path, or the snapshot that vLLM downloaded. Raises DeclinedError."""
    if os.path.exists(model.model):
        return Path(model.model)
    from huggingface_hub import snapshot_download

    try:
        place = {"revision": model.revision, "cache_dir": download_dir}
        return Path(snapshot_download(model.model, **place, local_files_only=True))
    except Exception as error:
        raise DeclinedError(f"the files of {model.model!r} were not found on this machine: {error}") from error


def config_folder(model: Any) -> Path | None:
    """Where the configs lie that `hf_config_path` names; None where they lie beside the weights."""
    given = getattr(model, "hf_config_path", None)
    if not given or given == model.model:
        return None
    revision = getattr(model, "_hf_config_revision", None) or model.revision
    return local_path(SimpleNamespace(model=given, revision=revision))


def _chosen_files(load_config: Any, folder: str) -> list[str]:
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

    loader: Any = get_model_loader(load_config)
    if type(loader) is DefaultModelLoader:
        return list(loader._prepare_weights(folder, None, None, True, None)[1])
    if type(loader) is RunaiModelStreamerLoader:
        return list(loader._prepare_weights(folder, None))
    raise DeclinedError(f"load format {load_config.load_format!r} is not vLLM's own")
