"""Streaming detokenisation: whatever tokens come, the pieces join to the text of all of them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import RequestError
from headwater.models.tokenizer import REPLACEMENT, StreamDecoder, Tokenizer

SPECIAL = 1000


class ByteTokenizer:
    """Token i is `texts[i]`, any bytes; ids from SPECIAL on have no text. `strips` mimics decoders that drop the space
    at the very start of a text."""

    def __init__(self, texts: list[bytes], strips: bool = False) -> None:
        self.texts = texts
        self.strips = strips
        self.calls: list[int] = []

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        self.calls.append(len(token_ids))
        text = b"".join(self.texts[i] for i in token_ids if i < SPECIAL).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips else text


tokens = st.lists(
    st.one_of(
        st.text(min_size=1, max_size=4).map(lambda text: text.encode("utf-8", "ignore") or b"x"),
        st.binary(min_size=1, max_size=3),
        st.sampled_from([b"\xe4", b"\xbd", b"\xa0", b"\xf0\x9f", b"\x98", b"\x80", b"\xff", b" a", b" ", "é".encode()]),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=300)
@given(tokens, st.data())
def test_pieces_join_to_the_whole(texts: list[bytes], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(texts) - 1) | st.just(SPECIAL), max_size=40))
    decoder = StreamDecoder(ByteTokenizer(texts))
    pieces = []
    while ids_left := ids[sum(len(piece[0]) for piece in pieces) :]:
        taken = ids_left[: data.draw(st.integers(1, 5))]
        pieces.append((taken, decoder.push(taken)))
    joined = "".join(text for _, text in pieces) + decoder.finish()
    assert joined == ByteTokenizer(texts).decode(ids)


@given(st.lists(st.sampled_from([0, 1, 2, 3, SPECIAL]), max_size=30))
def test_a_decoder_that_strips_the_first_space(ids: list[int]) -> None:
    tokenizer = ByteTokenizer([b" a", b"b", " é".encode(), b" "], strips=True)
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.push([i]) for i in ids) + decoder.finish() == tokenizer.decode(ids)


def test_half_a_character_is_held_back() -> None:
    decoder = StreamDecoder(ByteTokenizer([b"a", b"\xf0\x9f", b"\x98", b"\x80"]))
    assert [decoder.push([i]) for i in (0, 1, 2, 3)] == ["a", "", "", "😀"]
    assert decoder.push([1]) == ""
    assert decoder.finish() == REPLACEMENT
    assert decoder.push([0]) == "a"


@pytest.mark.parametrize("text", [b"word ", b"\xff", b"\x80"])
def test_the_window_stays_small(text: bytes) -> None:
    tokenizer = ByteTokenizer([text])
    decoder = StreamDecoder(tokenizer)
    for _ in range(500):
        decoder.push([0])
    assert max(tokenizer.calls) <= 2 * StreamDecoder.MAX_PENDING + 2
    assert len(tokenizer.calls) < 500 * 4


class Backend:
    """What `Tokenizer` uses of `transformers`, around a vocabulary and a template that fails."""

    eos_token_id = 2
    chat_template = "{{ 1 / 0 }}"

    def __init__(self, vocab: dict[str, int], error: Exception | None = None) -> None:
        self._texts = {token_id: text for text, token_id in vocab.items()}
        self._vocab = vocab
        self._error = error

    def __len__(self) -> int:
        return len(self._vocab)

    def get_vocab(self) -> dict[str, int]:
        return self._vocab

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(self._texts.get(token_id, "") for token_id in token_ids)

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        assert self._error is not None
        raise self._error


def make_tokenizer(backend: Backend) -> Tokenizer:
    config: Any = SimpleNamespace(eos_token_ids=(5,))
    return Tokenizer(backend, config, "test")


def test_ids_beyond_a_gap_in_the_vocabulary_have_their_text() -> None:
    tokenizer = make_tokenizer(Backend({"a": 0, "b": 1, "c": 100}))
    assert tokenizer.decode([0, 100, 50, 101]) == "ac"
    assert tokenizer.vocab_size == 101
    assert make_tokenizer(Backend({})).vocab_size == 0


def test_end_ids_are_those_of_config_and_tokenizer() -> None:
    assert make_tokenizer(Backend({"a": 0})).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("division by zero"), RecursionError(), IndexError("none"), OSError()]
)
def test_a_template_that_fails_is_the_request_s_error(error: Exception) -> None:
    with pytest.raises(RequestError, match=str(error) or type(error).__name__) as caught:
        make_tokenizer(Backend({"a": 0}, error)).apply_chat_template([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"
