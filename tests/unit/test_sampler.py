"""The sampler: distributions, truncations, penalties and log-probabilities, and that a draw depends on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine.params import SamplingParams
from headwater.engine.request import Request, SampleRow
from headwater.engine.sampler import Sampled, _uniform, make_sampling_batch, sample, unpack_logprobs
from headwater.errors import RequestError

VOCAB = 40


def request(tokens: list[int] | None = None, num_prompt: int | None = None, seed: int = 0, **params: Any) -> Request:
    tokens = [1, 2, 3] if tokens is None else tokens
    made = Request(
        "r",
        tokens,
        SamplingParams(**params),
        arrival=0,
        max_tokens=100,
        stop_ids=frozenset({5, 6}),
        seed=seed,
        max_pages=1,
    )
    made.num_prompt = len(tokens) if num_prompt is None else num_prompt
    return made


def run(logits: torch.Tensor, *requests: Request) -> Sampled:
    return run_rows(logits, *map(SampleRow, requests))


def run_rows(logits: torch.Tensor, *rows: SampleRow) -> Sampled:
    return sample(logits, make_sampling_batch(rows, logits.shape[-1]))


def draws(logits: torch.Tensor, count: int, **params: Any) -> torch.Tensor:
    """`count` draws from one row of logits, by as many seeds."""
    requests = [request(seed=seed, **params) for seed in range(count)]
    return run(logits.expand(count, -1), *requests).token_ids


def test_greedy_takes_the_best() -> None:
    logits = torch.randn(8, VOCAB)
    requests = [request(temperature=0.0) for _ in range(8)]
    assert run(logits, *requests).token_ids.tolist() == logits.argmax(-1).tolist()


def test_draws_follow_the_softmax() -> None:
    torch.manual_seed(0)
    logits, count, temperature = torch.randn(12) * 2, 40_000, 0.7
    got = draws(logits, count, temperature=temperature).bincount(minlength=12).double()
    wanted = (logits.double() / temperature).softmax(0) * count
    chi_square = float(((got - wanted).square() / wanted).sum())
    assert chi_square < 31.3, f"chi-square {chi_square} with 11 degrees of freedom: p below 0.001"


def test_noise_is_uniform_and_never_zero_or_one() -> None:
    keys = torch.randint(0, 1 << 32, (64, 2))
    noise = _uniform(keys, 4096)
    assert 0.0 < float(noise.min()) < float(noise.max()) < 1.0
    counts = torch.histc(noise, bins=64, min=0, max=1).double()
    wanted = noise.numel() / 64
    assert float(((counts - wanted).square() / wanted).sum()) < 110, "not uniform (63 degrees of freedom)"
    columns = noise - noise.mean(0)
    assert abs(float((columns[:, :-1] * columns[:, 1:]).mean())) < 0.002, "neighbouring tokens are correlated"


def test_noise_of_extreme_keys_stays_inside() -> None:
    top = (1 << 32) - 1
    noise = _uniform(torch.tensor([[0, 0], [top, top], [0, top], [top, 0]]), 100_000)
    assert float(noise.min()) > 0.0
    assert float(noise.max()) < 1.0


@given(seed=st.integers(0, 1 << 40), others=st.integers(0, 5), place=st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_a_draw_depends_on_seed_and_position_alone(seed: int, others: int, place: int) -> None:
    torch.manual_seed(seed % 1000)
    row = torch.randn(VOCAB)
    alone = run(row[None], request(seed=seed, top_k=10, top_p=0.9)).token_ids.tolist()
    batch = [request(seed=i + 1, temperature=0.3 * i) for i in range(others)]
    place = min(place, others)
    batch.insert(place, request(seed=seed, top_k=10, top_p=0.9))
    logits = torch.randn(others + 1, VOCAB)
    logits[place] = row
    assert run(logits, *batch).token_ids[place] == alone[0]


def test_positions_and_seeds_draw_differently() -> None:
    flat = torch.zeros(1, 10_000)
    by_seed = {int(run(flat, request(seed=seed)).token_ids) for seed in range(50)}
    by_position = {int(run(flat, request(tokens=[1] * n, num_prompt=1)).token_ids) for n in range(1, 51)}
    assert len(by_seed) > 45
    assert len(by_position) > 45


@given(k=st.integers(1, VOCAB), seed=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_top_k_keeps_the_k_best(k: int, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(VOCAB)
    kept = set(logits.topk(k).indices.tolist())
    assert set(draws(logits, 300, top_k=k, temperature=3.0).tolist()) <= kept


@given(p=st.floats(0.05, 0.99), seed=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(VOCAB) * 2
    probabilities, order = logits.softmax(0).sort(descending=True)
    size = int((probabilities.cumsum(0) - probabilities < p - 1e-6).sum()) + 1
    assert set(draws(logits, 300, top_p=p).tolist()) <= set(order[:size].tolist())


def test_top_p_of_a_certain_token_keeps_it() -> None:
    logits = torch.full((VOCAB,), -50.0)
    logits[17] = 50.0
    assert set(draws(logits, 100, top_p=0.01, temperature=2.0).tolist()) == {17}


def test_min_p_drops_what_is_too_unlikely() -> None:
    logits = torch.tensor([2.0, 1.9, 0.0, -3.0]).repeat(1)
    assert set(draws(logits, 500, min_p=0.5).tolist()) == {0, 1}


def test_truncation_happens_after_the_temperature() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, -2.0])
    hot = set(draws(logits, 500, temperature=50.0, min_p=0.9).tolist())
    assert hot == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 1e-6])
def test_a_tiny_temperature_takes_the_best_token(temperature: float) -> None:
    logits = torch.randn(VOCAB) * 30
    assert set(draws(logits, 50, temperature=temperature).tolist()) == {int(logits.argmax())}


def test_more_logprobs_than_tokens_gives_all_of_them() -> None:
    batch = make_sampling_batch([SampleRow(request(temperature=0.0, logprobs=20))], 7)
    found = unpack_logprobs(batch, sample(torch.randn(1, 7), batch))
    assert len(found[0].top) == 7


def test_penalties_are_what_they_say() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.25, 0.0]])
    asked = request(
        tokens=[3, 0, 1, 1], num_prompt=1, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25,
        temperature=0.0, logprobs=0,
    )  # fmt: skip
    from headwater.engine.sampler import _penalise

    row = logits[0].clone()
    _penalise(row, SampleRow(asked))
    # repetition: prompt and output; presence and frequency: output alone
    assert row.tolist() == pytest.approx([2.0 / 2 - 0.5 - 0.25, -1.0 * 2 - 0.5 - 0.5, 0.5, 0.25 / 2, 0.0])
    kept = logits.clone()
    assert int(run(logits, asked).token_ids) == 2
    assert torch.equal(logits, kept), "the logits of the model were changed"


def penalised_anew(row: torch.Tensor, asked: Request) -> torch.Tensor:
    """The definition: everything is counted again for each token."""
    params, row = asked.params, row.clone()
    for token in set(asked.tokens):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    said = asked.tokens[asked.num_prompt :]
    for token in set(said):
        row[token] -= params.presence_penalty + params.frequency_penalty * said.count(token)
    return row


@pytest.mark.parametrize("repetition", [1.0, 1.3])
@pytest.mark.parametrize("presence", [0.0, 0.5])
@pytest.mark.parametrize("frequency", [0.0, -0.25])
def test_penalties_of_a_growing_answer_are_those_of_an_answer_counted_anew(
    repetition: float, presence: float, frequency: float
) -> None:
    penalties = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    asked = request(tokens=[3, 0, 3], temperature=0.0, **penalties)
    generator = torch.Generator().manual_seed(5)
    for _ in range(30):
        logits = torch.randn(1, VOCAB, generator=generator)
        token = int(run(logits, asked).token_ids)
        assert token == int(penalised_anew(logits[0], asked).argmax())
        asked.tokens.append(token)


def test_a_penalty_looks_at_each_token_once() -> None:
    class Watched(list[int]):
        num_read = 0

        def __getitem__(self, where: Any) -> Any:
            found = super().__getitem__(where)
            self.num_read += len(found) if isinstance(where, slice) else 1
            return found

        def __iter__(self) -> Any:
            self.num_read += len(self)
            return super().__iter__()

    tokens = Watched([1, 2, 3] * 100)
    asked = request(tokens=tokens, num_prompt=200, repetition_penalty=1.5, presence_penalty=0.5, temperature=0.0)
    for _ in range(50):
        tokens.append(int(run(torch.zeros(1, VOCAB), asked).token_ids))
    assert tokens.num_read < 2 * len(tokens)


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6], logits[0, 9] = 9.0, 8.0, 7.0
    assert int(run(logits, request(temperature=0.0, min_tokens=1)).token_ids) == 9
    late = request(tokens=[1, 2], num_prompt=1, temperature=0.0, min_tokens=1)
    assert int(run(logits, late).token_ids) == 5


def test_logprobs_are_the_models_own() -> None:
    torch.manual_seed(3)
    logits = torch.randn(3, VOCAB)
    requests = [request(temperature=5.0, logprobs=4), request(temperature=0.0), request(temperature=0.0, logprobs=0)]
    batch = make_sampling_batch([SampleRow(asked) for asked in requests], VOCAB)
    sampled = sample(logits, batch)
    found = unpack_logprobs(batch, sampled)
    assert set(found) == {0, 2}
    wanted = logits.log_softmax(-1)
    assert found[0].token_id == int(sampled.token_ids[0])
    assert found[0].logprob == pytest.approx(float(wanted[0, found[0].token_id]))
    assert [token for token, _ in found[0].top] == wanted[0].topk(4).indices.tolist()
    assert [value for _, value in found[0].top] == pytest.approx(wanted[0].topk(4).values.tolist())
    assert found[2].top == []


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"stop": ("",)}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 1 << 70}, "seed"),
        ({"max_tokens": 1 << 70}, "max_tokens"),
        ({"top_k": 1 << 70}, "top_k"),
        ({"stop_token_ids": (-5,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(1000))}, "stop_token_ids"),
    ],
)
def test_bad_parameters_are_named(params: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**params)
    assert caught.value.param == name


@given(
    drafted=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    seed=st.integers(0, 1 << 40),
    temperature=st.sampled_from([0.0, 0.7]),
    top_p=st.sampled_from([1.0, 0.8]),
    penalty=st.sampled_from([1.0, 1.4]),
    frequency=st.sampled_from([0.0, 0.6]),
    min_tokens=st.sampled_from([0, 3]),
)
@settings(max_examples=80, deadline=None)
def test_a_row_after_drafts_is_that_of_a_request_that_said_them(
    drafted: list[int],
    seed: int,
    temperature: float,
    top_p: float,
    penalty: float,
    frequency: float,
    min_tokens: int,
) -> None:
    """Noise, penalties and `min_tokens` go by the place of the row, and nothing of the drafts is remembered."""
    torch.manual_seed(seed % 1000)
    params: dict[str, Any] = {"seed": seed, "temperature": temperature, "top_p": top_p, "min_tokens": min_tokens}
    params |= {"repetition_penalty": penalty, "frequency_penalty": frequency, "logprobs": 0}
    asked = request(tokens=[3, 0, 3, 7], num_prompt=3, **params)
    logits = torch.randn(len(drafted) + 1, VOCAB)
    rows = [SampleRow(asked, tuple(drafted[:n])) for n in range(len(drafted) + 1)]
    for _ in range(2):  # the second time as the first
        got = run_rows(logits, *rows)
        for n, row in enumerate(logits):
            said = request(tokens=[*asked.tokens, *drafted[:n]], num_prompt=3, **params)
            alone = run(row[None], said)
            assert int(got.token_ids[n]) == int(alone.token_ids)
            assert got.logprobs is not None
            assert alone.logprobs is not None
            assert torch.equal(got.logprobs[n], alone.logprobs[0])
