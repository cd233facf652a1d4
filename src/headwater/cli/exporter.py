"""`headwater pool exporter`: a pool's metrics for Prometheus."""

from __future__ import annotations

import logging

import typer

from headwater.cli.engine_options import needs_extra
from headwater.cli.output import one_line, print_json
from headwater.logs import note
from headwater.serve.addresses import is_loopback


def export(
    url: str | None,
    host: str,
    port: int,
    api_key: str | None,
    insecure: bool,
    tls: tuple[str | None, str | None],
    as_json: bool,
) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    with needs_extra("exporter"):
        from headwater.serve.exporter import ExporterConfig, run_exporter
    from headwater.stores.url import DEFAULT_URL

    certfile, keyfile = tls
    config = ExporterConfig(
        pool=DEFAULT_URL if url is None else url,
        host=host,
        port=port,
        api_key=api_key,
        insecure=insecure,
        ssl_certfile=certfile,
        ssl_keyfile=keyfile,
    )
    if insecure and api_key is None and not is_loopback(host):
        note("--insecure: everybody who can reach this address can read the figures", logging.WARNING)
    if api_key is not None and certfile is None and not is_loopback(host):
        note("the API key crosses the network in plain text; --ssl-certfile encrypts it", logging.WARNING)

    def on_ready(address: str, is_up: bool) -> None:
        if as_json:
            print_json({"listening": address, "pool_is_up": is_up})
            return
        pool = "" if is_up else "; there is no pool yet, and it is looked for every second"
        typer.echo(f"ready    {one_line(address)}/metrics  (Ctrl-C stops){pool}")

    return run_exporter(config, on_ready)
