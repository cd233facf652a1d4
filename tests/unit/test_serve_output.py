"""Text out of tokens: stop strings under any cut of the text, and log-probabilities that stay in step with it."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.engine.params import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from headwater.serve.output import Delta, LogprobEntry, StopStrings, TextOutput, stopping_at
from headwater.serve.replies import LEAST_LOGPROB, ChatReply, Choice, CompletionReply, Reply, Usage

EOS = 1000
letters = st.text("ab", max_size=12)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


class PieceDecoder:
    """Token i is the i-th piece."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self._pieces = pieces
        self._tail = tail

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token_id] for token_id in token_ids)

    def finish(self) -> str:
        return self._tail


class Letters:
    """Token i is its number."""

    def token_text(self, token_id: int) -> str:
        return str(token_id)

    def token_bytes(self, token_id: int, *, begins_text: bool = False) -> bytes | None:
        return str(token_id).encode()


def cut_at_first_stop(text: str, stops: list[str], immune: int = 0) -> tuple[str, bool]:
    """The oracle: grow the text character by character until a stop string ends there."""
    for end in range(immune + 1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


def run(
    output: TextOutput, pieces: list[str], *, per_step: int = 1, last: FinishReason = FinishReason.LENGTH
) -> list[Delta]:
    deltas = []
    ids = list(range(len(pieces)))
    for start in range(0, len(ids), per_step):
        batch = ids[start : start + per_step]
        reason = last if batch[-1] == ids[-1] else None
        logprobs = [TokenLogprobs(token, -1.0, []) for token in batch]
        deltas.append(output.feed(RequestOutput("r", batch, logprobs, reason, 1, 0)))
        if deltas[-1].finish_reason:
            break
    return deltas


@given(st.lists(letters, min_size=1, max_size=8), stop_strings, st.integers(1, 3))
@example(["a", "b", "c"], ["abc", "b"], 1)
@example(["abc"], ["abc", "b"], 1)
@example(["a", "a", "b"], ["aab"], 1)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(
    pieces: list[str], stops: list[str], per_step: int
) -> None:
    output = TextOutput(PieceDecoder(pieces), SamplingParams(stop=tuple(stops)), [EOS])
    deltas = run(output, pieces, per_step=per_step)
    expected, stopped = cut_at_first_stop("".join(pieces), stops)
    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert not any(stop in expected for stop in stops)


@given(st.lists(letters, min_size=1, max_size=8), stop_strings, st.integers(0, 9))
def test_no_stop_string_ends_before_min_tokens(pieces: list[str], stops: list[str], min_tokens: int) -> None:
    output = TextOutput(PieceDecoder(pieces), SamplingParams(stop=tuple(stops), min_tokens=min_tokens), [EOS])
    deltas = run(output, pieces)
    immune = len("".join(pieces[: max(0, min_tokens - 1)]))
    expected, stopped = cut_at_first_stop("".join(pieces), stops, immune)
    assert "".join(delta.text for delta in deltas) == expected
    assert (deltas[-1].finish_reason is FinishReason.STOP) == stopped
    assert not stopped or output.num_tokens >= min_tokens


@given(st.lists(letters, min_size=1, max_size=8), stop_strings)
def test_nothing_is_held_back_that_no_stop_string_can_claim(pieces: list[str], stops: list[str]) -> None:
    stop = StopStrings(stops)
    shown = seen = ""
    for piece in pieces:
        ready, stopped = stop.push(piece)
        shown, seen = shown + ready, seen + piece
        if stopped:
            return
        held = seen[len(shown) :]
        assert not held or any(text.startswith(held) and text != held for text in stops)
    assert shown + stop.flush() == seen


@given(st.lists(letters, min_size=1, max_size=8), stop_strings)
def test_log_probabilities_belong_to_the_text_that_is_shown(pieces: list[str], stops: list[str]) -> None:
    output = TextOutput(PieceDecoder(pieces), SamplingParams(stop=tuple(stops), logprobs=0), [EOS])
    shown = 0
    entries = []
    for delta in run(output, pieces):
        shown += len(delta.text)
        entries += delta.logprobs
        assert all(entry.text_offset <= shown for entry in delta.logprobs)
    assert [entry.logprobs.token_id for entry in entries] == list(range(len(entries)))
    offsets = [len("".join(pieces[:index])) for index in range(len(pieces))]
    assert [entry.text_offset for entry in entries] == offsets[: len(entries)]
    # Every token with text that was shown is there.
    assert len(entries) >= sum(bool(piece) and start < shown for start, piece in zip(offsets, pieces, strict=True))


def test_the_token_that_ends_a_sequence_counts_but_is_not_shown() -> None:
    output = TextOutput(PieceDecoder(["hi", "<end>"]), SamplingParams(stop_token_ids=(1,), logprobs=0), [EOS])
    deltas = run(output, ["hi", "<end>"], last=FinishReason.STOP)
    assert "".join(delta.text for delta in deltas) == "hi"
    assert output.num_tokens == 2
    assert sum(len(delta.logprobs) for delta in deltas) == 1


def test_a_stop_token_that_did_not_end_the_sequence_is_text() -> None:
    output = TextOutput(PieceDecoder(["hi", "<end>"]), SamplingParams(stop_token_ids=(1,)), [EOS])
    deltas = run(output, ["hi", "<end>"], last=FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == "hi<end>"


def test_what_the_decoder_still_held_is_looked_through_for_stop_strings() -> None:
    output = TextOutput(PieceDecoder(["a"], tail="bc"), SamplingParams(stop=("ab",)), [EOS])
    (delta,) = run(output, ["a"])
    assert delta == Delta("", [], FinishReason.STOP)


def test_end_ids_that_only_the_tokenizer_names_end_the_text_but_not_with_ignore_eos() -> None:
    params = stopping_at(SamplingParams(stop_token_ids=(7,)), [1, 7])
    assert params.stop_token_ids == (7, 1)
    output = TextOutput(PieceDecoder(["hi", "<end>"]), params, [EOS])
    assert "".join(delta.text for delta in run(output, ["hi", "<end>"], last=FinishReason.STOP)) == "hi"
    ignoring = SamplingParams(ignore_eos=True)
    assert stopping_at(ignoring, [1]) == ignoring


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_json_never_holds_what_is_no_number(kind: type[Reply]) -> None:
    odd = [TokenLogprobs(1, value, [(2, value)]) for value in (-math.inf, math.nan, math.inf, -1e30, -0.5)]
    reply, choice = kind("m", Letters(), with_logprobs=True, include_usage=False), Choice()
    reply.add(0, choice, Delta("x", [LogprobEntry(entry, 0) for entry in odd], FinishReason.STOP))
    body = json.loads(b"".join(reply.whole([choice], Usage(1, 0, 1))))

    def numbers(value: object) -> list[float]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [value] if isinstance(value, float) else [number for item in inner for number in numbers(item)]

    found = numbers(body)
    assert set(found) == {LEAST_LOGPROB, -0.5}
    json.dumps(body, allow_nan=False)


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_an_answer_takes_little_more_memory_than_its_bytes(kind: type[Reply]) -> None:
    """As objects, these tokens and log-probabilities took nine times as much and more."""
    reply, choices = kind("m", Letters(), with_logprobs=True, include_usage=False), [Choice(), Choice()]
    tracemalloc.start()
    try:
        for number in range(4000):
            entry = LogprobEntry(TokenLogprobs(number % 26, -0.5, [(rank, -0.5 - rank) for rank in range(20)]), number)
            reason = FinishReason.LENGTH if number >= 3998 else None
            reply.add(number % 2, choices[number % 2], Delta("é", [entry], reason))
        parts = reply.whole(choices, Usage(1, 0, 4000))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = sum(map(len, parts))
    assert most < 2.8 * size, f"{most / size:.1f} times the {size} bytes of the answer"
    body = json.loads(b"".join(parts))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    texts = [choice["message"]["content"] if kind is ChatReply else choice["text"] for choice in body["choices"]]
    assert texts == ["é" * 2000] * 2
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 2


def test_feeding_after_the_end_is_a_bug() -> None:
    output = TextOutput(PieceDecoder(["a"]), SamplingParams(), [EOS])
    run(output, ["a"])
    with pytest.raises(AssertionError):
        output.feed(RequestOutput("r", [0], None, None, 1, 0))
