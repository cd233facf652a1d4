"""Same name, other numbers: none. Every field of a configuration is changed over the same weights, in the reference
engine and in vLLM's own model classes; whatever changes the first eight greedy logits must change the identity.

`make test-identity` (HEADWATER_ALL_FIELDS=1) tries all changes of all families and prints a table; without it, the
changes that once gave wrong tokens are tried, and a sample of the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config_search import FAMILIES

RUNNER = Path(__file__).with_name("vllm_search.py")
ALL_FIELDS = os.environ.get("HEADWATER_ALL_FIELDS") == "1"
SAMPLED = ("llama, dynamic", "llama, yarn", "llama, biases", "qwen3", "deepseek_v2")
ONCE_WRONG = ("rope.max_trained_positions", "rope.alpha", "rope.rope_dim", "rope.use_fope", "bias", "qkv_bias")
ONCE_WRONG += ("dual_chunk_attention_config", "sliding_window", "logit_scale", "is_causal")
ONCE_WRONG += ("rope.truncate", "rope.mrope_section", "max_position_embeddings")
NUM_SAMPLED = 25
SILENCE_S = 300.0
COLUMNS = ("fields", "changes", "failed", "declined", "numbers", "renamed", "both", "renamed only", "violations")


def search(family: str, folder: Path, wanted: str) -> Iterator[dict[str, Any]]:
    """What each change did. A change that crashes vLLM's kernels ends its process, and the next one goes on."""
    first, total = 0, 1
    log = folder.with_name("stderr.log")
    while first < total:
        command = [sys.executable, str(RUNNER), str(folder), family, str(first), wanted]
        with (
            open(log, "w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment()) as child,
            _Watch(child) as watch,
        ):
            assert child.stdout is not None
            is_ready, started = False, None
            for line in child.stdout:
                watch.again()
                found = json.loads(line)
                if "total" in found:
                    is_ready, total = True, found["total"]
                elif "started" in found:
                    started = found
                else:
                    started, first = None, found["done"] + 1
                    yield found
        assert is_ready, log.read_text()[-3000:]
        if started is not None:
            first = started["started"] + 1
            yield {"field": started["field"], "value": started["value"], "failed": f"ended with {child.returncode}"}


def _environment() -> dict[str, str]:
    quiet = {"VLLM_LOGGING_LEVEL": "CRITICAL", "TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_OFFLINE": "1"}
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    lengths = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}  # vLLM refuses models that are too short for the prompt otherwise
    return os.environ | quiet | cpu | lengths | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class _Watch:
    """Kills a child that says nothing for long."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self._timer = threading.Timer(SILENCE_S, child.kill)

    def __enter__(self) -> _Watch:
        self._timer.start()
        return self

    def again(self) -> None:
        self._timer.cancel()
        self._timer = threading.Timer(SILENCE_S, self._child.kill)
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def is_violation(found: dict[str, Any]) -> bool:
    """Other numbers under a name that was seen before, in either engine."""
    return found.get("clash", False) or found.get("reference_clash", False)


def count(results: list[dict[str, Any]]) -> Counter[str]:
    """A row of the table."""
    row: Counter[str] = Counter(fields=len({found["field"] for found in results}), changes=len(results))
    for found in results:
        changed, renamed = found.get("changed", False), found.get("renamed", False)
        row["failed"] += "failed" in found
        row["declined"] += "declined" in found
        row["numbers"] += changed
        row["renamed"] += renamed and "failed" not in found
        row["both"] += changed and renamed
        row["renamed only"] += renamed and not changed and "failed" not in found
        row["violations"] += is_violation(found)
    return row


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, Counter[str]]]:
    rows: dict[str, Counter[str]] = {}
    yield rows
    print("\n" + f"{'family':<18}" + "".join(f"{column:>13}" for column in COLUMNS))
    for name, row in [*rows.items(), ("sum", sum(rows.values(), Counter()))]:
        print(f"{name:<18}" + "".join(f"{row[column]:>13,}" for column in COLUMNS))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", list(FAMILIES) if ALL_FIELDS else SAMPLED)
def test_no_change_gives_other_numbers_under_the_same_name(
    family: str, tmp_path: Path, table: dict[str, Counter[str]]
) -> None:
    wanted = "all" if ALL_FIELDS else f"sample:{NUM_SAMPLED}:{','.join(ONCE_WRONG)}"
    results = list(search(family, tmp_path / "model", wanted))
    table[family] = count(results)
    if folder := os.environ.get("HEADWATER_SEARCH_RESULTS"):
        Path(folder, f"{family}.jsonl").write_text("".join(json.dumps(found) + "\n" for found in results))
    assert table[family]["numbers"] > 0, "a search in which nothing ever changes finds nothing"
    assert [found for found in results if is_violation(found)] == []
