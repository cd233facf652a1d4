"""Steps that check drafts: whatever is guessed, requests get the tokens they get without, and no guess is kept.

The device is that of `test_engine_steps`: its KV is the history itself, so a rejected draft that is read, shared or
saved shows up as a prefix that was never said.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.connector.config import LOAD_MODES
from headwater.engine.batch import make_step_input
from headwater.engine.draft import accept
from headwater.engine.engine import Engine
from headwater.engine.params import FinishReason, SamplingParams
from headwater.engine.request import Request

from histories import EOS, HistorySpace, next_token
from history_engine import GREEDY, HistoryDevice, check_nothing_left, collect, expected, make_engine, run


class Guesser:
    """Drafts of any length, right up to any place: it knows the model."""

    def __init__(self, rng: random.Random, most: int = 6) -> None:
        self._rng = rng
        self._most = most
        self.num_drafts = self.num_accepted = 0
        self.forgotten: list[str] = []

    def wants(self, request: Request) -> bool:
        return self._rng.random() < 0.8

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        assert not request.num_in_flight
        tokens, count = list(request.tokens), min(self._rng.randrange(self._most + 1), most)
        num_right = self._rng.choice([0, self._rng.randrange(count + 1), count])
        for number in range(count):
            token = next_token(tuple(tokens))
            tokens.append(token if number < num_right else self._rng.choice([EOS, (token + 1) % 50]))
        return tuple(tokens[len(request.tokens) :])

    def landed(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.id)


class Prophet(Guesser):
    """All that is asked for, and all of it right."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))

    def wants(self, request: Request) -> bool:
        return True

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        tokens = list(request.tokens)
        for _ in range(min(most, 8)):
            tokens.append(next_token(tuple(tokens)))
        return tuple(tokens[len(request.tokens) :])


