"""`headwater proxy` and `headwater router`: one program in front of several servers, with prefill servers or not."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from headwater.cli.engine_options import needs_extra
from headwater.cli.log_option import LogFormat
from headwater.cli.output import one_line, plural
from headwater.logs import note
from headwater.proxy.config import POLICIES, ProxyConfig, ServerSpec

if TYPE_CHECKING:
    from headwater.proxy.fleet import Fleet

SERVER_HELP = (
    "URL[,peer=HOST:PORT][,weight=N][,events=tcp://HOST:PORT[,replay=tcp://HOST:PORT]][,pool=POOL]; several may follow"
)


class _Row(NamedTuple):
    kind: Any
    option: Any


def _seconds(text: str) -> _Row:
    return _Row(float, typer.Option(min=0.01, metavar="SECONDS", help=text))


OPTIONS: dict[str, _Row] = {
    "host": _Row(str, typer.Option(help="Address to listen on.")),
    "port": _Row(int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")),
    "api_key": _Row(
        str | None,
        typer.Option(
            envvar="HEADWATER_API_KEY",
            show_envvar=True,
            help="What clients must send as `Authorization: Bearer KEY`; it is passed on to the servers.",
        ),
    ),
    "admin_key": _Row(
        str | None,
        typer.Option(
            envvar="HEADWATER_ADMIN_KEY",
            show_envvar=True,
            help="Key for /admin (drain a server); without it, /admin is off.",
        ),
    ),
    "insecure": _Row(bool, typer.Option("--insecure", help="Serve other machines without asking for a key.")),
    "policy": _Row(str, typer.Option(metavar="|".join(POLICIES), help="How to choose a server.")),
    "tokenizer": _Row(
        str | None,
        typer.Option(
            metavar="DIR|FILE|NAME",
            help="The model's tokenizer, which servers' events need; without it, prompts are compared by text.",
        ),
    ),
    "max_attempts": _Row(
        int, typer.Option(min=1, help="Decode servers that one request is sent to, until one answers.")
    ),
    "connect_timeout_s": _seconds("For a connection to a server."),
    "first_byte_timeout_s": _seconds("For the first byte of a stream, or the whole of another answer."),
    "idle_timeout_s": _seconds("Between two pieces of an answer."),
    "health_interval_s": _seconds("Between two health checks of a server."),
    "health_timeout_s": _seconds("For one health check."),
    "drain_timeout_s": _seconds("That streams may go on after SIGTERM."),
    "max_requests": _Row(int, typer.Option(min=1, help="Requests at a time; more are refused with status 429.")),
    "max_body_bytes": _Row(int, typer.Option(min=1, help="Size of one request; a larger one gets status 413.")),
    "max_total_body_bytes": _Row(int, typer.Option(min=1, help="Size of all requests that wait for a first byte.")),
    "max_connections": _Row(int, typer.Option(min=1, help="Connections of clients at a time.")),
    "header_timeout_s": _seconds("That a client may take to send the headers of a request."),
    "history_blocks": _Row(int, typer.Option(min=2, help="Blocks of prompts to remember, for servers without events.")),
    "history_age_s": _seconds("That they are remembered."),
    "upstream_ca": _Row(str | None, typer.Option(metavar="FILE", help="Certificates to trust for https:// servers.")),
    "ssl_certfile": _Row(
        str | None, typer.Option(metavar="FILE", help="Speak HTTPS with this certificate chain (PEM).")
    ),
    "ssl_keyfile": _Row(
        str | None, typer.Option(metavar="FILE", help="Its private key; if not given, in the same file.")
    ),
}
"""Settings of both commands, by the names of ProxyConfig's fields; seconds lose their `_s`."""


class SeveralValues(TyperCommand):
    """A command whose --prefill and --decode take all values that follow."""

    names = ("--prefill", "--decode")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write the option before each of its values, as Click wants it."""
        found: list[str] = []
        name: str | None = None
        for arg in args:
            if arg.startswith("-"):
                name = arg if arg in self.names else None
            elif name is not None and found[-1] != name:
                found.append(name)
            found.append(arg)
        return super().parse_args(ctx, found)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the settings of both commands; they come as the keyword arguments of ProxyConfig."""

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        own = {name: given[name] for name in parameters}
        settings = {name: given[name.removesuffix("_s")] for name in OPTIONS}
        command(**own, settings=settings)

    parameters = {
        name: parameter
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "settings"
    }
    defaults = {field.name: field.default for field in ProxyConfig.__dataclass_fields__.values()}
    added = [
        inspect.Parameter(
            name.removesuffix("_s"),
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=Annotated[row.kind, row.option],
        )
        for name, row in OPTIONS.items()
    ]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    wrapper.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    return wrapper


@_with_options
def proxy(
    settings: dict[str, Any],
    decode: Annotated[
        list[str], typer.Option("--decode", metavar="SERVER...", help=f"Servers that answer: {SERVER_HELP}.")
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option("--prefill", metavar="SERVER...", help="Servers that compute prompts and push their KV."),
    ] = None,
    min_prefill_tokens: Annotated[
        int, typer.Option(min=0, help="Prompts with fewer uncached tokens on their decode server always stay there.")
    ] = ProxyConfig.min_prefill_tokens,
    skip_prefill_tokens: Annotated[
        int, typer.Option(min=0, help="So do prompts with fewer than this, if their uncached share is small.")
    ] = ProxyConfig.skip_prefill_tokens,
    skip_prefill_share: Annotated[
        float, typer.Option(min=0, max=1, help="The uncached share of a prompt that counts as small.")
    ] = ProxyConfig.skip_prefill_share,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="That decode waits for KV that prefill was asked to push.")
    ] = ProxyConfig.wait_s,
    log_format: LogFormat = "text",
) -> None:
    """Prefill on some servers, decode on others: OpenAI's API in front of both."""
    _run(
        ProxyConfig(
            decode=tuple(map(ServerSpec.parse, decode)),
            prefill=tuple(map(ServerSpec.parse, prefill or [])),
            min_prefill_tokens=min_prefill_tokens,
            skip_prefill_tokens=skip_prefill_tokens,
            skip_prefill_share=skip_prefill_share,
            wait_s=wait,
            **settings,
        )
    )


@_with_options
def router(
    settings: dict[str, Any],
    servers: Annotated[list[str], typer.Argument(metavar="SERVER...", help=f"{SERVER_HELP}.")],
    log_format: LogFormat = "text",
) -> None:
    """Send each request to the server that has most of its prompt and least to do: OpenAI's API in front of several."""
    _run(ProxyConfig(decode=tuple(map(ServerSpec.parse, servers)), **settings))


def _run(config: ProxyConfig) -> None:
    with needs_extra("proxy"):
        from headwater.proxy.server import ProxyHooks, run_proxy

    if config.insecure and config.api_key is None:
        note("--insecure: everybody who can reach this address can ask the servers", logging.WARNING)
    hooks = ProxyHooks(
        on_ready=_print_ready,
        on_stopping=lambda count: note(f"stopping: {plural(count, 'request')} to be answered"),
    )
    with needs_extra("proxy"):
        code = run_proxy(config, hooks=hooks)
    raise typer.Exit(code)


def _print_ready(url: str, fleet: Fleet) -> None:
    for server in fleet.servers:
        state = "up" if server.is_up else "down"
        peer = f", receives KV at {one_line(server.peer)}" if server.peer else ""
        typer.echo(f"{server.role.value:8} {one_line(server.name)}  {state}{peer}")
    typer.echo(f"ready    {url}/v1  (Ctrl-C stops)")
