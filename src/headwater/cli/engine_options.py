"""The engine's settings as options of a command: one table, with the defaults of EngineConfig.

`@engine_options` gives a command that takes a `config: EngineConfig` one option for each row of the table.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Annotated, Any, NamedTuple

import typer

from headwater.cli.usage import choice, plain, reading_options
from headwater.connector.config import CARRIERS, LOAD_MODES, ROLES
from headwater.engine.config import DTYPES, LAYOUTS, LOAD_FORMATS, EngineConfig
from headwater.errors import EngineError
from headwater.extras import install_hint

DEFAULT_MODEL = "smollm2"
PANEL = "Engine"


class _Row(NamedTuple):
    kind: Any
    help: str
    metavar: str | None = None
    least: int | None = None


def _count(kind: Any, text: str) -> _Row:
    return _Row(kind, text, "N", 1)


def _choice(text: str, *names: str) -> _Row:
    return _Row(choice(*names), text, "|".join(names))


OPTIONS: dict[str, _Row] = {
    "model": _Row(str, "Checkpoint directory, GGUF file, or smollm2.", "DIR|FILE|NAME"),
    "load_format": _choice("dummy: random weights of the model's shapes.", *LOAD_FORMATS),
    "dtype": _choice("auto: bfloat16 on a GPU, float32 on a CPU.", *DTYPES),
    "device": _choice("Device to run on.", "auto", "cpu", "cuda"),
    "tensor_parallel_size": _count(int, "Number of tensor-parallel ranks, one process each."),
    "max_model_len": _count(int | None, "Context length in tokens; default: what model and memory allow."),
    "page_size": _count(int, "Tokens per page of the KV cache."),
    "num_pages": _count(int | None, "Pages of the KV cache; default: from measured memory."),
    "memory_ratio": _Row(float | None, "Share of free memory to use; default: 0.9 on a GPU, 0.3 on a CPU.", "X"),
    "cache_layout": _choice("Order of the KV cache in memory.", *LAYOUTS),
    "prefix_cache": _choice("naive: no prefix cache.", "radix", "naive"),
    "max_num_seqs": _count(int, "Sequences in one step."),
    "max_batched_tokens": _count(int, "Tokens in one step; longer prompts are computed in several steps."),
    "attention_backend": _Row(str, "Attention kernels; auto: the best for this device.", "NAME"),
    "cuda_graphs": _Row(bool, "Replay recorded decode steps (GPU only)."),
    "overlap": _Row(bool | None, "Schedule the next step while this one computes; default: on a GPU."),
    "speculative_ngram": _count(int | None, "Draft N tokens by looking back in the text; default: no drafts."),
    "seed": _Row(int, "Base of the seeds for requests without one.", "N"),
    "num_threads": _count(int | None, "CPU threads per rank; default: cores divided by ranks."),
    "pool": _Row(str | None, "Pool to share KV through, e.g. shm:///headwater.", "URL"),
    "pool_role": _choice("Save KV, load it, or both.", *ROLES),
    "pool_load": _choice(
        "How a request waits for its KV; async: outside the batch; auto: in its step if that delays no other.",
        *LOAD_MODES,
    ),
    "pool_saves_decoded": _Row(bool, "Also save generated tokens."),
    "pool_group_bytes": _count(int | None, "Group layers up to this size when they move; default: by device."),
    "peer_secret_file": _Row(
        str | None,
        "File with the secret shared by servers that push KV to each other; required between hosts.",
        "FILE",
    ),
    "peer_tls_cert": _Row(str | None, "Use TLS between peers, with this certificate chain.", "FILE"),
    "peer_tls_key": _Row(str | None, "Private key, if it is not in the certificate file.", "FILE"),
    "peer_tls_ca": _Row(str | None, "Use TLS between peers; accept certificates signed by this CA.", "FILE"),
    "peer_carrier": _choice("How KV travels to peers; nixl only if both ends name it.", *CARRIERS),
}


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's `config` by options that make one; an option of the command's own hides the engine's.

    Values that cannot be are wrong usage.
    """
    own = inspect.signature(command, eval_str=True).parameters
    added = {name: _parameter(name, row) for name, row in OPTIONS.items() if name not in own}

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        with reading_options():
            config = EngineConfig(**{name: plain(values.pop(name)) for name in added})
        command(config=config, **values)

    kept = [parameter for name, parameter in own.items() if name != "config"]
    parameters = [*kept, *added.values()]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


@contextmanager
def needs_extra(extra: str = "serve") -> Iterator[None]:
    """Say what to install where a package that the engine needs is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "headwater":
            raise
        raise EngineError(f"the package {error.name} is not installed; {install_hint(extra)}") from error


def _parameter(name: str, row: _Row) -> inspect.Parameter:
    (default,) = (field.default for field in fields(EngineConfig) if field.name == name)
    option = typer.Option(help=row.help, metavar=row.metavar, min=row.least, rich_help_panel=PANEL)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=DEFAULT_MODEL if default is MISSING else default,
        annotation=Annotated[row.kind, option],
    )
