"""The public surface is what `__all__` says, of the package and of the two that engine authors use: sorted, resolvable,
complete for the errors, and lazy."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import headwater
import headwater.connector
import headwater.transfer
from headwater import errors

SRC = Path(__file__).resolve().parents[2] / "src"
SURFACES = [headwater, headwater.connector, headwater.transfer]
FOR_ENGINES = SURFACES[1:]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda module: module.__name__)
def test_all_is_sorted_and_unique(surface: ModuleType) -> None:
    assert list(surface.__all__) == sorted(set(surface.__all__))
    assert dir(surface) == surface.__all__


def test_every_public_name_resolves() -> None:
    unresolved = [name for name in headwater.__all__ if getattr(headwater, name, None) is None]
    assert not unresolved


@pytest.mark.parametrize("surface", FOR_ENGINES, ids=lambda module: module.__name__)
def test_every_name_for_engine_authors_resolves_and_says_what_it_is(surface: ModuleType) -> None:
    pytest.importorskip("torch", reason="engines need torch")
    found = {name: getattr(surface, name, None) for name in surface.__all__}
    assert [name for name, value in found.items() if value is None] == []
    assert [name for name, value in found.items() if not isinstance(value, str) and not inspect.getdoc(value)] == []


@pytest.mark.parametrize("surface", SURFACES, ids=lambda module: module.__name__)
def test_type_checkers_see_the_names_that_are_there(surface: ModuleType) -> None:
    """The imports under TYPE_CHECKING name the same things, from the same modules, as the table that is used."""
    tree = ast.parse(Path(inspect.getfile(surface)).read_text(encoding="utf-8"))
    seen = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    homes = {
        name: home for name, home in seen.items() if str(home).startswith("headwater.") and home != "headwater.lazy"
    }
    assert homes == surface._HOME_OF
    assert set(surface.__all__) - {"__version__"} == surface._HOME_OF.keys()


@pytest.mark.parametrize("surface", FOR_ENGINES, ids=lambda module: module.__name__)
def test_importing_it_loads_no_torch(surface: ModuleType) -> None:
    """A process that only opens a pool, or forwards orders, must not pay for what it does not use."""
    code = f"import sys, {surface.__name__}; print({{'torch', 'numpy'}} & set(sys.modules))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("surface", SURFACES, ids=lambda module: module.__name__)
def test_an_unknown_name_is_an_attribute_error(surface: ModuleType) -> None:
    """A lazy `__getattr__` that raises anything else breaks hasattr(), copy and doctest."""
    with pytest.raises(AttributeError, match="no_such_name"):
        surface.no_such_name  # noqa: B018


def test_every_public_error_is_exported() -> None:
    public = {
        name: cls
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if cls.__module__ == errors.__name__ and not name.startswith("_")
    }
    assert public, "headwater.errors defines no class: the test looks in the wrong place"
    assert sorted(public.keys() - set(headwater.__all__)) == []
    assert [name for name, cls in public.items() if getattr(headwater, name) is not cls] == []
