"""What a request may ask of the sampler, and how it can end. Plain data: it crosses process boundaries as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from headwater.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 256
MAX_SEED = (1 << 63) - 1
MAX_COUNT = (1 << 31) - 1
"""No context is longer and no vocabulary larger, and it fits every integer on the way."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the model's context is full."""
    ABORT = "abort"
    """Someone called `abort`."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises RequestError, naming the parameter, for what cannot be."""

    max_tokens: int | None = None
    """None: until the context is full."""
    min_tokens: int = 0
    """No stop of any kind but `max_tokens` before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None draws one when the request is added."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings, looked for by whoever turns tokens into text; the engine itself sees only ids."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none; 0: of the chosen token; k: of the k best as well."""

    def __post_init__(self) -> None:
        _check_count("max_tokens", self.max_tokens, least=1)
        _check_count("min_tokens", self.min_tokens)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_count("top_k", self.top_k)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check("top_p", self.top_p > 0.0, self.top_p, "above 0")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check("seed", self.seed is None or abs(self.seed) <= MAX_SEED, self.seed, "a 64-bit integer")
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check(
            "stop",
            len(self.stop) <= MAX_STOP_STRINGS and all(self.stop),
            list(self.stop[:8]),
            f"at most {MAX_STOP_STRINGS} strings, none empty",
        )
        _check(
            "stop_token_ids",
            len(self.stop_token_ids) <= MAX_STOP_TOKENS and all(0 <= i <= MAX_COUNT for i in self.stop_token_ids),
            list(self.stop_token_ids[:8]),
            f"at most {MAX_STOP_TOKENS} token ids",
        )
        _check("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, self.logprobs, "0 to 20")
        if self.max_tokens is not None:
            _check("min_tokens", self.min_tokens <= self.max_tokens, self.min_tokens, "at most max_tokens")

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes what is said next."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, of the model itself: before penalties, temperature and truncation."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """(token id, logprob) of the best tokens, best first; empty when only the chosen one was asked for."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step gave one request: new tokens, and at the end the reason. Order is the order of generation."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were not computed because their KV was already there."""
    num_sent_tokens: int | None = None
    """At the end of a request whose KV was to go to another host: prompt tokens, from the first on, that are there."""


def _check(name: str, fine: bool, value: object, expected: str) -> None:
    if not fine:
        raise RequestError(f"{name} is {value!r}; expected {expected}", param=name)


def _check_count(name: str, value: int | None, least: int = 0) -> None:
    _check(name, value is None or least <= value <= MAX_COUNT, value, f"{least} to {MAX_COUNT}")


def _check_number(name: str, value: float, least: float, most: float) -> None:
    _check(name, math.isfinite(value) and least <= value <= most, value, f"a number from {least:g} to {most:g}")
