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
            help="Tokens in the document, about; if not given, at most 4000, and as many as this machine can compute "
            "so that all is done within two minutes.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|FILE|NAME",
            help="A model of yours; if not given SmolLM2, or where that is missing a small one with random weights.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.")] = "auto",
    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated",
            help="Instead: a prefill and a decode server with pools of their own, a proxy before them, and what the "
            "decode server is spared.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
) -> None:
    """Start two servers on one pool, ask both about a long document, and show what the second one saved.

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
