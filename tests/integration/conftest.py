"""Fixtures that several files of integration tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_server import Server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers around the fake engine, with the options given, and stops them when the test ends."""
    from fake_server import Server  # it needs packages that a test file asks for first

    with ExitStack() as stack:

        def start(**options: Any) -> Server:
            made = Server(tmp_path / "aborts", **options)
            stack.callback(made.close)
            return made

        yield start
