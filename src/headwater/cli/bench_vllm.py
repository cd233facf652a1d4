"""`headwater bench vllm`: real vLLM on this machine's CPU or GPU, with Headwater and with other connectors."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from headwater.cli.bench_output import note, rounded

PROFILE = "profile"
"""May be written among the parts, too."""


class Device(StrEnum):
    """The device that vLLM computes on: each has a benchmark of its own."""

    CPU = "cpu"
    CUDA = "cuda"


def bench_vllm(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    pairs: Annotated[int, typer.Option(help="Alternating pairs of hits.", min=1)] = 9,
    mooncake: Annotated[bool, typer.Option("--mooncake/--no-mooncake", help="Compare with Mooncake's store.")] = True,
    example: Annotated[bool, typer.Option("--example/--no-example", help="Compare with ExampleConnector.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Run everything once and small, as a smoke test.")] = False,
    device: Annotated[Device, typer.Option(help="Device that vLLM runs on.")] = Device.CPU,
    sides: Annotated[str | None, typer.Option(help="GPU: compare only these sides, separated by commas.")] = None,
    parts: Annotated[str | None, typer.Option(help="GPU: run only these parts, separated by commas.")] = None,
    eager: Annotated[bool, typer.Option("--eager/--compiled", help="GPU: without or with compilation.")] = True,
    model: Annotated[Path | None, typer.Option(help="GPU: Llama checkpoint; created there if missing.")] = None,
    lmcache_path: Annotated[
        Path | None, typer.Option(help="GPU: where LMCache is installed, if not beside vLLM.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="GPU: layers of the random model (32).", min=1)] = None,
    capacity: Annotated[str | None, typer.Option(help="GPU: host memory of every connector (30GiB).")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="GPU: start nothing that would end after this time.", min=1)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="GPU: write results to this file, and resume from it.")] = None,
    again: Annotated[bool, typer.Option("--again", help="GPU: repeat what that file already has.")] = False,
    merge: Annotated[list[Path] | None, typer.Option(help="GPU: measure nothing, report these files together.")] = None,
    mixed: Annotated[bool, typer.Option("--mixed", help="GPU: allow files from several machines.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="GPU: also profile a pool hit.")] = False,
    cpu_trial: Annotated[bool, typer.Option("--cpu-trial", hidden=True)] = False,
) -> None:
    """Measure the time to the first token of a pool hit in vLLM.

    Also measures the cost of saving. Takes half an hour or more.

    With --device cuda: an 8B-class Llama on a GPU, beside plain vLLM, its OffloadingConnector and LMCache.
    """
    from headwater.bench import vllm, vllm_gpu
    from headwater.cli.output import print_json
    from headwater.errors import EngineConfigError
    from headwater.stores.url import parse_size

    if merge:
        _show_gpu(vllm_gpu.merge(merge, mixed=mixed), as_json)
        return
    if find_spec("vllm") is None:
        raise EngineConfigError(
            "vLLM is not installed in this environment; `make test-vllm` creates one with it (see docs/vllm.md)"
        )
    if device is Device.CUDA or cpu_trial:
        gpu = vllm_gpu.TRIAL if cpu_trial else vllm_gpu.QUICK if quick else vllm_gpu.GpuPlan(pairs=pairs)
        given: dict[str, Any] = {
            "is_eager": eager,
            "model": model and model.resolve(),
            "out": out,
            "again": again,
            "profile": profile,
        }
        if sides is not None:
            given["sides"] = _names(sides)
        if parts is not None:
            chosen = _names(parts)
            given["parts"] = tuple(name for name in chosen if name != PROFILE)
            given["profile"] = profile or PROFILE in chosen
        if lmcache_path is not None:
            given["lmcache_path"] = lmcache_path.resolve()
        if layers is not None:
            given["shape"] = replace(gpu.shape, num_layers=layers)
        if capacity is not None:
            from headwater.stores.url import parse_size

            given["capacity_bytes"] = parse_size(capacity)
        if seconds is not None:
            given["seconds"] = seconds
        _show_gpu(vllm_gpu.run(replace(gpu, **given), note), as_json)
        return
    plan = vllm.QUICK if quick else vllm.VllmBench(pairs=pairs)
    wanted = {"none": True, "example": example, "mooncake": mooncake}
    report = vllm.run(replace(plan, peers=tuple(name for name in plan.peers if wanted[name])), note)
    if as_json:
        print_json(rounded(report))
    else:
        _print(report)


def _show_gpu(report: dict[str, Any], as_json: bool) -> None:
    from headwater.cli.bench_vllm_gpu import print_report
    from headwater.cli.output import print_json

    print_report(report, to_stderr=as_json)
    if as_json:
        print_json(rounded(report))
    if report.get("interrupted"):
        raise typer.Exit(1)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


_ROW = ("cold_s", "headwater_beside_floor_s", "floor_s", "vs_floor", "vs_mooncake", "vs_example", "speedup")


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
    rich_print({key: rounded(value) for key, value in report.items() if isinstance(value, float)})


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
