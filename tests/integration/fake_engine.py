"""An engine without a model, for tests of the server: its prompts say what it shall do. Run by path, in two roles.

    python fake_engine.py worker FD        the engine process, through the real worker's entry point
    python fake_engine.py serve OPTIONS    a server around it; OPTIONS are ServerConfig's, as JSON

Prompts: `say:TEXT` gives TEXT and ends; `count` gives a, b, c, … until max_tokens; `slow` does so at 20 ms a token;
`crash` breaks the engine at its first token; `refuse` is rejected; `exit` ends the process without a word; `hang` is a
step that waits for ever, `toil` one that works for TOIL_S. The text `tokenise slowly…` takes the tokenizer half a
minute. A token is a byte of UTF-8, and 256 ends a sequence. A page is 16 tokens.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headwater.connector.transfers import TransferParams
from headwater.engine.config import EngineConfig
from headwater.engine.params import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from headwater.errors import ModelError, RequestError
from headwater.models.text_bound import TextBound
from headwater.serve.messages import Ready, Stats
from headwater.serve.worker import Running, main

EOS = 256
VOCAB_SIZE = 300
MAX_MODEL_LEN = 20_000
NUM_PAGES = 1000
TOIL_S = 6.0


class ByteTokenizer:
    """Bytes are tokens."""

    eos_token_ids = (EOS,)

    def text_bound(self) -> TextBound:
        return TextBound(1)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        if text.startswith("tokenise slowly"):
            time.sleep(30)
        return list(text.encode())

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if any(message["role"] not in ("system", "user", "assistant") for message in messages):
            raise RequestError("no such role", param="messages")
        if messages[-1]["content"] == "no template":
            raise RequestError("the template does not accept this, as asked", param="messages")
        return messages[-1]["content"]

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode(errors="replace") if token_id < EOS else "<end>"

    def token_bytes(self, token_id: int, *, begins_text: bool = False) -> bytes | None:
        return bytes([token_id]) if token_id < EOS else None

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        return bytes(token for token in token_ids if token < EOS).decode(errors="replace")


class FakeEngine:
    """One token a step for everybody; a prompt that was there before is cached but for its last token."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self._num_said: dict[str, int] = {}
        self._num_cached: dict[str, int] = {}
        self._seen: set[tuple[str | None, tuple[int, ...]]] = set()
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        transfer: TransferParams | None = None,
    ) -> None:
        if self._text(prompt) == "refuse":
            raise RequestError("refused, as asked", param="prompt", code="refused")
        if self._text(prompt) == "exit":
            os._exit(3)
        self._num_cached[request_id] = len(prompt) - 1 if (cache_salt, tuple(prompt)) in self._seen else 0
        self._seen.add((cache_salt, tuple(prompt)))
        self._requests[request_id] = (list(prompt), params)
        self._num_said[request_id] = 0

    def check_alive(self) -> None:
        pass

    def abort(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) and (path := os.environ.get("FAKE_ENGINE_ABORTS")):
            with Path(path).open("a") as log:
                print(request_id, file=log)

    def step(self) -> list[RequestOutput]:
        self._num_steps += 1
        if any(self._text(prompt) == "slow" for prompt, _ in self._requests.values()):
            time.sleep(0.02)
        return [self._next(request_id) for request_id in list(self._requests)]

    def stats(self) -> Stats:
        used = sum((len(prompt) + self._num_said[rid] + 15) // 16 for rid, (prompt, _) in self._requests.items())
        return Stats(
            num_running=len(self._requests), num_pages=NUM_PAGES, num_used_pages=used, num_steps=self._num_steps
        )

    def close(self) -> None:
        pass

    def _next(self, request_id: str) -> RequestOutput:
        prompt, params = self._requests[request_id]
        said = self._num_said[request_id]
        text = self._text(prompt)
        if text == "hang":
            threading.Event().wait()
        if text == "toil" and not said:
            _toil()
        if text == "crash":
            raise ZeroDivisionError("broken, as asked")
        answer = text.removeprefix("say:").encode() if text.startswith("say:") else None
        if answer is None:
            token = ord("a") + (said + (params.seed or 0)) % 26
        else:
            token = answer[said] if said < len(answer) else EOS
        reason = FinishReason.STOP if token == EOS else None
        most = params.max_tokens or MAX_MODEL_LEN
        if reason is None and said + 1 >= min(most, MAX_MODEL_LEN - len(prompt)):
            reason = FinishReason.LENGTH
        self._num_said[request_id] += 1
        if reason:
            del self._requests[request_id]
        logprobs = None
        if params.logprobs is not None:
            top = [(token + i, -0.5 - i) for i in range(params.logprobs)]
            logprobs = [TokenLogprobs(token, -0.5, top)]
        return RequestOutput(request_id, [token], logprobs, reason, len(prompt), self._num_cached[request_id])

    @staticmethod
    def _text(prompt: Sequence[int]) -> str:
        return bytes(prompt).decode(errors="replace")


def _toil() -> None:
    """A step that moves on all the time."""
    end_s = time.monotonic() + TOIL_S
    while time.monotonic() < end_s:
        sum(map(len, map(str, range(1000))))


def create(config: EngineConfig, progress: Callable[[int, int], None]) -> Running:
    if config.model == "bad":
        raise ModelError("there is no such model")
    if config.model == "dies":
        os._exit(7)
    if config.model == "breaks":
        raise ZeroDivisionError("not on purpose")
    if config.model == "hangs":
        time.sleep(60)
    for done in range(3):
        progress(done, 2)
    engine = FakeEngine()
    ready = Ready(
        model="fake",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS],
        num_pages=NUM_PAGES,
        page_size=16,
        max_num_seqs=config.max_num_seqs,
        placement="nowhere",
        sizing="made up",
    )
    return Running(engine, ready, engine.stats)


def serve(options: str) -> int:
    from headwater.serve.config import ServerConfig
    from headwater.serve.server import Hooks, run_server

    def on_ready(ready: Ready, model: str, url: str) -> None:
        print(json.dumps({"url": url, "model": model, "num_frozen": gc.get_freeze_count()}), flush=True)

    fields = json.loads(options)
    config = ServerConfig(engine=EngineConfig(model=fields.pop("model", "fake"), max_num_seqs=4), **fields)
    hooks = Hooks(on_ready=on_ready, on_death=lambda reason: print(f"died: {reason}", file=sys.stderr))
    return run_server(config, hooks=hooks, load_tokenizer=lambda config: ByteTokenizer(), worker_command=WORKER)


WORKER = (sys.executable, __file__, "worker")

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], create) if sys.argv[1] == "worker" else serve(sys.argv[2]))
