"""Which of a model's configuration and of vLLM's options is part of a server's name: everything, unless it is known to
change nothing. The configurations are vLLM's own, from its engine arguments."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_identity import changed, config_of
from vllm.config import KVTransferConfig

from headwater.engine.identity import engine_identity
from headwater.integrations.vllm import before
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.identity import server_identity
from headwater.integrations.vllm.options import read_options
from headwater.integrations.vllm.settings import _mistral_files, check_running_code
from headwater.integrations.vllm.variables import HARMLESS_VARIABLES
from headwater.models.checkpoint import open_checkpoint
from headwater.models.config import FAMILIES
from headwater.models.config_keys import HARMLESS

from vllm_models import save_experts

OPTIONS = read_options({}, "kv_both")
WEIGHTS = f"sha256:{0:064x}"
THETA = {"rope_theta": 10000.0}
DYNAMIC = THETA | {"rope_type": "dynamic", "factor": 2.0}
LLAMA3 = THETA | {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LENGTH = "max_position_embeddings"


def name(config: Any) -> bytes:
    return server_identity(config, OPTIONS, WEIGHTS).digest


def engine(path: Path, **arguments: Any) -> Any:
    """vLLM's whole configuration."""
    from vllm.engine.arg_utils import EngineArgs

    known: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True} | arguments
    return EngineArgs(model=str(path), **{"max_model_len": 512, **known}).create_engine_config()


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({"rope_parameters": DYNAMIC}, {"rope_parameters": DYNAMIC | {"max_trained_positions": 64}}),
        ({"rope_parameters": DYNAMIC}, {"rope_parameters": DYNAMIC | {"alpha": 4.0}}),
        ({"rope_parameters": THETA}, {"rope_parameters": THETA | {"rope_dim": 16}}),
        ({"rope_parameters": THETA}, {"rope_parameters": THETA | {"use_fope": True}}),
        ({}, {"bias": True}),
        ({}, {"qkv_bias": True}),
        ({}, {"dual_chunk_attention_config": {"chunk_size": 64, "local_size": 16}}),
        ({}, {"is_causal": False}),
        ({}, {"logit_scale": 0.5}),
        ({}, {"nobody_knows": 1}),
        ({}, {"tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_a_key_that_vllm_reads_is_part_of_the_name(
    qwen3: Path, tmp_path: Path, base: dict[str, Any], change: dict[str, Any]
) -> None:
    """Each of them once gave two models one name; the first gave wrong tokens."""
    assert name(engine(changed(qwen3, tmp_path / "a", **base))) != name(
        engine(changed(qwen3, tmp_path / "b", **{**base, **change}))
    )


def test_harmless_keys_are_shared(qwen3: Path, moe: Path, tmp_path: Path) -> None:
    harmless = {"use_cache": False, "initializer_range": 0.5, "eos_token_id": [2, 5], "transformers_version": "4.0.0"}
    assert set(harmless) <= set(HARMLESS)
    for number, model in enumerate((qwen3, moe)):
        other = changed(model, tmp_path / str(number), **harmless)
        assert name(engine(other)) == name(engine(model))


def test_real_configurations_have_the_reference_engines_name(qwen3: Path, smollm2: Path) -> None:
    for path in (qwen3, smollm2):
        mine = engine_identity(open_checkpoint(path), "float32", "auto")
        theirs = server_identity(engine(path, trust_remote_code=True, seed=7), OPTIONS, mine.weights)
        assert theirs.digest == mine.digest


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_reference_engines_name(family: str, tmp_path: Path) -> None:
    path = save_experts(tmp_path / family, family)
    mine = engine_identity(open_checkpoint(path), "float32", "auto")
    theirs = server_identity(engine(path), OPTIONS, mine.weights)
    assert (theirs.settings, theirs.digest) == (mine.settings, mine.digest)


def test_an_override_counts_as_what_it_makes_of_the_config(qwen3: Path, moe: Path, tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    written = name(engine(changed(qwen3, tmp_path / "theta", **rope)))
    assert name(engine(qwen3, hf_overrides=rope)) == written != name(engine(qwen3))
    assert name(engine(qwen3, hf_config_path=str(tmp_path / "theta"))) == written
    assert name(engine(qwen3, hf_overrides={"rope_parameters": DYNAMIC | {"max_trained_positions": 64}})) != name(
        engine(qwen3, hf_overrides={"rope_parameters": DYNAMIC})
    )
    other = changed(moe, tmp_path / "moe", norm_topk_prob=True)
    names = [
        name(engine(moe)),
        name(engine(moe, hf_overrides={"norm_topk_prob": True})),
        name(engine(moe, hf_config_path=str(other))),
        name(engine(other)),
    ]
    assert len(set(names)) == len(names)
    with pytest.raises(DeclinedError, match="hf_overrides is a function"):
        name(engine(moe, hf_overrides=lambda config: config))


def test_options_that_change_numbers_are_part_of_the_name(
    qwen3: Path, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in (qwen3, moe):
        names = [
            name(engine(model)),
            name(engine(model, disable_sliding_window=True)),
            name(engine(model, model_impl="transformers")),
            name(engine(model, runner="pooling", convert="embed")),
            name(engine(model, additional_config={"a": 1})),
        ]
        monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "medium")
        names.append(name(engine(model)))
        monkeypatch.undo()
        assert len(set(names)) == len(names)
        same = engine(model, model_impl="vllm", runner="generate", max_model_len=256, trust_remote_code=True)
        assert name(same) == names[0]
    for variable in ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "VLLM_TEST_FORCE_LOAD_FORMAT"):
        config = engine(moe)
        monkeypatch.setenv(variable, "uniform_random")
        with pytest.raises(DeclinedError, match=variable):
            name(config)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_USE_DEEP_GEMM_E8M0", "0"),
        ("VLLM_USE_DEEP_GEMM", "0"),
        ("VLLM_DISABLED_KERNELS", "MarlinLinearKernel"),
        ("VLLM_USE_TRITON_AWQ", "1"),
        ("VLLM_ROCM_USE_AITER_FP8BMM", "0"),
        ("VLLM_VIDEO_LOADER_BACKEND", "opencv_dynamic"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1"),
        ("DNNL_DEFAULT_FPMATH_MODE", "BF16"),
    ],
)
def test_variables_count_unless_they_are_known_to_change_nothing(
    moe: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    config = engine(moe)
    before = name(config)
    for harmless in ("VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE", "VLLM_VERSION", "VLLM_SERVER_DEV_MODE"):
        monkeypatch.setenv(harmless, "1")
    assert name(config) == before
    monkeypatch.setenv(variable, value)
    assert name(config) != before


def test_harmless_variables_are_vllms() -> None:
    """A name that vLLM does not have is a slip of the pen."""
    from vllm import envs

    assert not HARMLESS_VARIABLES - set(envs.environment_variables)


def test_the_length_counts_where_a_rope_type_reads_it(qwen3: Path, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 256}
    long = changed(qwen3, tmp_path / "long", rope_parameters=THETA | factors | {"rope_type": "longrope", "factor": 16})
    assert name(engine(long, max_model_len=256)) != name(engine(long, max_model_len=512))


def test_a_length_past_the_end_of_vllms_rope_table_is_declined(qwen3: Path, tmp_path: Path) -> None:
    """vLLM computes with what lies behind the table: other numbers in each process."""
    yarn = THETA | {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    path = changed(qwen3, tmp_path / "yarn", rope_parameters=yarn)
    name(engine(path, max_model_len=256))
    with pytest.raises(DeclinedError, match="rope table ends at 256"):
        name(engine(path, max_model_len=257))


@pytest.mark.parametrize(
    ("rope", "end"),
    [
        (THETA, 256),
        (THETA | {"rope_type": "linear", "factor": 1.5}, 384),
        (DYNAMIC, 256),
        (THETA | {"rope_type": "ntk", "factor": 2.0}, 256),
        (LLAMA3, 256),
    ],
    ids=lambda value: str(value.get("rope_type", "default")) if isinstance(value, dict) else str(value),
)
def test_no_option_leads_past_the_end_of_a_rope_table(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rope: dict[str, Any], end: int
) -> None:
    """Two ways to a longer max_model_len, neither of which counts in the name: a key of the config, and a variable."""
    sizes = {"max_position_embeddings": 256, "rope_parameters": rope}
    path = changed(qwen3, tmp_path / "short", **sizes)
    long = changed(qwen3, tmp_path / "long", **sizes, model_max_length=100_000)
    name(engine(path, max_model_len=end))
    assert name(engine(long, max_model_len=256)) == name(engine(path, max_model_len=256))
    with pytest.raises(DeclinedError, match=f"ends at {end}"):
        name(engine(long, max_model_len=end + 1))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with pytest.raises(DeclinedError, match=f"ends at {end}"):
        name(engine(path, max_model_len=end + 1))


def test_positions_past_the_end_are_declined_where_the_config_has_no_such_key(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the key, the class of transformers has a length of its own, and vLLM's table ends there."""
    path = changed(qwen3, tmp_path / "model")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({key: values[key] for key in values if key != LENGTH}))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with pytest.raises(DeclinedError, match="ends at 32768"):
        name(engine(path, max_model_len=40_000))


def test_quantization_files_beside_the_weights_count(moe: Path, tmp_path: Path) -> None:
    path = changed(moe, tmp_path / "model")
    before = name(engine(path))
    (path / "notes.json").write_text("[1]")
    (path / "tokenizer_config.json").write_text("{}")
    assert name(engine(path)) == before
    config = engine(path)
    (path / "quantize_config.json").write_text('{"bits": 4}')
    assert name(config) != before


def test_remote_code_counts_or_is_declined(moe: Path, tmp_path: Path) -> None:
    path = changed(moe, tmp_path / "model")
    config = engine(path, trust_remote_code=True)
    before = name(config)
    config.model_config.hf_config.auto_map = {"AutoModel": "modeling.Model"}
    (path / "modeling.py").write_text("a = 1")
    one = name(config)
    (path / "modeling.py").write_text("a = 2")
    assert len({before, one, name(config)}) == 3
    config.model_config.hf_config.auto_map = {"AutoModel": "someone/else--modeling.Model"}
    with pytest.raises(DeclinedError, match="another repository"):
        name(config)


@pytest.mark.parametrize("where", ["model", "elsewhere"])
def test_a_config_that_names_others_is_declined(moe: Path, tmp_path: Path, where: str) -> None:
    """transformers reads another file in its place, which did not count."""
    path = changed(moe, tmp_path / "model", configuration_files=["config.4.0.0.json"])
    shutil.copy(moe / "config.json", path / "config.4.0.0.json")
    config = engine(path) if where == "model" else engine(moe, hf_config_path=str(path))
    with pytest.raises(DeclinedError, match="configuration_files"):
        name(config)


def test_weights_that_decide_which_config_is_read_count(moe: Path, tmp_path: Path) -> None:
    """vLLM reads params.json in place of config.json where weights of Mistral's format lie, loaded or not."""
    path = changed(moe, tmp_path / "model")
    config = engine(path)
    plain = name(config)
    (path / "params.json").write_text("{}")
    with_params = name(config)
    (path / "consolidated.safetensors").write_bytes(b"not loaded")
    assert len({plain, with_params, name(config)}) == 3
    config.model_config.model = "acme/of-the-hub"
    with pytest.raises(DeclinedError, match="--config-format"):
        _mistral_files(config.model_config, path)


def test_the_config_that_vllm_holds_counts_wherever_it_was_read(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = KVTransferConfig(
        kv_connector="HeadwaterConnector", kv_connector_module_path="headwater.integrations.vllm", kv_role="kv_both"
    )
    find = before._config_in_the_making

    def make(**held: Any) -> Any:
        """vLLM's configuration, with a model's config that holds something else than the files."""

        def find_and_change() -> Any:
            if (config := find()) is not None:
                config.model_config.hf_config.update(held)
            return config

        monkeypatch.setattr(before, "_config_in_the_making", find_and_change)
        monkeypatch.setattr(before, "_is_young", lambda state, config: False)
        config = engine(moe, kv_transfer_config=transfer)
        assert before.noted(config) is not None
        return config

    plain = make()
    assert name(make()) == name(plain) == name(make(initializer_range=0.5, _name_or_path="elsewhere"))
    assert name(make(rms_norm_eps=0.5)) != name(plain)
    expected = name(plain)
    plain.model_config.hf_config.update({"rms_norm_eps": 0.5})  # as workers do while they build some models
    assert name(pickle.loads(pickle.dumps(plain))) == expected


def test_code_of_another_revision_is_declined(moe: Path, tmp_path: Path) -> None:
    path = changed(moe, tmp_path / "model", auto_map={"AutoConfig": "code.Config"})
    (path / "code.py").write_text(
        "from transformers import Qwen3MoeConfig\n\n\nclass Config(Qwen3MoeConfig):\n    pass\n"
    )
    config = engine(path, trust_remote_code=True)
    name(config)
    config.model_config.code_revision = "0123456789abcdef"
    with pytest.raises(DeclinedError, match="code_revision"):
        name(config)


def test_copies_of_code_that_differ_from_the_named_files_are_declined(
    moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers runs the copies, and does not compare those of a commit again."""
    path = changed(moe, tmp_path / "model", auto_map={"AutoConfig": "code.Config"})
    (path / "code.py").write_text(
        "from transformers import Qwen3MoeConfig\n\n\nclass Config(Qwen3MoeConfig):\n    pass\n"
    )
    config = engine(path, trust_remote_code=True)
    for imported in [found for found in sys.modules if found.startswith("transformers_modules.")]:
        monkeypatch.delitem(sys.modules, imported)
    copy = tmp_path / "copy.py"
    shutil.copy(path / "code.py", copy)
    monkeypatch.setitem(sys.modules, "transformers_modules.x.code", SimpleNamespace(__file__=str(copy)))
    check_running_code(config.model_config)
    copy.write_text("changed = True\n")
    with pytest.raises(DeclinedError, match=r"copy\.py.* runs"):
        check_running_code(config.model_config)


def test_code_in_packages_counts(moe: Path, tmp_path: Path) -> None:
    path = changed(moe, tmp_path / "model")
    config = engine(path, trust_remote_code=True)
    config.model_config.hf_config.auto_map = {"AutoConfig": "code/acme.AcmeConfig"}
    names = [name(config)]
    (path / "code" / "more").mkdir(parents=True)
    for file in ("code/acme.py", "code/more/rope.py", "code/more/rope.json"):
        for content in ("a = 1", "a = 2"):
            (path / file).write_text(content)
            names.append(name(config))
    assert len(set(names)) == len(names)
    (path / "code" / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(DeclinedError, match="links to directories"):
        name(config)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json", "tokenizer_config.json"])
def test_code_of_image_processors_counts(qwen3: Path, tmp_path: Path, file: str) -> None:
    config = llava(tmp_path / "llava", qwen3)
    folder = Path(config.model_config.model)
    config.model_config.trust_remote_code = True
    (folder / "acme.py").write_text("SCALE = 1")
    names = [name(config)]
    (folder / file).write_text(json.dumps({"auto_map": {"AutoImageProcessor": "acme.AcmeImageProcessor"}}))
    names.append(name(config))
    (folder / "acme.py").write_text("SCALE = 2")
    assert len({*names, name(config)}) == 3
    (folder / file).write_text(json.dumps({"auto_map": {"AutoImageProcessor": "someone/else--acme.Processor"}}))
    with pytest.raises(DeclinedError, match="another repository"):
        name(config)


def test_a_class_of_a_plugin_does_not_have_the_name_of_vllms(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    config = engine(qwen3)
    name(config)
    ModelRegistry.register_model("Qwen3ForCausalLM", "elsewhere:OtherQwen3")
    with pytest.raises(DeclinedError, match="not vLLM's own class"):
        name(config)


def llava(folder: Path, qwen3: Path, processor: dict[str, Any] | None = None, **changes: Any) -> Any:
    """As much of vLLM's configuration of a model with images as a name needs."""
    import transformers
    from vllm.config.multimodal import MultiModalConfig

    text = transformers.AutoConfig.from_pretrained(qwen3).to_dict()
    config = transformers.LlavaConfig(text_config=text, **changes)
    folder.mkdir()
    for path in qwen3.glob("*.safetensors"):
        os.link(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor or {"image_mean": [0.5, 0.5, 0.5]}))
    model = {"hf_config": config, "hf_text_config": config.text_config, "multimodal_config": MultiModalConfig()}
    model |= {"architecture": "LlavaForConditionalGeneration", "model": str(folder)}
    return config_of(qwen3, model=model)


def test_all_of_a_model_with_images_counts(qwen3: Path, tmp_path: Path) -> None:
    from vllm.config.multimodal import MultiModalConfig

    def with_media(folder: str, **options: Any) -> Any:
        config = llava(tmp_path / folder, qwen3)
        config.model_config.multimodal_config = MultiModalConfig(**options)
        return config

    names = [
        name(config_of(qwen3)),
        name(llava(tmp_path / "a", qwen3)),
        name(llava(tmp_path / "b", qwen3, vision_feature_layer=-1)),
        name(llava(tmp_path / "c", qwen3, {"image_mean": [0.1, 0.5, 0.5]})),
        name(with_media("d", mm_processor_kwargs={"size": 8})),
        name(with_media("e", language_model_only=True)),
        name(with_media("f", video_pruning_rate=0.5)),
    ]
    assert len(set(names)) == len(names)
    assert name(with_media("g", mm_processor_cache_gb=1)) == names[1]
    (tmp_path / "a" / "video_preprocessor_config.json").write_text("{}")
    shutil.rmtree(tmp_path / "b")
    config = llava(tmp_path / "b", qwen3)
    assert name(config) == names[1]
    (tmp_path / "b" / "video_preprocessor_config.json").write_text("{}")
    assert name(config) != names[1]
    with pytest.raises(DeclinedError, match="mm_encoder_attn_dtype"):
        name(with_media("h", mm_encoder_attn_dtype="fp8"))


def test_building_a_model_in_a_worker_does_not_rename_it(moe: Path) -> None:
    """vLLM's models change their config while they are built; its scheduler has one that was never built."""
    config = engine(moe)
    before = name(config)
    hf = config.model_config.hf_config
    hf.rope_parameters = dict(hf.rope_parameters, rope_type="deepseek_yarn")
    hf.num_ln_in_parallel_attn = 2
    assert name(config) == before


def test_an_output_matrix_beside_tied_embeddings_is_the_same_model_in_both_engines(qwen3: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = changed(qwen3, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    mine = engine_identity(open_checkpoint(path), "float32", "auto")
    assert not open_checkpoint(path).config.tie_embeddings
    assert server_identity(engine(path), OPTIONS, mine.weights).digest == mine.digest
