"""Mixtures of experts against `transformers`: its routers, its tokens and its logits, alone and over ranks; and mutants
of every rule, each of which must give other tokens in some family.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headwater.errors import InvalidArgumentError, ModelError
from headwater.kernels.moe import route, run_experts
from headwater.kernels.routing import RoutingRule
from headwater.kv.identity import canonical_settings
from headwater.models.checkpoint import open_checkpoint
from headwater.models.checkpoint.dummy import tensor_shapes
from headwater.models.config import ModelConfig
from headwater.models.config_experts import EXPERTS
from headwater.models.config_hf import config_from_hf
from headwater.models.decoder import Decoder
from headwater.models.fields import Fields
from headwater.models.moe import SparseMLP
from headwater.models.parallel import TensorParallel

from models_support import load_model, run_ranks, run_tokens, save_tiny

NUM_GREEDY = 64
PROMPT = [(7 * i * i + 3 * i + 5) % 131 for i in range(20)]
TIE = 1e-3
"""Logits this close may be ordered either way by float32."""
QWEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "eos_token_id": None}
GLM: dict[str, Any] = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "eos_token_id": None,
}
PLAIN: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", PLAIN | {"num_local_experts": 8}),
    "mixtral, tied": ("mixtral", PLAIN | {"num_local_experts": 4, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", QWEN | {"shared_expert_intermediate_size": 34}),
    "qwen2_moe, dense layers": (
        "qwen2_moe",
        QWEN | {"shared_expert_intermediate_size": 34, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN | {"head_dim": 16}),
    "qwen3_moe, norm": ("qwen3_moe", QWEN | {"head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "olmoe": ("olmoe", PLAIN | {"num_experts": 8}),
    "olmoe, MQA": ("olmoe", PLAIN | {"num_experts": 8, "num_key_value_heads": 1}),
    "glm4_moe": ("glm4_moe", GLM | {"n_group": 4, "topk_group": 2, "use_qk_norm": True}),
    "glm4_moe, no norm": ("glm4_moe", GLM | {"norm_topk_prob": False, "attention_bias": True}),
}


class Tiny(NamedTuple):
    name: str
    path: Path
    tokens: list[int]
    """The prompt and 64 greedy tokens."""
    logits: Tensor
    """Of every position, by transformers."""


@pytest.fixture(scope="module")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            family, changes = CASES[name]
            path = tmp_path_factory.mktemp("moe")
            model = save_tiny(path, family, **changes)
            with torch.no_grad():
                found = model.generate(
                    torch.tensor([PROMPT]), max_new_tokens=NUM_GREEDY, do_sample=False, eos_token_id=None
                )
                made[name] = Tiny(name, path, found[0].tolist(), model(found).logits[0])
        return made[name]

    return make


def wrong_tokens(logits: Tensor, tiny: Tiny) -> list[int]:
    """The positions at which greedy decoding would leave transformers' tokens, ties aside."""
    steps = range(len(PROMPT) - 1, len(tiny.tokens) - 1)
    best = logits.topk(2, dim=-1)
    return [
        at
        for at in steps
        if int(best.indices[at, 0]) != tiny.tokens[at + 1] and float(best.values[at, 0] - best.values[at, 1]) > TIE
    ]


