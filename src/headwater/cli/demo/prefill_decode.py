"""Prefill in one server, decode in another, a proxy before both: what the decode server is spared.

The story of `headwater demo --disaggregated`. Each server has a pool of its own, as on two hosts, and KV goes over TCP.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headwater.cli.demo.document import make_question
from headwater.cli.demo.live import ASK_S, LiveServer, Reply
from headwater.cli.demo.pace import Plan, measure_pace
from headwater.cli.demo.run import own_pool
from headwater.cli.demo.servers import uninterrupted
from headwater.cli.demo.two_servers import (
    PAGE_SIZE,
    ROOM_TOKENS,
    WARM_UP,
    Note,
    chosen_model,
    pool_capacity,
    room_for,
)
from headwater.cli.output import one_line, plural, table
from headwater.models.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from rich.console import Console

MOST_DOCUMENT_TOKENS = 2000
"""Unless more are asked for: there are two documents, and both servers have only half of the machine each."""
STREAM_TOKENS = 5
"""Of the other client's stream, for each token of an answer."""
STREAM = "Count as far as you can, one number a line."


@dataclass(frozen=True)
class Handover:
    """What the demo shows: one document that decode computes itself, and one that prefill computes for it. Beside each,
    another client reads a stream of the decode server."""

    model: str
    note: str
    question: str
    alone: Reply
    through: Reply
    again: Reply
    """What the prefill server itself says to the second one."""
    pause_alone_s: float
    """The longest pause in the other client's stream."""
    pause_through_s: float

    @property
    def computed_alone(self) -> int:
        """Tokens of the prompt that decode computed."""
        return self.alone.prompt_tokens - self.alone.cached_tokens

    @property
    def computed_through(self) -> int:
        """The same, behind the proxy."""
        return self.through.prompt_tokens - self.through.cached_tokens

    @property
    def correct(self) -> bool:
        """Decode had most of the prompt from prefill, and both say the same."""
        return 4 * self.computed_through < self.computed_alone and self.through.text == self.again.text

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        replies = {name: getattr(self, name)._asdict() for name in ("alone", "through", "again")}
        own = {name: value for name, value in asdict(self).items() if name not in replies}
        counts = {"computed_alone": self.computed_alone, "computed_through": self.computed_through}
        return own | replies | counts | {"correct": self.correct}


def run_prefill_decode(model: str | None, num_tokens: int | None, device: str, note: Note) -> Handover:
    """Run it. Raises ModelError for a model that is not there, EngineError where a server fails. Without a number of
    tokens the documents are as long as this machine can compute in time."""
    begin_s = time.monotonic()
    with ExitStack() as stack:
        path, load_format, remark = stack.enter_context(chosen_model(model))
        checkpoint = open_checkpoint(path, load_format)
        most_tokens = room_for(checkpoint, num_tokens)
        max_len, capacity = most_tokens + ROOM_TOKENS, pool_capacity(checkpoint, 4 * most_tokens)
        pools = [stack.enter_context(own_pool(capacity, keep=False)) for _ in range(2)]
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        options = ["--model", path, "--load-format", load_format, "--device", device, "--num-threads", str(threads)]
        options += ["--max-model-len", str(max_len), "--num-pages", str(2 * -(-max_len // PAGE_SIZE) + 32)]
        note(f"a prefill and a decode server load {one_line(checkpoint.label)}; each has a pool of its own")
        with uninterrupted():  # a server that was started is known, so that it can be ended
            prefill = stack.enter_context(LiveServer([*options, "--pool", pools[0][0]]))
            listen = ["--pool", pools[1][0], "--peer-listen", "127.0.0.1:0"]
            decode = stack.enter_context(LiveServer([*options, *listen]))
        tokenizer = checkpoint.load_tokenizer()
        for server in (prefill, decode):
            server.wait_ready()
            server.ask(WARM_UP, 1)
        waits = ["--wait", str(ASK_S)]  # a slow machine is slow, and shows the same
        with uninterrupted():
            front = stack.enter_context(LiveServer(["--decode", decode.url, "--prefill", prefill.url, *waits], "proxy"))
        front.wait_ready()
        if num_tokens is not None:
            plan = Plan(num_tokens)
        else:
            note("the decode server answers a short question: how fast is this machine?")
            pace = measure_pace(decode)
            # Two documents and three answers, two of them beside a stream that computes on the same cores.
            asked = {"documents": 3, "answers": 3 + 2 * STREAM_TOKENS}
            plan = pace.plan(time.monotonic() - begin_s, **asked, most=min(most_tokens, MOST_DOCUMENT_TOKENS))
        question = make_question(plan.document_tokens, lambda text: len(tokenizer.encode(text)))
        about = f"a document of about {plan.document_tokens:,} tokens"
        note(f"the decode server computes {about} itself, beside another client{plan.soon}")
        alone, pause_alone_s = _ask_beside(decode, decode, question.text, plan.answer_tokens)
        note("the proxy has the prefill server compute another one, and its KV sent to the decode server")
        text = f"(2) {question.text}"
        through, pause_through_s = _ask_beside(decode, front, text, plan.answer_tokens)
        note("the prefill server answers the same question, and what both say is compared")
        again = prefill.ask(text, plan.answer_tokens)
        note("both servers and the proxy end")
        remark = " ".join(filter(None, (remark, *(pool_note for _, pool_note in pools))))
        return Handover(checkpoint.label, remark, question.about, alone, through, again, pause_alone_s, pause_through_s)


def _ask_beside(decode: LiveServer, server: LiveServer, text: str, answer_tokens: int) -> tuple[Reply, float]:
    """Ask one server while another client reads a stream of the decode server; the longest pause in that."""
    streams: list[Reply] = []
    began = threading.Event()  # a pause before the first piece would be no pause in the stream
    reader = threading.Thread(target=lambda: streams.append(decode.ask(STREAM, STREAM_TOKENS * answer_tokens, began)))
    reader.start()
    began.wait()
    reply = server.ask(text, answer_tokens)
    reader.join()
    return reply, max((stream.longest_pause_s for stream in streams), default=0.0)


def show_handover(outcome: Handover, out: Console) -> None:
    """Print it for people."""
    if outcome.note:
        out.print(f"{outcome.note}\n")
    rows = table("", ">prompt", ">by decode", ">first token", ">other stream's pause")
    for name, reply, computed, pause_s in (
        ("decode alone", outcome.alone, outcome.computed_alone, outcome.pause_alone_s),
        ("prefill, then decode", outcome.through, outcome.computed_through, outcome.pause_through_s),
    ):
        figures = f"{reply.prompt_tokens:,}", f"{computed:,}", f"{reply.first_token_s:.2f} s", f"{pause_s:.2f} s"
        rows.add_row(name, *figures)
    out.print(rows)
    out.print("\nPrompt, and what the decode server computed of it: in tokens. The last column is the longest pause")
    out.print("of a stream that another client was reading from the decode server meanwhile.")
    spared = plural(outcome.computed_alone - outcome.computed_through, "token")
    out.print(f"\nThe decode server was spared {spared}: their KV came layer by layer while they were computed.")
    out.print("Here both servers share the cores of one machine; on two hosts the first token comes sooner, too.")
    out.print(f"\nQ: {outcome.question}")
    for name, reply in (("decode", outcome.through), ("prefill", outcome.again)):
        out.print(f"A ({name}): {one_line(' '.join(reply.text.split()))}")
    if not outcome.correct:
        out.print("\nWRONG: the decode server computed the document itself, or said something else.")
    out.print("\nBoth servers, the proxy and the pools are gone again. How to set this up: docs/disaggregation.md")
