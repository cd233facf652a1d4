"""The experts in torch: the loop against the formula written out, and torch's grouped product against the loop."""

import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: kernels are not checked here")
pytest.importorskip("triton", reason="Triton is not installed: the shared cases need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from headwater.errors import InvalidArgumentError  # noqa: E402
from headwater.kernels.moe_reference import run_experts_grouped, run_experts_torch  # noqa: E402
from headwater.kernels.moe_triton import experts_config, most_tiles  # noqa: E402
from moe_cases import ExpertsCase, random_experts_case  # noqa: E402

from kernel_cases import relative_error  # noqa: E402

seeds = st.integers(0, 2**31)
H200_SHARED = 232448


@given(seed=seeds)
@settings(max_examples=30)
def test_loop_is_the_formula(seed):
    case = random_experts_case(random.Random(seed), max_rows=8)
    expected = torch.zeros(case.rows, case.hidden, dtype=torch.float64)
    for row in range(case.rows):
        for expert, weight in zip(case.ids[row].tolist(), case.weights[row].tolist(), strict=True):
            if 0 <= expert < case.experts:
                both = case.gate_up[expert].double() @ case.x[row].double()
                gate, up = both[: case.inner], both[case.inner :]
                expected[row] += weight * (case.down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
    assert relative_error(run_experts_torch(*case.args), expected) < 1e-5


@given(seed=seeds, choice=st.sampled_from(("uniform", "skewed", "one")))
@settings(max_examples=20)
def test_grouped_product_equals_the_loop(seed, choice):
    case = ExpertsCase(9, 8, 3, 32, 16, choice, seed)
    assert relative_error(run_experts_grouped(*case.args), run_experts_torch(*case.args)) < 1e-5


@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=40), block_rows=st.sampled_from((16, 64, 128)))
def test_no_choice_needs_more_tiles_than_the_grid_has(counts, block_rows):
    used = sum(-(-count // block_rows) for count in counts)
    assert used <= most_tiles(sum(counts), len(counts), block_rows)


def test_the_bound_on_tiles_is_reached():
    assert most_tiles(3 + 16, 4, 16) == 4 + 15 // 16
    assert most_tiles(2, 100, 16) == 2
    assert most_tiles(16 * 5 + 1, 1, 16) == 6


def test_configs_follow_the_rows_of_an_expert():
    def rows(num_pairs, dtype=torch.bfloat16):
        return experts_config(dtype, num_pairs, 128, H200_SHARED).block_rows

    assert [rows(n) for n in (8, 32, 33, 512, 4096, 65536)] == [1, 1, 16, 16, 64, 128]
    assert rows(65536, torch.float32) == 16


@pytest.mark.parametrize("shared_bytes", [H200_SHARED, 166912, 101376, 49152])
@pytest.mark.parametrize("num_pairs", [33, 512, 4096, 65536])
def test_tiles_fit_the_shared_memory_of_smaller_devices(num_pairs, shared_bytes):
    config = experts_config(torch.bfloat16, num_pairs, 128, shared_bytes)
    for product, cols in ((config.gate_up, 2 * config.gate_up.block_cols), (config.down, config.down.block_cols)):
        assert product.num_stages >= 2
        assert (config.block_rows + cols) * product.block_k * product.num_stages * 2 <= shared_bytes
    if shared_bytes == H200_SHARED and num_pairs == 65536:
        assert (config.gate_up.num_stages, config.down.num_stages) == (4, 4)


def test_bad_arguments_are_named():
    x, ids, weights, gate_up, down = ExpertsCase(3, 4, 2, 16, 8, "uniform", 0).args
    for args in (
        (x, ids.long(), weights, gate_up, down),
        (x, ids, weights.half(), gate_up, down),
        (x, ids[:2], weights[:2], gate_up, down),
        (x, ids, weights, gate_up[:, :-1], down),
        (x, ids, weights, gate_up.half(), down),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^expected .*; got "):
            run_experts_torch(*args)