@pytest.mark.parametrize("name", CASES)
def test_64_greedy_tokens_are_those_of_transformers(name: str, make_tiny: Callable[[str], Tiny]) -> None:
    tiny = make_tiny(name)
    assert len(tiny.tokens) == len(PROMPT) + NUM_GREEDY
    model = load_model(tiny.path)
    for chunk in (None, 13, 1):
        logits = run_tokens(model, tiny.tokens, chunk)
        assert wrong_tokens(logits, tiny) == []
        torch.testing.assert_close(logits, tiny.logits, rtol=0, atol=2e-4)
    top = tiny.logits[len(PROMPT) - 1 : -1].topk(2, dim=-1).values
    print(f"{name}: {int((top[:, 0] - top[:, 1] < TIE).sum())} ties in {NUM_GREEDY} tokens")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_ranks_divide_every_expert(name: str, size: int, make_tiny: Callable[[str], Tiny]) -> None:
    tiny = make_tiny(name)
    config = open_checkpoint(tiny.path).config
    if size % config.attention.num_kv_heads and config.attention.num_kv_heads % size:
        pytest.skip(f"{config.attention.num_kv_heads} KV heads cannot be divided over {size} ranks")

    def run(rank: TensorParallel) -> tuple[Decoder, Tensor]:
        model = load_model(tiny.path, rank)
        return model, run_tokens(model, tiny.tokens, 16)

    whole = load_model(tiny.path)
    results = run_ranks(size, run)
    for model, logits in results:
        assert wrong_tokens(logits, tiny) == []
        assert model.num_bytes < whole.num_bytes
    for layer, dense in enumerate(whole.layers):
        if isinstance(dense.mlp, SparseMLP):
            stacks = [model.layers[layer].mlp.experts.gate_up.shape for model, _ in results]
            assert sum(shape[1] for shape in stacks) == dense.mlp.experts.gate_up.shape[1]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"moe_intermediate_size": 2}, "experts of width 2 cannot be divided over tensor_parallel_size=3"),
        ({"shared_expert_intermediate_size": 1}, "experts of width 1 cannot be divided over tensor_parallel_size=3"),
    ],
)
def test_experts_narrower_than_the_ranks_are_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    family, given = CASES["qwen2_moe"]
    save_tiny(tmp_path, family, **given | changes)
    with pytest.raises(ModelError, match=what):
        run_ranks(3, lambda rank: load_model(tmp_path, rank))


Mutate = Callable[[Decoder], None]


def _sparse(model: Decoder) -> list[SparseMLP]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseMLP)]


def _rule(change: Callable[[RoutingRule], RoutingRule]) -> Mutate:
    def mutate(model: Decoder) -> None:
        for mlp in _sparse(model):
            mlp.router._rule = change(mlp.router._rule)

    return mutate


def _no_bias(model: Decoder) -> None:
    for mlp in _sparse(model):
        mlp.router.bias = None


def _bias_in_weights(model: Decoder) -> None:
    for mlp in _sparse(model):
        mlp.router = _BiasedWeights(mlp.router)  # type: ignore[assignment]


class _BiasedWeights:
    def __init__(self, router: Any) -> None:
        self._router = router

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, _ = self._router(x)
        scores = torch.nn.functional.linear(x, self._router.weight).sigmoid() + self._router.bias
        weights = scores.gather(1, ids.long())
        return ids, weights / weights.sum(dim=-1, keepdim=True) * self._router._rule.scaling


def _no_shared(model: Decoder) -> None:
    for mlp in _sparse(model):
        mlp.shared = None


def _no_shared_gate(model: Decoder) -> None:
    for mlp in _sparse(model):
        mlp.shared_gate = None


def _up_before_gate(model: Decoder) -> None:
    for mlp in _sparse(model):
        mlp.experts.gate_up = torch.cat(mlp.experts.gate_up.chunk(2, dim=1)[::-1], dim=1)


def _whole_heads(model: Decoder) -> None:
    model.cos_sin = replace(model.config.rope, dim=model.config.attention.head_dim).table(96)


