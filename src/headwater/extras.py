"""What to install where an optional package is missing: said in one place, the same everywhere."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """The command that brings an extra of Headwater's own."""
    return f"pip install 'headwater[{extra}]' (in a checkout: pip install '.[{extra}]')"
