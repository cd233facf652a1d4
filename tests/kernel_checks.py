"""Checks that Triton kernels equal their torch references on fresh random inputs, on whatever device runs Triton.

Called by the tests in the interpreter (CPU) and on a GPU; each check draws from the random source that it is given.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from headwater.kernels.activation import silu_and_mul_torch
from headwater.kernels.activation_triton import silu_and_mul_triton
from headwater.kernels.attention.reference import ReferenceAttention
from headwater.kernels.attention.triton_backend import TritonAttention
from headwater.kernels.attention.triton_decode import decode_attention, decode_config
from headwater.kernels.attention.triton_latent import latent_attention, latent_config, tile_queries
from headwater.kernels.attention.triton_prefill import prefill_attention, prefill_config
from headwater.kernels.attention.triton_tiles import TileConfig
from headwater.kernels.norm import add_rms_norm_torch, rms_norm_torch
from headwater.kernels.norm_triton import add_rms_norm_triton, rms_norm_triton
from headwater.kernels.rope import apply_rope_torch, rope_and_store_torch
from headwater.kernels.rope_triton import apply_rope_triton, rope_and_store_triton
from headwater.kernels.store import store_kv_torch
from headwater.kernels.store_triton import store_kv_triton

from kernel_cases import (
    AttentionCase,
    AttentionShape,
    LatentCase,
    RopeCase,
    empty_pages,
    random_latent_case,
    random_rope_case,
    random_shape,
    relative_error,
    tolerance,
)


def check_norms(rng: random.Random, device: str, dtype: torch.dtype) -> None:
    """`rms_norm` and `add_rms_norm`, on strided rows."""
    rows, dim = rng.choice((1, 5)), rng.choice((8, 80, 128, 1000, 4096))
    x, residual = torch.randn(2, rows, dim + 16, device=device).to(dtype)[:, :, :dim].unbind(0)
    weight = torch.randn(dim, device=device).to(dtype)
    assert relative_error(rms_norm_triton(x, weight, 1e-5), rms_norm_torch(x, weight, 1e-5)) < tolerance(dtype)
    normed, total = add_rms_norm_triton(x, residual, weight, 1e-5)
    expected, expected_total = add_rms_norm_torch(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert relative_error(normed, expected) < tolerance(dtype)


def check_activation(rng: random.Random, device: str, dtype: torch.dtype) -> None:
    """`silu_and_mul`, with widths around the block size."""
    gate_up = torch.randn(rng.choice((1, 3)), 2 * rng.choice((1, 24, 1023, 1024, 1500)), device=device).to(dtype) * 4
    assert relative_error(silu_and_mul_triton(gate_up), silu_and_mul_torch(gate_up)) < tolerance(dtype)


def check_store(rng: random.Random, device: str, dtype: torch.dtype) -> None:
    """`store_kv` is a copy: equal bits, and nothing else written."""
    case = random_rope_case(rng, device=device, dtype=dtype)
    v_dim = rng.choice((case.dim, 24))
    v = torch.randn(case.rows, case.kv_heads, v_dim, device=device).to(dtype)
    planes = []
    for store in (store_kv_torch, store_kv_triton):
        shape = (case.k_pages.shape[0], case.page_size, case.kv_heads)
        k_pages, v_pages = (
            empty_pages(*shape, d, layout=case.layout, device=device, dtype=dtype) for d in (case.dim, v_dim)
        )
        store(case.k, v, k_pages, v_pages, case.slots)
        planes.append((k_pages, v_pages))
    for expected, got in zip(*planes, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def check_rope(rng: random.Random, device: str, dtype: torch.dtype) -> None:
    """`apply_rope`, in place on slices of a fused product, whose other parts stay."""
    case = random_rope_case(rng, device=device, dtype=dtype)
    q, k, v = case.q.clone(), case.k.clone(), case.v.clone()
    apply_rope_torch(q, k, case.cos_sin, case.positions, case.order)
    apply_rope_triton(case.q, case.k, case.cos_sin, case.positions, case.order)
    assert relative_error(case.q, q) < tolerance(dtype)
    assert relative_error(case.k, k) < tolerance(dtype)
    assert torch.equal(case.v, v)


def check_rope_and_store(
    rng: random.Random, device: str, dtype: torch.dtype, *, case: RopeCase | None = None, norms: bool | None = None
) -> None:
    """`rope_and_store`, with and without the norms, against its composition."""
    expected = case or random_rope_case(rng, device=device, dtype=dtype)
    got = RopeCase(**{name: getattr(expected, name) for name in RopeCase.__dataclass_fields__})
    norms = rng.random() < 0.5 if norms is None else norms
    for function, case in ((rope_and_store_torch, expected), (rope_and_store_triton, got)):
        args = (case.q, case.k, case.v, case.cos_sin, case.positions, case.k_pages, case.v_pages, case.slots)
        weights = (case.q_norm, case.k_norm, case.eps) if norms else ()
        function(*args, *weights, order=case.order)
    assert relative_error(got.q, expected.q) < tolerance(dtype)
    for plane, expected_plane in ((got.k_pages, expected.k_pages), (got.v_pages, expected.v_pages)):
        untouched = expected_plane.isnan()
        assert torch.equal(plane.isnan(), untouched)
        assert relative_error(plane[~untouched], expected_plane[~untouched]) < tolerance(dtype)


def check_attention(
    rng: random.Random, device: str, dtype: torch.dtype, *, shape: AttentionShape | None = None, max_prefix: int = 100
) -> None:
    """The whole backend on a mixed ragged batch, as it would cut the work on a device of some size."""
    case = AttentionCase(shape or random_shape(rng, max_prefix=max_prefix), device=device, dtype=dtype)
    reference = ReferenceAttention()
    triton = TritonAttention(device, num_sms=rng.choice((1, 16, 132)))
    got = triton.run(case.q, case.k_pages, case.v_pages, triton.plan(case.batch), case.scale)
    expected = reference.run(case.q, case.k_pages, case.v_pages, reference.plan(case.batch), case.scale)
    assert got.is_contiguous()
    assert relative_error(got, expected) < tolerance(dtype), case.shape


def check_decode_splits(rng: random.Random, device: str, dtype: torch.dtype) -> None:
    """Any number of splits gives one result, also where some are empty."""
    shape = random_shape(rng, max_prefix=150)
    n = len(shape.query_lens)
    shape = AttentionShape(
        **{**{f: getattr(shape, f) for f in shape.__dataclass_fields__}, "query_lens": (1,) * n, "num_decodes": n}
    )
    case = AttentionCase(shape, device=device, dtype=dtype)
    out = torch.full((n, shape.kv_heads * shape.group, case.v_pages.shape[3]), float("nan"), device=device, dtype=dtype)
    decode_attention(
        case.q,
        case.k_pages,
        case.v_pages,
        out,
        kv_lens=case.batch.kv_lens,
        page_table=case.batch.page_table,
        scale=case.scale,
        config=decode_config(dtype, shape.dim, shape.group, deep=rng.random() < 0.5),
        num_splits=rng.randint(1, 7),
        min_split_tokens=rng.choice((1, 64)),
    )
    expected = ReferenceAttention().run(case.q, case.k_pages, case.v_pages, case.batch, case.scale)
    assert relative_error(out, expected) < tolerance(dtype), case.shape


def check_prefill_splits(
    rng: random.Random, device: str, dtype: torch.dtype, *, shape: AttentionShape | None = None
) -> None:
    """Prefill cut along the KV, where tiles may see nothing of a split; decodes' rows stay as they were."""
    shape = shape or random_shape(rng, max_requests=2, max_query=20, max_prefix=300)
    case = AttentionCase(shape, device=device, dtype=dtype)
    n = shape.num_decodes
    heads = shape.kv_heads * shape.group
    out = torch.full((case.q.shape[0], heads, case.v_pages.shape[3]), 7.0, device=device, dtype=dtype)
    config = prefill_config(dtype, shape.dim, shape.group, shared_bytes=100 * 1024)
    plan = TritonAttention(device).plan(case.batch)
    if n < len(shape.query_lens):
        prefill_attention(
            case.q[n:],
            case.k_pages,
            case.v_pages,
            out[n:],
            row_base=n,
            tiles=plan.prefill_tiles(config.block_rows // shape.group),
            query_starts=case.batch.query_starts,
            kv_lens=case.batch.kv_lens,
            page_table=case.batch.page_table,
            scale=case.scale,
            config=config,
            num_splits=4,
            split_tokens=128,
        )
    expected = ReferenceAttention().run(case.q, case.k_pages, case.v_pages, case.batch, case.scale)
    assert bool((out[:n] == 7.0).all())
    assert relative_error(out[n:], expected[n:]) < tolerance(dtype), case.shape


def check_latent(
    rng: random.Random,
    device: str,
    dtype: torch.dtype,
    *,
    case: LatentCase | None = None,
    max_prefix: int = 100,
    config: TileConfig | None = None,
) -> None:
    """Latent attention of the whole backend on a mixed ragged batch, some requests of which hold nothing."""
    case = case or random_latent_case(rng, device=device, dtype=dtype, max_prefix=max_prefix)
    backend = TritonAttention(device, latent=config, num_sms=rng.choice((1, 16, 132)))
    got, lse = case.run(backend)
    expected, expected_lse = case.run(ReferenceAttention())
    assert got.is_contiguous()
    assert relative_error(got, expected) < tolerance(dtype), case
    assert_same_lse(lse, expected_lse, dtype)
    args = (case.q_latent, case.q_rope, case.latent_pages, case.rope_pages)
    assert torch.equal(backend.run_latent(*args, backend.plan(case.batch), case.scale), got)


def check_latent_of_shared_rows(rng: random.Random, device: str, dtype: torch.dtype) -> None:
    """The same in tiles of 64 rows, which 8 warps share; blocks of 16 tokens have all kinds of masks."""
    check_latent(rng, device, dtype, config=SHARED_ROWS)
    check_latent_splits(rng, device, dtype, config=SHARED_ROWS)


SHARED_ROWS = TileConfig(64, 16, 8, 2)


def check_latent_splits(
    rng: random.Random, device: str, dtype: torch.dtype, *, config: TileConfig | None = None
) -> None:
    """Decodes and chunks over latents, cut along the KV into spans of which some are empty."""
    case = random_latent_case(rng, device=device, dtype=dtype, max_prefix=300)
    expected, expected_lse = case.run(ReferenceAttention())
    got, lse = torch.full_like(expected, 7.0), torch.full_like(expected_lse, 7.0)
    batch, n = case.batch, case.batch.num_decodes
    config = config or latent_config(dtype, case.shape.group, 64, shared_bytes=100 * 1024)
    tiles = TritonAttention(device).plan(batch).prefill_tiles(tile_queries(case.shape.group, config))
    parts = [(slice(0, n), None)] * (n > 0) + [(slice(n, len(got)), tiles)] * (n < batch.num_requests)
    for rows, part_tiles in parts:
        latent_attention(
            case.q_latent[rows],
            case.q_rope[rows],
            case.latent_pages,
            case.rope_pages,
            got[rows],
            lse[rows],
            tiles=part_tiles,
            row_base=rows.start,
            query_starts=batch.query_starts,
            kv_lens=batch.kv_lens,
            page_table=batch.page_table,
            scale=case.scale,
            config=config,
            num_splits=rng.choice((2, 5)),
            min_split_tokens=rng.choice((1, 64)),
        )
    assert relative_error(got, expected) < tolerance(dtype), case
    assert_same_lse(lse, expected_lse, dtype)


def assert_same_lse(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """-inf in the same places, and equal elsewhere."""
    seen = expected > float("-inf")
    assert torch.equal(got > float("-inf"), seen)
    assert not bool(got.isnan().any())
    assert bool(((got - expected)[seen].abs() < (1e-4 if dtype == torch.float32 else 3e-2)).all())


CHECKS = (
    check_norms,
    check_activation,
    check_store,
    check_rope,
    check_rope_and_store,
    check_attention,
    check_decode_splits,
    check_prefill_splits,
    check_latent,
    check_latent_splits,
    check_latent_of_shared_rows,
)
