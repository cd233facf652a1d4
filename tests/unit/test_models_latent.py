"""Latent attention against `transformers`: its tokens, its logits and its cache, alone and over ranks; and mutants of
every rule, each of which must give other tokens in some family.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headwater.errors import ModelError
from headwater.kernels.attention import create_attention_backend
from headwater.kernels.attention.base import AttentionBatch
from headwater.kernels.rope import rope_and_store
from headwater.kv.identity import canonical_settings
from headwater.models import latent
from headwater.models.checkpoint import open_checkpoint
from headwater.models.checkpoint.dummy import tensor_shapes
from headwater.models.config import MLAConfig, ModelConfig
from headwater.models.config_hf import config_from_hf
from headwater.models.context import StepContext
from headwater.models.decoder import Decoder
from headwater.models.moe import SparseMLP
from headwater.models.parallel import TensorParallel
from latent_cases import CASES, YARN

from models_support import PAGE_SIZE, SIZES, StubCache, load_model, run_ranks, run_tokens, save_tiny, stub_cache

NUM_GREEDY = 64
PROMPT = [(7 * i * i + 3 * i + 5) % 131 for i in range(20)]
TIE = 1e-3
"""Logits this close may be ordered either way by float32."""
LONG = 50
"""Queries of a chunk that every case with `least_expanded` of 48 or less expands."""


class Tiny(NamedTuple):
    name: str
    path: Path
    tokens: list[int]
    """The prompt and 64 greedy tokens."""
    logits: Tensor
    """Of every position, by transformers."""
    planes: list[tuple[Tensor, Tensor]]
    """Latents and rotary keys of every layer, [tokens, width], as transformers caches them."""


@pytest.fixture(scope="module")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            family, changes = CASES[name]
            path = tmp_path_factory.mktemp("mla")
            model = save_tiny(path, family, **changes)
            with torch.no_grad():
                found = model.generate(
                    torch.tensor([PROMPT]), max_new_tokens=NUM_GREEDY, do_sample=False, eos_token_id=None
                )
                out = model(found, use_cache=True)
            planes = [(layer.keys[0, 0], layer.values[0, 0]) for layer in out.past_key_values.layers]
            made[name] = Tiny(name, path, found[0].tolist(), out.logits[0], planes)
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


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_64_greedy_tokens_are_those_of_transformers(name: str, backend: str, make_tiny: Callable[[str], Tiny]) -> None:
    tiny = make_tiny(name)
    assert len(tiny.tokens) == len(PROMPT) + NUM_GREEDY
    model = load_model(tiny.path)
    for chunk in (None, LONG, 13, 1):
        logits = run_tokens(model, tiny.tokens, chunk, backend=create_attention_backend(backend, "cpu"))
        assert wrong_tokens(logits, tiny) == []
        torch.testing.assert_close(logits, tiny.logits, rtol=0, atol=2e-4)
    top = tiny.logits[len(PROMPT) - 1 : -1].topk(2, dim=-1).values
    print(f"{name}, {backend}: {int((top[:, 0] - top[:, 1] < TIE).sum())} ties in {NUM_GREEDY} tokens")


@pytest.mark.parametrize("chunk", [None, 13])
@pytest.mark.parametrize("name", CASES)
def test_planes_are_those_of_transformers(name: str, chunk: int | None, make_tiny: Callable[[str], Tiny]) -> None:
    """The latent after its norm, the rotary key after its rotation, in pairs: DeepseekV3 and Glm4MoeLite of
    transformers keep halves."""
    tiny = make_tiny(name)
    model = load_model(tiny.path)
    total = len(tiny.tokens)
    cache = stub_cache(model, total)
    run_tokens(model, tiny.tokens, chunk, cache=cache)
    for layer, (latents, ropes) in enumerate(tiny.planes):
        mine, my_ropes = (plane[:, 0] for plane in cache.tokens(layer, total))
        if CASES[name][0] != "deepseek_v2":
            ropes = torch.stack(ropes.chunk(2, dim=-1), dim=-1).flatten(1)
        torch.testing.assert_close(mine, latents, rtol=0, atol=float(latents.abs().max()) * 1e-5)
        torch.testing.assert_close(my_ropes, ropes, rtol=0, atol=float(ropes.abs().max()) * 1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_ranks_divide_the_heads_and_repeat_the_latents(name: str, size: int, make_tiny: Callable[[str], Tiny]) -> None:
    tiny = make_tiny(name)

    def run(rank: TensorParallel) -> tuple[Decoder, Tensor, StubCache]:
        model = load_model(tiny.path, rank)
        cache = stub_cache(model, len(tiny.tokens))
        return model, run_tokens(model, tiny.tokens, LONG, cache=cache), cache

    whole = load_model(tiny.path)
    results = run_ranks(size, run)
    for model, logits, cache in results:
        assert wrong_tokens(logits, tiny) == []
        assert model.num_bytes < whole.num_bytes
        assert model.layers[0].attention.kv_b.shape[0] * size == whole.layers[0].attention.kv_b.shape[0]
        # Bit for bit, or which replica wrote a tile would count.
        for layer in range(model.config.num_layers):
            for mine, first in zip(cache.planes(layer), results[0][2].planes(layer), strict=True):
                assert torch.equal(mine, first)


@pytest.mark.parametrize("name", ["dsv2 grouped, yarn", "dsv3", "glm4_moe_lite, yarn"])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_step_of_decodes_and_of_short_and_long_chunks(
    name: str, bounded: bool, make_tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request says what it says alone, whether its neighbours are expanded or not, all heads at once or not."""
    if bounded:
        monkeypatch.setattr(latent, "EXPANDED_BYTES", 1)
    tiny = make_tiny(name)
    model = load_model(tiny.path)
    expected = run_tokens(model, tiny.tokens)
    lens = [(1, 30), (1, 84), (5, 40), (60, 60), (7, 7), (52, 80)]  # (queries, tokens with them)
    page_counts = [-(-kv // PAGE_SIZE) for _, kv in lens]
    pages = torch.randperm(sum(page_counts), generator=torch.Generator().manual_seed(1)).split(page_counts)
    table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True)
    cache = StubCache(model.config, sum(page_counts), 1)
    backend = create_attention_backend("cpu", "cpu")
    for phase in ("before", "now"):
        rows = [range(kv - q, kv) if phase == "now" else range(max(kv - q, 1)) for q, kv in lens]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]) > 1)
        rows = [rows[i] for i in order]
        positions = torch.tensor([at for found in rows for at in found])
        slots = [int(table[i, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE for i, r in zip(order, rows) for at in r]  # noqa: B905
        query_lens = tuple(len(found) for found in rows)
        batch = AttentionBatch(
            query_starts=torch.tensor([0, *query_lens]).cumsum(0).int(),
            kv_lens=torch.tensor([found.stop for found in rows]).int(),
            page_table=table[order].int(),
            query_lens_cpu=query_lens,
            kv_lens_cpu=tuple(found.stop for found in rows),
            num_decodes=sum(length == 1 for length in query_lens),
            page_size=PAGE_SIZE,
        )
        ctx = StepContext(positions, torch.tensor(slots), backend, batch, backend.plan(batch), cache)
        logits = model.logits(model.forward(torch.tensor(tiny.tokens)[positions], ctx))
        plan = ctx.shared["latent"]
        if phase == "now":
            assert len(plan.expanded) == 2
            assert plan.absorbed is not None
        torch.testing.assert_close(logits, expected[positions], rtol=0, atol=2e-4)


Mutate = Callable[[Decoder, pytest.MonkeyPatch], None]


def _rule(**changes: Any) -> Mutate:
    def mutate(model: Decoder, patch: pytest.MonkeyPatch) -> None:
        for mlp in _sparse(model):
            mlp.router._rule = replace(mlp.router._rule, **changes)

    return mutate


def _sparse(model: Decoder) -> list[SparseMLP]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseMLP)]


