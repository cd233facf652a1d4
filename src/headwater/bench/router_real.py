"""Two real servers with pools of their own behind `headwater router`, against the same router choosing in turns."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from headwater.bench.measure import Note
from headwater.errors import HeadwaterError, StoreError
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

ANSWER_S = 600.0
SENTENCES = (
    "The river rose in the night and the mill stood in the water. ",
    "Nobody had seen the ferryman since the feast of the harvest. ",
    "In the village they spoke of a light on the far side of the marsh. ",
    "The miller counted his sacks twice and found one too many. ",
    "A letter came from the city, sealed with green wax and signed by no one. ",
)


@dataclass(frozen=True, kw_only=True)
class RealBench:
    """Conversations of several turns, one question after the other. Their number is odd: otherwise taking turns would
    bring each back to its server."""

    model: str = "smollm2"
    num_conversations: int = 5
    num_turns: int = 3
    num_sentences: int = 32
    """Of the first question; later ones have a quarter."""
    max_tokens: int = 8


NOTHING: dict[str, Any] = {
    "real_cached_share": None,
    "real_round_robin_cached_share": None,
    "real_ideal_cached_share": None,
    "real_cached_over_round_robin": None,
    "real_reason": "",
}


def measure_real(bench: RealBench | None, note: Note) -> dict[str, Any]:
    """Shares of cached prompt tokens as the servers report them. Where there is no model, says so instead."""
    if bench is None:
        return NOTHING | {"real_reason": "not asked for"}
    from headwater.models.checkpoint import open_checkpoint

    try:
        open_checkpoint(bench.model)
    except HeadwaterError as error:
        return NOTHING | {"real_reason": str(error)}
    with ExitStack() as stack:
        note(f"starting two servers of {bench.model}")
        # A thread each: two servers whose threads wait for each other are slower than two that do not.
        engine = ["--model", bench.model, "--device", "cpu", "--num-pages", "512", "--max-model-len", "4096"]
        engine += ["--num-threads", "1"]
        pools = [stack.enter_context(_own_pool()) for _ in range(2)]
        urls = [stack.enter_context(_started("serve", *engine, "--pool", pool)) for pool in pools]
        specs = [f"{url},pool={pool}" for url, pool in zip(urls, pools, strict=True)]
        found = {}
        for policy in ("cost", "round-robin"):
            note(f"{bench.num_conversations} conversations of {bench.num_turns} turns: {policy}")
            with _started("router", *specs, "--tokenizer", bench.model, "--policy", policy) as url:
                found[policy] = _talk(url, bench, salt=policy)
    cost, turns = found["cost"], found["round-robin"]
    return {
        "real_cached_share": cost.cached / cost.prompt,
        "real_round_robin_cached_share": turns.cached / turns.prompt,
        "real_ideal_cached_share": cost.repeated / cost.prompt,
        "real_cached_over_round_robin": cost.cached * turns.prompt / max(1, turns.cached * cost.prompt),
        "real_reason": "",
    }


@dataclass
class _Counts:
    prompt: int = 0
    cached: int = 0
    repeated: int = 0
    """Tokens that the prompt before in the same conversation had."""


def _talk(url: str, bench: RealBench, salt: str) -> _Counts:
    counts = _Counts()
    talks: list[list[dict[str, str]]] = [[] for _ in range(bench.num_conversations)]
    before = [0] * bench.num_conversations
    for turn in range(bench.num_turns):
        for number, talk in enumerate(talks):
            count = bench.num_sentences if turn == 0 else bench.num_sentences // 4
            text = "".join(SENTENCES[(number * 7 + turn + n * (number + 1)) % len(SENTENCES)] for n in range(count))
            talk.append({"role": "user", "content": f"Tale {number}, part {turn}. {text}What comes next?"})
            # A salt of its own: what one way to choose leaves behind must not help the other.
            body = {"messages": talk, "max_tokens": bench.max_tokens, "temperature": 0, "cache_salt": salt}
            answer = _ask(url, body)
            talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            usage = answer["usage"]
            counts.prompt += usage["prompt_tokens"]
            counts.cached += usage["prompt_tokens_details"]["cached_tokens"]
            counts.repeated += before[number]
            before[number] = usage["prompt_tokens"]
    return counts


def _ask(url: str, body: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise StoreError(f"the router answered with status {response.status}: {data[:300]!r}")
    return json.loads(data)


@contextmanager
def _own_pool() -> Iterator[str]:
    url = f"shm:///headwater-bench-{uuid.uuid4().hex[:8]}?capacity=512MiB"
    try:
        yield url
    finally:
        destroy(parse_url(url))


@contextmanager
def _started(*args: str) -> Iterator[str]:
    """The address of a command that serves, for the time of a `with`."""
    with _process([sys.executable, "-m", "headwater", *args, "--port", "0"]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"ready\s+(http://\S+)/v1", line):
                yield found[1]
                return
        raise StoreError(f"headwater {args[0]} did not start")


@contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    env = {
        name: value for name, value in os.environ.items() if name not in ("HEADWATER_API_KEY", "HEADWATER_ADMIN_KEY")
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
