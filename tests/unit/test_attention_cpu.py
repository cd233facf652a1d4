"""The CPU attention backend against the reference: ragged batches, any page size and layout, unused memory poisoned."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from headwater.errors import InvalidArgumentError  # noqa: E402
from headwater.kernels.attention import create_attention_backend  # noqa: E402
from headwater.kernels.attention.base import AttentionBatch  # noqa: E402
from headwater.kernels.attention.cpu import CpuAttention  # noqa: E402
from headwater.kernels.attention.cpu_plan import GROUP_TOKENS, UNIT_TOKENS, plan_step  # noqa: E402
from headwater.kernels.attention.reference import ReferenceAttention  # noqa: E402

BACKEND = CpuAttention()
"""One for all tests, so that its scratch memory holds what the test before left there."""

LAYOUTS = {
    "layer-first": lambda pages, size, heads, dim: torch.full((2, pages, size, heads, dim), float("nan"))[1],
    "page-first": lambda pages, size, heads, dim: torch.full((pages, 6, size, heads, dim), float("nan"))[:, 3],
    "head-major": lambda pages, size, heads, dim: torch.full((pages, heads, size, dim), float("nan")).transpose(1, 2),
    "odd gaps": lambda pages, size, heads, dim: torch.full((pages, size * heads * dim + 5), float("nan"))[
        :, 5:
    ].unflatten(1, (size, heads, dim)),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors this small lose by being divided, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_batch(decodes, prefills, page_size, num_pages, seed):
    """Requests of (queries, KV) tokens in random pages; the columns beyond the last page hold other valid pages."""
    requests = [(1, kv) for kv in decodes] + list(prefills)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    width = max(-(-kv // page_size) for _, kv in requests) + 1
    table, used = [], 0
    for _, kv in requests:
        count = -(-kv // page_size)
        table.append(torch.cat((order[used : used + count], order[:1].expand(width - count))))
        used += count
    query_lens, kv_lens = zip(*requests, strict=True)
    return AttentionBatch(
        query_starts=torch.tensor([0, *query_lens]).cumsum(0).int(),
        kv_lens=torch.tensor(kv_lens).int(),
        page_table=torch.stack(table).int(),
        query_lens_cpu=query_lens,
        kv_lens_cpu=kv_lens,
        num_decodes=len(decodes),
        page_size=page_size,
    )


def fill(pages, batch, generator):
    """Random KV where the batch has tokens; NaN stays everywhere else."""
    for row, kv_len in zip(batch.page_table.long(), batch.kv_lens_cpu, strict=True):
        at = torch.arange(kv_len)
        shape = (kv_len, *pages.shape[2:])
        pages[row[at // batch.page_size], at % batch.page_size] = torch.randn(shape, generator=generator)
    return pages


def problem(decodes, prefills, *, page_size=16, layout="layer-first", kv_heads=3, share=3, dim=64, seed=0):
    """Queries, pages and the batch; q is a slice of a wider tensor, as it is behind a fused projection."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(-(-kv // page_size) for kv in [*decodes, *(kv for _, kv in prefills)]) + 2
    batch = make_batch(decodes, prefills, page_size, num_pages, seed)
    k, v = (fill(LAYOUTS[layout](num_pages, page_size, kv_heads, dim), batch, generator) for _ in range(2))
    rows, heads = sum(batch.query_lens_cpu), kv_heads * share
    q = torch.randn(rows, heads + kv_heads, dim, generator=generator)[:, :heads]
    return q, k, v, batch


def attend(backend, q, k, v, batch):
    return backend.run(q, k, v, backend.plan(batch), q.shape[2] ** -0.5)


def assert_equals_reference(q, k, v, batch, tolerance=1e-5):
    got = attend(BACKEND, q, k, v, batch)
    assert got.is_contiguous()
    assert got.shape == q.shape
    assert got.dtype == q.dtype
    torch.testing.assert_close(got, attend(ReferenceAttention(), q, k, v, batch), atol=tolerance, rtol=tolerance)