def _norm_by_head(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.width_norm = _HeadNorm(layer.attention)


class _HeadNorm:
    def __init__(self, attention: Any) -> None:
        self._norm, self._dim = attention.width_norm, attention._dim

    def __call__(self, parts: Any) -> list[Tensor]:
        heads = [part.unflatten(1, (-1, self._dim)) for part in parts]
        normed = [part * torch.rsqrt(part.square().mean(-1, keepdim=True) + self._norm.eps) for part in heads]
        return [part.flatten(1) * weight for part, weight in zip(normed, self._norm.weights, strict=True)]


MUTANTS: dict[str, tuple[str, Mutate]] = {
    "group score max, not top 2": ("glm4_moe", _rule(lambda rule: replace(rule, group_score="max"))),
    "groups ignored": ("glm4_moe", _rule(lambda rule: replace(rule, num_groups=1, groups_kept=1))),
    "one group kept": ("glm4_moe", _rule(lambda rule: replace(rule, groups_kept=1))),
    "bias dropped": ("glm4_moe", _no_bias),
    "bias in weights": ("glm4_moe", _bias_in_weights),
    "scaling dropped": ("glm4_moe", _rule(lambda rule: replace(rule, scaling=1.0))),
    "softmax for sigmoid": ("glm4_moe", _rule(lambda rule: replace(rule, scores="softmax"))),
    "renormalised": ("qwen3_moe", _rule(lambda rule: replace(rule, renormalise=True))),
    "not renormalised": ("qwen3_moe, norm", _rule(lambda rule: replace(rule, renormalise=False))),
    "Mixtral not renormalised": ("mixtral", _rule(lambda rule: replace(rule, renormalise=False))),
    "an expert fewer": ("mixtral", _rule(lambda rule: replace(rule, top_k=2))),
    "shared expert dropped": ("qwen2_moe", _no_shared),
    "shared expert's gate dropped": ("qwen2_moe", _no_shared_gate),
    "shared experts dropped": ("glm4_moe, no norm", _no_shared),
    "up before gate": ("olmoe", _up_before_gate),
    "whole heads rotated": ("glm4_moe", _whole_heads),
    "norm by head": ("olmoe", _norm_by_head),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_gives_other_tokens(mutant: str, make_tiny: Callable[[str], Tiny]) -> None:
    name, mutate = MUTANTS[mutant]
    tiny = make_tiny(name)
    model = load_model(tiny.path)
    mutate(model)
    assert wrong_tokens(run_tokens(model, tiny.tokens), tiny)


ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 16},
    "qwen2_moe": {"num_experts": 16},
    "qwen3_moe": {"num_experts": 16, "norm_topk_prob": True},
    "olmoe": {"num_experts": 16},
    "glm4_moe": {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
    "deepseek_v2": {"n_routed_experts": 16, "routed_scaling_factor": 1.3},
    "deepseek_v2, grouped": {
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.3,
    },
    "deepseek_v3": {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "deepseek_v3, no norm": {"n_routed_experts": 16, "n_group": 8, "topk_group": 3, "norm_topk_prob": False},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routes_are_those_of_transformers(name: str) -> None:
    import transformers

    family = name.split(",")[0]
    title = "".join(part.capitalize() for part in family.split("_"))
    theirs = getattr(transformers, f"{title}Config")(
        hidden_size=32, num_attention_heads=4, num_experts_per_tok=4, **ROUTERS[name]
    )
    module = getattr(transformers.models, family)
    modeling = getattr(module, f"modeling_{family}")
    routers = [getattr(modeling, f"{title}{end}", None) for end in ("TopKRouter", "TopkRouter")]
    router = next(found for found in routers if found is not None)(theirs)
    rule = EXPERTS[family].rule(Fields(theirs.to_dict(), name))
    torch.manual_seed(1)
    with torch.no_grad():
        router.weight.normal_(0.0, 0.4)
        bias = getattr(router, "e_score_correction_bias", None)
        assert (bias is not None) == EXPERTS[family].biased
        if bias is not None:
            bias.normal_(0.0, 0.3)
        x = torch.randn(500, 32)
        logits, weights, ids = router(x)
        my_ids, my_weights = route(logits.float(), rule, bias)
    assert (my_ids.dtype, my_weights.dtype) == (torch.int32, torch.float32)
    assert (my_ids.shape, my_weights.shape) == ((500, 4), (500, 4))
    mine = torch.zeros(500, 16).scatter_(1, my_ids.long(), my_weights)
    expected = torch.zeros(500, 16).scatter_(1, ids.long(), weights)
    assert torch.equal(mine != 0, expected != 0)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7)


def test_sigmoids_that_are_all_zero_give_weights_of_zero() -> None:
    rule = RoutingRule(top_k=2, scores="sigmoid", renormalise=True)
    _, weights = route(torch.full((3, 8), -200.0), rule)
    assert weights.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize(("rows", "dtype"), [(0, torch.float32), (1, torch.float32), (37, torch.float32), (37, torch.bfloat16)])  # fmt: skip  # noqa: E501
def test_experts_are_summed_with_their_weights(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = torch.randn(rows, 24, dtype=dtype)
    gate_up, down = torch.randn(5, 2 * 7, 24, dtype=dtype), torch.randn(5, 24, 7, dtype=dtype)
    ids = torch.stack([torch.randperm(4)[:3] for _ in range(rows)]).int() if rows else torch.empty(0, 3).int()
    weights = torch.rand(rows, 3)
    expected = torch.zeros(rows, 24)
    for row in range(rows):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (gate_up[expert].float() @ x[row].float()).chunk(2)
            expected[row] += weight * (down[expert].float() @ (torch.nn.functional.silu(gate) * up))
    found = run_experts(x, ids, weights, gate_up, down)
    assert found.dtype == dtype
    largest = float(expected.abs().max()) if rows else 0.0
    atol = largest * (1e-6 if dtype == torch.float32 else 0.01)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=atol)


def test_arguments_of_the_kernels_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="float32"):
        route(torch.zeros(2, 8, dtype=torch.bfloat16), RoutingRule(top_k=2))
    with pytest.raises(InvalidArgumentError, match="no fewer than top_k"):
        route(torch.zeros(2, 8), RoutingRule(top_k=9))
    x, ids, weights = torch.zeros(2, 8), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1)
    with pytest.raises(InvalidArgumentError, match="gate_up"):
        run_experts(x, ids, weights, torch.zeros(4, 6, 8), torch.zeros(4, 8, 4))
    with pytest.raises(InvalidArgumentError, match="ids int32"):
        run_experts(x, ids.long(), weights, torch.zeros(4, 8, 8), torch.zeros(4, 8, 4))