def check_kept(engine: Engine, device: HistoryDevice, said: dict[bytes, list[list[int]]]) -> None:
    """Every page of the prefix cache, and every chunk of the pool, holds a prefix of what some request really said."""
    prefix: Any = engine._prefix
    shared: set[int] = set()
    for tenant, sequences in said.items():
        for tokens in sequences:
            match = prefix.match(tokens, tenant)
            shared |= set(match.pages)
            for position in range(match.num_tokens):
                slot = device._slot(match.pages, position)
                assert device.histories[slot] == tuple(tokens[: position + 1]), "a shared page holds what was not said"
    assert len(shared) == prefix.num_pages, "the prefix cache has pages of a sequence that nobody said"
    if device.space is not None:
        known = {tuple(tokens[:end]) for group in said.values() for tokens in group for end in range(len(tokens) + 1)}
        assert set(device.space.kept.values()) <= known, "the pool has a chunk of a sequence that nobody said"


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    page_size = draw(st.sampled_from([1, 2, 4, 5]))
    max_model_len = draw(st.integers(8, 40))
    return {
        "page_size": page_size,
        "num_pages": -(-max_model_len // page_size) + draw(st.integers(0, 20)),
        "max_model_len": max_model_len,
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_batched_tokens": draw(st.sampled_from([1, 3, 8, 64])),
        "prefix_cache": draw(st.sampled_from(["radix", "naive"])),
        "overlap": draw(st.booleans()),
        "pool_seed": draw(st.none() | st.integers(0, 1000)),
        "mode": draw(st.sampled_from(LOAD_MODES)),
        "chunk_tokens": draw(st.sampled_from([1, 2, 3, 8])),
        "num_ranks": draw(st.sampled_from([1, 2])),
        "drafter": Guesser(random.Random(draw(st.integers(0, 1000)))),
    }


@given(scenario=scenarios(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_guess_changes_an_answer_or_is_kept(scenario: dict[str, Any], data: st.DataObject) -> None:
    engine, device = make_engine(**scenario)
    wanted: dict[str, tuple[list[int], FinishReason]] = {}
    said: dict[bytes, list[list[int]]] = {}
    got: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    for number in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=engine.max_model_len - 1))
        params = SamplingParams(
            max_tokens=data.draw(st.none() | st.integers(1, 20)), temperature=0.0, ignore_eos=data.draw(st.booleans())
        )
        engine.add(f"r{number}", prompt, params, cache_salt=data.draw(st.sampled_from([None, "a"])))
        request = engine._requests[f"r{number}"]
        wanted[request.id] = expected(prompt, params, engine.max_model_len)
        said.setdefault(request.tenant, []).append([*prompt, *wanted[request.id][0]])
        for _ in range(data.draw(st.integers(0, 3))):
            collect(engine.step(), got, ends)
            engine.check_integrity()
            check_kept(engine, device, said)
        if data.draw(st.integers(0, 4)) == 0:
            engine.abort(f"r{data.draw(st.integers(0, number))}")
            engine.check_integrity()
            check_kept(engine, device, said)
    for _ in range(5000):
        if not engine.has_work:
            break
        collect(engine.step(), got, ends)
        engine.check_integrity()
        check_kept(engine, device, said)
    assert not engine.has_work
    assert device.max_rows <= engine.config.max_batched_tokens
    for name, (tokens, reason) in wanted.items():
        if ends[name] is FinishReason.ABORT:
            assert got[name] == tokens[: len(got[name])]
        else:
            assert (got[name], ends[name]) == (tokens, reason)
    assert sorted(scenario["drafter"].forgotten) == sorted(wanted)
    check_nothing_left(engine, device)


def test_several_tokens_come_at_once_and_count_one_by_one() -> None:
    drafter = Prophet()
    engine, device = make_engine(drafter=drafter)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add("a", [1, 2, 3], params)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    tokens, _ = expected([1, 2, 3], params, 64)
    assert [output.token_ids for output in outputs] == [tokens[:1], tokens[1:10], tokens[10:19], tokens[19:]]
    assert [output.finish_reason for output in outputs] == [None, None, None, FinishReason.LENGTH]
    stats = engine.stats()
    assert (stats.num_generated_tokens, stats.num_prompt_tokens, stats.num_steps) == (20, 3, 4)
    assert (drafter.num_drafts, drafter.num_accepted) == (16, 16), "none is drafted beyond max_tokens"
    assert device.num_rows == 3 + 9 + 9 + 1


def first_end(prompt: list[int]) -> int:
    """How many tokens the model says after a prompt until its end token."""
    return len(expected(prompt, SamplingParams(temperature=0.0), 64)[0])


PROMPT = next([n, 1, 2] for n in range(50) if 4 <= first_end([n, 1, 2]) <= 8)
"""Its end token is among the first drafts of a `Prophet`."""


def test_an_end_token_among_drafts_cuts_what_follows() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30)
    engine, device = make_engine(drafter=Prophet(), pool_seed=1)
    assert device.space is not None
    device.space.drop_rate = device.space.far_rate = 0.0
    engine.add("a", PROMPT, params)
    got, ends = run(engine)
    tokens, _ = expected(PROMPT, params, 64)
    assert got["a"] == tokens
    assert tokens[-1] == EOS
    assert ends["a"] is FinishReason.STOP
    check_kept(engine, device, {b"": [[*PROMPT, *tokens]]})
    check_nothing_left(engine, device)


def test_a_stop_token_before_min_tokens_is_no_end() -> None:
    """The device says it anyway, as a model without the ban would: each token is judged by its own place."""
    params = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=first_end(PROMPT))
    engine, _ = make_engine(drafter=Prophet())
    engine.add("a", PROMPT, params)
    got, _ = run(engine)
    assert len(got["a"]) > first_end(PROMPT)
    assert got["a"] == expected(PROMPT, SamplingParams(temperature=0.0, ignore_eos=True), 64)[0][: len(got["a"])]


@pytest.mark.parametrize("drafter", [None, Prophet()])
def test_nobody_is_preempted_for_a_guess(drafter: Prophet | None) -> None:
    """Two requests fill the cache to the last page but two: drafts leave each its next page."""
    engine, _ = make_engine(num_pages=14, max_model_len=12, page_size=1, drafter=drafter)
    for name, max_tokens in (("a", 9), ("b", 5)):
        engine.add(name, [ord(name) % 7, 1, 2], replace(GREEDY, max_tokens=max_tokens))
    got, _ = run(engine)
    assert {name: len(tokens) for name, tokens in got.items()} == {"a": 9, "b": 5}
    assert engine.stats().num_preemptions == 0


