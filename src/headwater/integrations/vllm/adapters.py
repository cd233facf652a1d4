"""LoRA adapters: what names their KV on the scheduler side, and proof on the worker side that this is what was loaded.

vLLM loads an adapter when it is told to, or when the first request needs it, and again after it had to make room; it
tells no connector. So `watch_loads` notes the state of the files around vLLM's own loading in each worker, and every
step that computes with a named adapter carries the state that the name was made from.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headwater.errors import HeadwaterError, WeightsChangedError
from headwater.integrations.vllm.before import START_MARGIN_NS, process_start_ns
from headwater.integrations.vllm.declined import LOGGER, DeclinedError
from headwater.kv.checkpoint import digest_checkpoint
from headwater.kv.files import FileState, NamedFile, last_change, take_states

_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_ROOM_FOR_ADAPTERS = frozenset(
    {"max_lora_rank", "max_loras", "max_cpu_loras", "max_lora_cls_labels", "specialize_active_lora"}
)
log = logging.getLogger(LOGGER)

_loaded: dict[int, bytes] = {}
"""Adapters that vLLM has loaded in this process, by id: the state of their files, b"" if that changed meanwhile."""


class _Adapter(NamedTuple):
    """An adapter when it was first asked for. No digest: nobody knows what vLLM runs under this id."""

    path: str
    states: tuple[FileState, ...]
    digest: bytes | None
    state: bytes = b""
    """The same states, packed; b"" for an adapter that never had a name."""


class Adapters:
    """Digests of the LoRA adapters in use. An adapter's name and path say nothing: its weights and its config do.

    An adapter is named only if its files have not changed since before the server started: whenever they were loaded,
    it was these. Once they change, requests with its id are private until a restart, since some may still run with the
    old weights. (One that is loaded anew has a new id, and files younger than the server.) A change between a request
    and the loading that it causes is found by `check_loaded`.
    """

    def __init__(self, *, rules: str = "", started_ns: int | None = None) -> None:
        """`rules`: what of the server's settings changes what an adapter does, from `adapter_rules`."""
        self._rules = rules
        self._started_ns = process_start_ns() if started_ns is None else started_ns
        self._known: dict[int, _Adapter] = {}

    def digest(self, lora: Any) -> bytes:
        """SHA-256 over the adapter's weights and config. They are read once; later calls look only at their state.

        Raises HeadwaterError or OSError where they are not to be found, or may not be what runs.
        """
        path = _adapter_path(lora.lora_path)
        states = take_states(_adapter_files(path))
        known = self._known.get(lora.lora_int_id)
        if known is None:
            known = self._known[lora.lora_int_id] = self._first(lora, path, states)
        if known.digest is not None and (known.path, known.states) != (lora.lora_path, states):
            known = self._known[lora.lora_int_id] = known._replace(digest=None)
            log.warning("Headwater: the adapter %s was changed; restart to share its KV", lora.lora_path)
        if known.digest is None:
            raise WeightsChangedError(f"the adapter {lora.lora_path!r} changed after the server started")
        return known.digest

    def named_from(self, number: int) -> bytes | None:
        """The state that an adapter's name was made from, for `check_loaded`; None for one that never had a name."""
        known = self._known.get(number)
        return known.state if known is not None and known.state else None

    def _first(self, lora: Any, path: Path, states: tuple[FileState, ...]) -> _Adapter:
        if last_change(states)[1] >= self._started_ns - START_MARGIN_NS:
            log.warning(
                "Headwater: the adapter %s is younger than this server, so its requests are served without the pool; "
                "restart to share its KV",
                lora.lora_path,
            )
            return _Adapter(lora.lora_path, states, None)
        names = [state.name for state in states]
        content = digest_checkpoint(path, files=names, before=states)
        text = f"headwater adapter v2\0{content}\0{bool(getattr(lora, 'is_3d_lora_weight', False))}\0{self._rules}"
        return _Adapter(lora.lora_path, states, hashlib.sha256(text.encode()).digest(), _pack(states))


def adapter_rules(lora_config: Any | None) -> str:
    """What vLLM's settings make of an adapter: their precision, the modules they apply to. Everything counts but what
    says only how many adapters there are room for."""
    settings = vars(lora_config) if lora_config is not None else {}
    return repr(sorted((name, str(value)) for name, value in settings.items() if name not in _ROOM_FOR_ADAPTERS))


def watch_loads() -> None:
    """From now on note the state of the files of every adapter that vLLM loads in this process. Idempotent.

    Raises DeclinedError for a vLLM that loads adapters elsewhere.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager

    load: Any = getattr(WorkerLoRAManager, "_load_adapter", None)
    if load is None:
        raise DeclinedError("this vLLM does not say which LoRA adapters it loads; run it without --enable-lora")
    if hasattr(load, "headwater_watches"):
        return

    @functools.wraps(load)
    def watched(self: Any, lora_request: Any) -> Any:
        before = _state_of(lora_request)
        adapter = load(self, lora_request)
        _loaded[lora_request.lora_int_id] = before if before == _state_of(lora_request) else b""
        return adapter

    watched.headwater_watches = True  # type: ignore[attr-defined]
    setattr(WorkerLoRAManager, "_load_adapter", watched)  # noqa: B010


def check_loaded(named: Mapping[int, bytes]) -> None:
    """Raise DeclinedError if this worker runs another adapter than the one that names the KV of the step."""
    for number, state in named.items():
        if _loaded.get(number) != state:
            raise DeclinedError(
                f"the LoRA adapter {number} was replaced between a request and its loading; restart to use the pool"
            )


def _adapter_path(given: str) -> Path:
    """As vLLM understands it. Adapters of the hub are private: which revision vLLM fetched, it does not say."""
    return Path(os.path.expanduser(given)).absolute()


def _adapter_files(path: Path) -> list[NamedFile]:
    """Its config, since the same weights with another rank or alpha are another adapter, and its weights: vLLM takes
    the first kind that is there, and tensors of two kinds are never mixed."""
    weights = next((name for name in _ADAPTER_WEIGHTS if (path / name).is_file()), _ADAPTER_WEIGHTS[0])
    return [NamedFile(name, path / name) for name in ("adapter_config.json", weights)]


def _state_of(lora: Any) -> bytes:
    """The state of an adapter's files in a few bytes; b"" where they cannot be found."""
    try:
        return _pack(take_states(_adapter_files(_adapter_path(lora.lora_path))))
    except (HeadwaterError, OSError):
        return b""


def _pack(states: tuple[FileState, ...]) -> bytes:
    return hashlib.sha256(repr(states).encode("utf-8", "surrogateescape")).digest()
