"""A server's engine in a process of its own, for `headwater bench ttft`: `python -m headwater.bench.ttft_peer`.

One JSON object a line: the engine's settings first, then questions on stdin and answers on stdout. `Peer` is the other
end. For measuring only: there is no protection against a peer that talks nonsense.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from headwater.bench.ttft_side import Answer, Side
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.errors import EngineError, HeadwaterError


class Peer:
    """A process with an engine in it. Close it, or use it as a context manager."""

    def __init__(self, config: EngineConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater.bench.ttft_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._say(asdict(config))

    def wait_ready(self) -> None:
        """Until the model is loaded. Raises EngineError where it cannot be."""
        self._hear()

    def ask(self, prompt: Sequence[int], num_outputs: int) -> Answer:
        """One question, answered and saved to the pool. Raises EngineError if the process fails."""
        self._say({"prompt": list(prompt), "num_outputs": num_outputs})
        return Answer(**self._hear())

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its answer will say why

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"a server's process ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"a server's process failed: {answer['error']}")
        return answer


def main() -> None:
    """The process: answer until stdin ends."""
    lines = iter(sys.stdin)
    try:
        with Engine(EngineConfig(**json.loads(next(lines)))) as engine:
            side = Side(engine)
            _answer({})
            for line in lines:
                question = json.loads(line)
                answer = side.ask(question["prompt"], question["num_outputs"])
                side.drain()
                _answer(answer._asdict())
    except HeadwaterError as error:
        _answer({"error": f"{type(error).__name__}: {error}"})


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
