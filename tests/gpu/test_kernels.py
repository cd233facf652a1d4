"""Triton kernels on a real device: against their references, beyond 2³¹ elements, and inside a CUDA graph."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed: its kernels are not checked here")

from headwater.kernels.activation import silu_and_mul  # noqa: E402
from headwater.kernels.attention import AttentionBatch, create_attention_backend  # noqa: E402
from headwater.kernels.attention.reference import ReferenceAttention  # noqa: E402

import kernel_checks  # noqa: E402
from kernel_cases import AttentionCase, AttentionShape, relative_error, tolerance  # noqa: E402


@pytest.mark.parametrize("check", kernel_checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("draw", range(3), ids=lambda draw: f"draw{draw}")
def test_equals_reference(check, dtype, draw):
    check(random.Random(random.randrange(2**31)), "cuda", dtype)


@pytest.mark.parametrize("prefix", [0, 1000, 9000], ids=lambda prefix: f"prefix{prefix}")
def test_model_sized_attention(prefix):
    shape = AttentionShape((1, 1, 1, 700), (prefix,) * 4, num_decodes=3, kv_heads=8, group=4, dim=128, seed=prefix)
    kernel_checks.check_attention(random.Random(prefix), "cuda", torch.bfloat16, shape=shape)


def test_more_rows_than_a_grid_has_in_its_second_dimension():
    """Eight experts a token make 65,536 rows of a prefill of 8,192 tokens."""
    gate_up = torch.randn(70_000, 64, device="cuda", dtype=torch.bfloat16)
    gate, up = gate_up.float().chunk(2, dim=1)
    assert relative_error(silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up) < tolerance(torch.bfloat16)


def test_offsets_beyond_two_to_the_31():
    page_stride = 2**24
    base = torch.empty(130 * page_stride, device="cuda", dtype=torch.bfloat16)
    k_pages = base.as_strided((130, 16, 2, 64), (page_stride, 128, 64, 1))
    v_pages = base.as_strided((130, 16, 2, 64), (page_stride, 128, 64, 1), storage_offset=2**20)
    table = torch.tensor([[129, 3, 128], [1, 127, 2]], dtype=torch.int32, device="cuda")
    for page in table.flatten().tolist():
        k_pages[page].normal_()
        v_pages[page].normal_()
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 1, 21], dtype=torch.int32, device="cuda"),
        kv_lens=torch.tensor([40, 48], dtype=torch.int32, device="cuda"),
        page_table=table,
        query_lens_cpu=(1, 20),
        kv_lens_cpu=(40, 48),
        num_decodes=1,
        page_size=16,
    )
    q = torch.randn(21, 8, 64, device="cuda", dtype=torch.bfloat16)
    backend = create_attention_backend("auto", "cuda")
    got = backend.run(q, k_pages, v_pages, backend.plan(batch), 0.1)
    assert relative_error(got, ReferenceAttention().run(q, k_pages, v_pages, batch, 0.1)) < tolerance(q.dtype)


def test_captured_decode_is_right_for_every_length_up_to_its_bound():
    num_rows, max_len, page_size, dummy_page = 6, 3000, 16, 0
    shape = AttentionShape((1,) * num_rows, (max_len - 1,) * num_rows, num_decodes=num_rows, dim=128, seed=7)
    case = AttentionCase(shape, device="cuda", dtype=torch.bfloat16)
    full = case.batch
    case.k_pages[dummy_page].normal_()
    case.v_pages[dummy_page].normal_()
    static = AttentionBatch(
        query_starts=full.query_starts,
        kv_lens=torch.ones_like(full.kv_lens),
        page_table=torch.full_like(full.page_table, dummy_page),
        query_lens_cpu=(1,) * num_rows,
        kv_lens_cpu=(max_len,) * num_rows,
        num_decodes=num_rows,
        page_size=page_size,
    )
    backend = create_attention_backend("triton", "cuda")
    plan = backend.plan(static)

    def run():
        return backend.run(case.q, case.k_pages, case.v_pages, plan, case.scale)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    rng = random.Random(3)
    for live in (6, 4, 1):
        lens = [rng.choice((1, 15, 16, 17, 130, 2048, max_len)) for _ in range(live)] + [1] * (num_rows - live)
        static.kv_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        static.page_table.copy_(full.page_table)
        static.page_table[live:] = dummy_page  # padding rows
        out.fill_(float("nan"))
        graph.replay()
        now = AttentionBatch(
            static.query_starts, static.kv_lens, static.page_table, (1,) * num_rows, tuple(lens), num_rows, page_size
        )
        expected = ReferenceAttention().run(case.q, case.k_pages, case.v_pages, now, case.scale)
        assert relative_error(out, expected) < tolerance(out.dtype)