def test_those_who_only_decode_are_not_crowded_out_by_guesses() -> None:
    engine, device = make_engine(max_batched_tokens=6, num_pages=64, drafter=Prophet())
    for i in range(4):
        engine.add(f"r{i}", [i], GREEDY)
    while any(len(engine._requests[f"r{i}"].tokens) < 2 for i in range(4)):
        engine.step()
    assert sorted(output.request_id for output in engine.step()) == [f"r{i}" for i in range(4)]
    assert device.max_rows <= 6
    run(engine)


def test_an_abort_while_drafts_are_in_flight_keeps_none_of_them() -> None:
    """With overlap the step is on its way when the abort comes."""
    engine, device = make_engine(drafter=Guesser(random.Random(1)), overlap=True, page_size=1, pool_seed=1)
    assert device.space is not None
    device.space.drop_rate = device.space.far_rate = 0.0
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    num_tried = 0
    for number in range(20):
        prompt = [number, 1, 2]
        engine.add(f"r{number}", prompt, params)
        for _ in range(20):
            engine.step()
            if engine._in_flight is not None and engine._in_flight.step.has_drafts:
                num_tried += 1
                break
        engine.abort(f"r{number}")
        engine.check_integrity()
        run(engine)
    assert num_tried > 10
    said = [[n, 1, 2, *expected([n, 1, 2], params, 64)[0]] for n in range(20)]
    check_kept(engine, device, {b"": said})
    check_nothing_left(engine, device)


def test_rows_of_a_step_with_drafts_are_laid_out_request_by_request() -> None:
    engine, _ = make_engine(drafter=Prophet(), num_pages=64)
    engine.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    engine.add("b", [8, 9], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    engine.step()
    engine.add("c", [1, 2, 3, 4], GREEDY)
    step = engine._scheduler.schedule()
    laid_out = make_step_input(step, page_size=4)
    tokens, _ = expected([5, 6, 7], GREEDY, 64)
    assert laid_out.token_ids.tolist() == [*tokens[:3], 1, 2, 3, 4]
    assert laid_out.positions.tolist() == [3, 4, 5, 0, 1, 2, 3]
    assert laid_out.query_lens.tolist() == [3, 4]
    assert laid_out.sample_rows.tolist() == [0, 1, 2, 6]
    assert [row.num_outputs for row in step.sampled] == [1, 2, 3, 0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_with_drafts_lands_before_the_next_is_chosen(overlap: bool) -> None:
    class Watched(Prophet):
        def propose(self, request: Request, most: int) -> tuple[int, ...]:
            assert request.num_computed == len(request.tokens) - 1, "drafts are still taken for computed"
            return super().propose(request, most)

    engine, _ = make_engine(drafter=Watched(), overlap=overlap)
    engine.add("a", [1, 2, 3], GREEDY)
    got, _ = run(engine)
    assert got["a"] == expected([1, 2, 3], GREEDY, 64)[0]


def test_the_histories_notice_a_guess_that_is_kept() -> None:
    """The check of this module: a page with a wrong token, or a chunk of the pool, does not pass."""
    engine, device = make_engine(pool_seed=1, page_size=2)
    assert isinstance(device.space, HistorySpace)
    engine.add("a", [1, 2, 3, 4, 5], SamplingParams(temperature=0.0, max_tokens=1))
    tokens = [1, 2, 3, 4, 5, *run(engine)[0]["a"]]
    check_kept(engine, device, {b"": [tokens]})
    with pytest.raises(AssertionError, match="that nobody said"):
        check_kept(engine, device, {b"": [[1, 2, 9]]})
    slot = next(slot for slot, history in device.histories.items() if history == (1, 2))
    device.histories[slot] = (1, 9)
    with pytest.raises(AssertionError, match="what was not said"):
        check_kept(engine, device, {b"": [tokens]})


def test_tokens_count_up_to_the_first_that_was_not_drafted() -> None:
    sampled = [4, 5, 6]
    assert accept((), [4]) == [4]
    assert accept((4, 5), sampled) == [4, 5, 6]
    assert accept((4, 9), sampled) == [4, 5]
    assert accept((9, 5), sampled) == [4]
