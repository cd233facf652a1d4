"""How much a demo may ask of this machine: documents and answers as long as it can compute in time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.cli.demo.live import LiveServer

LIMIT_S = 120.0
"""A demo ends within two minutes, its start included."""
END_S = 15.0
"""Of these, for ending the servers."""
MOST_TOKENS, LEAST_TOKENS = 4000, 600
"""Of a document. More shows nothing new; with less there is nothing to see."""
ANSWER_TOKENS, LEAST_ANSWER_TOKENS = 24, 6
LONGEST_S = 20.0
"""Nobody likes to wait longer for one document, on a machine of any speed."""

_PROBE_LINES = 12
"""Less than a chunk, so that nothing of it gets into the pool."""
_PROBE_ANSWER_TOKENS = 8
_ENOUGH_S = 4.0
"""A first measurement that took so long is not repeated."""
_SLOWER = 1.6
"""A token of a long prompt takes longer than one of a short prompt: it attends to more of them."""


@dataclass(frozen=True)
class Plan:
    """How long everything is, in tokens."""

    document_tokens: int
    answer_tokens: int = ANSWER_TOKENS
    document_s: float | None = None
    """About how long computing one document takes; None: nobody measured."""

    @property
    def soon(self) -> str:
        """A remark on that."""
        return "" if self.document_s is None else f" (about {self.document_s:.0f} s)"


@dataclass(frozen=True)
class Pace:
    """What one server does in a second."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float

    def plan(self, elapsed_s: float, *, documents: int, answers: int, most: int = MOST_TOKENS) -> Plan:
        """For so many documents and answers, one after another. Documents get half of the time that is left, answers a
        quarter; the rest stays free, for whatever else the machine does."""
        left_s = max(0.0, LIMIT_S - END_S - elapsed_s)
        document_s, answer_s = min(LONGEST_S, left_s / 2 / documents), left_s / 4 / answers
        tokens = int(self.prefill_tokens_per_s / _SLOWER * document_s) // 100 * 100
        tokens = max(min(LEAST_TOKENS, most), min(MOST_TOKENS, most, tokens))
        answer = max(LEAST_ANSWER_TOKENS, min(ANSWER_TOKENS, int(self.decode_tokens_per_s * answer_s)))
        return Plan(tokens, answer, tokens * _SLOWER / self.prefill_tokens_per_s)


def measure_pace(server: LiveServer) -> Pace:
    """Ask a server, which has answered before, one or two short questions, and take the slower answer. Raises
    EngineError where it does not answer."""
    paces: list[tuple[float, float]] = []
    for attempt in ("first", "second"):
        lines = [f"Line {number} of the {attempt} text is about a river.\n" for number in range(_PROBE_LINES)]
        begin_s = time.perf_counter()
        reply = server.ask("".join(lines), _PROBE_ANSWER_TOKENS)
        took_s = time.perf_counter() - begin_s
        computed = max(1, reply.prompt_tokens - reply.cached_tokens)
        prefill = computed / max(reply.first_token_s, 1e-6)
        paces.append((prefill, _PROBE_ANSWER_TOKENS / max(took_s - reply.first_token_s, 1e-6)))
        if took_s > _ENOUGH_S:
            break
    return Pace(min(prefill for prefill, _ in paces), min(decode for _, decode in paces))
