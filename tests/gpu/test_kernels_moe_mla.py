"""Experts and latent attention on a real device: against their references, at models' sizes, and in CUDA graphs."""

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed: its kernels are not checked here")

import moe_cases  # noqa: E402
from headwater.kernels.attention.latent import merge_parts  # noqa: E402
from headwater.kernels.attention.reference import ReferenceAttention  # noqa: E402
from headwater.kernels.attention.triton_backend import TritonAttention  # noqa: E402
from headwater.kernels.moe_reference import run_experts_grouped, run_experts_torch  # noqa: E402
from headwater.kernels.moe_triton import run_experts_triton  # noqa: E402

import kernel_checks  # noqa: E402
from kernel_cases import AttentionShape, LatentCase, relative_error, tolerance  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("check", moe_cases.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("draw", range(3), ids=lambda draw: f"draw{draw}")
def test_experts_equal_reference(check, dtype, draw):
    check(random.Random(random.randrange(2**31)), "cuda", dtype)


@pytest.mark.parametrize("choice", moe_cases.CHOICES)
@pytest.mark.parametrize("rows", [1, 4, 64, 1000, 8192])
def test_model_sized_experts(rows, choice):
    case = moe_cases.ExpertsCase(rows, 128, 8, 2048, 768, choice, rows, device="cuda", dtype=torch.bfloat16)
    got = run_experts_triton(*case.args)
    if choice == "all-foreign":
        assert not got.any()
    else:
        assert relative_error(got, run_experts_torch(*case.args)) < tolerance(torch.bfloat16)
    assert torch.equal(run_experts_triton(*case.args), got)


def test_torchs_grouped_product_gives_the_same():
    case = moe_cases.ExpertsCase(64, 64, 6, 2048, 1408, "skewed", 3, device="cuda", dtype=torch.bfloat16)
    got = run_experts_triton(*case.args)
    assert relative_error(got, run_experts_grouped(*case.args)) < tolerance(torch.bfloat16)


def captured(run):
    """(graph, result) of `run`, after a run that compiles."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("rows", [2, 64])
def test_captured_experts_are_right_for_every_choice(rows):
    cases = [
        moe_cases.ExpertsCase(rows, 32, 4, 512, 256, choice, seed, device="cuda", dtype=torch.bfloat16)
        for seed, choice in enumerate(("uniform", "one", "skewed", "foreign"))
    ]
    static = cases[0]
    gate_up, down = (weights.clone().normal_() * 0.05 for weights in (static.gate_up, static.down))
    graph, out = captured(lambda: run_experts_triton(static.x, static.ids, static.weights, gate_up, down))
    for case in cases:
        static.x.copy_(case.x)
        static.ids.copy_(case.ids)
        static.weights.copy_(case.weights)
        out.fill_(float("nan"))
        graph.replay()
        expected = run_experts_torch(static.x, static.ids, static.weights, gate_up, down)
        assert relative_error(out, expected) < tolerance(torch.bfloat16), case.choice


@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("prefix", [0, 1000, 9000], ids=lambda prefix: f"prefix{prefix}")
def test_model_sized_latent_attention(prefix, heads):
    shape = AttentionShape((1, 1, 1, 70), (prefix,) * 4, num_decodes=3, group=heads, dim=512, seed=prefix)
    case = LatentCase(shape, device="cuda", dtype=torch.bfloat16, rope=64, empty=(1,))
    kernel_checks.check_latent(random.Random(prefix), "cuda", torch.bfloat16, case=case)


def test_latents_in_one_row_of_vllms_layout():
    shape = AttentionShape((1, 1), (300, 40), num_decodes=2, group=16, dim=512, seed=5)
    case = LatentCase(shape, device="cuda", dtype=torch.bfloat16, rope=64)
    expected, _ = case.run(ReferenceAttention())
    fused = torch.cat((case.latent_pages, case.rope_pages), dim=-1)
    case.latent_pages, case.rope_pages = fused.split((512, 64), dim=-1)
    got, _ = case.run(TritonAttention("cuda"))
    assert relative_error(got, expected) < tolerance(torch.bfloat16)


def test_ranks_that_hold_parts_of_the_tokens_merge_to_the_whole():
    shape = AttentionShape((1,) * 4, (500, 30, 0, 1999), num_decodes=4, group=16, dim=512, page_size=16, seed=2)
    case = LatentCase(shape, device="cuda", dtype=torch.bfloat16, rope=64)
    expected, expected_lse = case.run(ReferenceAttention())
    backend, batch = TritonAttention("cuda"), case.batch
    half = [min(n // 2 // 16 * 16, n) for n in batch.kv_lens_cpu]  # the first rank's whole pages; none of some
    lens = [half, [n - first for n, first in zip(batch.kv_lens_cpu, half, strict=True)]]
    outs, lses = [], []
    for rank, held in enumerate(lens):
        table = batch.page_table.clone()
        if rank:
            for request, first in enumerate(half):
                table[request] = table[request].roll(-(first // 16))
        kv_lens = torch.tensor(held, dtype=torch.int32, device="cuda")
        case.batch = replace(batch, page_table=table, kv_lens=kv_lens, kv_lens_cpu=tuple(held))
        out, lse = case.run(backend)
        outs.append(out.float())
        lses.append(lse)
    out, lse = merge_parts(torch.stack(outs), torch.stack(lses))
    assert relative_error(out, expected) < tolerance(torch.bfloat16)
    kernel_checks.assert_same_lse(lse, expected_lse, torch.bfloat16)


def test_captured_latent_decode_is_right_for_every_length_up_to_its_bound():
    num_rows, max_len, dummy_page = 6, 3000, 0
    shape = AttentionShape((1,) * num_rows, (max_len - 1,) * num_rows, num_decodes=num_rows, group=16, dim=512, seed=7)
    case = LatentCase(shape, device="cuda", dtype=torch.bfloat16, rope=64)
    case.latent_pages[dummy_page].normal_()
    case.rope_pages[dummy_page].normal_()
    full = case.batch
    static = replace(full, kv_lens=torch.ones_like(full.kv_lens), page_table=torch.zeros_like(full.page_table))
    backend = TritonAttention("cuda")
    plan = backend.plan(static)
    args = (case.q_latent, case.q_rope, case.latent_pages, case.rope_pages)
    lse = torch.empty(num_rows, 16, device="cuda")
    graph, out = captured(lambda: backend.run_latent(*args, plan, case.scale, lse))
    rng = random.Random(3)
    for live in (6, 4, 1):
        lens = [rng.choice((0, 1, 15, 16, 17, 130, 2048, max_len)) for _ in range(live)] + [1] * (num_rows - live)
        static.kv_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        static.page_table.copy_(full.page_table)
        static.page_table[live:] = dummy_page  # padding rows
        out.fill_(float("nan"))
        graph.replay()
        case.batch = replace(static, kv_lens_cpu=tuple(lens))
        expected, expected_lse = case.run(ReferenceAttention())
        assert relative_error(out, expected) < tolerance(out.dtype)
        kernel_checks.assert_same_lse(lse, expected_lse, out.dtype)
