"""The torch kernels, which are the CPU path and every other kernel's oracle, against formulas written out here."""

import math
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: kernels are not checked here")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from headwater.errors import EngineConfigError, InvalidArgumentError  # noqa: E402
from headwater.kernels.activation import silu_and_mul  # noqa: E402
from headwater.kernels.attention import (  # noqa: E402
    ATTENTION_BACKENDS,
    attention_backend_names,
    create_attention_backend,
    register_attention_backend,
)
from headwater.kernels.attention.reference import ReferenceAttention  # noqa: E402
from headwater.kernels.dispatch import describe_dispatch, runs_triton  # noqa: E402
from headwater.kernels.norm import add_rms_norm, rms_norm  # noqa: E402
from headwater.kernels.rope import apply_rope, rope_and_store  # noqa: E402
from headwater.kernels.store import store_kv  # noqa: E402

from kernel_cases import AttentionCase, random_rope_case, random_shape, relative_error  # noqa: E402

seeds = st.integers(0, 2**31)
DTYPES = [torch.float32, torch.float16]


def close(got, expected, dtype):
    return relative_error(got, expected) < (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 80), (3, 4, 16)], ids=str)
def test_rms_norm_is_the_formula_on_strided_rows(shape, dtype):
    x = torch.randn(*shape[:-1], shape[-1] + 3).to(dtype)[..., : shape[-1]]
    before = x.clone()
    weight = torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert close(got, expected, dtype)
    assert torch.equal(x, before)


def test_rms_norm_keeps_float32_sums_in_half_precision():
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # 300² overflows float16
    assert torch.allclose(rms_norm(x, torch.ones(64, dtype=torch.float16), 0.0).float(), torch.ones(1, 64), atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_adds_then_normalises(dtype):
    x, residual = torch.randn(2, 3, 32).to(dtype).unbind(0)
    weight = torch.randn(32).to(dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))
    assert total.data_ptr() not in (x.data_ptr(), residual.data_ptr())


def test_silu_and_mul_takes_the_gate_first():
    gate_up = torch.randn(4, 12, dtype=torch.float64)
    gate, up = gate_up[:, :6], gate_up[:, 6:]
    assert torch.allclose(silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up)


@given(seed=seeds)
@settings(max_examples=15)
def test_rope_turns_each_pair_by_its_angle(seed):
    case = random_rope_case(random.Random(seed))
    width = case.width or case.dim
    half = width // 2
    halves = case.order == "halves"
    first = slice(0, half) if halves else slice(0, width, 2)
    second = slice(half, width) if halves else slice(1, width, 2)
    q, k, v = case.q.double(), case.k.double(), case.v.clone()
    apply_rope(case.q, case.k, case.cos_sin, case.positions, case.order)
    table = case.cos_sin[case.positions].double()
    turn = torch.complex(table[:, :half], table[:, half:]).unsqueeze(1)
    for before, after in ((q, case.q), (k, case.k)):
        turned = torch.complex(before[..., first], before[..., second]) * turn
        assert close(after[..., first], turned.real, torch.float32)
        assert close(after[..., second], turned.imag, torch.float32)
        assert torch.equal(after[..., width:].double(), before[..., width:])
    assert torch.equal(case.v, v)


def test_rope_in_half_precision_rounds_once():
    case = random_rope_case(random.Random(1), dtype=torch.float16)
    wide_q, wide_k = case.q.float(), case.k.float()
    apply_rope(wide_q, wide_k, case.cos_sin, case.positions)
    apply_rope(case.q, case.k, case.cos_sin, case.positions)
    assert torch.equal(case.q, wide_q.half())
    assert torch.equal(case.k, wide_k.half())


