"""What a server is named by: the same as the reference engine, for the same checkpoint, and different in every respect
that changes KV."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import LoadConfig
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from headwater.engine.identity import engine_identity
from headwater.integrations.vllm.before import note_files_of
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.identity import server_identity, server_spec, writer_group
from headwater.integrations.vllm.options import read_options
from headwater.integrations.vllm.weights import name_weights
from headwater.kv.spec import KVSpec
from headwater.models.checkpoint import open_checkpoint
from headwater.models.config import FAMILIES
from headwater.models.config_experts import EXPERTS

from vllm_models import save_experts

OPTIONS = read_options({}, "kv_both")


def config_of(path: Path, **changes: Any) -> Any:
    """As much of vLLM's configuration as an identity needs."""
    import transformers

    hf = transformers.AutoConfig.from_pretrained(path)
    model = {"model": str(path), "dtype": torch.float32, "quantization": None, "hf_config": hf, "hf_text_config": hf}
    model |= {"hf_overrides": {}, "revision": None, "quantization_config": None, "max_model_len": 4096}
    model |= {"architecture": (hf.architectures or ["none"])[0], **changes.pop("model", {})}
    config = SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(cache_dtype=changes.pop("cache_dtype", "auto")),
        load_config=LoadConfig(load_format=changes.pop("load_format", "auto")),
        kv_transfer_config=SimpleNamespace(engine_id=changes.pop("engine_id", "e")),
        instance_id=changes.pop("instance_id", "i"),
    )
    note_files_of(config)  # as in a server whose files have not changed since it started
    return config


def identity(config: Any, options: Any = OPTIONS) -> bytes:
    return server_identity(config, options, name_weights(config, options)).digest


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_it_is_the_reference_engines(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    assert identity(config_of(path)) == engine_identity(open_checkpoint(path), "float32", "auto").digest


@pytest.mark.parametrize("family", [name for name in EXPERTS if name in FAMILIES])
def test_it_is_the_reference_engines_with_experts(family: str, tmp_path: Path) -> None:
    path = save_experts(tmp_path / "model", family)
    name = identity(config_of(path))
    assert name == engine_identity(open_checkpoint(path), "float32", "auto").digest
    values = json.loads((path / "config.json").read_text())
    other = changed(path, tmp_path / "other", num_experts_per_tok=values["num_experts_per_tok"] - 1)
    assert identity(config_of(other)) == engine_identity(open_checkpoint(other), "float32", "auto").digest != name


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_workers_name_a_model_as_the_scheduler_does_though_they_rename_its_rope(family: str, tmp_path: Path) -> None:
    config = config_of(save_experts(tmp_path / "model", family))
    before = identity(config)
    rope = config.model_config.hf_config.rope_parameters
    assert rope["rope_type"] == "yarn"
    rope["rope_type"] = "deepseek_yarn"  # as vLLM's class of latent attention does
    assert identity(config) == before


@pytest.mark.parametrize(
    ("kind", "custom_ops", "is_declined"),
    [
        ("default", [], True),
        ("default", ["all"], True),
        ("default", ["none", "+rotary_embedding"], True),
        ("default", ["none"], False),
        ("default", ["-rotary_embedding"], False),
        ("yarn", ["all"], False),
        ("deepseek_yarn", ["all"], False),
    ],
)
def test_wrong_rotations_of_vllm_on_cpus_are_declined(kind: str, custom_ops: list[str], is_declined: bool) -> None:
    config, cache = latent_server(kind, custom_ops)
    if is_declined:
        with pytest.raises(DeclinedError, match="-rotary_embedding"):
            server_spec(config, cache)
    else:
        assert server_spec(config, cache) == LATENTS


LATENTS = KVSpec.mla(num_layers=2, latent_dim=512, rope_dim=64, dtype="float32")


def latent_server(kind: str = "yarn", custom_ops: list[str] | None = None, **changes: Any) -> tuple[Any, Any]:
    """The configurations of a server whose model has latent attention, and of its cache."""
    hf = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64, rope_parameters={"rope_type": kind})
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=hf, get_total_num_hidden_layers=lambda: 2),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        speculative_config=None,
        compilation_config=SimpleNamespace(custom_ops=custom_ops or []),
    )
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    vars(config).update(changes)
    return config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "deepseek_mtp", "medusa", "draft_model", "suffix"])
