"""`headwater bench vllm`: real vLLM on this machine's CPU, with Headwater and with other connectors."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Any

import typer


def bench_vllm(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line of the output.")] = False,
    pairs: Annotated[int, typer.Option(help="Alternating pairs of hits.", min=1)] = 9,
    mooncake: Annotated[bool, typer.Option("--mooncake/--no-mooncake", help="Compare with Mooncake's store.")] = True,
    example: Annotated[bool, typer.Option("--example/--no-example", help="Compare with ExampleConnector.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Everything once and small: a smoke test.")] = False,
) -> None:
    """Time to a first token on a hit in the pool, in vLLM, and what saving costs. Takes half an hour or more."""
    from headwater.bench import vllm
    from headwater.cli.output import print_json
    from headwater.errors import EngineConfigError

    if find_spec("vllm") is None:
        raise EngineConfigError(
            "vLLM is not installed in this environment; `make test-vllm` makes one with it, and docs/vllm.md says how"
        )
    plan = vllm.QUICK if quick else vllm.VllmBench(pairs=pairs)
    wanted = {"none": True, "example": example, "mooncake": mooncake}
    report = vllm.run(replace(plan, peers=tuple(name for name in plan.peers if wanted[name])), _note)
    if as_json:
        print_json(_rounded(report))
    else:
        _print(report)


_ROW = ("cold_s", "headwater_beside_floor_s", "floor_s", "vs_floor", "vs_mooncake", "vs_example", "speedup")


def _note(text: str) -> None:
    typer.echo(f"… {text}", err=True)


def _rounded(value: Any) -> Any:
    """Four significant digits are more than any of these figures has."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _print(report: dict[str, Any]) -> None:
    from rich import print as rich_print

    from headwater.cli.output import table

    for name, model in report["models"].items():
        columns = (">cold s", ">hit s", ">local hit s", ">vs local", ">vs Mooncake", ">vs example", ">speed-up")
        rows = table(f"{name}: {model['token_bytes'] // 1024} KiB of KV a token", *columns)
        for count, row in model["prompts"].items():
            figures = (
                "cold_s",
                "headwater_beside_floor_s",
                "floor_s",
                "vs_floor",
                "vs_mooncake",
                "vs_example",
                "speedup",
            )
            rows.add_row(f"{count} tokens", *(_figure(row.get(figure)) for figure in figures))
        rich_print(rows)
    rich_print({key: _rounded(value) for key, value in report.items() if isinstance(value, float)})


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