def _no_bias(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    for mlp in _sparse(model):
        mlp.router.bias = None


def _bias_in_weights(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    for mlp in _sparse(model):
        patch.setattr(mlp, "router", partial(_biased_weights, mlp.router))


def _biased_weights(router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    ids, _ = router(x)
    weights = (torch.nn.functional.linear(x, router.weight).sigmoid() + router.bias).gather(1, ids.long())
    return ids, weights / weights.sum(dim=-1, keepdim=True) * router._rule.scaling


def _no_shared(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    for mlp in _sparse(model):
        mlp.shared = None


def _shape(**changes: Any) -> Mutate:
    def mutate(model: Decoder, patch: pytest.MonkeyPatch) -> None:
        for layer in model.layers:
            layer.attention._shape = replace(layer.attention._shape, **changes)

    return mutate


def _no_mscale(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    model.cos_sin = replace(model.config.rope, attention_factor=1.0).table(96)


def _halves(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(latent, "rope_and_store", lambda *given, order: rope_and_store(*given, order="halves"))


def _no_q_norm(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    for layer in model.layers:
        patch.setattr(layer.attention, "q_norm", lambda x: x)


def _no_kv_norm(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    for layer in model.layers:
        patch.setattr(layer.attention, "kv_norm", lambda x: x)


def _heads_side_by_side(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    """All heads' keys before all heads' values, as other checkpoints order them."""
    for layer in model.layers:
        attention, shape = layer.attention, layer.attention._shape
        by_head = attention.kv_b.unflatten(0, (-1, shape.nope_dim + shape.v_dim))
        parts = by_head.split([shape.nope_dim, shape.v_dim], dim=1)
        attention.kv_b = torch.cat([part.flatten(0, 1) for part in parts])


MUTANTS: dict[str, tuple[str, Mutate]] = {
    "group score max, not top 2": ("dsv3", _rule(group_score="max")),
    "group score top 2, not max": ("dsv2 grouped, yarn", _rule(group_score="top2")),
    "groups ignored": ("dsv2 grouped, all sparse", _rule(num_groups=1, groups_kept=1)),
    "one group kept": ("dsv3", _rule(groups_kept=1)),
    "bias dropped": ("dsv3", _no_bias),
    "bias in weights": ("dsv3", _bias_in_weights),
    "DeepSeek-V2 renormalised": ("dsv2 greedy, no q_lora", _rule(renormalise=True)),
    "DeepSeek-V3 not renormalised": ("dsv3", _rule(renormalise=False)),
    "scaling dropped": ("dsv2 grouped, yarn", _rule(scaling=1.0)),
    "softmax for sigmoid": ("glm4_moe_lite", _rule(scores="softmax")),
    "sigmoid for softmax": ("dsv2 greedy, no q_lora", _rule(scores="sigmoid")),
    "shared experts dropped": ("glm4_moe_lite", _no_shared),
    "mscale² dropped": ("dsv3, no q_lora, yarn", _shape(score_factor=1.0)),
    "mscale² dropped in GLM": ("glm4_moe_lite, yarn", _shape(score_factor=1.0)),
    "mscale of cosines dropped": ("dsv2 grouped, yarn", _no_mscale),
    "pairs as halves": ("dsv2 greedy, no q_lora", _halves),
    "pairs as halves in DeepSeek-V3": ("dsv3", _halves),
    "query latent not normed": ("dsv3", _no_q_norm),
    "latent not normed": ("glm4_moe_lite", _no_kv_norm),
    "keys of all heads before values": ("dsv2 greedy, no q_lora", _heads_side_by_side),
}


@pytest.mark.parametrize("chunk", [None, 13], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_gives_other_tokens(
    mutant: str, chunk: int | None, make_tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, mutate = MUTANTS[mutant]
    tiny = make_tiny(name)
    model = load_model(tiny.path)
    mutate(model, monkeypatch)
    assert wrong_tokens(run_tokens(model, tiny.tokens, chunk), tiny)


@pytest.mark.parametrize("name", CASES)
def test_a_token_is_a_latent_and_a_rotary_key_a_layer(name: str, make_tiny: Callable[[str], Tiny]) -> None:
    spec = open_checkpoint(make_tiny(name).path).config.kv_spec("bfloat16")
    _, changes = CASES[name]
    assert [plane.name for plane in spec.planes] == ["latent", "rope"]
    assert spec.num_kv_heads == 1
    assert spec.token_bytes == SIZES["num_hidden_layers"] * (changes["kv_lora_rank"] + changes["qk_rope_head_dim"]) * 2


def hf_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a case, as transformers writes it."""
    import transformers

    family, given = CASES[name]
    title = "".join(part.capitalize() for part in family.split("_"))
    values: dict[str, Any] = getattr(transformers, f"{title}Config")(**{**SIZES, **given}).to_dict()
    return values | changes


FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("dsv3", {"kv_lora_rank": 20}),
    ("dsv3", {"qk_nope_head_dim": 12, "qk_head_dim": 20}),
    ("dsv3", {"qk_rope_head_dim": 10, "qk_head_dim": 20, "head_dim": 10}),
    ("dsv3", {"v_head_dim": 14}),
    ("dsv3", {"q_lora_rank": 24}),
    ("dsv3", {"q_lora_rank": None}),
    ("dsv3", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    ("dsv3", {"n_routed_experts": 16}),
    ("dsv3", {"num_experts_per_tok": 2}),
    ("dsv3", {"moe_intermediate_size": 24}),
    ("dsv3", {"n_shared_experts": 1}),
    ("dsv3", {"routed_scaling_factor": 1.0}),
    ("dsv3", {"n_group": 2}),
    ("dsv3", {"topk_group": 1}),
    ("dsv3", {"norm_topk_prob": False}),
    ("dsv3", {"first_k_dense_replace": 2}),
    ("dsv3", {"rope_parameters": YARN}),
    ("dsv3, no q_lora, yarn", {"rope_parameters": YARN | {"mscale": 0.9}}),
    ("dsv3, no q_lora, yarn", {"rope_parameters": YARN | {"mscale_all_dim": 0.7}}),
    ("dsv3, no q_lora, yarn", {"rope_parameters": YARN | {"factor": 8.0}}),
    ("dsv2 grouped, yarn", {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    ("dsv2 grouped, yarn", {"topk_group": 1}),
    ("glm4_moe_lite", {"rms_norm_eps": 1e-5}),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "dense", "sparse"], "first_k_dense_replace": 2}),
]


@pytest.mark.parametrize(("name", "change"), FIELDS, ids=str)
def test_every_field_of_latents_and_routing_is_in_the_name(name: str, change: dict[str, Any]) -> None:
    names = []
    for more in ({}, change):
        config = config_from_hf(hf_config(name, **more))
        names.append(
            canonical_settings({**config.settings, **{f"rope.{k}": v for k, v in asdict(config.rope).items()}})
        )
    assert names[0] != names[1]


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_the_same_after_a_journey_as_json(name: str) -> None:
    config = config_from_hf(hf_config(name))
    assert isinstance(config.attention, MLAConfig)
    assert ModelConfig.from_fields(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("dsv2 greedy, no q_lora", {"norm_topk_prob": True}, "norm_topk_prob is True; expected false"),
        ("dsv2 greedy, no q_lora", {"n_group": 4, "topk_group": 2}, "vLLM divides experts into groups"),
        ("dsv2 greedy, no q_lora", {"topk_method": "noaux_tc"}, "expected greedy or group_limited_greedy"),
        ("dsv2 greedy, no q_lora", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; expected softmax"),
        ("dsv2 greedy, no q_lora", {"rms_norm_eps": 1e-5}, "does not know rms_norm_eps"),
        ("dsv3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; expected sigmoid"),
        ("dsv3", {"topk_method": "noaux_tc"}, "vLLM takes the softmax without it"),
        ("dsv3", {"rope_parameters": YARN | {"truncate": False}}, "truncate is False; expected true"),
        ("dsv3", {"attention_bias": True}, "does not know attention_bias"),
        ("dsv3", {"rope_interleave": False}, "does not know rope_interleave"),
        ("dsv3", {"moe_layer_freq": 2}, "does not know moe_layer_freq"),
        ("dsv3", {"tie_word_embeddings": True}, "does not know tie_word_embeddings"),
        ("dsv3", {"index_topk": 2048}, "does not know index_topk"),
        ("dsv3", {"num_key_value_heads": 3}, "num_key_value_heads is 3; expected 6"),
        ("dsv3", {"head_dim": 18}, "head_dim is 18; expected 8"),
        ("dsv3", {"qk_rope_head_dim": 7, "head_dim": 7, "qk_head_dim": 17}, "need an even number"),
        ("dsv3", {"kv_lora_rank": None}, "null is the value of kv_lora_rank"),
        ("dsv3", {"n_group": None}, "null is the value of n_group"),
        ("dsv3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "expected default or yarn"),
        ("dsv3", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor is 1.0; expected none"),
        ("dsv3", {"rope_parameters": {k: v for k, v in YARN.items() if k != "mscale"}}, "beside mscale"),
        ("dsv3", {"rope_parameters": YARN | {"mscale_all_dim": 0.0}}, "beside mscale"),
        ("dsv3", {"rope_parameters": YARN | {"mscale_all_dim": 0.0, "mscale": 0.0}}, "mscale is 0.0"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "mlp_layer_types is .*; expected 2 times dense"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "expected 1 times dense"),
        ("glm4_moe_lite", {"mlp_layer_types": None}, "null is the value of mlp_layer_types"),
    ],
)
def test_what_cannot_be_run_alike_is_refused(name: str, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        config_from_hf(hf_config(name, **changes))


def test_keys_of_published_checkpoints_are_known() -> None:
    """Beside those of transformers: where code lies that nobody runs, training, how experts were spread."""
    plain = config_from_hf(hf_config("dsv3"))
    more = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "ep_size": 1, "moe_layer_freq": 1}
    more |= {"aux_loss_alpha": 0.001, "seq_aux": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    assert config_from_hf(hf_config("dsv3", **more, num_nextn_predict_layers=1)).settings == plain.settings


@pytest.mark.parametrize("name", CASES)
def test_sizes_follow_from_the_parts(name: str, make_tiny: Callable[[str], Tiny]) -> None:
    config = open_checkpoint(make_tiny(name).path).config
    counted = {key: math.prod(shape) for key, shape in tensor_shapes(config).items()}
    small = sum(size for key, size in counted.items() if "self_attn" in key and "norm" in key)
    small += sum(size for key, size in counted.items() if key.endswith("e_score_correction_bias"))
    assert config.num_parameters == sum(counted.values()) - small


def test_layers_that_draft_tokens_are_not_loaded(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny(tmp_path, *CASES["dsv3"][:1], **CASES["dsv3"][1])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    load_model(tmp_path)
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="has no place for"):
        load_model(tmp_path)


def test_random_weights_are_one_model_however_divided(tmp_path: Path) -> None:
    save_tiny(tmp_path, *CASES["dsv3"][:1], **CASES["dsv3"][1])
    (tmp_path / "model.safetensors").unlink()
    expected = run_tokens(load_model(tmp_path, load_format="dummy"), PROMPT)
    assert torch.isfinite(expected).all()
    for found in run_ranks(3, lambda rank: run_tokens(load_model(tmp_path, rank, load_format="dummy"), PROMPT)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
