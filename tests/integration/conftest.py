"""Fixtures that several files of integration tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_server import Server
    from fake_upstream import FakeUpstream

    from proxy_process import ProxyProcess


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


@pytest.fixture
def upstream() -> Iterator[Callable[..., FakeUpstream]]:
    """Makes servers that behave as a test wants, and stops them when it ends."""
    from fake_upstream import FakeUpstream

    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> FakeUpstream:
            made = FakeUpstream(*args, **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def proxy() -> Iterator[Callable[..., ProxyProcess]]:
    """Starts `headwater proxy` or `headwater router` with the arguments given, and stops it when the test ends."""
    from proxy_process import ProxyProcess

    with ExitStack() as stack:

        def start(*args: str) -> ProxyProcess:
            made = ProxyProcess(*args)
            stack.callback(made.close)
            return made

        yield start
