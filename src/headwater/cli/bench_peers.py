"""`headwater bench peers`: pushes against bare sockets, packed tiles against raw ones, and both in real vLLM."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headwater.cli.bench_output import note, rounded


def bench_peers(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    pairs: Annotated[int, typer.Option(help="Alternating rounds of push and bare sockets.", min=1)] = 9,
    seconds: Annotated[float, typer.Option(help="Start no further case after this time.", min=1)] = 240.0,
    quick: Annotated[bool, typer.Option("--quick", help="Run everything once and small, as a smoke test.")] = False,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Compare with NixlConnector in real vLLM, and nothing else.")
    ] = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="Compare packed tiles with raw ones through slow links, and nothing else.")
    ] = False,
) -> None:
    """Measure a push into another process's pool against bare sockets.

    With --vllm: prefill in one real vLLM and decode in another, through Headwater and through vLLM's NixlConnector.
    With --packed: between two network namespaces whose link is limited to 1 and to 10 Gb/s.
    """
    from headwater.bench import push
    from headwater.cli.output import print_json

    if vllm:
        _bench_handoff(as_json=as_json, pairs=pairs, quick=quick)
        return
    if packed:
        _bench_packed(as_json=as_json, pairs=pairs, quick=quick)
        return
    report = push.run(push.QUICK if quick else push.PeersBench(rounds=pairs, seconds=seconds), note)
    if as_json:
        print_json(rounded(report))
    else:
        _print_peers(report)


def _bench_packed(*, as_json: bool, pairs: int, quick: bool) -> None:
    from headwater.bench import packed_link
    from headwater.cli.output import console, print_json, table

    plan = packed_link.QUICK if quick else packed_link.PackedLinkBench(rounds=pairs)
    report = rounded(packed_link.run(plan, note))
    if as_json:
        print_json(report)
        return
    rows = table("link", ">gives Gb/s", *(f">{way}" for way in packed_link.WAYS), ">packed_fetch", ">noise")
    for name, _ in plan.rates:
        ratios = [f"{report[f'packed_{way}_{name}']:.2f}" for way in (*packed_link.WAYS, "fetch")]
        noise = f"{report[f'packed_fetch_noise_{name}']:.2f}"
        rows.add_row(name, f"{8 * report[f'link_gbps_{name}']:.2f}", *ratios, noise)
    console().print(rows)
    console().print(f"time of packed tiles over that of raw ones; {report['packed_size_ratio']:.3f} of their bytes")


def _bench_handoff(*, as_json: bool, pairs: int, quick: bool) -> None:
    from headwater.bench import vllm_handoff
    from headwater.cli.output import console, print_json, table
    from headwater.errors import EngineConfigError

    if (reason := vllm_handoff.why_not()) is not None:
        raise EngineConfigError(reason)
    report = rounded(vllm_handoff.run(vllm_handoff.QUICK if quick else vllm_handoff.HandoffBench(pairs=pairs), note))
    if as_json:
        print_json(report)
        return
    rows = table(
        f"{report['prompt_len']} tokens", ">first token s", ">after prefill s", ">right tokens, prefill killed"
    )
    for name in ("headwater", "nixl"):
        seconds = [f"{report[f'{what}_{name}_s']:.3f}" for what in ("ttft", "after_prefill")]
        rows.add_row(name, *seconds, f"{report[f'killed_tokens_{name}']} of 4")
    console().print(rows)
    console().print(f"ttft_vs_nixl {report['ttft_vs_nixl']:.2f} (noise {report['ttft_noise']:.2f})")


def _print_peers(report: dict[str, Any]) -> None:
    from headwater.cli.output import console, table

    rates = table("tiles", ">push GB/s", ">bare GB/s", ">ratio", ">noise")
    for name in [key.removeprefix("push_gbps_") for key in report if key.startswith("push_gbps_")]:
        figures = [f"{what}_{name}" for what in ("push_gbps", "bare_gbps", "push_ratio", "push_noise")]
        rates.add_row(name, *(f"{report[figure]:.2f}" for figure in figures))
    console().print(rates)
    if (reason := report["hosts_reason"]) is not None:
        console().print(f"between hosts: not measured, {reason}")
    else:
        ratio, noise = report["push_ratio_hosts"], report["push_noise_hosts"]
        console().print(f"push_ratio_hosts {ratio:.2f} (noise {noise:.2f}): between two network namespaces")
    if (reason := report["nixl_reason"]) is not None:
        console().print(f"NIXL: not measured, {reason}")
    else:
        ratio, noise, idle = (report[f"nixl_{name}"] for name in ("ratio", "noise", "idle_cores"))
        console().print(
            f"nixl_ratio {ratio:.2f} (noise {noise:.2f}): a push, over a bare NIXL write; idle {idle:.3f} cores"
        )
    if (reason := report["push_layerwise_reason"]) is not None:
        console().print(f"layer by layer: not measured, {reason}")
        return
    for figure, noise, meaning in (
        (
            "push_layerwise_ratio",
            "push_layerwise_noise",
            "last layer computed → in decode's cache, over the same in bulk",
        ),
        ("step_cost", "step_noise", "prefill's step with a push, over the step without"),
        ("stopped_step_cost", "step_noise", "the same to a peer that is stopped"),
    ):
        console().print(f"{figure} {report[figure]:.2f} (noise {report[noise]:.2f}): {meaning}")