@st.composite
def problems(draw):
    decodes = draw(st.lists(st.integers(1, 90) | st.integers(500, 1100), max_size=5))
    prefills = draw(
        st.lists(
            st.tuples(st.integers(2, 70), st.integers(0, 150)).map(lambda x: (x[0], sum(x))),
            min_size=0 if decodes else 1,
            max_size=3,
        )
    )
    return problem(
        decodes,
        prefills,
        page_size=draw(st.sampled_from((1, 3, 16, 48))),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        kv_heads=draw(st.integers(1, 3)),
        share=draw(st.integers(1, 8)),
        dim=draw(st.sampled_from((16, 40, 64, 128))),
        seed=draw(st.integers(0, 1000)),
    )


@given(problems())
@settings(max_examples=30, deadline=None)
def test_equals_the_reference(case):
    assert_equals_reference(*case)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_mixed_batch_in_every_layout(layout):
    assert_equals_reference(*problem([1, 33, 700, 64, 64, 1200], [(17, 17), (5, 900), (40, 41)], layout=layout))


@pytest.mark.parametrize("kv_len", [1, UNIT_TOKENS, UNIT_TOKENS + 1, GROUP_TOKENS, GROUP_TOKENS + 1, 5000])
def test_one_decode_at_the_edges_of_units_and_groups(kv_len):
    assert_equals_reference(*problem([kv_len], []))


def test_scores_too_large_for_exp_are_merged_without_overflow():
    q, k, v, batch = problem([1200, 40], [(20, 600)])
    assert_equals_reference(q * 60, k, v, batch, tolerance=1e-3)


def test_same_inputs_same_bits():
    q, k, v, batch = problem([900, 64, 700, 65], [(50, 300)])
    assert torch.equal(attend(CpuAttention(), q, k, v, batch), attend(BACKEND, q, k, v, batch))


def test_a_request_is_divided_alike_in_every_batch():
    alone = plan_step(make_batch([1111], [], 16, 200, 0)).decodes
    among = plan_step(make_batch([30, 1111, 700], [(9, 20)], 16, 200, 0)).decodes
    assert len(alone.request_of) == 3 == among.request_of.tolist().count(1)


def test_groups_stay_small_and_padding_low():
    lengths = list(range(64, 1200, 47))
    plan = plan_step(make_batch(lengths, [], 16, 2000, 0)).decodes
    gathered = [len(group.tokens.pages) for group in plan.groups]
    assert max(gathered) <= GROUP_TOKENS
    assert sum(gathered) <= 1.1 * sum(lengths) + 256 * len(gathered)
    assert sum(gathered) >= sum(lengths)


def test_no_matrix_of_scores_for_a_long_prompt():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
            return result

    length = 1024
    q, k, v, batch = problem([], [(length, length + 512)], kv_heads=1, share=2, dim=16)
    with Largest() as largest:
        attend(BACKEND, q, k, v, batch)
    assert 0 < largest.numel < length * length / 4


@pytest.mark.parametrize("v_dim", [24, 96])
def test_values_of_another_width_than_keys(v_dim):
    q, k, v, batch = problem([20, 700], [(40, 90)])
    v = fill(torch.full((*v.shape[:3], v_dim), float("nan")), batch, torch.Generator().manual_seed(3))
    found = attend(BACKEND, q, k, v, batch)
    assert found.shape == (*q.shape[:2], v_dim)
    torch.testing.assert_close(found, attend(ReferenceAttention(), q, k, v, batch), rtol=0, atol=2e-6)


def test_the_registry_creates_it():
    assert isinstance(create_attention_backend("cpu", "cpu"), CpuAttention)
    assert isinstance(create_attention_backend("auto", "cpu"), CpuAttention)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[:-1], k, v), "as planned"),
        (lambda q, k, v: (q[:, :-1], k, v), "multiple of 3 heads"),
        (lambda q, k, v: (q, k, v[:-1]), "as many pages of K as of V"),
        (lambda q, k, v: (q[..., :32], k, v), "queries as wide as K"),
        (lambda q, k, v: (q, k, v.transpose(2, 3).contiguous().transpose(2, 3)), "contiguous"),
        (lambda q, k, v: (q.to("meta"), k, v), "main memory"),
    ],
)
def test_bad_tensors_are_refused(change, message):
    q, k, v, batch = problem([20, 30], [])
    with pytest.raises(InvalidArgumentError, match=message):
        attend(BACKEND, *change(q, k, v), batch)
