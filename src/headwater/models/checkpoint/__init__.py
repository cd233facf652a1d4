"""Checkpoints: safetensors directories, GGUF files, and random weights, behind one interface.

`open_checkpoint` chooses the reader. Weights go into a model with `headwater.models.weights.load_weights`.
"""

from __future__ import annotations

from pathlib import Path

from headwater.errors import ModelError
from headwater.kv.checkpoint import checkpoint_label
from headwater.models.catalog import CATALOG, find_in_catalog
from headwater.models.checkpoint.base import Checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(path_or_name: str | Path, load_format: str = "auto") -> Checkpoint:
    """Open a directory, a GGUF file, or a model that the catalog knows by name; weights are not read yet.

    With load_format "dummy" the weights are random, and a directory with a config.json, or that file itself, is
    enough. Raises ModelError for what does not exist or cannot be run.
    """
    path = find_in_catalog(path_or_name) or Path(path_or_name)
    if not path.exists():
        raise ModelError(
            f"no model {str(path_or_name)!r}: expected a checkpoint directory, a GGUF file or {' or '.join(CATALOG)}. "
            "Models are not downloaded; fetch one first and pass its directory"
        )
    if load_format == "dummy":
        return _open_dummy(path)
    if load_format != "auto":
        raise ModelError(f"load_format is {load_format!r}; expected auto or dummy")
    if gguf := _gguf_file(path):
        from headwater.models.checkpoint.gguf import GGUFCheckpoint

        return GGUFCheckpoint(gguf)
    if not path.is_dir():
        raise ModelError(f"{str(path)!r} is neither a checkpoint directory nor a GGUF file")
    from headwater.models.checkpoint.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


def _open_dummy(path: Path) -> Checkpoint:
    from headwater.models.checkpoint.dummy import DummyCheckpoint
    from headwater.models.checkpoint.gguf import GGUFCheckpoint
    from headwater.models.checkpoint.safetensors import read_config

    if gguf := _gguf_file(path):
        return DummyCheckpoint(GGUFCheckpoint(gguf).config, gguf, checkpoint_label(gguf))
    folder = path.parent if path.name == "config.json" else path
    return DummyCheckpoint(read_config(folder), folder, checkpoint_label(folder))


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file meant: `path` itself, or the only one of a directory that is no other checkpoint."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise ModelError(f"{str(path)!r} holds {len(found)} GGUF files; pass one of them, e.g. {found[0].name}")
    return found[0] if found else None