@given(seed=seeds)
@settings(max_examples=15)
def test_store_writes_its_slots_and_nothing_else(seed):
    case = random_rope_case(random.Random(seed))
    store_kv(case.k, case.v, case.k_pages, case.v_pages, case.slots)
    for rows, pages in ((case.k, case.k_pages), (case.v, case.v_pages)):
        for row, slot in zip(rows, case.slots.tolist(), strict=True):
            assert torch.equal(pages[slot // case.page_size, slot % case.page_size], row)
        assert int(pages.isnan().logical_not().sum()) == rows.numel()


@given(seed=seeds, norms=st.booleans())
@settings(max_examples=15)
def test_rope_and_store_is_the_composition(seed, norms):
    case, plain = (random_rope_case(random.Random(seed)) for _ in range(2))
    weights = (case.q_norm, case.k_norm, case.eps) if norms else ()
    args = (case.q, case.k, case.v, case.cos_sin, case.positions, case.k_pages, case.v_pages, case.slots)
    rope_and_store(*args, *weights, order=case.order)
    q, k = plain.q, plain.k
    if norms:
        q, k = rms_norm(q, plain.q_norm, plain.eps), rms_norm(k, plain.k_norm, plain.eps)
    apply_rope(q, k, plain.cos_sin, plain.positions, plain.order)
    store_kv(k, plain.v, plain.k_pages, plain.v_pages, plain.slots)
    assert torch.equal(case.q, q)
    for got, expected in ((case.k_pages, plain.k_pages), (case.v_pages, plain.v_pages)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@given(seed=seeds)
@settings(max_examples=20)
def test_reference_attention_is_the_formula(seed):
    case = AttentionCase(random_shape(random.Random(seed), max_requests=2, max_query=4, max_prefix=9))
    got = ReferenceAttention().run(case.q, case.k_pages, case.v_pages, case.batch, case.scale)
    shape, row = case.shape, 0
    for request, (query_len, prefix_len) in enumerate(zip(shape.query_lens, shape.prefix_lens, strict=True)):
        for position in range(prefix_len, prefix_len + query_len):
            for head in range(shape.kv_heads * shape.group):
                weights, values = [], []
                for token in range(position + 1):
                    page = case.batch.page_table[request, token // shape.page_size]
                    where = (page, token % shape.page_size, head // shape.group)
                    weights.append(math.exp(float(case.q[row, head] @ case.k_pages[where]) * case.scale))
                    values.append(case.v_pages[where] * weights[-1])
                assert torch.allclose(got[row, head], torch.stack(values).sum(0) / sum(weights), atol=1e-5)
            row += 1


def test_bad_arguments_are_named():
    case = random_rope_case(random.Random(0))
    rope = (case.q, case.k, case.cos_sin)
    pages = (case.k_pages, case.v_pages)
    bad_calls = [
        lambda: rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5),
        lambda: add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), 1e-5),
        lambda: silu_and_mul(torch.ones(2, 7)),
        lambda: apply_rope(*rope, case.positions.int()),
        lambda: apply_rope(case.q, case.k, case.cos_sin.double(), case.positions),
        lambda: apply_rope(case.q, case.k, case.cos_sin.repeat(1, case.dim), case.positions),
        lambda: apply_rope(*rope, case.positions, "thirds"),
        lambda: store_kv(case.k, case.v, *pages, case.slots.int()),
        lambda: store_kv(case.k, case.v, case.k_pages.half(), case.v_pages, case.slots),
        lambda: rope_and_store(case.q, case.k, case.v, case.cos_sin, case.positions, *pages, case.slots, case.q_norm),
    ]
    for call in bad_calls:
        with pytest.raises(InvalidArgumentError, match=r"^expected .*; got "):
            call()


def test_dispatch_says_why():
    assert not runs_triton(torch.ones(1))
    assert "cpu" in describe_dispatch(torch.ones(1))


def test_unknown_backend_lists_the_known():
    with pytest.raises(EngineConfigError, match=r"unknown attention backend 'flash'.*auto, reference, cpu, triton"):
        create_attention_backend("flash", "cpu")


def test_cpu_backend_refuses_another_device():
    with pytest.raises(EngineConfigError, match="runs on the CPU"):
        create_attention_backend("cpu", "cuda")


def test_triton_backend_refuses_the_cpu_or_says_that_triton_is_missing():
    with pytest.raises(EngineConfigError, match=r"needs a CUDA device|Triton is not installed"):
        create_attention_backend("triton", "cpu")


def test_registered_backend_is_created_by_name_and_the_decorator_returns_it():
    def create(device):
        return ReferenceAttention()

    try:
        assert register_attention_backend("custom")(create) is create
        assert attention_backend_names()[-1] == "custom"
        assert isinstance(create_attention_backend("custom", "cpu"), ReferenceAttention)
        with pytest.raises(EngineConfigError, match="already registered"):
            register_attention_backend("custom")(create)
    finally:
        ATTENTION_BACKENDS.pop("custom", None)
