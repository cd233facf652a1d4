"""`headwater demo`: its options. What it does is in `two_servers`, which is imported when it runs."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from headwater.cli.demo.steps import Steps
from headwater.cli.engine_options import needs_extra
from headwater.cli.output import console, print_json


def demo(
    tokens: Annotated[
        int | None,
        typer.Option(
            min=300,
            max=120_000,
            help="Approximate tokens in the document; default: what this machine computes within two minutes, at most "
            "4000.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|FILE|NAME",
            help="Model to run; default: SmolLM2, or a small model with random weights if that is missing.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Device to run on.")] = "auto",
    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated",
            help="Show prefill and decode on two servers with separate pools, behind a proxy.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
) -> None:
    """Show two servers that share one pool.

    Asks both about a long document, and prints what the second one saved.

    Exit code 1 if the second server did not find the document, or answered something else.
    """
    if disaggregated:
        _demo_disaggregated(model, tokens, device, as_json)
    with Steps() as steps, needs_extra():
        steps("the demo starts")
        from headwater.cli.demo.two_servers import run_two_servers, show

        outcome = run_two_servers(model, tokens, device, steps)
    if as_json:
        print_json(outcome.as_dict() | {"seconds": round(steps.elapsed_s, 1)})
    else:
        show(outcome, console())
    raise typer.Exit(0 if outcome.correct else 1)


def _demo_disaggregated(model: str | None, tokens: int | None, device: str, as_json: bool) -> NoReturn:
    with Steps() as steps, needs_extra():
        steps("the demo starts")
        from headwater.cli.demo.prefill_decode import run_prefill_decode, show_handover

        outcome = run_prefill_decode(model, tokens, device, steps)
    if as_json:
        print_json(outcome.as_dict() | {"seconds": round(steps.elapsed_s, 1)})
    else:
        show_handover(outcome, console())
    raise typer.Exit(0 if outcome.correct else 1)
