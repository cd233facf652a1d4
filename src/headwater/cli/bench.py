"""`headwater bench …`: measurements, for people by default and as one line of JSON with `--json`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

bench_app = typer.Typer(help="Measure Headwater on this machine.", no_args_is_help=True, add_completion=False)


@bench_app.callback()
def _bench() -> None:
    """Measure Headwater on this machine."""


@bench_app.command("store")
def bench_store(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line of the output.")] = False,
    url: Annotated[
        str | None, typer.Option(help="Where to make the pool of tiles (removed afterwards), e.g. shm:///NAME.")
    ] = None,
    tiles_gib: Annotated[float, typer.Option(help="GiB of tiles to move.", min=0.01, max=1024)] = 1.0,
    chunks: Annotated[int, typer.Option(help="Chunks in the pool that is searched.", min=1)] = 1_000_000,
    pairs: Annotated[int, typer.Option(help="Alternating pairs of pool and ceiling.", min=1)] = 9,
    redis: Annotated[bool, typer.Option("--redis/--no-redis", help="Compare with a Redis server.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Everything once and small: a smoke test.")] = False,
) -> None:
    """Read and write tiles against the memory's own speed, and look prompts up among a million chunks."""
    from headwater.bench import store
    from headwater.cli.output import print_json

    full = store.StoreBench(tiles_bytes=int(tiles_gib * 2**30), num_chunks=chunks, pairs=pairs)
    report = store.run(replace(store.QUICK if quick else full, url=url, redis=redis), _note)
    if as_json:
        print_json(_rounded(report))
    else:
        _print_store(report)


def _note(text: str) -> None:
    typer.echo(f"… {text}", err=True)


def _rounded(value: Any) -> Any:
    """Four significant digits are more than any of these figures has."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _print_store(report: dict[str, Any]) -> None:
    from headwater.cli.output import console, table

    speeds = table("verified 128 KiB tiles", ">pool GB/s", ">limit GB/s", ">ratio", ">noise")
    for verb in ("read", "write"):
        for threads, suffix in (("one thread", ""), ("two threads", "_2t")):
            figures = [f"{verb}_gbps{suffix}", f"ceiling_{verb}_gbps{suffix}"]
            figures += [f"{verb}_vs_ceiling{suffix}", f"{verb}_noise{suffix}"]
            speeds.add_row(f"{verb}, {threads}", *(f"{report[name]:.2f}" for name in figures))
    speeds.add_row("copy without checksum", "", f"{report['memcpy_gbps']:.2f}")
    speeds.add_row("read, an array for each tile", f"{report['read_piece_gbps']:.2f}")
    speeds.add_row("read, whole chunks", f"{report['read_chunk_gbps']:.2f}")
    speeds.add_row("write, tile by tile", f"{report['write_tile_gbps']:.2f}")
    for verb in ("read", "write"):
        speeds.add_row(f"{verb}, file://", f"{report[f'file_{verb}_gbps']:.2f}")
        peer = report[f"redis_{verb}_gbps"]
        speeds.add_row(f"{verb}, Redis", report["redis_reason"] if peer is None else f"{peer:.2f}")

    other = table("finding and keeping", ">")
    tokens, among = f"{report['match_tokens']:,} tokens", f"{report['match_chunks']:,} chunks"
    other.add_row(f"hash {tokens}", f"{report['hash_ms']:.2f} ms")
    other.add_row(f"hash and match among {among}", f"{report['match_ms']:.2f} ms")
    other.add_row("match alone", f"{report['lookup_only_ms']:.2f} ms")
    other.add_row("write tiny chunks", f"{report['fill_chunks_per_s']:,.0f} a second")
    other.add_row("index in use / data", f"{report['overhead_ratio']:.5f}")
    other.add_row("index reserved / capacity", f"{report['index_reserved_ratio']:.5f}")
    other.add_row("import headwater", f"{report['import_ms']:.0f} ms")

    bars = table("bar", ">limit", ">measured", "verdict")
    for name, bar in report["bars"].items():
        bars.add_row(name, f"{bar['limit']:g}", f"{report[name]:.4g}", bar["verdict"])
    out = console()
    for figures_of in (speeds, other, bars):
        out.print(figures_of)
        out.print()
    out.print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
