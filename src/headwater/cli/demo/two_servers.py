"""Two real servers on one pool: the first computes a long document, the second finds it.

The story of `headwater demo`, from making the pool to removing it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.demo.document import make_question
from headwater.cli.demo.live import LiveServer, Reply
from headwater.cli.demo.pace import MOST_TOKENS, Plan, measure_pace
from headwater.cli.demo.run import held_pool, own_pool
from headwater.cli.demo.servers import uninterrupted
from headwater.cli.demo.stand_in import write_stand_in
from headwater.cli.output import one_line, plural, table
from headwater.errors import EngineError, InvalidArgumentError, ModelError
from headwater.kv.hashing import DEFAULT_CHUNK_TOKENS
from headwater.models.checkpoint import open_checkpoint
from headwater.pool import Pool

if TYPE_CHECKING:
    from rich.console import Console

    from headwater.models.checkpoint import Checkpoint

Note = Callable[[str], None]

ROOM_TOKENS = 256
"""For the question, the answer, and the last line of the document."""
WARM_UP = "Hello."
SAVE_S = 60.0
PAGE_SIZE = 16


@dataclass(frozen=True)
class Outcome:
    """What the demo shows."""

    model: str
    note: str
    url: str
    question: str
    first: Reply
    second: Reply

    @property
    def correct(self) -> bool:
        """The second server found the document, and both said the same."""
        return self.second.cached_tokens > self.first.cached_tokens and self.first.text == self.second.text

    @property
    def speedup(self) -> float:
        """How many times as fast the second one had its first token."""
        return self.first.first_token_s / self.second.first_token_s

    @property
    def saved_tokens(self) -> int:
        """How many tokens less the second one computed. The first knows a few, too: how every chat begins."""
        return self.second.cached_tokens - self.first.cached_tokens

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        servers = [reply._asdict() | {"first_token_s": round(reply.first_token_s, 4)} for reply in self.replies]
        own = {name: value for name, value in asdict(self).items() if name not in ("first", "second")}
        return own | {
            "servers": servers,
            "speedup": round(self.speedup, 2),
            "saved_tokens": self.saved_tokens,
            "correct": self.correct,
        }

    @property
    def replies(self) -> tuple[Reply, Reply]:
        """Both, in order."""
        return self.first, self.second


def run_two_servers(model: str | None, num_tokens: int | None, device: str, note: Note) -> Outcome:
    """Run it. Raises ModelError for a model that is not there, EngineError where a server fails.

    Without a model named it is SmolLM2, or where that is not installed a small one with random weights. Without a
    number of tokens the document is as long as this machine can compute in time.
    """
    begin_s = time.monotonic()
    with ExitStack() as stack:
        path, load_format, remark = stack.enter_context(chosen_model(model))
        checkpoint = open_checkpoint(path, load_format)
        most_tokens = room_for(checkpoint, num_tokens)
        url, pool_note = stack.enter_context(own_pool(pool_capacity(checkpoint, most_tokens), keep=False))
        remark = " ".join(filter(None, (remark, pool_note)))
        pool = stack.enter_context(held_pool(url))
        max_len = most_tokens + ROOM_TOKENS
        options = ["--model", path, "--load-format", load_format, "--device", device, "--pool", url]
        options += ["--max-model-len", str(max_len), "--num-pages", str(-(-max_len // PAGE_SIZE) + 16)]
        note(f"two servers load {one_line(checkpoint.label)}; they share {url}")
        with uninterrupted():  # a server that was started is known, so that it can be ended
            servers = [stack.enter_context(LiveServer(options)) for _ in range(2)]
        tokenizer = checkpoint.load_tokenizer()
        for server in servers:
            server.wait_ready()
        for server in servers:
            server.ask(WARM_UP, 1)  # the first request of any process is slower than all that follow
        if num_tokens is not None:
            plan = Plan(num_tokens)
        else:
            note("the first server answers a short question: how fast is this machine?")
            pace = measure_pace(servers[0])
            plan = pace.plan(time.monotonic() - begin_s, documents=1, answers=2, most=most_tokens)
        question = make_question(plan.document_tokens, lambda text: len(tokenizer.encode(text)))
        note(f"the first server reads a document of about {plan.document_tokens:,} tokens{plan.soon}")
        first = servers[0].ask(question.text, plan.answer_tokens)
        _wait_saved(pool, first.prompt_tokens)
        note("the second server, which has never seen it, is asked the same")
        second = servers[1].ask(question.text, plan.answer_tokens)
        note("both servers end")
        return Outcome(checkpoint.label, remark, url, question.about, first, second)


def show(outcome: Outcome, out: Console) -> None:
    """Print it for people."""
    if outcome.note:
        out.print(f"{outcome.note}\n")
    rows = table("", ">prompt tokens", ">found, not computed", ">time to first token")
    for name, reply in zip(("first server", "second server"), outcome.replies, strict=True):
        time_s = f"{reply.first_token_s:.3f} s"
        rows.add_row(name, f"{reply.prompt_tokens:,}", f"{reply.cached_tokens:,}", time_s)
    out.print(rows)
    saved = plural(outcome.saved_tokens, "fewer token")
    out.print(f"\nThe second server computed {saved} and was {outcome.speedup:.1f} times as fast.")
    out.print(f"\nQ: {outcome.question}")
    for name, reply in zip(("first", "second"), outcome.replies, strict=True):
        out.print(f"A ({name}): {one_line(' '.join(reply.text.split()))}")
    if not outcome.correct:
        out.print("\nWRONG: the second server did not find the document, or said something else.")
    out.print("\nBoth servers and their pool are gone again. To keep one running: make serve (or headwater serve)")


@contextmanager
def chosen_model(name: str | None) -> Iterator[tuple[str, str, str]]:
    """What to serve: a path or name, how to load it, and a remark about it."""
    if name is not None:
        yield name, "auto", ""
        return
    try:
        open_checkpoint("smollm2")
    except ModelError as error:
        with tempfile.TemporaryDirectory(prefix="headwater-demo-") as folder:
            write_stand_in(Path(folder))
            remark = f"A small model with random weights stands in, and talks nonsense: {error}."
            yield folder, "dummy", remark
    else:
        yield "smollm2", "auto", ""


def room_for(checkpoint: Checkpoint, num_tokens: int | None) -> int:
    """Tokens of the longest document there will be. Raises InvalidArgumentError for one that is too long."""
    most = checkpoint.config.max_position_embeddings
    if num_tokens is None:
        return max(1, min(MOST_TOKENS, most - ROOM_TOKENS))
    if num_tokens + ROOM_TOKENS > most:
        raise InvalidArgumentError(
            f"--tokens is {num_tokens:,}; this model was made for {most:,}, and {ROOM_TOKENS} are for the question "
            "and the answer"
        )
    return num_tokens


def pool_capacity(checkpoint: Checkpoint, num_tokens: int) -> int:
    """Room for the document twice over, in float32."""
    config = checkpoint.config
    return 2 * config.kv_spec("float32").token_bytes * (num_tokens + 1024)


def _wait_saved(pool: Pool, num_tokens: int) -> None:
    """Until the prompt's complete chunks are in the pool: saving goes on behind the answer."""
    deadline = time.monotonic() + SAVE_S
    while pool.stats().store.chunks < num_tokens // DEFAULT_CHUNK_TOKENS or pool.stats().store.pending_bytes:
        if time.monotonic() > deadline:
            raise EngineError(f"the first server's KV was not in the pool after {SAVE_S:.0f} s")
        time.sleep(0.01)
