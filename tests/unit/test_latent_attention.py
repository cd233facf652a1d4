"""Latent attention: the reference against the formula, the CPU's blocks against the reference, and joining parts."""

import math
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: kernels are not checked here")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from headwater.errors import InvalidArgumentError  # noqa: E402
from headwater.kernels.attention import cpu_latent, create_attention_backend  # noqa: E402
from headwater.kernels.attention.latent import merge_parts  # noqa: E402

from kernel_cases import AttentionShape, LatentCase, random_latent_case, relative_error  # noqa: E402

REFERENCE = create_attention_backend("reference", "cpu")
seeds = st.integers(0, 2**31)


def assert_same(got, expected, bound=1e-5):
    (out, lse), (expected_out, expected_lse) = got, expected
    assert relative_error(out, expected_out) < bound
    assert torch.equal(lse == -math.inf, expected_lse == -math.inf)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=max(1e-4, bound))


@given(seed=seeds)
@settings(max_examples=15)
def test_reference_is_the_formula(seed):
    case = random_latent_case(random.Random(seed), max_prefix=9)
    out, lse = case.run(REFERENCE)
    row, page_size = 0, case.shape.page_size
    for request, (query_len, kv_len) in enumerate(zip(case.batch.query_lens_cpu, case.batch.kv_lens_cpu, strict=True)):
        for position in range(kv_len - query_len, kv_len):
            for head in (0, case.shape.group - 1):
                total, values = 0.0, torch.zeros(case.shape.dim, dtype=torch.float64)
                for token in range(position + 1):
                    page = case.batch.page_table[request, token // page_size]
                    latent = case.latent_pages[page, token % page_size, 0].double()
                    rope = case.rope_pages[page, token % page_size, 0].double()
                    score = case.q_latent[row, head].double() @ latent + case.q_rope[row, head].double() @ rope
                    total += math.exp(float(score) * case.scale)
                    values += latent * math.exp(float(score) * case.scale)
                if position < 0:
                    assert lse[row, head] == -math.inf
                    assert not out[row, head].any()
                else:
                    assert torch.allclose(out[row, head].double(), values / total, atol=1e-5)
                    assert math.isclose(float(lse[row, head]), math.log(total), abs_tol=1e-4)
            row += 1


@given(seed=seeds)
@settings(max_examples=40)
def test_cpu_equals_reference(seed):
    case = random_latent_case(random.Random(seed), max_prefix=1500)
    assert_same(case.run(create_attention_backend("cpu", "cpu")), case.run(REFERENCE))


@example(blocks=(3, 7), seed=1)
@given(blocks=st.tuples(st.integers(1, 64), st.integers(1, 40)), seed=seeds)
@settings(max_examples=20)
def test_cpu_chunks_are_the_same_in_blocks_of_any_size(blocks, seed):
    case = random_latent_case(random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_latent, "BLOCK_ROWS", blocks[0])
        patch.setattr(cpu_latent, "BLOCK_TOKENS", blocks[1])
        assert_same(case.run(create_attention_backend("cpu", "cpu")), case.run(REFERENCE))


def test_cpu_in_bfloat16_rounds_only_the_result():
    shape = AttentionShape((1, 1, 9), (700, 3, 40), num_decodes=2, group=4, dim=64)
    case = LatentCase(shape, dtype=torch.bfloat16)
    assert_same(case.run(create_attention_backend("cpu", "cpu")), case.run(REFERENCE), 1e-2)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_nothing_of_any_request_is_zero_and_minus_infinity(name):
    shape = AttentionShape((1, 1, 4), (5, 0, 9), num_decodes=2, group=2, dim=16)
    out, lse = LatentCase(shape, empty=(0, 1, 2)).run(create_attention_backend(name, "cpu"))
    assert not out.any()
    assert bool((lse == -math.inf).all())


@given(seed=seeds, ranks=st.integers(2, 4))
@settings(max_examples=20)
def test_parts_over_disjoint_tokens_merge_to_the_whole(seed, ranks):
    torch.manual_seed(seed)
    q, k = torch.randn(3, 2, 8), torch.randn(7, 8)
    owner = torch.randint(0, ranks, (7,))
    scores = torch.einsum("qhd,kd->qhk", q, k)
    parts, lses = [], []
    for rank in range(ranks):
        mine = owner == rank
        lses.append(scores[..., mine].logsumexp(-1))
        parts.append(scores[..., mine].softmax(-1) @ k[mine])
    out, lse = merge_parts(torch.stack(parts), torch.stack(lses))
    assert torch.allclose(out, scores.softmax(-1) @ k, atol=1e-5)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)


def test_merging_nothing_with_nothing_is_nothing_and_not_nan():
    out, lse = merge_parts(torch.zeros(2, 1, 1, 4), torch.full((2, 1, 1), -math.inf))
    assert not out.any()
    assert float(lse) == -math.inf


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_bad_arguments_are_named(name):
    case = LatentCase(AttentionShape((1,), (5,), num_decodes=1, group=2, dim=16))
    backend = create_attention_backend(name, "cpu")
    plan = backend.plan(case.batch)
    q, pages = (case.q_latent, case.q_rope), (case.latent_pages, case.rope_pages)
    for args in (
        (q[0], q[1][..., 1:], *pages, plan, 0.1),
        (*q, pages[0].half(), pages[1], plan, 0.1),
        (*q, *pages, plan, -1.0),
        (*q, *pages, plan, 0.1, torch.zeros(1, 3)),
        (q[0][:0], q[1][:0], *pages, plan, 0.1),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^expected .*; got "):
            backend.run_latent(*args)
