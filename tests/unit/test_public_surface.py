"""The public surface is what `headwater.__all__` says: sorted, resolvable and complete for the errors."""

import inspect

import pytest

import headwater
from headwater import errors


def test_all_is_sorted_and_unique() -> None:
    assert list(headwater.__all__) == sorted(set(headwater.__all__))


def test_every_public_name_resolves() -> None:
    unresolved = [name for name in headwater.__all__ if getattr(headwater, name, None) is None]
    assert not unresolved


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A lazy `__getattr__` that raises anything else breaks hasattr(), copy and doctest."""
    with pytest.raises(AttributeError, match="no_such_name"):
        headwater.no_such_name  # noqa: B018


def test_every_public_error_is_exported() -> None:
    public = {
        name: cls
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if cls.__module__ == errors.__name__ and not name.startswith("_")
    }
    assert public, "headwater.errors defines no class: the test looks in the wrong place"
    assert sorted(public.keys() - set(headwater.__all__)) == []
    assert [name for name, cls in public.items() if getattr(headwater, name) is not cls] == []
