"""`headwater pool …`: the commands and their options. What they do is in `inspection`, `clear`, `receive` and `demo`,
which are imported when a command runs: they bring numpy, and `--help` must not."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.cli.output import HUMAN_ROWS, console, print_json, progress

pool_app = typer.Typer(no_args_is_help=True, help="Look at a pool, check it, empty it, and see one at work.")

Url = Annotated[str | None, typer.Argument(metavar="URL", help="The pool; shm:///headwater if not given.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant: its text, or its tag as `ls` shows it.")]
Identity = Annotated[
    str | None, typer.Option(help="Only this model: its label, or four or more first digits of its weights.")
]


@pool_app.command()
def stats(url: Url = None, as_json: Json = False) -> None:
    """Show how full a pool is and what happened to it."""
    from headwater.cli.inspection import show_stats

    show_stats(url, as_json)


@pool_app.command()
def ls(
    url: Url = None,
    chunks: Annotated[bool, typer.Option("--chunks", help="List single chunks.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=0, help=f"At most N rows; if not given {HUMAN_ROWS}, and all with --json.")
    ] = None,
    tenant: Tenant = None,
    identity: Identity = None,
    as_json: Json = False,
) -> None:
    """List what a pool holds, the most recently used first: one row per model, tenant and adapter."""
    from headwater.cli.inspection import list_chunks, list_roots
    from headwater.cli.listing import Selection

    (list_chunks if chunks else list_roots)(url, Selection(tenant, identity), limit, as_json)


@pool_app.command()
def verify(url: Url = None, as_json: Json = False) -> None:
    """Read every byte and check every record. Damaged chunks are removed; exit code 1 if anything was wrong."""
    from headwater.cli.inspection import verify_pool

    raise typer.Exit(0 if verify_pool(url, as_json) else 1)


@pool_app.command()
def clear(
    url: Url = None,
    tenant: Tenant = None,
    identity: Identity = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Delete the pool itself; nobody may have it open.")] = False,
    as_json: Json = False,
) -> None:
    """Forget everything, one tenant, or one model; or delete the pool itself."""
    from headwater.cli.clear import delete_pool, forget
    from headwater.cli.listing import Selection

    selected = Selection(tenant, identity)
    if not remove:
        forget(url, selected, yes, as_json)
    elif selected.is_everything:
        delete_pool(url, yes, as_json)
    else:
        raise typer.BadParameter("it deletes the whole pool; leave --tenant and --identity out", param_hint="--remove")


@pool_app.command()
def events(
    url: Url = None,
    since: Annotated[
        int | None, typer.Option(min=0, help="Begin after the event of this number; with what is new if not given.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="End after so long; never if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")] = False,
) -> None:
    """Follow what happens to a pool's chunks: stored, removed, cleared, and in which tier."""
    from headwater.cli.events import show_events

    show_events(url, since, seconds, as_json)


@pool_app.command()
def receive(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")],
    url: Url = None,
    secret_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Holds the secret that all peers share; needed unless HOST is loopback."),
    ] = None,
    space: Annotated[
        list[str] | None, typer.Option(metavar="HEX", help="Take KV of this space only (repeatable); any if not given.")
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Of the pool's room for pending chunks, what peers may take.")
    ] = 0.5,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Use TLS, with this certificate chain.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its key, if it is in a file of its own.")] = None,
    tls_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="Callers must show a certificate that this one signed.")
    ] = None,
    carrier: Annotated[
        str, typer.Option(help="tcp, or nixl: callers that offer it write into the pool one-sided. Trusted networks.")
    ] = "tcp",
    as_json: Json = False,
) -> None:
    """Let other hosts push KV into a pool and pull from it, until SIGTERM. See docs/disaggregation.md."""
    from headwater.cli.receive import receive as serve_peers

    serve_peers(url, listen, secret_file, space or [], share, (tls_cert, tls_key, tls_ca), as_json, carrier)


@pool_app.command()
def demo(
    url: Annotated[str | None, typer.Option(help="Use this pool, and leave the KV in it.")] = None,
    tokens: Annotated[int, typer.Option(min=1, max=32768, help="Tokens in the prompt.")] = 2000,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the demo's own pool for you to look at.")] = False,
    as_json: Json = False,
) -> None:
    """Write KV as one topology, read it as two others, and compare every byte.

    Eight processes write as TP=4 × PP=2; eight read as TP=8 × PP=1 and three as TP=1 × PP=3, with other block sizes.
    """
    from headwater.cli.demo.run import run_demo
    from headwater.cli.demo.show import show

    with progress("demo") as advance:
        outcome = run_demo(url, tokens, keep, advance)
    if as_json:
        print_json(outcome.as_dict())
    else:
        show(outcome, console())
    raise typer.Exit(0 if outcome.correct else 1)
