"""A real server for the demo: `headwater serve` as a process, and one streamed question over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from headwater.errors import EngineError

START_S = 600.0
"""Loading a model from a cold disk on a busy laptop."""
ASK_S = 600.0
STOP_S = 20.0
_READY = re.compile(r"ready\s+(http://\S+)/v1")


class Reply(NamedTuple):
    """What a client saw."""

    first_token_s: float
    """From sending the question to the first piece of the answer."""
    prompt_tokens: int
    cached_tokens: int
    text: str
    longest_pause_s: float = 0.0
    """Between two pieces of the answer."""


class LiveServer:
    """A server process with the given options of `headwater serve`, or another command of that kind. Close it, or use
    it as a context manager."""

    def __init__(self, options: Sequence[str], command: str = "serve") -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (see `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater", command, "--port", "0", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C reaches the demo alone, which then ends the server
        )
        self._url = ""

    @property
    def url(self) -> str:
        """Where it listens, once it is ready."""
        return self._url

    def wait_ready(self) -> None:
        """Until it takes requests. Raises EngineError, with what the server said, where it does not."""
        assert self._process.stdout is not None
        give_up = threading.Timer(START_S, self._process.kill)
        give_up.start()
        try:
            for line in self._process.stdout:
                if found := _READY.search(line):
                    self._url = found[1]
                    return
        finally:
            give_up.cancel()
        raise EngineError(f"a server did not start: {self._last_words()}")

    def ask(self, content: str, max_tokens: int, began: threading.Event | None = None) -> Reply:
        """One question, answered greedily. Raises EngineError where the server does not answer. `began` is set with the
        first piece of the answer, or when none will come."""
        began = began or threading.Event()
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": max_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        where = urlsplit(self._url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=ASK_S)
        try:
            begin = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise EngineError(f"a server answered with status {response.status}: {_error_of(response.read())}")
            return _read_stream(response, begin, began)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineError(f"a server did not answer ({error}): {self._last_words()}") from error
        finally:
            began.set()
            connection.close()

    def close(self) -> None:
        """End it, whatever it does. Idempotent."""
        with self._process as process:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _last_words(self) -> str:
        """Its error, or whatever it said last."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["it said nothing"])[-1]


def _read_stream(response: http.client.HTTPResponse, begin: float, began: threading.Event) -> Reply:
    first_s, pieces, usage, last_s, pause_s = 0.0, [], dict[str, Any](), 0.0, 0.0
    while line := response.readline():
        data = line.decode().strip().removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise EngineError(f"a server failed in the middle of its answer: {event['error'].get('message')}")
        now_s = time.perf_counter() - begin
        pause_s = max(pause_s, now_s - last_s) if first_s else 0.0
        first_s, last_s = first_s or now_s, now_s
        began.set()
        pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
        usage = event.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Reply(first_s, usage.get("prompt_tokens", 0), cached, "".join(pieces), pause_s)


def _error_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
