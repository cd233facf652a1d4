"""`headwater serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.engine_options import PANEL, engine_options, needs_extra
from headwater.cli.output import one_line, progress
from headwater.engine.config import EngineConfig
from headwater.errors import InvalidArgumentError
from headwater.serve.addresses import is_loopback
from headwater.serve.config import ServerConfig

if TYPE_CHECKING:
    from headwater.serve.default_pool import PoolChoice
    from headwater.serve.messages import Ready


@engine_options
def serve(
    config: EngineConfig,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = ServerConfig.host,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = ServerConfig.port,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; if not given, its own name.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HEADWATER_API_KEY",
            show_envvar=True,
            help="What clients must send as `Authorization: Bearer KEY`. Needed where others can reach the server.",
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without a key.")] = False,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Sequences that may wait for room; more are refused with status 429.")
    ] = ServerConfig.max_waiting,
    require_cache_salt: Annotated[
        bool,
        typer.Option(
            "--require-cache-salt",
            help="Refuse requests without a cache_salt, so that no client learns from cached tokens what others asked.",
        ),
    ] = False,
    ssl_certfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Speak HTTPS with this certificate chain (PEM).")
    ] = None,
    ssl_keyfile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Its private key, without a passphrase; if not given, in the same file."),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Size of one request; a larger one is refused with status 413.")
    ] = ServerConfig.max_body_bytes,
    max_total_body_bytes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Size of all requests that are being read; more are refused with status 503, short ones not.",
        ),
    ] = ServerConfig.max_total_body_bytes,
    max_connections: Annotated[
        int,
        typer.Option(min=1, help="Connections at a time; idle ones make room for more, else these get status 503."),
    ] = ServerConfig.max_connections,
    header_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a client may take to send the headers of a request.")
    ] = ServerConfig.header_timeout_s,
    engine_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds without a sign of life of the engine, after which /health answers with 503."),
    ] = ServerConfig.engine_timeout_s,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            rich_help_panel=PANEL,
            help="The pool to share KV through with other servers, e.g. shm:///NAME?capacity=8GiB; if not given, one "
            "in shared memory that all servers of this user share.",
        ),
    ] = None,
    peer_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=PANEL,
            help="Let other servers push KV into this one's pool: the receiver listens here (port 0 takes a free one).",
        ),
    ] = None,
    no_pool: Annotated[
        bool, typer.Option("--no-pool", rich_help_panel=PANEL, help="Share nothing, and keep nothing.")
    ] = False,
) -> None:
    """Serve a model with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics."""
    with needs_extra():
        from headwater.connector.peering import peer_options
        from headwater.serve.server import Hooks, run_server

    server = ServerConfig(
        engine=config,
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_key=api_key,
        insecure=insecure,
        max_waiting=max_waiting,
        requires_cache_salt=require_cache_salt,
        max_body_bytes=max_body_bytes,
        max_total_body_bytes=max_total_body_bytes,
        max_connections=max_connections,
        header_timeout_s=header_timeout,
        engine_timeout_s=engine_timeout,
        peer_listen=peer_listen,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
    )
    # Here and now: a rank that cannot use them would only push nothing.
    peer_options(config).check(receives=peer_listen is not None)
    if peer_listen is not None and no_pool:
        raise InvalidArgumentError("--peer-listen needs a pool to receive into; leave --no-pool out")
    # Only now: it makes the pool if there is none.
    chosen = _choose_pool(pool, no_pool, config)
    server = replace(server, engine=replace(config, pool=chosen.url))
    if insecure and api_key is None:
        typer.echo("warning: --insecure: everybody who can reach this address can use the model", err=True)
    if api_key is not None and ssl_certfile is None and not is_loopback(host):
        typer.echo("warning: the API key crosses the network in plain text; --ssl-certfile encrypts it", err=True)
    typer.echo(f"… loading {one_line(config.model)}", err=True)
    with ExitStack() as bar:
        on_progress = bar.enter_context(progress("loading"))

        def on_ready(ready: Ready, model: str, url: str) -> None:
            bar.close()
            _print_ready(ready, server, model, url, chosen.note)

        hooks = Hooks(
            on_progress=on_progress,
            on_ready=on_ready,
            on_peer=lambda address: typer.echo(f"peers    {address}"),
            on_death=lambda reason: typer.echo(f"error: {one_line(reason)}", err=True),
        )
        with needs_extra():
            code = run_server(server, hooks=hooks)
    raise typer.Exit(code)


def _choose_pool(url: str | None, no_pool: bool, config: EngineConfig) -> PoolChoice:
    from headwater.serve.default_pool import PoolChoice, choose_pool
    from headwater.stores.config import find_pool

    if url is not None and no_pool:
        raise InvalidArgumentError("--pool and --no-pool contradict each other; give one of them")
    if no_pool:
        return PoolChoice(None, "none (--no-pool)")
    if url is not None:
        tiers = [replace(tier, options=MappingProxyType({})) for tier in find_pool(url).urls]
        return PoolChoice(url, f"{', '.join(map(str, tiers))} (as asked)")
    return choose_pool(num_ranks=config.tensor_parallel_size)


def _print_ready(ready: Ready, server: ServerConfig, model: str, url: str, pool: str) -> None:
    num_tokens = ready.num_pages * ready.page_size
    typer.echo(f"model    {one_line(model)}")
    typer.echo(f"runs on  {one_line(ready.placement)}")
    typer.echo(f"KV cache {ready.num_pages:,} pages of {ready.page_size} tokens: room for {num_tokens:,} tokens")
    typer.echo(f"         {one_line(ready.sizing)}")
    typer.echo(f"pool     {one_line(f'none: {ready.pool_declined}' if ready.pool_declined else pool)}")
    typer.echo(f"context  {ready.max_model_len:,} tokens; up to {ready.max_num_seqs} sequences at a time")
    typer.echo(f"ready    {url}/v1  (Ctrl-C stops)\n")
    trusts = f" --cacert {shlex.quote(server.ssl_certfile)}" if server.ssl_certfile is not None else ""
    key = ' -H "Authorization: Bearer $HEADWATER_API_KEY"' if server.api_key is not None else ""
    salt = ', "cache_salt": "me"' if server.requires_cache_salt else ""
    body = f'{{"messages": [{{"role": "user", "content": "What is the capital of France?"}}], "temperature": 0{salt}}}'
    json = "-H 'content-type: application/json'"
    typer.echo(f"try: curl -sS{trusts} {url}/v1/chat/completions{key} {json} -d {shlex.quote(body)}")
