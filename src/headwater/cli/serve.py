"""`headwater serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import logging
import shlex
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.engine_options import PANEL, engine_options, needs_extra
from headwater.cli.log_option import LogFormat
from headwater.cli.output import one_line, progress
from headwater.cli.usage import reading_options
from headwater.engine.config import EngineConfig
from headwater.errors import InvalidArgumentError
from headwater.logs import adopt, note
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
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free port.")
    ] = ServerConfig.port,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name for clients; default: the last part of --model.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HEADWATER_API_KEY",
            show_envvar=True,
            help="Key that clients send as `Authorization: Bearer KEY`; required off loopback.",
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without a key.")] = False,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Sequences that may wait in the queue; more get status 429.")
    ] = ServerConfig.max_waiting,
    require_cache_salt: Annotated[
        bool,
        typer.Option(
            "--require-cache-salt",
            help="Refuse requests without a cache_salt, so that clients cannot detect each other's prompts.",
        ),
    ] = False,
    ssl_certfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Serve HTTPS with this certificate chain (PEM).")
    ] = None,
    ssl_keyfile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Private key without a passphrase; default: in the same file."),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Size of one request body; larger ones get status 413.")
    ] = ServerConfig.max_body_bytes,
    max_total_body_bytes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Size of all bodies that are not tokenised yet; more get status 503, short ones pass.",
        ),
    ] = ServerConfig.max_total_body_bytes,
    max_connections: Annotated[
        int,
        typer.Option(
            min=1, help="Concurrent connections; idle ones are closed for new ones, otherwise those get status 503."
        ),
    ] = ServerConfig.max_connections,
    header_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to receive the headers of a request.")
    ] = ServerConfig.header_timeout_s,
    engine_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds without a heartbeat of the engine until /health answers 503."),
    ] = ServerConfig.engine_timeout_s,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            rich_help_panel=PANEL,
            help="Pool to share KV through, e.g. shm:///NAME?capacity=8GiB; default: one in "
            "shared memory for all servers of this user.",
        ),
    ] = None,
    peer_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=PANEL,
            help="Address at which other servers push KV into this server's pool; port 0 takes a free port.",
        ),
    ] = None,
    no_pool: Annotated[
        bool, typer.Option("--no-pool", rich_help_panel=PANEL, help="Use no pool: share and keep nothing.")
    ] = False,
    log_format: LogFormat = "text",
) -> None:
    """Serve a model with OpenAI's API.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics; / shows the pool at work.
    """
    with needs_extra():
        from headwater.connector.peering import peer_options
        from headwater.serve.server import Hooks, run_server

    with reading_options():
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
        if peer_listen is not None and no_pool:
            raise InvalidArgumentError("--peer-listen needs a pool to receive into; leave --no-pool out")
        if pool is not None and no_pool:
            raise InvalidArgumentError("--pool and --no-pool contradict each other; give one of them")
        if config.peer_tls_key is not None and config.peer_tls_cert is None:
            raise InvalidArgumentError("--peer-tls-key needs --peer-tls-cert")
        if peer_listen is not None and config.peer_tls_ca is not None and config.peer_tls_cert is None:
            raise InvalidArgumentError("--peer-listen with --peer-tls-ca needs --peer-tls-cert")
    # Here and now: a rank that cannot use them would only push nothing.
    peer_options(config).check(receives=peer_listen is not None)
    # Only now: it makes the pool if there is none.
    chosen = _choose_pool(pool, no_pool, config)
    server = replace(server, engine=replace(config, pool=chosen.url))
    if insecure and api_key is None:
        note("--insecure: anyone who can reach this address can use the model", logging.WARNING)
    if api_key is not None and ssl_certfile is None and not is_loopback(host):
        note("the API key crosses the network in plain text; --ssl-certfile encrypts it", logging.WARNING)
    note(f"… loading {one_line(config.model)}")
    with ExitStack() as bar:
        on_progress = bar.enter_context(progress("loading"))

        def on_ready(ready: Ready, model: str, url: str) -> None:
            bar.close()
            adopt("transformers")  # which the tokenizer has brought
            _print_ready(ready, server, model, url, chosen.note)

        hooks = Hooks(
            on_progress=on_progress,
            on_ready=on_ready,
            on_peer=lambda address: typer.echo(f"peers    {address}"),
            on_death=lambda reason: note(one_line(reason), logging.ERROR),
        )
        with needs_extra():
            code = run_server(server, hooks=hooks)
    raise typer.Exit(code)


def _choose_pool(url: str | None, no_pool: bool, config: EngineConfig) -> PoolChoice:
    from headwater.serve.default_pool import PoolChoice, choose_pool
    from headwater.stores.config import find_pool

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
    typer.echo(f"page     {url}/")
    typer.echo(f"ready    {url}/v1  (Ctrl-C stops)\n")
    trusts = f" --cacert {shlex.quote(server.ssl_certfile)}" if server.ssl_certfile is not None else ""
    key = ' -H "Authorization: Bearer $HEADWATER_API_KEY"' if server.api_key is not None else ""
    salt = ', "cache_salt": "me"' if server.requires_cache_salt else ""
    body = f'{{"messages": [{{"role": "user", "content": "What is the capital of France?"}}], "temperature": 0{salt}}}'
    json = "-H 'content-type: application/json'"
    typer.echo(f"try: curl -sS{trusts} {url}/v1/chat/completions{key} {json} -d {shlex.quote(body)}")
