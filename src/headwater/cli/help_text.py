"""`--help` that reads the same under every version of Typer: `--port N`, not `--port <int range>`, and nothing cut off.

Typer builds the tree of commands; this goes over it once more, before it is used. Costs a millisecond or two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import typer

_BY_NAME = {
    "api_key": "KEY",
    "admin_key": "KEY",
    "capacity": "SIZE",
    "host": "HOST",
    "model": "DIR|FILE|NAME",
    "out": "FILE",
    "merge": "FILE",
    "parts": "NAME,...",
    "sides": "NAME,...",
    "only": "NAME,...",
    "served_model_name": "NAME",
    "url": "URL",
}
_BY_ENDING = (("_bytes", "BYTES"), ("seconds", "SECONDS"), ("_timeout", "SECONDS"), ("_path", "DIR"), ("_file", "FILE"))
_BY_KIND = ((int, "N"), (float, "X"), (Path, "PATH"), (str, "TEXT"))


def tidy_help(app: typer.Typer, command: Any) -> None:
    """Give every option and argument of the built tree a metavar, where its declaration has none, and every command a
    summary that Typer does not shorten."""
    for registered in app.registered_commands:
        callback = registered.callback
        assert callback is not None
        built = command.commands[registered.name or callback.__name__.replace("_", "-")]
        signature = inspect.signature(callback, eval_str=True).parameters
        for parameter in built.params:
            if parameter.metavar is None and parameter.name in signature:
                parameter.metavar = metavar(parameter.name, signature[parameter.name].annotation)
            if parameter.param_type_name == "argument":
                parameter.get_help_record = partial(_record_without_type, parameter.get_help_record)
    for group in app.registered_groups:
        if group.typer_instance is not None and group.name:
            tidy_help(group.typer_instance, command.commands[group.name])
    for built in command.commands.values():
        built.short_help = built.short_help or _first_sentence(built.help or "")


def metavar(name: str, annotation: Any) -> str | None:
    """By the parameter's name, or its type; None for a flag, which takes no value."""
    kind = _kind(annotation)
    if kind is bool:
        return None
    if name in _BY_NAME:
        return _BY_NAME[name]
    for ending, word in _BY_ENDING:
        if name.endswith(ending):
            return word
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(member.value) for member in kind)
    return next((word for known, word in _BY_KIND if isinstance(kind, type) and issubclass(kind, known)), None)


def _record_without_type(record: Callable[[Any], tuple[str, str] | None], ctx: Any) -> tuple[str, str] | None:
    """Newer versions write the type behind an argument's name: `SERVER <list[str]>`."""
    made = record(ctx)
    return made and (made[0].partition(" <")[0], made[1])


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".") + "." if paragraph else ""


def _kind(annotation: Any) -> Any:
    """The type of one value: without Annotated, None and list."""
    while get_args(annotation):
        if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
            annotation = next(part for part in get_args(annotation) if part is not type(None))
        else:
            annotation = get_args(annotation)[0]  # Annotated[kind, …], list[kind]
    return annotation
