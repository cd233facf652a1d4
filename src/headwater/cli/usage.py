"""Values of options: choices as types, and errors that speak of options instead of the fields behind them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from headwater.errors import InvalidArgumentError

_FIELD = re.compile(r"^([a-z]+(?:_[a-z]+)*)(?= (?:is|must|needs)\b)")
_OTHER_NAMES = {"role": "pool_role", "load_mode": "pool_load", "group_bytes": "pool_group_bytes"}
"""What the connector calls the options of the command line."""


class WrongUsageError(Exception):
    """An option has a value that cannot be, or two options contradict each other: exit code 2. `cause` is what was
    raised for it."""

    def __init__(self, cause: InvalidArgumentError) -> None:
        super().__init__(_in_words_of_options(str(cause)))
        self.cause = cause


@contextmanager
def reading_options() -> Iterator[None]:
    """Around what only looks at options: an InvalidArgumentError there is wrong usage, not a failure."""
    try:
        yield
    except InvalidArgumentError as error:
        raise WrongUsageError(error) from error


def choice(*names: str) -> Any:
    """A type for an option that takes one of these names. Typer refuses others, and shells complete them."""
    return StrEnum("Choice", {name: name for name in names})


def plain(value: Any) -> Any:
    """The value of a choice as an ordinary string: what was made for one command line cannot be pickled."""
    return value.value if isinstance(value, StrEnum) else value


def _in_words_of_options(text: str) -> str:
    """`page_size is 0; …` as `--page-size is 0; …`."""
    return _FIELD.sub(lambda found: "--" + _OTHER_NAMES.get(found[1], found[1]).replace("_", "-"), text)
