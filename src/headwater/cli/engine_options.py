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

from headwater.connector.config import CARRIERS, LOAD_MODES, ROLES
from headwater.engine.config import DTYPES, LAYOUTS, LOAD_FORMATS, EngineConfig
from headwater.errors import EngineError

DEFAULT_MODEL = "smollm2"
PANEL = "Engine"


class _Row(NamedTuple):
    kind: Any
    help: str
    metavar: str | None = None


def _one_of(*names: str) -> str:
    return "|".join(names)


OPTIONS: dict[str, _Row] = {
    "model": _Row(str, "A checkpoint directory, a GGUF file, or smollm2.", "DIR|FILE|NAME"),
    "load_format": _Row(str, "dummy: random weights of the right shapes.", _one_of(*LOAD_FORMATS)),
    "dtype": _Row(str, "auto: bfloat16 on a GPU, float32 on a CPU.", _one_of(*DTYPES)),
    "device": _Row(str, "Where to run.", "auto|cpu|cuda"),
    "tensor_parallel_size": _Row(int, "Ranks that share the model's heads, a process each."),
    "max_model_len": _Row(int | None, "Context in tokens; if not given, what model and memory allow."),
    "page_size": _Row(int, "Tokens in a page of the KV cache."),
    "num_pages": _Row(int | None, "Pages of the KV cache; if not given, from measured memory."),
    "memory_ratio": _Row(float | None, "Part of free memory to use; if not given, 0.9 on a GPU and 0.3 on a CPU."),
    "cache_layout": _Row(str, "Order of the KV cache in memory.", _one_of(*LAYOUTS)),
    "prefix_cache": _Row(str, "naive: remember nothing between requests.", "radix|naive"),
    "max_num_seqs": _Row(int, "Sequences that run at the same time."),
    "max_batched_tokens": _Row(int, "Tokens of one step; longer prompts are computed in chunks."),
    "attention_backend": _Row(str, "Attention kernels; auto takes the best that run here."),
    "cuda_graphs": _Row(bool, "Replay recorded decode steps (GPU only)."),
    "overlap": _Row(bool | None, "Schedule the next step while this one computes; if not given, on a GPU."),
    "seed": _Row(int, "Where the seeds of requests that bring none start from."),
    "num_threads": _Row(int | None, "CPU threads of one rank; if not given, the cores divided by the ranks."),
    "pool": _Row(str | None, "Share KV with other servers through this pool, e.g. shm:///headwater.", "URL"),
    "pool_role": _Row(str, "Save KV, load it, or both.", _one_of(*ROLES)),
    "pool_load": _Row(
        str,
        "How a request waits for its KV; async: outside the batch; auto: in its step if no other waits.",
        _one_of(*LOAD_MODES),
    ),
    "pool_saves_decoded": _Row(bool, "Save what was generated, too."),
    "pool_group_bytes": _Row(int | None, "Layers move together until they have so many bytes; if not given, as suits."),
    "peer_secret_file": _Row(
        str | None,
        "A file with the secret that servers share which push KV to each other; needed between hosts.",
        "FILE",
    ),
    "peer_tls_cert": _Row(str | None, "Use TLS between peers; this certificate chain is shown to them.", "FILE"),
    "peer_tls_key": _Row(str | None, "Its key, if it is in a file of its own.", "FILE"),
    "peer_tls_ca": _Row(str | None, "Use TLS between peers; this CA has signed their certificates.", "FILE"),
    "peer_carrier": _Row(str, "How KV travels to peers; nixl where both ends say so.", _one_of(*CARRIERS)),
}


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's `config` by options that make one; an option of the command's own hides the engine's.

    The command raises EngineConfigError for values that cannot be.
    """
    own = inspect.signature(command, eval_str=True).parameters
    added = {name: _parameter(name, row) for name, row in OPTIONS.items() if name not in own}

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        config = EngineConfig(**{name: values.pop(name) for name in added})
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
        raise EngineError(
            f"the package {error.name} is not installed; pip install '/path/to/headwater[{extra}]'"
        ) from error


def _parameter(name: str, row: _Row) -> inspect.Parameter:
    (default,) = (field.default for field in fields(EngineConfig) if field.name == name)
    option = typer.Option(help=row.help, metavar=row.metavar, rich_help_panel=PANEL)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=DEFAULT_MODEL if default is MISSING else default,
        annotation=Annotated[row.kind, option],
    )
