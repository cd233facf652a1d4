"""The step loop against a device that checks what it is told: every page a row reads must hold its own prefix."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.connector.config import LOAD_MODES
from headwater.engine.batch import StepInput
from headwater.engine.engine import LOAD_WAIT_S, Engine
from headwater.engine.params import FinishReason, SamplingParams
from headwater.errors import RequestError

from histories import EOS, ROOT, VOCAB, HistoryFetch
from history_engine import GREEDY, HistoryDevice, check_nothing_left, collect, expected, make_engine, run


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
    }


@given(scenario=scenarios(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_schedule_gives_the_same_tokens(scenario: dict[str, Any], data: st.DataObject) -> None:
    """Chunks, pages, preemption, sharing, overlap and aborts change nothing but the order of the work."""
    engine, device = make_engine(**scenario)
    wanted: dict[str, tuple[list[int], FinishReason]] = {}
    got: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    for number in range(data.draw(st.integers(1, 10))):
        prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=engine.max_model_len - 1))
        params = SamplingParams(
            max_tokens=data.draw(st.none() | st.integers(1, 20)), temperature=0.0, ignore_eos=data.draw(st.booleans())
        )
        engine.add(f"r{number}", prompt, params, cache_salt=data.draw(st.sampled_from([None, "a"])))
        wanted[f"r{number}"] = expected(prompt, params, engine.max_model_len)
        for _ in range(data.draw(st.integers(0, 3))):
            collect(engine.step(), got, ends)
            engine.check_integrity()
        if data.draw(st.integers(0, 4)) == 0:
            engine.abort(f"r{data.draw(st.integers(0, number))}")
            engine.check_integrity()
    for _ in range(5000):
        if not engine.has_work:
            break
        collect(engine.step(), got, ends)
        engine.check_integrity()
    assert not engine.has_work
    for name, (tokens, reason) in wanted.items():
        if ends[name] is FinishReason.ABORT:
            assert got[name] == tokens[: len(got[name])]
        else:
            assert (got[name], ends[name]) == (tokens, reason)
    check_nothing_left(engine, device)


def test_a_cache_too_small_preempts_and_goes_on() -> None:
    engine, _ = make_engine(num_pages=12, max_model_len=40, max_num_seqs=8)
    for i in range(6):
        engine.add(f"r{i}", [i, 1, 2, 3, i, 5], GREEDY)
    got, _ = run(engine)
    assert engine.stats().num_preemptions > 0
    assert all(got[f"r{i}"] == expected([i, 1, 2, 3, i, 5], GREEDY, 40)[0] for i in range(6))


def fill(device: HistoryDevice, prompt: list[int]) -> None:
    """The pool has a prompt, all of it in its first tier."""
    assert device.space is not None
    for chunk in device.space.keys(prompt).chunks():
        device.space.kept[chunk.key] = tuple(prompt[: chunk.first_token + chunk.num_tokens])


def test_an_abort_while_kv_is_on_its_way_keeps_the_pages_until_it_has_come() -> None:
    engine, device = make_engine(pool_seed=4, prefix_cache="naive")
    prompt = list(range(20))
    fill(device, prompt)
    device.is_waiting = True
    engine.add("a", prompt, GREEDY)
    engine.step()
    assert engine._scheduler.running[0].is_loading
    held = engine.stats().num_pages - engine.stats().num_pages_free
    engine.abort("a")
    engine.step()
    engine.check_integrity()
    assert engine.stats().num_pages - engine.stats().num_pages_free == held
    assert engine.has_work
    device.is_waiting = False
    run(engine)
    assert engine.stats().num_pages_free == engine.stats().num_pages
    check_nothing_left(engine, device)


@pytest.mark.parametrize("mode", ["auto", "layerwise", "blocking"])
def test_a_step_whose_kv_did_not_verify_is_taken_back(mode: str) -> None:
    engine, device = make_engine(pool_seed=1, prefix_cache="radix", mode=mode)
    prompt = list(range(20))
    for i in range(12):
        fill(device, prompt)
        engine.add(f"r{i}", prompt, SamplingParams(max_tokens=3, ignore_eos=True))
        got, _ = run(engine)
        assert got[f"r{i}"] == expected(prompt, SamplingParams(max_tokens=3, ignore_eos=True), 64)[0]
        engine.check_integrity()
        engine.reset_prefix_cache()
    assert 0 < device.num_failed < device.num_loads
    assert engine.stats().num_prompt_tokens == 12 * len(prompt)


@pytest.mark.parametrize("mode", ["async", "layerwise", "blocking"])
def test_a_step_that_fails_is_computed_and_saved_when_it_is_repeated(mode: str) -> None:
    """Its loads go on, and nothing that it was to save is taken for saved."""
    engine, device = make_engine(pool_seed=3, prefix_cache="naive", mode=mode, chunk_tokens=2)
    fill(device, list(range(20)))
    prompts = {"a": [*range(20), 1, 1], "b": [5] * 9}
    for name, prompt in prompts.items():
        engine.add(name, prompt, GREEDY)
    device.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check_integrity()
    got, _ = run(engine)
    assert got == {name: expected(prompt, GREEDY, 64)[0] for name, prompt in prompts.items()}
    assert device.num_during
    check_nothing_left(engine, device)


def test_a_request_whose_kv_is_far_away_lets_others_go_first() -> None:
    engine, device = make_engine(pool_seed=5, prefix_cache="naive")
    space, prompt = device.space, list(range(20))
    assert space is not None
    fill(device, prompt)
    space.far = set(space.kept) - {ROOT}
    fetch = HistoryFetch(space, space.keys(prompt).chunks())
    fetch._num_questions = 1 << 30
    space.fetch = lambda chunks, deadline_s: (space.fetches.append(fetch), fetch)[1]  # type: ignore[method-assign]
    engine.add("far", prompt, GREEDY)
    engine.add("near", [9, 8, 7], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    got: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    while "near" not in ends:
        collect(engine.step(), got, ends)
        assert not device.num_loads
    assert "far" not in got
    assert engine.stats().num_pages_free == engine.stats().num_pages, "a fetch holds no pages"
    begin = time.monotonic()
    num_steps = 0
    while time.monotonic() < begin + 3 * LOAD_WAIT_S:
        assert engine.step() == []
        num_steps += 1
    assert num_steps <= 4, "an engine with nothing to do spins"
    fetch._num_questions = 1
    got, _ = run(engine)
    assert got["far"] == expected(prompt, GREEDY, 64)[0]
    assert device.num_loads == 1
    check_nothing_left(engine, device)


def test_an_abort_while_kv_is_being_fetched_leaves_nothing_behind() -> None:
    engine, device = make_engine(pool_seed=5, prefix_cache="naive")
    space, prompt = device.space, list(range(20))
    assert space is not None
    fill(device, prompt)
    space.far = set(space.kept) - {ROOT}
    fetch = HistoryFetch(space, space.keys(prompt).chunks())
    fetch._num_questions = 1 << 30
    space.fetch = lambda chunks, deadline_s: (space.fetches.append(fetch), fetch)[1]  # type: ignore[method-assign]
    engine.add("far", prompt, GREEDY)
    engine.step()
    assert space.fetches
    engine.abort("far")
    run(engine)
    check_nothing_left(engine, device)


def test_two_identical_prompts_in_one_step_share_pages_afterwards() -> None:
    """The second one's duplicate pages are freed only after its row points at the first one's."""
    engine, _ = make_engine()
    for name in ("a", "b"):
        engine.add(name, [1, 2, 3, 4, 5, 6, 7, 8, 9], GREEDY)
    engine.step()
    engine.check_integrity()
    first, second = engine._scheduler.running
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    got, _ = run(engine)
    assert got["a"] == got["b"]


def test_a_second_prompt_computes_only_what_is_new() -> None:
    engine, device = make_engine()
    prompt = list(range(20, 41))
    engine.add("a", prompt, SamplingParams(max_tokens=1, temperature=0.0))
    run(engine)
    before = device.num_rows
    engine.add("b", prompt, SamplingParams(max_tokens=1, temperature=0.0))
    outputs = engine.step()
    assert outputs[0].num_cached_tokens == 20
    assert outputs[0].num_prompt_tokens == 21
    assert device.num_rows - before == 1


def test_an_abort_while_the_step_is_in_flight_frees_each_page_once() -> None:
    engine, _ = make_engine(overlap=True)
    engine.add("a", list(range(9)), GREEDY)
    engine.step()
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.check_integrity()
    _, ends = run(engine)
    assert ends == {"a": FinishReason.ABORT}
    stats = engine.stats()
    assert stats.num_pages_free + stats.num_pages_evictable == stats.num_pages


def test_prompts_that_fill_the_last_page_are_admitted_in_pages() -> None:
    """Two prompts of 17 tokens and pages of 16: three pages are too few for both, and nothing breaks."""
    engine, _ = make_engine(page_size=16, num_pages=3, max_model_len=48)
    for name in ("a", "b"):
        engine.add(name, [ord(name) % 7] * 17, GREEDY)
    got, _ = run(engine)
    assert {len(tokens) for tokens in got.values()} == {12}


def test_long_prompts_do_not_hold_up_decoding() -> None:
    engine, device = make_engine(num_pages=64, max_model_len=200, max_batched_tokens=8)
    engine.add("short", [1, 2, 3], SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))
    engine.step()
    engine.add("long", list(range(20)) * 5, SamplingParams(max_tokens=1, temperature=0.0))
    for _ in range(5):
        assert [output.request_id for output in engine.step()] == ["short"]
    assert device.max_rows <= 8
    run(engine)


def test_equal_inputs_give_equal_schedules() -> None:
    def trace() -> list[list[tuple[str, int]]]:
        engine, _ = make_engine(num_pages=12, max_model_len=40, max_batched_tokens=9)
        for i in range(8):
            engine.add(f"r{i}", [i % 3] * (5 + i), GREEDY)
        steps = []
        while engine.has_work:
            step = engine._scheduler.schedule
            outputs = engine.step()
            steps.append([(o.request_id, o.token_ids[0]) for o in outputs])
            assert step is not None
        return steps

    assert trace() == trace()


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "empty"), ([1] * 64, "context holds 64"), ([VOCAB], "token ids"), ([-1], "token ids")]
)
def test_what_can_never_be_served_is_refused(prompt: list[int], message: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add("a", prompt, GREEDY)
    assert not engine.has_work


@pytest.mark.parametrize("token", [VOCAB, 1 << 30])
def test_a_stop_token_that_the_model_does_not_have_is_refused(token: int) -> None:
    """Banned before `min_tokens`, it would be an index outside the logits, and the end of the engine."""
    engine, _ = make_engine()
    with pytest.raises(RequestError, match="stop_token_ids") as caught:
        engine.add("a", [1], SamplingParams(stop_token_ids=(token,), min_tokens=2, max_tokens=3))
    assert caught.value.param == "stop_token_ids"
    assert not engine.has_work


def test_an_id_in_use_is_refused() -> None:
    engine, _ = make_engine()
    engine.add("a", [1], GREEDY)
    with pytest.raises(RequestError, match="in use"):
        engine.add("a", [2], GREEDY)


def test_min_tokens_keeps_stop_tokens_banned() -> None:
    engine, _ = make_engine()
    engine.add("a", [1, 2], SamplingParams(min_tokens=2, max_tokens=4, temperature=0.0))
    from headwater.engine.sampler import make_sampling_batch

    step = engine._scheduler.schedule()
    assert make_sampling_batch(step.sampled, VOCAB).banned == ((0, (EOS,)),)


def test_step_inputs_pad_with_the_dummy_page() -> None:
    one = np.array([3], dtype=np.int64)
    small = np.array([1], dtype=np.int32)
    step = StepInput(one, one, one, small, small, np.zeros((1, 2), np.int32), np.array([0]))
    padded = step.padded(4, dummy_page=9, page_size=4)
    assert padded.slots.tolist() == [3, 36, 36, 36]
    assert padded.kv_lens.tolist() == [1, 1, 1, 1]
    assert padded.page_table[1:].tolist() == [[9, 9]] * 3
    assert step.padded(1, 9, 4) is step


def ask(engine: Engine, name: str, prompt: list[int], cache_salt: str | None) -> int:
    """Prompt tokens that were found."""
    engine.add(name, prompt, SamplingParams(max_tokens=1, temperature=0.0), cache_salt=cache_salt)
    found = [output.num_cached_tokens for _ in range(100) if engine.has_work for output in engine.step()]
    assert not engine.has_work
    return found[-1]


SALTS = [None, "a", "b", "x" * 2000, "y" * 2000]


def test_nobody_learns_from_the_prefix_cache_what_others_asked_with_another_salt() -> None:
    engine, device = make_engine(num_pages=64)
    prompt = list(range(17))
    assert [ask(engine, f"first {i}", prompt, salt) for i, salt in enumerate(SALTS)] == [0] * len(SALTS)
    assert [ask(engine, f"again {i}", prompt, salt) for i, salt in enumerate(SALTS)] == [16] * len(SALTS)
    engine.check_integrity()
    check_nothing_left(engine, device)


def test_nobody_learns_from_the_pool_what_others_asked_with_another_salt() -> None:
    engine, device = make_engine(num_pages=64, pool_seed=0, prefix_cache="naive")
    assert device.space is not None
    device.space.drop_rate = device.space.far_rate = device.space.fail_rate = 0.0
    prompt = list(range(17))
    assert [ask(engine, f"first {i}", prompt, salt) for i, salt in enumerate(SALTS)] == [0] * len(SALTS)
    assert [ask(engine, f"again {i}", prompt, salt) for i, salt in enumerate(SALTS)] == [16] * len(SALTS)
    check_nothing_left(engine, device)
