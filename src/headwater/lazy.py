"""Packages whose names are imported on first use, so that importing the package costs next to nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_on_demand(package: str, home_of: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package: `home_of` says in which module each of its names is."""

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
