"""`headwater config …`: whether a configuration can be used, and what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headwater.stores.url import StoreUrl

config_app = typer.Typer(no_args_is_help=True, help="Check a configuration file.")


@config_app.callback()
def config() -> None:
    """Check a configuration file."""


@config_app.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="TOML file with pools.")],
    connect: Annotated[bool, typer.Option("--connect", help="Also contact every remote tier.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
) -> None:
    """List the pools of a configuration, and every mistake in it. Exit code 1 if there is one."""
    from headwater.cli.output import console, print_json, table
    from headwater.stores.config import check_config

    pools, problems = check_config(file)
    if connect:
        problems += [problem for pool in pools.values() for url in pool.urls for problem in _ask(pool.name, url)]
    if as_json:
        shown = {
            name: {"tiers": [str(url) for url in pool.urls], "tenant_secret": pool.tenant_secret is not None}
            for name, pool in pools.items()
        }
        print_json({"file": file, "ok": not problems, "pools": shown, "problems": problems})
    else:
        rows = table("pool", "tier", "url")
        for name, pool in pools.items():
            for number, url in enumerate(pool.urls, start=1):
                rows.add_row(name if number == 1 else "", str(number), str(url))
        if pools:
            console().print(rows)
        for problem in problems:
            typer.echo(f"wrong: {problem}", err=True)
    raise typer.Exit(1 if problems else 0)


def _ask(name: str, url: StoreUrl) -> list[str]:
    """What a remote tier answers, if that is an error."""
    from headwater.cli.target import why_unreachable

    reason = why_unreachable(url) if url.is_remote else None
    return [] if reason is None else [f"pools.{name}: {url}: {reason}"]