def test_speculation_with_more_than_the_requests_own_tokens_is_declined(method: str) -> None:
    config, cache = latent_server(speculative_config=SimpleNamespace(method=method))
    with pytest.raises(DeclinedError, match="speculative decoding"):
        server_spec(config, cache)


def test_ngram_speculation_shares() -> None:
    config, cache = latent_server(speculative_config=SimpleNamespace(method="ngram"))
    assert server_spec(config, cache) == LATENTS


def test_the_index_of_sparse_latent_attention_is_a_second_kind_of_kv() -> None:
    """As DeepSeek-V3.2 has it: 132 bytes a token beside the latents."""
    config, cache = latent_server()
    index = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    cache.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=index))
    with pytest.raises(DeclinedError, match="2 groups of KV"):
        server_spec(config, cache)


def online(**settings: Any) -> Any:
    from vllm.config.quantization import QuantizationConfigArgs

    return QuantizationConfigArgs(**settings)


def changed(model: Path, directory: Path, **settings: Any) -> Path:
    """The same weights under another config."""
    shutil.copytree(model, directory)
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))
    return directory


def test_everything_that_changes_kv_changes_it(qwen3: Path, qwen3_twin: Path, tmp_path: Path) -> None:
    fp8 = {"quantization": "fp8"}
    elsewhere = changed(qwen3, tmp_path / "elsewhere", model_type="gemma2", rms_norm_eps=1e-2)
    found = [
        identity(config_of(qwen3)),
        identity(config_of(qwen3_twin)),
        identity(config_of(qwen3, model={"dtype": torch.bfloat16})),
        identity(config_of(qwen3, model=fp8)),
        identity(config_of(qwen3, model={**fp8, "quantization_config": {"ignore": ["a"]}})),
        identity(config_of(qwen3, model={**fp8, "quantization_config": online(ignore=["b"])})),
        identity(config_of(qwen3, model={**fp8, "quantization_config": online(linear="fp8_per_token")})),
        identity(config_of(changed(qwen3, tmp_path / "eps", rms_norm_eps=1e-3))),
        identity(config_of(changed(qwen3, tmp_path / "unknown", model_type="gemma2"))),
        identity(config_of(tmp_path / "unknown", model={"hf_config_path": str(elsewhere)})),
        identity(config_of(changed(qwen3, tmp_path / "act", model_type="gemma2", hidden_activation="gelu"))),
        identity(config_of(qwen3), read_options({"epoch": 1}, "kv_both")),
        identity(config_of(qwen3), read_options({"sample_weights": True}, "kv_both")),
        identity(config_of(qwen3, load_format="dummy")),
        identity(config_of(qwen3, load_format="dummy", instance_id="j")),
    ]
    assert len(set(found)) == len(found)


def test_what_vllm_does_to_a_config_while_it_runs_changes_nothing(qwen3: Path, tmp_path: Path) -> None:
    """Some of its models change it while they are built, in workers and not in the scheduler."""
    config = config_of(changed(qwen3, tmp_path / "unknown", model_type="gemma2"))
    before = identity(config)
    config.model_config.hf_text_config.rope_parameters = {"rope_type": "deepseek_yarn"}
    config.model_config.hf_text_config.num_ln_in_parallel_attn = 2
    assert identity(config) == before


def test_what_is_not_certain_is_declined(qwen3: Path, tmp_path: Path) -> None:
    for config in (
        config_of(qwen3, cache_dtype="fp8"),
        config_of(qwen3, cache_dtype="fp8_ds_mla"),
        config_of(qwen3, load_format="sharded_state"),
    ):
        with pytest.raises(DeclinedError):
            identity(config)
    missing = config_of(qwen3, model={"model": "nobody/nothing"})
    with pytest.raises(DeclinedError, match="not found"):
        identity(missing)


def test_servers_have_groups_of_their_own(qwen3: Path) -> None:
    groups = [
        writer_group(config_of(qwen3, engine_id=engine, instance_id=instance)) for engine in "ab" for instance in "cd"
    ]
    assert len(set(groups)) == 4
    assert writer_group(config_of(qwen3)) == writer_group(config_of(qwen3))
    assert all(0 < group < 1 << 63 for group in groups)
