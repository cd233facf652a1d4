"""The Triton kernels against their references, in Triton's interpreter; started by test_kernels_triton.py.

Not collected by itself: TRITON_INTERPRET must be set before Triton is first imported, so it needs its own process.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_cases
from headwater.kernels import moe
from headwater.kernels.attention.triton_backend import TritonAttention, decode_splits, prefill_splits
from headwater.kernels.attention.triton_decode import decode_config
from headwater.kernels.attention.triton_latent import latent_splits
from headwater.kernels.attention.triton_prefill import prefill_config
from headwater.kernels.moe_reference import run_experts_torch
from headwater.kernels.moe_triton import run_experts_triton
from headwater.kernels.routing import RoutingRule
from headwater.models.config_hf import config_from_hf
from headwater.models.decoder import build_model
from headwater.models.latent import least_expanded

import kernel_checks
from kernel_cases import AttentionShape, RopeCase, relative_error
from models_support import run_tokens

torch.set_num_threads(1)


@pytest.mark.parametrize("check", kernel_checks.CHECKS + moe_cases.CHECKS, ids=lambda check: check.__name__)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_equals_reference(check, seed):
    check(random.Random(seed), "cpu", torch.float32)


def test_long_context_is_cut_by_the_backend():
    shape = AttentionShape((1, 5), (1100, 1300), num_decodes=1, kv_heads=1, group=3, dim=16)
    kernel_checks.check_attention(random.Random(5), "cpu", torch.float32, shape=shape)


def test_padding_rows_of_a_graph_read_only_their_one_token():
    shape = AttentionShape((1,) * 8, (70, 3, 0, 0, 0, 0, 0, 0), num_decodes=8)
    kernel_checks.check_attention(random.Random(0), "cpu", torch.float32, shape=shape)


def test_rows_of_one_tile_on_both_sides_of_a_split():
    shape = AttentionShape((20,), (118,), num_decodes=0, kv_heads=1, group=1, dim=16)
    kernel_checks.check_prefill_splits(random.Random(0), "cpu", torch.float32, shape=shape)


def test_queries_that_begin_at_the_edge_of_a_block():
    shape = AttentionShape((3,) * 4, (30, 31, 32, 62), num_decodes=0, kv_heads=1, group=1, dim=16)
    kernel_checks.check_attention(random.Random(0), "cpu", torch.float32, shape=shape)


@pytest.mark.parametrize("chunk", [None, 13], ids=["expanded", "absorbed"])
def test_layers_of_latent_attention(chunk):
    """What a model gives the kernels: slices, transposed products, values of another width than keys."""
    values = {"model_type": "deepseek_v2", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 3, "intermediate_size": 16, "max_position_embeddings": 64, "q_lora_rank": 12}
    values |= {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 10}
    model = build_model(config_from_hf(values | {"first_k_dense_replace": 1}))
    generator = torch.Generator().manual_seed(0)
    for name, target in model.targets().items():
        target.destination.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    tokens = [(7 * i * i + 3) % 40 for i in range(31)]
    assert 13 < least_expanded(model.config.attention) <= len(tokens)
    expected = run_tokens(model, tokens)
    found = run_tokens(model, tokens, chunk, backend=TritonAttention("cpu", num_sms=4))
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("order", ["halves", "pairs"])
def test_the_norm_counts_what_is_not_rotated(order):
    case = RopeCase(3, 2, 2, 16, 4, "layer-first", seed=1, width=8, order=order)
    kernel_checks.check_rope_and_store(random.Random(0), "cpu", torch.float32, case=case, norms=True)


@pytest.mark.parametrize("choice", moe_cases.CHOICES)
@pytest.mark.parametrize("rows", [1, 40])
def test_experts_however_they_are_chosen(choice, rows):
    case = moe_cases.ExpertsCase(rows, 8, 2, 48, 24, choice, seed=1)
    expected = run_experts_torch(*case.args)
    assert relative_error(run_experts_triton(*case.args), expected) < 1e-5


@pytest.mark.parametrize("rows", [1, 40])
def test_what_a_layer_calls_runs_in_triton(rows, monkeypatch):
    """As on a GPU: routed and summed by one launch and by two or four, without a reference in between."""
    rule = RoutingRule(
        top_k=3, scores="sigmoid", num_groups=4, groups_kept=2, group_score="top2", renormalise=True, scaling=1.7
    )
    case = moe_cases.ExpertsCase(rows, 8, 8, 48, 24, "uniform", seed=2)
    logits, bias = torch.randn(rows, 8), torch.randn(8) * 0.3
    ids, weights = moe.route(logits, rule, bias)
    expected = moe.run_experts(case.x, ids, weights, case.gate_up, case.down)
    monkeypatch.setattr(moe, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(moe, "route_torch", None)
    monkeypatch.setattr(moe, "run_experts_torch", None)
    found_ids, found_weights = moe.route(logits, rule, bias)
    assert torch.equal(found_ids.sort(dim=1).values, ids.sort(dim=1).values)
    got = moe.run_experts(case.x, found_ids, found_weights, case.gate_up, case.down)
    assert relative_error(got, expected) < 1e-5


def test_no_rows_have_no_experts():
    case = moe_cases.ExpertsCase(0, 8, 2, 48, 24, "uniform", seed=1)
    assert run_experts_triton(*case.args).shape == (0, 48)


@given(
    num_programs=st.integers(1, 5000), max_kv_len=st.integers(1, 200_000), num_sms=st.sampled_from((1, 16, 108, 132))
)
def test_splits_cover_the_longest_request_and_fill_the_device(num_programs, max_kv_len, num_sms):
    num_splits, least = decode_splits(num_programs, max_kv_len, num_sms)
    assert 1 <= num_splits <= 64
    assert (num_splits - 1) * least < max_kv_len  # no split that could not be used
    num_splits, split_tokens = prefill_splits(num_programs, max_kv_len, num_sms)
    assert (num_splits - 1) * split_tokens < max_kv_len <= num_splits * split_tokens
    assert num_splits == 1 or (split_tokens % 128 == 0 and num_programs * num_splits <= num_sms)


@given(
    num_programs=st.integers(1, 5000), max_kv_len=st.integers(0, 200_000), num_sms=st.sampled_from((1, 16, 108, 132))
)
def test_splits_of_latents_can_all_be_used(num_programs, max_kv_len, num_sms):
    num_splits, least = latent_splits(num_programs, max_kv_len, num_sms)
    assert 1 <= num_splits <= 64
    assert num_splits == 1 or (num_splits - 1) * least < max_kv_len


def test_splits_of_latents_fill_the_last_wave():
    assert latent_splits(64, 4096, 132)[0] == 2
    assert latent_splits(128, 4096, 132)[0] == 1
    assert latent_splits(100, 4096, 132)[0] == 5
    assert latent_splits(1, 4096, 132)[0] == 32


@pytest.mark.parametrize("shared_kib", [48, 99, 163, 227])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_fit_the_shared_memory(shared_kib, dim):
    config = prefill_config(torch.bfloat16, dim, 4, shared_kib * 1024)
    assert (config.block_rows + 2 * config.block_tokens) * dim * 2 <= shared_kib * 1024
    if shared_kib == 227 and dim <= 128:
        assert config.num_stages == 5


def test_a_large_group_gets_rows_enough():
    assert prefill_config(torch.float32, 64, 71, 48 * 1024).block_rows == 128
    assert decode_config(torch.float32, 64, 71, deep=False).block_rows == 128
