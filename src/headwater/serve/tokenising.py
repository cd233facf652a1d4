"""From a call to token ids, in pieces: a prompt that cannot fit is refused before it is tokenised as a whole.

Three checks come first, each cheaper than the next step: the bytes of the text against what the context can hold at
most, a cap on the text of one prompt, and, for long texts, the tokens of its parts until they are clearly too many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from headwater.errors import ModelError, RequestError
from headwater.models.text_bound import TextBound
from headwater.serve.openai import Call, too_long
from headwater.serve.workers import PieceLength, TextJob

PIECE_CHARS = 1 << 14
"""Text that is tokenised in one go while others wait: about 20 ms. More counts as a long piece."""
MIN_CAP_BYTES = 1 << 20
CAP_BYTES_PER_TOKEN = 16
"""The text of one prompt may be a MiB, or this many bytes for each token of the context. Text has 3 to 5 of them."""
CHECK_CHARS_PER_TOKEN = 4
"""Texts with more characters than this for each token of the context are counted in parts first."""
CUT_TOKENS = 16
"""Tokens that one more cut may add to a text: those of the word that it splits."""
MARGIN = 1.25
"""Parts must have so many times the tokens that fit before their sum is believed."""
MIN_CALL_TOKENS = 1 << 20
CALL_CONTEXTS = 8
"""All sequences of a call may have a million prompt tokens, or those of so many full contexts."""


class Encoder(Protocol):
    """What is needed of a tokenizer here. Calls may come from several threads at once."""

    def text_bound(self) -> TextBound | None: ...
    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...
    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str: ...


class TextLimits(NamedTuple):
    """How long prompts may be."""

    max_model_len: int
    bound: TextBound | None
    """None: a token may stand for any amount of text."""

    @property
    def cap_bytes(self) -> int:
        """Longer texts are not looked at, whether they would fit or not."""
        return max(MIN_CAP_BYTES, self.max_model_len * CAP_BYTES_PER_TOKEN)

    @property
    def max_call_tokens(self) -> int:
        """Prompt tokens of all sequences of a call."""
        return max(MIN_CALL_TOKENS, self.max_model_len * CALL_CONTEXTS)

    def check_text(self, text: str, param: str) -> None:
        """Raises RequestError for a text that is too long to be tokenised."""
        if len(text) * 4 <= self.max_model_len:
            return
        data = text.encode(errors="surrogatepass")
        most = len(data) if self.bound is None else self.max_model_len * self.bound.max_bytes_per_token
        if self.bound is not None and len(data) > most and (num_bytes := self.bound.num_bytes(data)) > most:
            reason = (
                f"the prompt has {num_bytes} bytes of text; the context of this server is {self.max_model_len} tokens, "
                f"which hold at most {most} bytes; shorten it"
            )
            raise RequestError(reason, param=param, code="context_length_exceeded")
        if len(data) > (cap := self.cap_bytes):
            reason = f"the prompt has {len(data)} bytes of text; this server takes at most {cap} per prompt; shorten it"
            raise RequestError(reason, param=param, code="request_too_large")


def tokenise(tokenizer: Encoder, call: Call, limits: TextLimits) -> TextJob[list[list[int]]]:
    """The prompts of a call as token ids, each shorter than the context. Raises RequestError for what is too long."""
    if call.is_chat:
        try:
            text = tokenizer.render_chat(call.messages)
        except ModelError as error:  # no template: this model cannot chat
            raise RequestError(str(error), param="messages") from error
        limits.check_text(text, "messages")
        ids = yield from _encode(tokenizer, text, limits, "messages", add_special=False)
        if len(ids) >= limits.max_model_len:
            raise too_long(len(ids), limits.max_model_len, "messages")
        _check_sum(len(ids) * call.num_choices, limits, "messages")
        return [ids]
    for prompt in call.prompts:
        if isinstance(prompt, str):
            limits.check_text(prompt, "prompt")
    prompts: list[list[int]] = []
    num_tokens = 0
    for prompt in call.prompts:
        if isinstance(prompt, str):
            prompt = yield from _encode(tokenizer, prompt, limits, "prompt", add_special=True)
        if len(prompt) >= limits.max_model_len:
            raise too_long(len(prompt), limits.max_model_len, "prompt")
        num_tokens += len(prompt) * call.num_choices
        _check_sum(num_tokens, limits, "prompt")
        prompts.append(prompt)
    return prompts


def at_once(job: TextJob[list[list[int]]]) -> list[list[int]]:
    """A job's result without threads: for calls that are small."""
    while True:
        try:
            next(job)
        except StopIteration as end:
            result: list[list[int]] = end.value
            return result


def _encode(tokenizer: Encoder, text: str, limits: TextLimits, param: str, *, add_special: bool) -> TextJob[list[int]]:
    if len(text) > max(PIECE_CHARS, limits.max_model_len * CHECK_CHARS_PER_TOKEN):
        yield from _check_parts(tokenizer, text, limits.max_model_len, param)
    yield PieceLength.SHORT if len(text) <= PIECE_CHARS else PieceLength.LONG
    return tokenizer.encode(text, add_special=add_special)


def _check_parts(tokenizer: Encoder, text: str, max_model_len: int, param: str) -> TextJob[None]:
    """Raises RequestError as soon as the parts of a text have clearly more tokens than fit."""
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARS):
        yield PieceLength.SHORT
        num_tokens += len(tokenizer.encode(text[start : start + PIECE_CHARS], add_special=False)) - CUT_TOKENS
        if num_tokens > max_model_len * MARGIN:
            reason = (
                f"the prompt has {len(text)} characters, and its first {start + PIECE_CHARS} alone have more tokens "
                f"than the {max_model_len} of this server's context; shorten it"
            )
            raise RequestError(reason, param=param, code="context_length_exceeded")


def _check_sum(num_tokens: int, limits: TextLimits, param: str) -> None:
    if num_tokens > limits.max_call_tokens:
        text = (
            f"the sequences of this call have more than {limits.max_call_tokens} prompt tokens in total (each "
            "choice counts); send fewer at a time"
        )
        raise RequestError(text, param=param, code="request_too_large")
