"""`headwater chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.engine_options import engine_options, needs_extra
from headwater.cli.generate import (
    DEFAULT_TEMPERATURE,
    DEFAULT_TOP_P,
    MAX_TOKENS_HELP,
    Seed,
    System,
    Temperature,
    TopK,
    TopP,
)
from headwater.cli.output import one_line, progress
from headwater.cli.usage import reading_options
from headwater.engine.config import EngineConfig
from headwater.engine.params import SamplingParams
from headwater.errors import RequestError

if TYPE_CHECKING:
    from headwater.serve.local import LocalModel

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it; Ctrl-C stops an answer"


@engine_options
def chat(
    config: EngineConfig,
    system: System = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help=f"{MAX_TOKENS_HELP} Default: until the model ends it or the context is full."),
    ] = None,
    temperature: Temperature = DEFAULT_TEMPERATURE,
    top_p: TopP = DEFAULT_TOP_P,
    top_k: TopK = SamplingParams.top_k,
    seed: Seed = None,
) -> None:
    """Chat with a model in the terminal; only new turns are computed."""
    with reading_options():
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=secrets.randbits(62) if seed is None else seed,
        )
    with needs_extra():
        from headwater.serve.local import LocalModel

        with progress("loading") as bar:
            model = LocalModel(config, bar)
    with model:
        typer.echo(f"… {one_line(model.label)} on {one_line(model.note)}\n… {HELP}", err=True)
        _converse(model, params, [{"role": "system", "content": system}] if system is not None else [])


def _converse(model: LocalModel, params: SamplingParams, opening: list[dict[str, str]]) -> None:
    turns = list(opening)
    for line in _lines():
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                turns = list(opening)
                typer.echo("… forgotten", err=True)
            case "/help":
                typer.echo(f"… {HELP}", err=True)
            case _:
                asked = [*turns, {"role": "user", "content": line}]
                try:
                    said = _say(model, params, asked)
                except RequestError as error:
                    typer.echo(f"error: {one_line(error)}; /reset starts a new conversation", err=True)
                    continue
                turns = [*asked, {"role": "assistant", "content": said}]


def _say(model: LocalModel, params: SamplingParams, turns: list[dict[str, str]]) -> str:
    """Print an answer as it comes. Ctrl-C ends the answer and keeps what was said."""
    pieces = []
    with _interruptible() as interrupted:
        for delta in model.answer(model.tokenizer.apply_chat_template(turns), params):
            print(delta.text, end="", flush=True)
            pieces.append(delta.text)
            if interrupted:
                break
    print(flush=True)
    return "".join(pieces)


def _lines() -> Iterator[str]:
    """What the user says, line by line, with a prompt and editing where that is a terminal."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    try:
        import readline  # noqa: F401  (importing it gives `input` its editing)
    except ImportError:
        pass
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A list that Ctrl-C makes true, instead of ending the program in the middle of a step."""
    seen: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
