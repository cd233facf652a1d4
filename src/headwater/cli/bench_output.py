"""What every benchmark's command says: how far it is, and figures without digits that mean nothing."""

from __future__ import annotations

from typing import Any

import typer


def note(text: str) -> None:
    """Say on stderr what is measured now."""
    typer.echo(f"… {text}", err=True)


def rounded(value: Any) -> Any:
    """Four significant digits are more than any of these figures has."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
