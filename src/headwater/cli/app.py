"""The tree of commands. Each group lives in its own module; this one only hangs them together."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headwater.cli.bench import bench_app
from headwater.cli.chat import chat
from headwater.cli.config import config_app
from headwater.cli.convert import convert
from headwater.cli.demo.command import demo
from headwater.cli.generate import generate
from headwater.cli.help_text import tidy_help
from headwater.cli.pool import pool_app
from headwater.cli.proxy import SeveralValues, proxy, router
from headwater.cli.serve import serve

# Plain help: Rich's tables cut the names of options where a terminal has 80 columns.
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(serve)
app.command(cls=SeveralValues)(proxy)
app.command()(router)
app.command()(generate)
app.command()(chat)
app.command()(convert)
app.command()(demo)
app.add_typer(pool_app, name="pool")
app.add_typer(bench_app, name="bench")
app.add_typer(config_app, name="config")


def command() -> Any:
    """The tree as something to call with arguments: Click's, or what newer versions of Typer have in its place."""
    built = typer.main.get_command(app)
    tidy_help(app, built)
    return built


def _print_version(wanted: bool) -> None:
    if wanted:
        from headwater import __version__

        typer.echo(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def headwater(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One KV cache under every LLM engine."""
