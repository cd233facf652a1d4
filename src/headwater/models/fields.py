"""Reading numbers out of files that came from elsewhere: every value is checked for type and bounds, and an error names
the file and the field. It knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.errors import ModelError

MAX_JSON_BYTES = 64 << 20


class Fields:
    """A mapping from outside, with the name of the place it came from."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """An integer within bounds; without a default it must be there."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number within bounds."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        if not least <= value <= most:  # nor is NaN, and an integer too large for a float can be compared
            raise self.wrong(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def integers(self, name: str, least: int, most: int) -> tuple[int, ...]:
        """One integer or a list of them, as a tuple; empty where the field is absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        listed = value if isinstance(value, list | tuple) else [value]
        if len(listed) > 1024 or any(type(item) is not int or not least <= item <= most for item in listed):
            raise self.wrong(name, f"an integer from {least} to {most}, or a list of them")
        return tuple(listed)

    def section(self, name: str) -> Fields:
        """A mapping inside this one; empty where it is absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Fields(value or {}, f"{self.source}, {name}")

    def wrong(self, name: str, expected: str) -> ModelError:
        """The error for a field that is not what was expected."""
        return ModelError(f"{self.source}: {name} is {_short(self.values.get(name))}; expected {expected}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.source}: {name} is missing")
        return default


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of bounded size. Raises ModelError, naming the file, for anything else."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if len(data) > MAX_JSON_BYTES:
        raise ModelError(f"{str(path)!r} is larger than {MAX_JSON_BYTES >> 20} MiB, too large for what it should hold")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{str(path)!r} holds JSON, but not an object")
    return value


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
