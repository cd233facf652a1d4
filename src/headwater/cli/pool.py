"""`headwater pool …`: the commands and their options. What they do is in `inspection`, `clear`, `receive`, `exporter`
and `demo`, which are imported when a command runs: they bring numpy, and `--help` must not."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from headwater.cli.log_option import LogFormat
from headwater.cli.output import HUMAN_ROWS, console, print_json, progress

pool_app = typer.Typer(no_args_is_help=True, help="Inspect, verify, clear and share pools.")

Url = Annotated[str | None, typer.Argument(metavar="URL", help="Pool URL or name; default: shm:///headwater.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant: its name, or its tag as shown by `ls`.")]
Identity = Annotated[
    str | None, typer.Option(help="Only this model: its label, or the first four or more digits of its weights.")
]


class Carrier(StrEnum):
    """What `--carrier` takes."""

    TCP = "tcp"
    NIXL = "nixl"


@pool_app.command()
def stats(url: Url = None, as_json: Json = False) -> None:
    """Show how full a pool is, and its counters."""
    from headwater.cli.inspection import show_stats

    show_stats(url, as_json)


@pool_app.command()
def ls(
    url: Url = None,
    chunks: Annotated[bool, typer.Option("--chunks", help="List single chunks.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=0, help=f"Maximum number of rows; default: {HUMAN_ROWS}, and all with --json.")
    ] = None,
    tenant: Tenant = None,
    identity: Identity = None,
    as_json: Json = False,
) -> None:
    """List what a pool holds, most recently used first.

    One row per model, tenant and adapter, or per chunk with --chunks.
    """
    from headwater.cli.inspection import list_chunks, list_roots
    from headwater.cli.listing import Selection

    (list_chunks if chunks else list_roots)(url, Selection(tenant, identity), limit, as_json)


@pool_app.command()
def verify(url: Url = None, as_json: Json = False) -> None:
    """Verify every byte and record, and remove damaged chunks.

    Exit code 1 if anything was wrong.
    """
    from headwater.cli.inspection import verify_pool

    raise typer.Exit(0 if verify_pool(url, as_json) else 1)


@pool_app.command()
def clear(
    url: Url = None,
    tenant: Tenant = None,
    identity: Identity = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete the pool itself; refused while a process has it open.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove chunks from a pool, or delete the pool itself.

    Removes all chunks, or those of one tenant or model. Asks for confirmation.
    """
    from headwater.cli.clear import delete_pool, forget
    from headwater.cli.listing import Selection

    selected = Selection(tenant, identity)
    if not remove:
        forget(url, selected, yes, as_json)
    elif selected.is_everything:
        delete_pool(url, yes, as_json)
    else:
        raise typer.BadParameter("deletes the whole pool; leave out --tenant and --identity", param_hint="--remove")


@pool_app.command()
def events(
    url: Url = None,
    since: Annotated[
        int | None, typer.Option(min=0, help="Begin after the event with this number; default: with new events.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after this many seconds; default: never.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")] = False,
) -> None:
    """Print the events of a pool as they happen.

    Chunks stored, removed and cleared, by tier.
    """
    from headwater.cli.events import show_events

    show_events(url, since, seconds, as_json)


@pool_app.command()
def watch(
    url: Url = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, metavar="S", help="Seconds between two looks.")] = 1.0,
    seconds: Annotated[float | None, typer.Option(min=0, help="End after so long; never if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each look as one line of JSON.")] = False,
) -> None:
    """Watch a pool at work: fill, hit rate, loads and saves, the largest prefixes. q or Ctrl-C ends it."""
    from headwater.cli.watch import watch_pool

    watch_pool(url, interval, seconds, as_json)


@pool_app.command()
def receive(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 takes a free port.")],
    url: Url = None,
    secret_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File with the secret that all peers share; required off loopback."),
    ] = None,
    space: Annotated[
        list[str] | None, typer.Option(metavar="HEX", help="Accept KV of this space only (repeatable); default: any.")
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the pool's space for pending chunks that peers may use.")
    ] = 0.5,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Use TLS with this certificate chain.")] = None,
    tls_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Private key, if it is in a separate file.")
    ] = None,
    tls_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="Require a client certificate signed by this CA.")
    ] = None,
    carrier: Annotated[
        Carrier, typer.Option(help="nixl: let peers that offer it write into the pool; trusted networks only.")
    ] = Carrier.TCP,
    log_format: LogFormat = "text",
    as_json: Json = False,
) -> None:
    """Let other hosts push KV into a pool and pull from it.

    Runs until SIGTERM. See docs/disaggregation.md.
    """
    from headwater.cli.receive import receive as serve_peers

    serve_peers(url, listen, secret_file, space or [], share, (tls_cert, tls_key, tls_ca), as_json, carrier.value)


@pool_app.command()
def exporter(
    url: Url = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 9464,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HEADWATER_API_KEY",
            show_envvar=True,
            help="What clients must send as `Authorization: Bearer KEY`. Needed where others can reach the exporter.",
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without a key.")] = False,
    ssl_certfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Speak HTTPS with this certificate chain (PEM).")
    ] = None,
    ssl_keyfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Its private key; if not given, in the same file.")
    ] = None,
    log_format: LogFormat = "text",
    as_json: Json = False,
) -> None:
    """Serve a pool's metrics to Prometheus at /metrics, until SIGTERM. Never creates a pool; waits for one."""
    from headwater.cli.exporter import export

    raise typer.Exit(export(url, host, port, api_key, insecure, (ssl_certfile, ssl_keyfile), as_json))


@pool_app.command()
def demo(
    url: Annotated[str | None, typer.Option(help="Use this pool, and leave the KV in it.")] = None,
    tokens: Annotated[int, typer.Option(min=1, max=32768, help="Tokens in the prompt.")] = 2000,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the demo's own pool.")] = False,
    as_json: Json = False,
) -> None:
    """Write KV as one topology and read it as two others.

    Compares every byte.

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
