"""The state of a model's files before vLLM loaded them: without it nobody knows whether they are what was loaded.

vLLM makes a connector when the model is loaded. It asks for the connector's class much earlier, in the front process
while it makes its configuration; `note_files` takes the state then and there, and the model's config as vLLM holds it,
and leaves both at the configuration, which goes to every process of the server. Where vLLM did not ask, or the files
were not there yet, `check_before` accepts files that are older than the server, and blobs of one commit of the Hugging
Face hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.errors import HeadwaterError, WeightsChangedError
from headwater.integrations.vllm.declined import DeclinedError
from headwater.kv.checkpoint import MAX_GIT_BYTES, check_unchanged
from headwater.kv.files import FileState, last_change

_ATTRIBUTE = "_headwater_files"
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TOKENS = ("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens", "vocab", "chat_template")
READ_LATER = frozenset(f"{name}.json" for name in (*_TOKENS, "generation_config"))
"""Files that do not count."""
_NAMED_ELSEWHERE = frozenset({"dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path"})
"""Keys of a config that count by what vLLM made of them, or not at all."""
START_MARGIN_NS = 2_000_000_000
"""How much older than the server a file must be: clocks of file systems and of processes tick coarsely."""
RANKS_APART_NS = 60_000_000_000
"""How far apart the processes of one server may start, where vLLM does not say when it did."""


def note_files() -> None:
    """Take the state of the files, if vLLM is making its configuration right now. Never raises."""
    config = _config_in_the_making()
    if config is None or noted(config) is not None or config.load_config.load_format == "dummy":
        return
    states = _take(config)
    if states is not None and not _read_before(config, states):
        _note(config, states)


def _read_before(config: Any, states: Sequence[FileState]) -> bool:
    """Whether a file that vLLM has read by now may have been replaced since: it is younger than the server, and not
    what vLLM holds of it. Without a note, such a file leaves the server without a pool.

    The states are those that are noted: a file that is replaced from here on is not in its state any more.
    """
    from headwater.integrations.vllm.weights import loaded_files

    try:
        weights = loaded_files(config).names
        read = [state for state in states if state.name not in weights]
        young = [state for state in _uncertain(read, config) if _is_young(state, config)]
        return not all(_is_held(state, config.model_config) for state in young)
    except (HeadwaterError, DeclinedError, OSError, AttributeError, ValueError):
        return True


def _is_young(state: FileState, config: Any) -> bool:
    return last_change([state])[1] >= server_start_ns(config) - START_MARGIN_NS


def _is_held(state: FileState, model: Any) -> bool:
    """Whether vLLM holds what the file says now, or reads it only later."""
    name = Path(state.name).name
    if name in READ_LATER or name.endswith(".index.json"):
        return True
    if name != "config.json":
        return False
    held = _as_json(model.hf_config.to_dict())
    said = json.loads(Path(state.path).read_bytes())
    meant = _as_json(type(model.hf_config).from_dict(dict(said)).to_dict())
    overrides = model.hf_overrides if isinstance(getattr(model, "hf_overrides", None), Mapping) else {}
    keys = (said.keys() | meant.keys() | held.keys()) - _NAMED_ELSEWHERE - overrides.keys()
    if held.get("sliding_window", 0) is None and meant.get("sliding_window") == 0:
        keys -= {"sliding_window"}  # vLLM takes a window of 0 out by itself
    return all(held.get(key) in (meant.get(key), said.get(key, meant.get(key))) for key in keys)


def _as_json(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return plain


def note_files_of(config: Any) -> None:
    """Leave the state of the files at a configuration with which nothing was loaded yet."""
    if config.load_config.load_format != "dummy" and (states := _take(config)) is not None:
        _note(config, states)


def _take(config: Any) -> tuple[FileState, ...] | None:
    from headwater.integrations.vllm.weights import loaded_files

    try:
        return loaded_files(config).states()
    except (HeadwaterError, DeclinedError, OSError, AttributeError):
        return None  # not downloaded yet, or not to be named at all: `name_weights` says so when it is asked


def _note(config: Any, states: tuple[FileState, ...]) -> None:
    hf = getattr(config.model_config, "hf_config", None)
    held = {} if hf is None else _as_json(hf.to_dict())
    object.__setattr__(config, _ATTRIBUTE, (_machine(), states, held))


def held_config(config: Any) -> Mapping[str, Any]:
    """The model's config as vLLM held it before any worker changed it; nothing where that was not noted."""
    held: dict[str, Any] = getattr(config, _ATTRIBUTE, ("", None, {}))[2]
    return {key: value for key, value in held.items() if key not in _NAMED_ELSEWHERE}


