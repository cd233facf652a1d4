"""Long prompts, as bad clients send them: what they cost the others, and how long the server takes to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

pytest.importorskip("httpx")
pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fake_server import Server, answer, request, wait_until

SLOWLY = "tokenise slowly"
"""Half a minute for the tokenizer, however long the text is."""
SOON_S = 10.0
"""Far less than that, and far more than anything here takes."""


def test_long_prompts_do_not_stall_short_requests(start: Callable[..., Server]) -> None:
    """Six of two MiB, which are refused before they are tokenised, and six that fit and are slow to tokenise."""
    server = start()
    with ExitStack() as stack:
        sent = request({"prompt": SLOWLY + "x" * (2 << 20)})
        socks = [stack.enter_context(server.connect(sent)) for _ in range(6)]
        begin_s = time.monotonic()
        assert server.chat("say:" + "x" * 5000, max_tokens=1).status_code == 200
        for sock in socks:
            assert b"context_length_exceeded" in answer(sock)
        for _ in range(6):
            stack.enter_context(server.connect(request({"prompt": SLOWLY + "x" * (17 << 10)})))
        assert server.chat("say:" + "x" * 5000, max_tokens=1).status_code == 200
        assert time.monotonic() - begin_s < SOON_S


def test_collecting_garbage_leaves_out_what_was_there_before_the_first_request(start: Callable[..., Server]) -> None:
    """With a tokenizer of `transformers` a full collection would hold everybody up for some 200 ms."""
    assert start().facts["num_frozen"] > 10_000


def test_a_signal_ends_the_server_whatever_is_being_tokenised(start: Callable[..., Server]) -> None:
    server = start()
    with ExitStack() as stack:
        socks = [
            stack.enter_context(server.connect(request({"prompt": SLOWLY + "x" * size})))
            for size in [17 << 10, 5 << 10] * 6
        ]
        # All have been read when this one, which comes last, has been answered.
        wait_until(lambda: server.http.get("/health").status_code == 200)
        begin_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert time.monotonic() - begin_s < SOON_S
        for sock in socks:
            assert b"the server is stopping" in answer(sock)
    assert server.process.stderr is not None
    assert "Traceback" not in server.process.stderr.read()
