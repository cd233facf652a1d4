"""Drafts by looking back: what is proposed, when nothing is, and that looking back stays cheap."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.engine.config import EngineConfig
from headwater.engine.draft import NgramDrafter, NoDrafts, create_drafter
from headwater.engine.draft.ngram import MOST_CREDIT, NGRAM, PAUSES
from headwater.engine.params import SamplingParams
from headwater.engine.request import Request
from headwater.errors import EngineConfigError

from histories import VOCAB, next_token
from history_engine import GREEDY, expected, make_engine, run


def request(tokens: list[int], name: str = "r") -> Request:
    params = SamplingParams(temperature=0.0)
    return Request(name, tokens, params, arrival=0, max_tokens=1000, stop_ids=frozenset(), seed=0, max_pages=1)


def looked_up(tokens: list[int], most: int) -> list[int]:
    """The definition: the latest earlier place of the last n-gram, and what follows there, over and over."""
    last = tokens[-NGRAM:]
    places = [end for end in range(NGRAM, len(tokens)) if tokens[end - NGRAM : end] == last]
    if not places:
        return []
    text = list(tokens)
    for _ in range(most):
        text.append(text[places[-1] + len(text) - len(tokens)])
    return text[len(tokens) :]


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 60), max_size=5),
    most=st.integers(1, 9),
)
@example(tokens=[1, 1, 1, 1, 0, 1, 1, 1, 1, 2, 1, 1, 1, 1], cuts=[], most=2)
@settings(max_examples=200, deadline=None)
def test_drafts_are_what_followed_the_last_tokens_before(tokens: list[int], cuts: list[int], most: int) -> None:
    """However many tokens came between two looks."""
    drafter, growing = NgramDrafter(most), request([])
    for end in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        growing.tokens += tokens[len(growing.tokens) : end]
        assert list(drafter.propose(growing, 100)) == looked_up(growing.tokens, most)


def test_no_more_is_drafted_than_there_is_room_for() -> None:
    assert NgramDrafter(8).propose(request([1, 2, 3, 4, 5, 1, 2, 3, 4]), 3) == (5, 1, 2)


def test_a_request_that_drafts_do_not_pay_for_has_ever_longer_pauses() -> None:
    drafter, asked = NgramDrafter(8), request([1, 2, 3, 4] * 3)
    pauses = []
    for _ in range(8):
        assert drafter.wants(asked)
        drafter.propose(asked, 8)
        drafter.landed(asked, 8, 0)
        pauses.append(0)
        while not drafter.wants(asked):
            drafter.landed(asked, 0, 0)
            pauses[-1] += 1
    assert pauses[:3] == [PAUSES[0], 2 * PAUSES[0], 4 * PAUSES[0]]
    assert pauses[-2:] == [PAUSES[1]] * 2
    drafter.propose(asked, 8)
    drafter.landed(asked, 8, 8)
    drafter.landed(asked, 8, 0)
    drafter.landed(asked, 8, 0)
    assert drafter.wants(asked), f"credit for {MOST_CREDIT} tokens makes up for two bad steps"
    drafter.landed(asked, 8, 0)
    assert not drafter.wants(asked)
    for _ in range(PAUSES[0]):
        drafter.landed(asked, 0, 0)
    assert drafter.wants(asked), "drafts that paid make the next pause short again"


def test_requests_do_not_learn_from_each_other() -> None:
    drafter = NgramDrafter(4)
    one, other = request([1, 2, 3, 4, 9, 1, 2, 3, 4], "one"), request([7, 1, 2, 3, 4], "other")
    assert drafter.propose(one, 4) == (9, 1, 2, 3)
    assert drafter.propose(other, 4) == ()
    drafter.landed(one, 4, 0)
    assert not drafter.wants(one)
    assert drafter.wants(other)
    drafter.forget(one)
    drafter.forget(one)
    assert drafter.wants(one), "an id may be used again"
    assert not drafter._texts.keys() & {"one"}


def test_looking_back_reads_each_token_a_few_times() -> None:
    class Watched(list[int]):
        num_read = 0

        def __getitem__(self, where: Any) -> Any:
            found = super().__getitem__(where)
            self.num_read += len(found) if isinstance(where, slice) else 1
            return found

    tokens = Watched(n * n % 101 for n in range(2000))
    drafter, asked = NgramDrafter(4), request(tokens)
    for token in range(500):
        drafter.propose(asked, 4)
        tokens.append(token % 7)
    assert tokens.num_read < 5 * NGRAM * len(tokens)


def test_drafts_are_off_unless_asked_for() -> None:
    assert isinstance(create_drafter(EngineConfig(model="m").speculative_ngram), NoDrafts)
    assert EngineConfig(model="m", max_num_seqs=4, speculative_ngram=3).max_samples == 16
    with pytest.raises(EngineConfigError, match="speculative_ngram"):
        EngineConfig(model="m", speculative_ngram=0)


def quoting(filler: int) -> list[int]:
    """A prompt whose first answer token stood in it before, after the same three tokens."""
    asked = ([1, 2, 3, token, filler, 8, 9, 1, 2, 3] for token in range(VOCAB))
    return next((prompt for prompt in asked if next_token(tuple(prompt)) == prompt[3]), [])


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_with_ngram_drafts_answers_as_without(overlap: bool) -> None:
    prompts = {str(filler): quoting(filler) for filler in range(12) if quoting(filler)}
    engine, _ = make_engine(speculative_ngram=4, num_pages=64, overlap=overlap)
    for name, prompt in prompts.items():
        engine.add(name, list(prompt), GREEDY)
    got, _ = run(engine)
    assert got == {name: expected(prompt, GREEDY, 64)[0] for name, prompt in prompts.items()}
    assert engine.stats().num_draft_tokens == 4 * len(prompts) > 0
    drafter: Any = engine._drafter
    assert not drafter._texts, "nothing is kept of requests that are over"