def hf_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a case, as transformers writes it."""
    import transformers

    from models_support import SIZES

    family, given = CASES[name]
    title = "".join(part.capitalize() for part in family.split("_"))
    values: dict[str, Any] = getattr(transformers, f"{title}Config")(**{**SIZES, **given}).to_dict()
    return values | changes


FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"num_experts_per_tok": 2}),
    ("mixtral", {"num_local_experts": 6}),
    ("mixtral", {"intermediate_size": 44}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 30}),
    ("qwen2_moe", {"mlp_only_layers": [1]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"moe_intermediate_size": 24}),
    ("qwen3_moe, norm", {"intermediate_size": 30}),
    ("glm4_moe", {"n_group": 2}),
    ("glm4_moe", {"topk_group": 1}),
    ("glm4_moe", {"n_shared_experts": 1}),
    ("glm4_moe", {"routed_scaling_factor": 1.0}),
    ("glm4_moe", {"first_k_dense_replace": 2}),
    ("glm4_moe", {"norm_topk_prob": False}),
    ("glm4_moe", {"use_qk_norm": False}),
]


@pytest.mark.parametrize(("name", "change"), FIELDS, ids=str)
def test_every_field_of_routing_is_in_the_name(name: str, change: dict[str, Any]) -> None:
    names = [canonical_settings(config_from_hf(hf_config(name, **more)).settings) for more in ({}, change)]
    assert names[0] != names[1]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "glm4_moe"])
def test_a_config_is_the_same_after_a_journey_as_json(name: str) -> None:
    config = config_from_hf(hf_config(name))
    assert config.sparse is not None
    assert ModelConfig.from_fields(json.loads(json.dumps(asdict(config)))) == config


def test_what_changes_nothing_is_not_in_the_name() -> None:
    plain = config_from_hf(hf_config("qwen3_moe"))
    assert config_from_hf(hf_config("qwen3_moe", intermediate_size=1)) == plain, "no layer is dense"
    glm = config_from_hf(hf_config("glm4_moe", num_nextn_predict_layers=3))
    assert glm.settings == config_from_hf(hf_config("glm4_moe")).settings


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("mixtral", {"sliding_window": 64}, "does not know sliding_window"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts out of the 8"),
        ("mixtral", {"num_experts": 7}, "num_experts is 7; expected the same number as num_local_experts"),
        ("mixtral", {"moe_intermediate_size": 8}, "does not know moe_intermediate_size"),
        ("qwen2_moe", {"qkv_bias": False}, "does not know qkv_bias"),
        ("qwen2_moe", {"head_dim": 16}, "head_dim is 16; expected hidden_size 48"),
        ("qwen2_moe", {"use_sliding_window": True}, "does not know use_sliding_window"),
        ("qwen3_moe", {"attention_bias": True}, "does not know attention_bias"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("olmoe", {"norm_topk_prob": True}, "does not know norm_topk_prob"),
        ("olmoe", {"rms_norm_eps": 1e-6}, "does not know rms_norm_eps"),
        ("olmoe", {"clip_qkv": 8.0}, "does not know clip_qkv"),
        ("glm4_moe", {"n_group": 5}, "12 experts cannot be divided into 5 groups"),
        ("glm4_moe", {"topk_group": 5}, "of which 5 are kept"),
        ("glm4_moe", {"n_group": 12, "topk_group": 3}, "no two experts each"),
        ("glm4_moe", {"num_experts_per_tok": 7}, "7 experts out of the 6"),
        ("glm4_moe", {"scoring_func": "softmax"}, "does not know scoring_func"),
        ("glm4_moe", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25; expected the same as"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "an even part of heads of width 16"),
        ("glm4_moe", {"tie_word_embeddings": True}, "does not know tie_word_embeddings"),
    ],
)
def test_what_cannot_be_run_alike_is_refused(name: str, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        config_from_hf(hf_config(name, **changes))


NULLS: dict[str, tuple[str, ...]] = {
    "mixtral": ("num_local_experts", "num_experts_per_tok", "intermediate_size", "router_jitter_noise"),
    "qwen2_moe": ("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "shared_expert_intermediate_size"),
    "qwen3_moe": ("norm_topk_prob", "num_experts", "mlp_only_layers", "moe_intermediate_size"),
    "olmoe": ("num_experts", "num_experts_per_tok"),
    "glm4_moe": (
        *("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "num_nextn_predict_layers"),
        *("norm_topk_prob", "use_qk_norm", "n_shared_experts", "attention_bias"),
    ),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in NULLS.items() for key in keys])
def test_null_is_not_the_same_as_absent(name: str, key: str) -> None:
    with pytest.raises(ModelError, match=f"null is the value of {key}"):
        config_from_hf(hf_config(name, **{key: None}))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("mixtral", "norm_topk_prob"),
        ("qwen2_moe", "qkv_bias"),
        ("qwen2_moe", "use_sliding_window"),
        ("qwen3_moe", "a_key_of_a_fork"),
        ("olmoe", "rms_norm_eps"),
        ("glm4_moe", "scoring_func"),
    ],
)
def test_null_does_not_hide_a_key_that_is_not_known(name: str, key: str) -> None:
    with pytest.raises(ModelError, match=f"does not know {key}"):
        config_from_hf(hf_config(name, **{key: None}))


def test_no_clipping_is_null() -> None:
    values = hf_config("olmoe")
    assert values["clip_qkv"] is None
    without = {key: value for key, value in values.items() if key != "clip_qkv"}
    assert config_from_hf(values) == config_from_hf(without)


def test_dense_families_have_no_experts() -> None:
    values = hf_config("qwen3_moe") | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(ModelError, match="qwen3 models have no experts"):
        config_from_hf(values)


@pytest.mark.parametrize("name", CASES)
def test_sizes_follow_from_the_parts(name: str, make_tiny: Callable[[str], Tiny]) -> None:
    config = open_checkpoint(make_tiny(name).path).config
    counted = {key: math.prod(shape) for key, shape in tensor_shapes(config).items()}
    small = sum(size for key, size in counted.items() if "self_attn" in key and ("norm" in key or "bias" in key))
    small += sum(size for key, size in counted.items() if key.endswith("e_score_correction_bias"))
    assert config.num_parameters == sum(counted.values()) - small


def test_layers_that_draft_tokens_are_not_loaded(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny(tmp_path, "glm4_moe", **CASES["glm4_moe"][1])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    load_model(tmp_path)
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="has no place for"):
        load_model(tmp_path)


def test_random_weights_are_one_model_however_divided(tmp_path: Path) -> None:
    save_tiny(tmp_path, "glm4_moe", **CASES["glm4_moe"][1])
    (tmp_path / "model.safetensors").unlink()
    expected = run_tokens(load_model(tmp_path, load_format="dummy"), PROMPT)
    assert torch.isfinite(expected).all()
    for found in run_ranks(3, lambda rank: run_tokens(load_model(tmp_path, rank, load_format="dummy"), PROMPT)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
