"""`headwater generate "prompt"`: one answer, streamed to the terminal."""

from __future__ import annotations

import secrets
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.engine_options import engine_options, needs_extra
from headwater.cli.output import one_line, print_json, progress
from headwater.cli.usage import reading_options
from headwater.engine.config import EngineConfig
from headwater.engine.params import SamplingParams
from headwater.errors import InvalidArgumentError

if TYPE_CHECKING:
    from headwater.serve.local import LocalModel

MAX_TOKENS_HELP = "Maximum number of tokens of the answer."
Temperature = Annotated[float, typer.Option(help="0 always takes the best token.")]
TopP = Annotated[float, typer.Option(help="Sample from the best tokens with this total probability.")]
TopK = Annotated[int, typer.Option(help="Sample from this many best tokens; 0: all.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the answer; default: random.")]
System = Annotated[str | None, typer.Option(help="A system message.")]

# Small models ramble at OpenAI's defaults: SmolLM2's best first token is often ahead of nonsense by a hair.
DEFAULT_TEMPERATURE = 0.0
DEFAULT_TOP_P = 1.0


@engine_options
def generate(
    config: EngineConfig,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")],
    max_tokens: Annotated[int, typer.Option(help=MAX_TOKENS_HELP)] = 256,
    temperature: Temperature = DEFAULT_TEMPERATURE,
    top_p: TopP = DEFAULT_TOP_P,
    top_k: TopK = SamplingParams.top_k,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text (repeatable).")] = None,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text without a chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
) -> None:
    """Generate one answer and stream it to the terminal."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with reading_options():
        if not text:
            raise InvalidArgumentError("the prompt is empty; expected some text, as an argument or on stdin")
        if raw and system is not None:
            raise InvalidArgumentError("--system needs the chat template; leave out --raw")
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=secrets.randbits(62) if seed is None else seed,
            stop=tuple(stop or ()),
        )
    with needs_extra():
        from headwater.serve.local import LocalModel

        with progress("loading") as bar:
            model = LocalModel(config, bar)
    with model:
        typer.echo(f"… {one_line(model.label)} on {one_line(model.note)}", err=True)
        turns = [{"role": "system", "content": system}] if system is not None else []
        turns.append({"role": "user", "content": text})
        ids = model.tokenizer.encode(text) if raw else model.tokenizer.apply_chat_template(turns)
        report = _run(model, ids, params, echo=not as_json)
    if as_json:
        print_json(report)


def _run(model: LocalModel, ids: list[int], params: SamplingParams, *, echo: bool) -> dict[str, Any]:
    begin_s = time.monotonic()
    pieces = []
    reason = None
    for delta in model.answer(ids, params):
        pieces.append(delta.text)
        reason = delta.finish_reason
        if echo:
            print(delta.text, end="", flush=True)
    if echo:
        print(flush=True)
    return {
        "text": "".join(pieces),
        "finish_reason": reason.value if reason else None,
        "usage": model.usage.as_json(),
        "seconds": round(time.monotonic() - begin_s, 4),
    }
