"""`--log-format`, the same for every command that serves. It takes effect before anything else is looked at, so that
errors in other options are written in that format, too."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.usage import choice, plain, reading_options
from headwater.logs import LOG_FORMAT_VARIABLE, LOG_FORMATS, set_up_logs

SERVING = ("serve", "router", "proxy", "receive", "exporter")
"""The commands that have the option."""

_PROCESSES = {"serve": "server", "receive": "receiver"}
"""What the process of a command is called in its lines, where that is not the command's name."""

_TEXT = dict.fromkeys(("proxy", "router", "exporter"), "%(levelname)s %(message)s")
"""How lines for people look; of other commands, as Python writes them."""


def _set_up(context: typer.Context, chosen: str) -> str:
    if not context.resilient_parsing:  # which is completion, and runs nothing
        name = context.info_name or ""
        with reading_options():
            set_up_logs(_PROCESSES.get(name, name), plain(chosen), text=_TEXT.get(name))
    return chosen


def set_up_unparsed(args: Sequence[str]) -> None:
    """For a command line that could not be parsed, so that no option took effect: write JSON if it asks for that."""
    name = next((word for word in args[:2] if word in SERVING), None)
    asked = re.findall(r"^--log-format[=\n](.*)$", "\n".join(args), re.MULTILINE)
    if name is not None and (asked[-1] if asked else os.environ.get(LOG_FORMAT_VARIABLE)) == "json":
        set_up_logs(_PROCESSES.get(name, name), "json")


if TYPE_CHECKING:
    _Format = str
else:
    _Format = choice(*LOG_FORMATS)

LogFormat = Annotated[
    _Format,
    typer.Option(
        metavar="|".join(LOG_FORMATS),
        envvar=LOG_FORMAT_VARIABLE,
        show_envvar=True,
        is_eager=True,
        callback=_set_up,
        help="Lines on stderr: for people, or one JSON object each.",
    ),
]
