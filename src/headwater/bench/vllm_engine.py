"""vLLM engines: started, asked and ended, each in a process group of its own. `vllm_process` is the other side."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[2]
START_S = 600.0
ANSWER_S = 600.0
"""Long: an engine that is only slow has not failed."""
CLOSE_S = 30.0
OMP_BINDS = {1: None, 2: "0|1", 3: "0|1|1"}
"""Which cores the ranks of a CPU engine compute on, by how many there are: two cores are enough for three."""


class EngineProcess:
    """One engine. Every wait has a limit, and what it printed is in `log`.

    `command` is the module that serves it, with its arguments. Without `begin` the process is only spawned, and imports
    what it needs while others do the same; `begin` is to be called later.
    """

    def __init__(
        self,
        log: Path,
        settings: dict[str, Any],
        *,
        command: Sequence[str] = ("headwater.bench.vllm_process",),
        begin: bool = True,
    ) -> None:
        self._settings = settings = dict(settings)
        self._has_begun = False
        self.log = log
        self._stderr = log.open("a")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}
        environment |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {name: str(value) for name, value in settings.pop("environment", {}).items()}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        if begin:
            self.begin(START_S)

    def begin(self, timeout_s: float) -> None:
        """Start the engine. Raises RuntimeError, with the process ended, where it does not start."""
        self._has_begun = True
        try:
            self._send(self._settings)
            self._take(timeout_s)
        except (RuntimeError, OSError):
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process that drives the engine."""
        return self._process.pid

    def ask(self, command: str, *, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
        """One command. Raises RuntimeError for what the engine raised, and where it does not answer."""
        self._send([command, arguments])
        return self._take(timeout_s).get("value")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End it, gently first. Idempotent."""
        if self._has_begun and self._process.poll() is None:
            try:
                self._send(["close", {}])
                self._process.wait(timeout_s)
            except (OSError, ValueError, subprocess.TimeoutExpired):
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                stream.close()

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                if line.startswith("@"):
                    self._answers.put(json.loads(line[1:]))
                else:
                    self._stderr.write(line)
        except ValueError:
            pass  # closed while it was being read
        self._answers.put(None)

    def _take(self, timeout_s: float) -> dict[str, Any]:
        try:
            found = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RuntimeError(f"no answer in {timeout_s:.0f} s; see {self.log}") from None
        if found is None:
            raise RuntimeError(f"the engine has ended:\n{self.log.read_text()[-3000:]}")
        if "error" in found:
            raise RuntimeError(found["error"])
        return found


def settings_of(
    model: Path, pool: str | None, *, tp: int = 1, block_size: int = 128, role: str = "kv_both", **more: Any
) -> dict[str, Any]:
    """The settings of an engine; `extra` in `more` goes to the connector, `environment` to the process."""
    extra = more.pop("extra", {})
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **more.pop("environment", {})}
    if bind := OMP_BINDS[tp]:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = bind
    settings: dict[str, Any] = {"model": str(model), "tensor_parallel_size": tp, "block_size": block_size}
    settings |= {"max_model_len": 2048, "environment": environment, **more}
    if pool is not None:
        settings["kv_transfer_config"] = {
            "kv_connector": "HeadwaterConnector",
            "kv_connector_module_path": "headwater.integrations.vllm",
            "kv_role": role,
            "kv_connector_extra_config": {"pool": pool, **extra},
        }
    return settings


@contextmanager
def engine(log: Path, settings: dict[str, Any]) -> Iterator[EngineProcess]:
    """An engine that is ended in any case."""
    running = EngineProcess(log, settings)
    try:
        yield running
    finally:
        running.close()
