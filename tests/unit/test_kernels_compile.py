"""The Triton kernels of experts, rope and latent attention compile for an H200, whose shared memory holds their tiles.

Needs no GPU: Triton brings its own assembler. The interpreter, which proves the results, accepts code that the compiler
refuses.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels are not checked here")
triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels are not checked here")

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from headwater.kernels import moe_kernels, moe_pair_kernels, rope_triton, route_triton  # noqa: E402
from headwater.kernels.attention import triton_latent, triton_latent_merge, triton_prefill  # noqa: E402
from headwater.kernels.moe_triton import experts_config  # noqa: E402

SHARED_BYTES = 232448
HALF, WIDE, INDEX, LONG = "*bf16", "*fp32", "*i32", "*i64"
QWEN3_30B = {"TOP_K": 8, "INNER": 768, "HIDDEN": 2048, "NUM_EXPERTS": 128}


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """Compile to a binary. Arguments that are neither in `types` nor constants are 32-bit integers."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    assert not [name for name in kernel.arg_names if name.isupper() and name not in constants]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name] != "constexpr" and signature[name] != "fp32"
    }
    source = ASTSource(kernel, signature, values, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    assert made.metadata.shared <= SHARED_BYTES
    return made


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is compiled anew, as by older versions of Triton; newer ones warn that a default will change."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


EXPERTS = dict.fromkeys(("x", "gate_up", "inner", "down", "outer", "out"), HALF)
EXPERTS |= dict.fromkeys(("ids", "order", "counts", "tiles"), INDEX) | {"weights": WIDE}


@pytest.mark.parametrize("num_pairs", [512, 8192, 65536])
def test_grouped_products(num_pairs: int) -> None:
    config = experts_config(torch.bfloat16, num_pairs, 128, SHARED_BYTES)
    for kernel, product in ((moe_kernels.gate_up_kernel, config.gate_up), (moe_kernels.down_kernel, config.down)):
        blocks = {"BLOCK_ROWS": config.block_rows, "BLOCK_COLS": product.block_cols, "BLOCK_K": product.block_k}
        options = {"num_warps": product.num_warps, "num_stages": product.num_stages}
        compile_kernel(kernel, EXPERTS, QWEN3_30B | blocks | {"PRECISION": "tf32"}, **options)


def test_experts_of_few_pairs() -> None:
    config = experts_config(torch.bfloat16, 8, 128, SHARED_BYTES)
    for kernel, product in (
        (moe_pair_kernels.pair_gate_up_kernel, config.gate_up),
        (moe_pair_kernels.pair_down_sum_kernel, config.down),
    ):
        blocks = {"BLOCK_COLS": product.block_cols, "BLOCK_K": product.block_k, "STAGES": product.num_stages}
        compile_kernel(kernel, EXPERTS, QWEN3_30B | blocks, num_warps=product.num_warps)


def test_sorting_and_summing() -> None:
    blocks = {"BINS": 256, "BLOCK": 2048, "BLOCK_ROWS": 64, "BLOCK_COLS": 1024}
    compile_kernel(moe_kernels.sort_kernel, EXPERTS, QWEN3_30B | blocks, num_warps=8)
    compile_kernel(moe_kernels.sum_kernel, EXPERTS, QWEN3_30B | blocks, num_warps=4)


@pytest.mark.parametrize("groups", [1, 8])
def test_routing(groups: int) -> None:
    types = {"logits": WIDE, "bias": WIDE, "ids": INDEX, "weights": WIDE, "scaling": "fp32"}
    types |= {"counts": LONG, "live": INDEX}
    grouped = {"GROUPS": groups, "BLOCK_GROUPS": groups, "KEPT": max(groups // 2, 1), "TOP2": groups > 1}
    rule = {"TOP_K": 8, "BLOCK_K": 8, "SOFTMAX": groups == 1, "BIAS": groups > 1, "RENORMALISE": True}
    rule["COUNTED"] = True
    compile_kernel(route_triton._route_kernel, types, {"NUM_EXPERTS": 160, "BLOCK": 256} | grouped | rule, num_warps=1)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("rest", [0, 64])
def test_rope(pairs: bool, rest: int, store: bool) -> None:
    types = dict.fromkeys(("q", "k", "v", "q_weight", "k_weight", "k_pages", "v_pages"), HALF)
    types |= {"cos_sin": WIDE, "positions": LONG, "slots": LONG, "eps": "fp32"}
    sizes = {"PAGE_SIZE": 16, "HALF": 32, "HALF_BLOCK": 32, "REST": rest, "REST_BLOCK": max(rest, 1), "HEAD_BLOCK": 8}
    modes = {"V_DIM": 128, "V_BLOCK": 128, "PAIRS": pairs, "NORM": store, "STORE": store}
    compile_kernel(rope_triton._rope_kernel, types, sizes | modes, num_warps=4)


def test_rope_beside_a_latent() -> None:
    types = dict.fromkeys(("q", "k", "v", "q_weight", "k_weight", "k_pages", "v_pages"), HALF)
    types |= {"cos_sin": WIDE, "positions": LONG, "slots": LONG, "eps": "fp32"}
    sizes = {"PAGE_SIZE": 16, "HALF": 32, "HALF_BLOCK": 32, "REST": 0, "REST_BLOCK": 1, "HEAD_BLOCK": 8}
    modes = {"V_DIM": 512, "V_BLOCK": 512, "PAIRS": True, "NORM": False, "STORE": True}
    compile_kernel(rope_triton._rope_kernel, types, sizes | modes, num_warps=4)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(192, 128), (256, 256)], ids=["DeepSeek", "GLM-4-MoE-Lite"])
@pytest.mark.parametrize("split", [False, True])
def test_attention_over_expanded_latents(k_dim: int, v_dim: int, split: bool) -> None:
    """Keys and values of every head, made for one chunk: K and V of different widths, a query head each."""
    config = triton_prefill.prefill_config(torch.bfloat16, k_dim, 1, SHARED_BYTES)
    types = dict.fromkeys(("q", "k_pages", "v_pages"), HALF) | {"out": WIDE if split else HALF}
    types |= dict.fromkeys(("tiles", "query_starts", "kv_lens", "page_table"), INDEX)
    types |= {"log_sums": WIDE, "scale": "fp32"}
    sizes = {"GROUP": 1, "PAGE_SIZE": 16, "K_DIM": k_dim, "V_DIM": v_dim, "BLOCK_K": 256, "BLOCK_V": v_dim}
    blocks = {"BLOCK_ROWS": config.block_rows, "BLOCK_TOKENS": config.block_tokens, "PRECISION": "tf32"}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compile_kernel(triton_prefill._prefill_kernel, types, sizes | blocks | {"SPLIT": split}, **options)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("tiled", [False, True])
def test_latent_attention(rows: int, tiled: bool) -> None:
    config = triton_latent.latent_config(torch.bfloat16, rows, 576, SHARED_BYTES)
    types = dict.fromkeys(("q_latent", "q_rope", "latent_pages", "rope_pages", "out"), HALF)
    types |= dict.fromkeys(("tiles", "query_starts", "kv_lens", "page_table"), INDEX)
    types |= {"sums": WIDE, "scale": "fp32"}
    sizes = {"LATENT": 512, "ROPE": 64, "BLOCK_LATENT": 512, "BLOCK_ROPE": 64, "PAGE_SIZE": 16, "HEAD_BLOCK": 16}
    blocks = {"BLOCK_ROWS": config.block_rows, "BLOCK_TOKENS": config.block_tokens, "PRECISION": "tf32"}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    modes = {"TILED": tiled, "SPLIT": True, "LSE": True, "BRANCHED": triton_latent.warps_share_rows(config)}
    code = compile_kernel(triton_latent._latent_kernel, types, sizes | blocks | modes, **options).asm
    if rows == 64:
        # Two groups of four warps: each makes the scores of half a block's tokens, and not both the same ones.
        assert code["ptx"].count("wgmma.mma_async.sync.aligned.m64n32k16") == (512 + 64) // 16


def test_merging_latent_splits() -> None:
    types = {"partials": WIDE, "log_sums": WIDE, "out": HALF, "lse": WIDE}
    sizes = {"V_DIM": 512, "BLOCK_V": 128, "BLOCK_SPLITS": 64, "LSE": True}
    compile_kernel(triton_latent_merge._latent_merge_kernel, types, sizes, num_warps=4)
