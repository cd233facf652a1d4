"""Tiny models with latent attention, in every variant that is served: the covering array of their tests."""

from __future__ import annotations

from typing import Any

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 24,
}
SHAPE: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-6,
    "eos_token_id": None,
}
DENSE_FIRST: dict[str, Any] = {"first_k_dense_replace": 1}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
LIMITED: dict[str, Any] = GROUPS | {"topk_method": "group_limited_greedy"}
LITE_TYPES: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
V2 = SHAPE | DENSE_FIRST
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dsv2 greedy, no q_lora": ("deepseek_v2", V2 | {"q_lora_rank": None, "topk_method": "greedy"}),
    "dsv2 greedy, q_lora, yarn": ("deepseek_v2", V2 | {"rope_parameters": YARN}),
    "dsv2 grouped, yarn": ("deepseek_v2", V2 | LIMITED | {"rope_parameters": YARN, "q_lora_rank": None}),
    "dsv2 grouped, all sparse": ("deepseek_v2", SHAPE | LIMITED | {"first_k_dense_replace": 0}),
    "dsv3": ("deepseek_v3", V2 | GROUPS),
    "dsv3, no q_lora, yarn": ("deepseek_v3", V2 | GROUPS | {"q_lora_rank": None, "rope_parameters": YARN}),
    "dsv3, no norm": ("deepseek_v3", V2 | GROUPS | {"norm_topk_prob": False, "v_head_dim": 24}),
    "glm4_moe_lite": ("glm4_moe_lite", SHAPE | LITE_TYPES),
    "glm4_moe_lite, yarn": (
        "glm4_moe_lite",
        SHAPE | LITE_TYPES | GROUPS | {"rope_parameters": YARN, "v_head_dim": 14},
    ),
}
