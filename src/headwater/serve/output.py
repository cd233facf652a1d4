"""From tokens to text: incremental decoding, stop strings, and log-probabilities that stay in step with the text.

One `TextOutput` per generated sequence. It knows nothing of HTTP; `openai` gives what it returns its shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from headwater.engine.params import FinishReason, RequestOutput, SamplingParams, TokenLogprobs


class TextDecoder(Protocol):
    """Turns token ids into text piece by piece; the pieces joined are the text of all of them."""

    def push(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class LogprobEntry(NamedTuple):
    """Log-probabilities of one token of the text, and where its text begins."""

    logprobs: TokenLogprobs
    text_offset: int


class Delta(NamedTuple):
    """What became certain: text that no stop string can take back, its log-probabilities, and at the end the reason."""

    text: str
    logprobs: list[LogprobEntry]
    finish_reason: FinishReason | None


def stopping_at(params: SamplingParams, end_ids: Sequence[int]) -> SamplingParams:
    """Parameters that stop at these end-of-sequence ids too, which the engine does not know; not with `ignore_eos`."""
    missing = () if params.ignore_eos else tuple(sorted(set(end_ids) - set(params.stop_token_ids)))
    return replace(params, stop_token_ids=params.stop_token_ids + missing) if missing else params


class StopStrings:
    """Looks for stop strings in text that comes in pieces, and holds back what may be the beginning of one.

    The stop string that ends first counts (of those that end together, the longest), so how the text was cut into
    pieces does not matter. At most the longest stop string's length, less one, is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._num_immune = 0
        """Characters of `_held` in which a stop string must not end."""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Add text: what can be shown now, and whether a stop string was found (then nothing more may be pushed).

        A stop string that ends in text pushed with `armed=False` is none.
        """
        held = self._held + text
        if not armed:
            self._num_immune = len(held)
        elif (start := self._find(held)) is not None:
            self._held = ""
            return held[:start], True
        num_shown = len(held) - self._num_doubtful(held)
        self._held = held[num_shown:]
        self._num_immune = max(0, self._num_immune - num_shown)
        return held[:num_shown], False

    def flush(self) -> str:
        """The text held back: nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        """Where the stop string that ends first begins."""
        ends = []
        for stop in self._stops:
            start = text.find(stop, max(0, self._num_immune - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start))
        return min(ends)[1] if ends else None

    def _num_doubtful(self, text: str) -> int:
        """Length of the longest end of the text that is a beginning of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(len(stop) > length and stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextOutput:
    """The text of one sequence. Feed it what the engine gives; it says what may be shown, and when it is over."""

    def __init__(self, decoder: TextDecoder, params: SamplingParams, eos_token_ids: Collection[int]) -> None:
        self._decoder = decoder
        self._stops = StopStrings(params.stop)
        self._min_tokens = params.min_tokens
        # The token that ends a sequence is no part of its text. With `ignore_eos` an end token ends nothing.
        self._end_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        self._num_decoded = 0
        self._num_shown = 0
        self._pending: deque[tuple[LogprobEntry, int]] = deque()
        self.num_tokens = 0
        """Tokens generated: the one that ended the sequence and those of a stop string count too."""
        self.finish_reason: FinishReason | None = None

    def feed(self, output: RequestOutput) -> Delta:
        """Take one output. Once the delta has a finish reason nothing more may be fed."""
        assert self.finish_reason is None, "fed after the end"
        shown: list[str] = []
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if position == last and output.finish_reason is FinishReason.STOP and token_id in self._end_ids:
                break
            start = self._num_decoded
            if self._push(self._decoder.push([token_id]), shown):
                self._note(output.logprobs, position, start)
                return self._delta(shown, FinishReason.STOP, keep_all=False)
            self._note(output.logprobs, position, start)
        if output.finish_reason is None:
            return self._delta(shown, None, keep_all=False)
        if self._push(self._decoder.finish(), shown):
            return self._delta(shown, FinishReason.STOP, keep_all=False)
        shown.append(self._stops.flush())
        return self._delta(shown, output.finish_reason, keep_all=True)

    def _push(self, text: str, shown: list[str]) -> bool:
        self._num_decoded += len(text)
        if not text:
            return False
        ready, stopped = self._stops.push(text, armed=self.num_tokens >= self._min_tokens)
        shown.append(ready)
        return stopped

    def _note(self, logprobs: list[TokenLogprobs] | None, position: int, start: int) -> None:
        if logprobs is not None:
            # A token without text is part of the character that follows, and goes out with it.
            end = max(self._num_decoded, start + 1)
            self._pending.append((LogprobEntry(logprobs[position], start), end))

    def _delta(self, shown: list[str], finish_reason: FinishReason | None, *, keep_all: bool) -> Delta:
        """Log-probabilities go out with the last of their token's text; at a stop string, with any of it."""
        text = "".join(shown)
        self._num_shown += len(text)
        self.finish_reason = finish_reason
        entries = []
        while self._pending:
            entry, end = self._pending[0]
            if not (keep_all or end <= self._num_shown or (finish_reason and entry.text_offset < self._num_shown)):
                break
            entries.append(self._pending.popleft()[0])
        return Delta(text, entries, finish_reason)