def noted(config: Any) -> tuple[FileState, ...] | None:
    """What `note_files` left; None where it could not, or did on another machine than this."""
    machine, states, _ = getattr(config, _ATTRIBUTE, ("", None, {}))
    return states if machine == _machine() else None


def check_before(states: Sequence[FileState], config: Any) -> None:
    """Raise WeightsChangedError unless these files have been as they are since before this server started.

    What remains: a clock that was set forward since the start by as much as the files are younger.
    """
    where, changed_ns = last_change(_uncertain(states, config))
    if where and changed_ns >= server_start_ns(config) - START_MARGIN_NS:
        raise WeightsChangedError(
            f"{where!r} was changed after the server started, or shortly before, so the weights that run may "
            "differ from the files; restart to use the pool"
        )


def check_after(before: Sequence[FileState], states: Sequence[FileState], config: Any) -> None:
    """Raise WeightsChangedError for a file that is not what it was before, or came to be meanwhile: a config that vLLM
    did not read would count, or one that it read would not."""
    check_unchanged(before, _uncertain(states, config))


def server_start_ns(config: Any) -> int:
    """A moment before any process of this server loaded anything, by the wall clock."""
    own = process_start_ns()
    said = str(config.instance_id)
    if said.isdecimal() and abs(own - int(said)) < 86_400_000_000_000:  # vLLM 0.32 makes the id from the time
        return min(own, int(said))
    return own - RANKS_APART_NS


def process_start_ns() -> int:
    """When this process started, by the wall clock as it is set now."""
    stat = Path("/proc/self/stat").read_text()
    ticks = int(stat.rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age_s * 1e9)


def _machine() -> str:
    """The same in all processes of a machine until it starts again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return "unknown"


def _uncertain(states: Sequence[FileState], config: Any) -> list[FileState]:
    commit = str(getattr(config.model_config.revision, "commit_hash", None) or config.model_config.revision)
    return [state for state in states if not _is_pinned(state, commit)]


def _is_pinned(state: FileState, commit: str) -> bool:
    """Whether the file is a blob of the commit that vLLM settled on before it loaded anything. Its content is checked
    against its name, and a commit never changes."""
    snapshot, blob = Path(state.path).parent, Path(state.real_path)
    return (
        re.fullmatch(r"[0-9a-f]{40}", commit) is not None
        and snapshot.name == commit
        and snapshot.parent.name == "snapshots"
        and blob.parent == snapshot.resolve().parents[1] / "blobs"
        and _BLOB.fullmatch(blob.name) is not None
        and (len(blob.name) == 64 or state.size <= MAX_GIT_BYTES)  # a larger one is not git's, and not checked
        and (not state.name.endswith((".json", ".py")) or _is_whole(blob))
    )


def _is_whole(blob: Path) -> bool:
    """Whether a blob's content is what its name says. (Weights are compared when they are read.)"""
    content = blob.read_bytes()
    if len(blob.name) == 64:
        return hashlib.sha256(content).hexdigest() == blob.name
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == blob.name


def _config_in_the_making() -> Any | None:
    """The VllmConfig that an engine is being started with, if one of our callers is making it."""
    found, frame = None, sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_name == "__post_init__" and type(frame.f_locals.get("self")).__name__ == "VllmConfig":
            found = frame.f_locals["self"]
        elif found is not None and frame.f_code.co_name == "create_engine_config":
            return found
    return None
