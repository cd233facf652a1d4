"""How long a prompt may be: what is refused before it is tokenised, and that nothing that fits is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("msgspec")

from headwater.engine.params import SamplingParams
from headwater.errors import RequestError
from headwater.models.text_bound import TextBound
from headwater.serve.openai import Call
from headwater.serve.tokenising import MIN_CAP_BYTES, PIECE_CHARS, TextLimits, at_once, tokenise
from headwater.serve.workers import PieceLength

MAX_LEN = 1000


class WordTokenizer:
    """A token for each run of `width` characters. Notes how much it was given."""

    def __init__(self, width: int = 1) -> None:
        self._width = width
        self.lengths: list[int] = []

    def text_bound(self) -> TextBound:
        return TextBound(self._width)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        self.lengths.append(len(text))
        return [1] * -(-len(text) // self._width)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return messages[-1]["content"]  # a template may leave out most of a conversation


def call(*prompts: str | list[int], num_choices: int = 1, **fields: Any) -> Call:
    given: dict[str, Any] = {"is_chat": False, "messages": [], "prompts": list(prompts)} | fields
    return Call(
        model=None, params=SamplingParams(), num_choices=num_choices, stream=False, include_usage=False, **given
    )


def chat(*contents: str) -> Call:
    return call(is_chat=True, prompts=[], messages=[{"role": "user", "content": text} for text in contents])


def refused(tokenizer: WordTokenizer, asked: Call, limits: TextLimits) -> str | None:
    with pytest.raises(RequestError) as caught:
        at_once(tokenise(tokenizer, asked, limits))
    return caught.value.code


@pytest.mark.parametrize("letter", ["x", "é", "𝟎"])
def test_a_text_with_more_bytes_than_the_context_can_hold_is_not_tokenised(letter: str) -> None:
    limits = TextLimits(MAX_LEN, TextBound(8))
    size = len(letter.encode())
    tokenizer = WordTokenizer(8)
    too_long = letter * (MAX_LEN * 8 // size + 1)
    for asked in (call(too_long), call("x", too_long), chat("x", too_long)):
        assert refused(tokenizer, asked, limits) == "context_length_exceeded"
    assert tokenizer.lengths == []
    fits = letter * ((MAX_LEN - 1) * 8 // size)
    (ids,) = at_once(tokenise(tokenizer, call(fits), limits))
    assert len(ids) < MAX_LEN


def test_bytes_that_give_no_token_do_not_count() -> None:
    limits = TextLimits(MAX_LEN, TextBound(1, b"\x01"))
    limits.check_text("\x01" * 5000 + "x" * 900, "prompt")
    with pytest.raises(RequestError):
        limits.check_text("\x01" * 5000 + "x" * 1001, "prompt")


def test_a_conversation_counts_as_its_template_writes_it() -> None:
    limits = TextLimits(MAX_LEN, TextBound(1))
    assert at_once(tokenise(WordTokenizer(), chat("left out " * 10_000, "x" * 900), limits)) == [[1] * 900]


def test_without_a_bound_the_text_of_one_prompt_has_a_cap() -> None:
    limits = TextLimits(MAX_LEN, None)
    tokenizer = WordTokenizer()
    assert refused(tokenizer, call("x" * (MIN_CAP_BYTES + 1)), limits) == "request_too_large"
    assert tokenizer.lengths == []
    assert TextLimits(1 << 20, None).cap_bytes == 1 << 24


def test_a_long_text_is_given_up_as_soon_as_its_parts_are_too_many_tokens() -> None:
    tokenizer = WordTokenizer()
    assert refused(tokenizer, call("x" * MIN_CAP_BYTES), TextLimits(MAX_LEN, None)) == "context_length_exceeded"
    assert tokenizer.lengths == [PIECE_CHARS]


def test_a_long_text_of_few_tokens_is_tokenised_as_a_whole() -> None:
    tokenizer = WordTokenizer(2000)
    text = "x" * 500_000
    limits = TextLimits(MAX_LEN, None)
    job = tokenise(tokenizer, call(text), limits)
    pieces = [*job]
    assert pieces == [PieceLength.SHORT] * -(-len(text) // PIECE_CHARS) + [PieceLength.LONG]
    assert tokenizer.lengths[-1] == len(text)
    assert at_once(tokenise(tokenizer, call(text), limits)) == [[1] * 250]


def test_every_prompt_is_shorter_than_the_context() -> None:
    limits = TextLimits(MAX_LEN, None)
    tokenizer = WordTokenizer()
    for asked in (call("x" * MAX_LEN), call([1] * MAX_LEN), chat("x" * MAX_LEN)):
        assert refused(tokenizer, asked, limits) == "context_length_exceeded"
    assert at_once(tokenise(tokenizer, call("x" * 999, [1] * 999), limits)) == [[1] * 999, [1] * 999]


@pytest.mark.parametrize("prompt", ["x" * 900, [1] * 900])
def test_the_sequences_of_a_call_are_bounded_in_sum(prompt: str | list[int]) -> None:
    limits = TextLimits(MAX_LEN, None)
    most = limits.max_call_tokens // 900
    assert len(at_once(tokenise(WordTokenizer(), call(prompt, num_choices=most), limits))) == 1
    for asked in (call(prompt, num_choices=most + 1), call(*[prompt] * (most + 1))):
        assert refused(WordTokenizer(), asked, limits) == "request_too_large"
