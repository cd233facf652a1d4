"""A generator and its app around an engine that is a list of messages, for tests of the server's own process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwater.engine.params import FinishReason, RequestOutput, SamplingParams
from headwater.serve.app import AppConfig, create_app
from headwater.serve.client import EngineClient
from headwater.serve.generation import Generator
from headwater.serve.messages import FromEngine, Outputs, Ready, Stats, Submit, ToEngine, encode
from headwater.serve.metrics import ServerMetrics
from headwater.serve.openai import Call

EOS, OWN_EOS = 256, 257
JSON = [(b"content-type", b"application/json")]
READY = Ready(
    model="m",
    max_model_len=10_000,
    vocab_size=300,
    eos_token_ids=[EOS],
    num_pages=10,
    page_size=16,
    max_num_seqs=2,
    placement="",
    sizing="",
)


class Wire:
    """The engine's end of a connection: what was sent to it, and what it shall say."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.num_waiting_bytes = 0
        self.replies: asyncio.Queue[list[FromEngine]] = asyncio.Queue()

    def send(self, message: ToEngine) -> None:
        encode(message)  # raises what the real one raises
        self.sent.append(message)

    async def drain(self) -> None:
        pass

    async def receive(self) -> list[FromEngine]:
        return await self.replies.get()

    def submitted(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]

    async def end(self, request_id: str) -> None:
        """Give a request its last token."""
        output = RequestOutput(request_id, [97], None, FinishReason.LENGTH, 1, 0)
        await self.replies.put([Outputs([output])])
        await asyncio.sleep(0.01)


class Process:
    """One that lives."""

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


class ByteTokenizer:
    """Bytes are tokens; it knows an end that the engine does not. Notes the threads it was called in."""

    eos_token_ids = (EOS, OWN_EOS, 5000)

    def __init__(self) -> None:
        self.threads: list[int] = []

    def text_bound(self) -> None:
        return None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        self.threads.append(threading.get_ident())
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return messages[-1]["content"]

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int, *, begins_text: bool = False) -> bytes | None:
        return chr(token_id).encode()


class Rig:
    """A generator around a wire."""

    def __init__(self, max_sequences: int = 2) -> None:
        self.wire = Wire()
        process: Any = Process()
        connection: Any = self.wire
        self.client = EngineClient(process, READY, connection)
        self.tokenizer = ByteTokenizer()
        metrics = ServerMetrics(Stats, {"version": "0", "model": "m"})
        self.generator = Generator(self.client, self.tokenizer, metrics, max_sequences=max_sequences)
        config = AppConfig(
            served_model_name="m",
            host="127.0.0.1",
            api_key=None,
            max_body_bytes=1 << 24,
            max_total_body_bytes=1 << 24,
            engine_timeout_s=60,
        )
        self.app = create_app(self.generator, config)

    async def post(self, fields: dict[str, Any], send: Callable[[Any], Any]) -> None:
        """POST /v1/completions from a client that stays."""
        messages = iter([{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}])

        async def receive() -> Any:
            if (message := next(messages, None)) is None:
                await asyncio.Event().wait()
            return message

        path = "/v1/completions"
        scope = {"type": "http", "method": "POST", "path": path, "headers": JSON, "query_string": b"", "root_path": ""}
        await self.app(scope, receive, send)

    def close(self) -> None:
        self.generator.close()
        for task in (self.client._reading, self.client._watching):
            task.cancel()


def with_rig(test: Callable[[Rig], Any], **options: Any) -> None:
    async def run() -> None:
        rig = Rig(**options)
        try:
            async with asyncio.timeout(10):
                await test(rig)
        finally:
            rig.close()

    asyncio.run(run())


def call(num_choices: int = 1, text: str = "x", num_body_bytes: int = 0, **params: Any) -> Call:
    return Call(
        is_chat=False, model=None, messages=[], prompts=[text], params=SamplingParams(**params),
        num_choices=num_choices, stream=True, include_usage=False, num_body_bytes=num_body_bytes,
    )  # fmt: skip
