"""Weights are named by the files that vLLM loads, and only if they are still what was loaded."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import EngineArgs
from vllm.config import KVTransferConfig, LoadConfig

from headwater.integrations.vllm import before, weights
from headwater.integrations.vllm.before import note_files_of, noted, process_start_ns
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.options import read_options
from headwater.integrations.vllm.weights import check_sources, loaded_files, name_weights
from headwater.kv import files
from headwater.kv.checkpoint import digest_checkpoint

from vllm_models import save_experts

OPTIONS = read_options({}, "kv_both")
HOUR_NS = 3600 * 10**9
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(folder: Path, **contents: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", "-").replace("_DOT_", ".")).write_bytes(content)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the same model in two formats, as many on the hub are."""
    return write(
        tmp_path / "model",
        config_DOT_json=b"{}",
        model_DOT_safetensors=b"safe",
        extra_DOT_safetensors=b"more",
        model_DOT_pt=b"torch",
        optimizer_DOT_pt=b"not weights",
        pytorch_model_DOT_bin=b"bin",
    )


def config_of(path: Path | str, *, revision: Any = None, instance_id: str = "i", **load: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(path), revision=revision, model_weights=""),
        load_config=LoadConfig(**load),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        instance_id=instance_id,
    )


def started(config: Any) -> Any:
    """As vLLM leaves it for the workers, before anything is loaded."""
    note_files_of(config)
    assert noted(config) is not None
    return config


def index(path: Path, *names: str) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: n for n in names}}))


@pytest.mark.parametrize(
    ("load_format", "expected"),
    [
        ("auto", ["extra.safetensors", "model.safetensors"]),
        ("hf", ["extra.safetensors", "model.safetensors"]),
        ("safetensors", ["extra.safetensors", "model.safetensors"]),
        ("pt", ["model.pt"]),
    ],
)
def test_files_that_are_loaded_count(model: Path, load_format: str, expected: list[str]) -> None:
    config = started(config_of(model, load_format=load_format))
    assert loaded_files(config)[:2] == (model, expected)
    assert name_weights(config, OPTIONS) == digest_checkpoint(model, files=expected)


@pytest.mark.skipif(importlib.util.find_spec("runai_model_streamer") is not None, reason="the streamer is installed")
def test_a_loader_that_cannot_say_what_it_loads_is_declined(model: Path) -> None:
    with pytest.raises(DeclinedError, match="does not say which files"):
        loaded_files(config_of(model, load_format="runai_streamer"))


def test_the_same_directory_in_two_formats_is_two_models(model: Path) -> None:
    names = {name_weights(started(config_of(model, load_format=kind)), OPTIONS) for kind in ("safetensors", "pt")}
    assert len(names) == 2


def test_an_index_counts_and_files_that_it_does_not_name_do_not(model: Path) -> None:
    index(model, "model.safetensors")
    config = started(config_of(model))
    assert loaded_files(config).names == ["model.safetensors", "model.safetensors.index.json"]
    before = name_weights(config, OPTIONS)
    (model / "extra.safetensors").write_bytes(b"other")
    assert name_weights(config, OPTIONS) == before
    index(model, "model.safetensors", "extra.safetensors")
    assert name_weights(started(config_of(model)), OPTIONS) != before


def test_official_mistral_files_are_chosen_as_vllm_does(model: Path) -> None:
    write(model, consolidated_DOT_safetensors=b"official")
    assert loaded_files(config_of(model)).names == ["consolidated.safetensors"]
    assert "consolidated.safetensors" in loaded_files(config_of(model, load_format="safetensors")).names


@pytest.mark.parametrize("load_format", ["mistral", "npcache", "sharded_state", "tensorizer", "ipc_cache", "theirs"])
def test_what_may_load_other_weights_is_declined(model: Path, load_format: str) -> None:
    with pytest.raises(DeclinedError, match="load format"):
        name_weights(config_of(model, load_format=load_format), OPTIONS)


def test_a_loader_that_somebody_registered_in_place_of_vllms_is_declined(model: Path, monkeypatch: Any) -> None:
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class Theirs(DefaultModelLoader):
        pass

    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Theirs)
    with pytest.raises(DeclinedError, match="not vLLM's own"):
        name_weights(config_of(model), OPTIONS)


def test_weights_of_an_object_store_are_declined(model: Path) -> None:
    config = config_of(model)
    config.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(DeclinedError, match="object store"):
        name_weights(config, OPTIONS)


def test_models_that_load_from_further_places_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import model_loader
    from vllm.model_executor.models.adapters import as_embedding_model
    from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM
    from vllm.model_executor.models.jina import JinaEmbeddingsV5Model
    from vllm.model_executor.models.laguna_dflash import DFlashLagunaForCausalLM
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.roberta import BgeM3EmbeddingModel

    plain = (LlamaForCausalLM, DeepseekV3ForCausalLM, as_embedding_model(LlamaForCausalLM))
    further = (BgeM3EmbeddingModel, JinaEmbeddingsV5Model, DFlashLagunaForCausalLM)
    for model_class, is_declined in (*((found, False) for found in plain), *((found, True) for found in further)):
        monkeypatch.setattr(model_loader, "get_model_cls", lambda config, chosen=model_class: chosen)
        if is_declined:
            with pytest.raises(DeclinedError, match="further places"):
                check_sources(None)
        else:
            check_sources(None)


# -- the hub ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A cache of the hub with one repository of two sets of weights."""
    repository = tmp_path / "hub" / "models--acme--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    write(repository / "refs", main=COMMIT.encode())
    (repository / "blobs").mkdir()
    for name, content in {"model.safetensors": b"safe", "pytorch_model.bin": b"bin", "config.json": b"{}"}.items():
        put(snapshot, name, content)
    return repository.parent


def put(snapshot: Path, name: str, content: bytes) -> Path:
    if name == "config.json":
        digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    else:
        digest = hashlib.sha256(content).hexdigest()
    blob = snapshot.parents[1] / "blobs" / digest
    blob.write_bytes(content)
    (snapshot / name).unlink(missing_ok=True)
    (snapshot / name).symlink_to(f"../../blobs/{digest}")
    return blob


def test_ignored_files_count_only_if_they_are_loaded(hub: Path, tmp_path: Path) -> None:
    both = started(config_of("acme/tiny", download_dir=str(hub)))
    assert loaded_files(both).names == ["model.safetensors"]
    safe = name_weights(both, OPTIONS)
    assert safe == digest_checkpoint(write(tmp_path / "copy", model_DOT_safetensors=b"safe"))
    # Without safetensors in the cache, as after a download that ignored them, vLLM takes the others.
    (hub / "models--acme--tiny" / "snapshots" / COMMIT / "model.safetensors").unlink()
    rest = started(config_of("acme/tiny", download_dir=str(hub), ignore_patterns=["*.safetensors"]))
    assert loaded_files(rest).names == ["pytorch_model.bin"]
    assert name_weights(rest, OPTIONS) != safe


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "modeling_tiny.py", "code/x.py"])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_config_that_is_replaced_or_added_while_the_server_starts(tmp_path: Path, name: str, is_new: bool) -> None:
    """They count in the identity, as they are when it is made; vLLM has read them before."""
    model = write(tmp_path / "model", model_DOT_safetensors=b"weights", config_DOT_json=b"{}")
    (model / name).parent.mkdir(exist_ok=True)
    if not is_new:
        (model / name).write_bytes(b"{ }")
    config = started(config_of(model))
    assert name_weights(config, OPTIONS).startswith("sha256:")
    (model / "new").write_bytes(b"{  }")
    (model / "new").rename(model / name)
    with pytest.raises(DeclinedError, match=name):
        name_weights(config, OPTIONS)


def test_a_config_that_lies_elsewhere_is_replaced(tmp_path: Path) -> None:
    model = write(tmp_path / "model", model_DOT_safetensors=b"weights")
    other = write(tmp_path / "other", config_DOT_json=b"{}")
    config = config_of(model)
    config.model_config.hf_config_path = str(other)
    started(config)
    assert name_weights(config, OPTIONS).startswith("sha256:")
    (other / "new").write_bytes(b"{ }")
    (other / "new").rename(other / "config.json")
    with pytest.raises(DeclinedError, match=r"config\.json"):
        name_weights(config, OPTIONS)


def test_what_only_the_hub_knows_is_declined(hub: Path) -> None:
    put(hub / "models--acme--tiny" / "snapshots" / COMMIT, "consolidated.safetensors", b"official")
    with pytest.raises(DeclinedError, match="two sets of weights"):
        loaded_files(config_of("acme/tiny", download_dir=str(hub)))
    loaded_files(config_of("acme/tiny", download_dir=str(hub), load_format="safetensors"))


def test_a_blob_that_is_not_what_its_name_says_is_declined(hub: Path) -> None:
    blob = put(hub / "models--acme--tiny" / "snapshots" / COMMIT, "model.safetensors", b"safe")
    blob.write_bytes(b"evil")
    with pytest.raises(DeclinedError, match="damaged or was edited"):
        name_weights(started(config_of("acme/tiny", download_dir=str(hub))), OPTIONS)


def test_files_that_came_during_the_start_are_those_of_the_commit(hub: Path) -> None:
    """Workers download the weights; the commit was settled before."""
    now = str(time.time_ns())
    pinned = config_of("acme/tiny", download_dir=str(hub), revision=COMMIT, instance_id=now)
    assert name_weights(pinned, OPTIONS).startswith("sha256:")
    moving = config_of("acme/tiny", download_dir=str(hub), revision="main", instance_id=now)
    with pytest.raises(DeclinedError, match="restart to use the pool"):
        name_weights(moving, OPTIONS)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_blob_whose_name_says_nothing_of_its_content_is_judged_by_its_age(hub: Path, is_large: bool) -> None:
    """Some mirrors give large files names of 40 digits, too: those of git stand for small ones."""
    snapshot = hub / "models--acme--tiny" / "snapshots" / COMMIT
    content = b"w" * ((65 << 20) if is_large else 1000)
    name = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() if not is_large else "a" * 40
    (snapshot / "model.safetensors").unlink()
    (hub / "models--acme--tiny" / "blobs" / name).write_bytes(content)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
    options = {"download_dir": str(hub), "revision": COMMIT, "load_format": "safetensors"}
    config = config_of("acme/tiny", instance_id=str(time.time_ns()), **options)
    if is_large:
        with pytest.raises(DeclinedError, match="restart to use the pool"):
            name_weights(config, OPTIONS)
        config = started(config_of("acme/tiny", **options))
    assert name_weights(config, OPTIONS).startswith("sha256:")


# -- before and after ---------------------------------------------------------------------------------------------


def rename_over(model: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "incoming")
    os.replace(model / "incoming", model / "model.safetensors")


def swap_version(model: Path) -> None:
    shutil.copytree(model, model.with_name("v2"))
    model.with_name("incoming").symlink_to("v2")
    os.replace(model.with_name("incoming"), model)


def add_index(model: Path) -> None:
    index(model, "model.safetensors")


def add_shard(model: Path) -> None:
    write(model, another_DOT_safetensors=b"more")


@pytest.mark.parametrize("deploy", [rename_over, swap_version, add_index, add_shard], ids=lambda f: f.__name__)
def test_weights_replaced_while_vllm_loads_them_have_no_name(model: Path, deploy: Callable[[Path], None]) -> None:
    current = model.with_name("current")
    current.symlink_to(model)
    config = started(config_of(current))
    name_weights(config, OPTIONS)
    config = pickle.loads(pickle.dumps(config))  # on its way to a worker
    deploy(current)
    with pytest.raises(DeclinedError, match="while the server started"):
        name_weights(config, OPTIONS)
    name_weights(started(config_of(current)), OPTIONS)


@pytest.mark.parametrize("multi", [False, True])
def test_vllm_tells_us_before_it_loads(qwen3: Path, multi: bool) -> None:
    """The state of the files is taken while the real vLLM makes its real configuration, and reaches the workers."""
    ours: dict[str, Any] = {
        "kv_connector": "HeadwaterConnector",
        "kv_connector_module_path": "headwater.integrations.vllm",
        "kv_role": "kv_both",
    }
    theirs = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    if multi:
        ours = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [ours, theirs]},
        }
    args = EngineArgs(model=str(qwen3), dtype="float32", kv_transfer_config=KVTransferConfig(**ours))
    config = args.create_engine_config()
    states = noted(config)
    assert states is not None
    assert {state.name for state in states} >= {"config.json", "model.safetensors"}
    assert noted(pickle.loads(pickle.dumps(config))) == states
    assert name_weights(config, OPTIONS).startswith("sha256:")
    assert before.server_start_ns(config) <= time.time_ns()


SCALING = {"llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 1.0}}


@pytest.mark.parametrize(("old", "new"), [({}, {"rms_norm_eps": 0.5}), ({}, SCALING), (SCALING, {})], ids=str)
def test_a_config_that_is_replaced_after_vllm_has_read_it_and_before_it_tells_us(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: dict[str, Any], new: dict[str, Any]
) -> None:
    """A key that is taken out counts, too, if no class of transformers has a default for it."""
    model = shutil.copytree(qwen3, tmp_path / "model")
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | old))
    find = before._config_in_the_making
    transfer = KVTransferConfig(
        kv_connector="HeadwaterConnector", kv_connector_module_path="headwater.integrations.vllm", kv_role="kv_both"
    )

    def find_and_deploy() -> Any:
        (model / "config.json").write_text(json.dumps(content | new))
        return find()

    monkeypatch.setattr(before, "_config_in_the_making", find_and_deploy)
    config = EngineArgs(model=str(model), dtype="float32", kv_transfer_config=transfer).create_engine_config()
    assert noted(config) is None
    with pytest.raises(DeclinedError, match="restart to use the pool"):
        name_weights(config, OPTIONS)


@pytest.mark.parametrize("window", [0, 64])
def test_a_young_config_with_a_window_that_vllm_takes_out(tmp_path: Path, window: int) -> None:
    """vLLM holds none where the file has a window of 0, and a server that was just deployed has a pool all the same;
    any other window that vLLM does not hold was put there later."""
    model = save_experts(tmp_path / "model", "qwen2_moe")
    values = json.loads((model / "config.json").read_text())
    assert values["sliding_window"] == 0
    transfer = KVTransferConfig(
        kv_connector="HeadwaterConnector", kv_connector_module_path="headwater.integrations.vllm", kv_role="kv_both"
    )
    config = EngineArgs(model=str(model), dtype="float32", kv_transfer_config=transfer).create_engine_config()
    assert config.model_config.hf_config.sliding_window is None
    assert noted(config) is not None
    changed = values | {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    (model / "config.json").write_text(json.dumps(values if window == 0 else changed))
    state = next(state for state in loaded_files(config).states() if state.name == "config.json")
    assert before._is_held(state, config.model_config) == (window == 0)


def test_a_config_that_is_replaced_between_the_look_at_it_and_the_note(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(qwen3, tmp_path / "model")
    is_held = before._is_held
    transfer = KVTransferConfig(
        kv_connector="HeadwaterConnector", kv_connector_module_path="headwater.integrations.vllm", kv_role="kv_both"
    )

    def look_and_deploy(state: Any, held: Any) -> bool:
        answer = is_held(state, held)
        if state.name == "config.json":
            content = json.loads((model / "config.json").read_text()) | {"rms_norm_eps": 0.5}
            (model / "new.json").write_text(json.dumps(content))
            (model / "new.json").rename(model / "config.json")
        return answer

    monkeypatch.setattr(before, "_is_held", look_and_deploy)
    config = EngineArgs(model=str(model), dtype="float32", kv_transfer_config=transfer).create_engine_config()
    with pytest.raises(DeclinedError, match="restart"):
        name_weights(config, OPTIONS)


def test_a_config_of_a_commit_that_was_edited_in_place(hub: Path) -> None:
    now = str(time.time_ns())
    pinned = config_of("acme/tiny", download_dir=str(hub), revision=COMMIT, instance_id=now)
    assert name_weights(pinned, OPTIONS).startswith("sha256:")
    config = hub / "models--acme--tiny" / "snapshots" / COMMIT / "config.json"
    config.resolve().write_bytes(b'{"a": 1}')
    with pytest.raises(DeclinedError, match="restart to use the pool"):
        name_weights(pinned, OPTIONS)


def test_the_class_is_found_without_a_configuration_too() -> None:
    import headwater.integrations.vllm as package

    assert package.HeadwaterConnector.__name__ == "HeadwaterConnector"


def test_states_of_another_machine_do_not_count(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = started(config_of(model))
    monkeypatch.setattr(before, "_machine", lambda: "another")
    assert noted(config) is None


def test_without_a_state_from_before_files_must_be_older_than_the_server(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model)
    with pytest.raises(DeclinedError, match="restart to use the pool"):
        name_weights(config, OPTIONS)
    now = time.time_ns()
    monkeypatch.setattr(before, "process_start_ns", lambda: now + HOUR_NS)
    assert name_weights(config, OPTIONS).startswith("sha256:")
    with pytest.raises(DeclinedError, match="restart to use the pool"):  # a worker that started later than the server
        name_weights(config_of(model, instance_id=str(now)), OPTIONS)
    assert name_weights(config_of(model, instance_id=str(now + HOUR_NS)), OPTIONS).startswith("sha256:")
    monkeypatch.setattr(before, "process_start_ns", lambda: now + 600 * 10**9)
    monkeypatch.setattr(files, "OWN_CLOCK", frozenset())
    with pytest.raises(DeclinedError, match="restart to use the pool"):  # ten minutes by a clock that may be behind
        name_weights(config, OPTIONS)


def test_a_directory_that_was_moved_in_place_is_younger_than_its_files(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = loaded_files(config_of(model)).states()
    oldest = files.last_change(states)[1]
    shutil.copytree(model, model.with_name("v2"))
    (new,) = [files.last_change(loaded_files(config_of(model.with_name("v2"))).states())[1]]
    model.rename(model.with_name("old"))

    def moved_later() -> bool:
        model.with_name("v2").rename(model)
        moved_ns = files.last_change(loaded_files(config_of(model)).states())[1]
        if moved_ns > new >= oldest:
            return True
        model.rename(model.with_name("v2"))
        return False

    deadline = time.monotonic() + 10
    while not moved_later():
        assert time.monotonic() < deadline


def test_a_file_that_is_made_in_a_moved_directory_does_not_hide_the_move(model: Path) -> None:
    before_ns = files.last_change(loaded_files(config_of(model)).states())[1]

    def made_later() -> bool:
        (model / ".deployed").unlink(missing_ok=True)
        (model / ".deployed").touch()
        return files.last_change(loaded_files(config_of(model)).states())[1] > before_ns

    deadline = time.monotonic() + 10
    while not made_later():
        assert time.monotonic() < deadline


def test_a_file_that_is_made_in_a_moved_parent_does_not_hide_the_move(tmp_path: Path) -> None:
    """A deployment swaps a directory further up, and leaves a file in it."""

    def make(version: str) -> Path:
        return write(tmp_path / version / "model", config_DOT_json=b"{}", model_DOT_safetensors=version.encode())

    def last_ns() -> int:
        return files.last_change(loaded_files(config_of(tmp_path / "current" / "model")).states())[1]

    make("next")
    make("current")
    before_ns = last_ns()
    time_ns = before_ns
    deadline = time.monotonic() + 10
    while time_ns <= before_ns:  # clocks of file systems tick coarsely
        assert time.monotonic() < deadline
        (tmp_path / "tick").unlink(missing_ok=True)
        (tmp_path / "tick").touch()
        time_ns = (tmp_path / "tick").stat().st_mtime_ns
    (tmp_path / "current").rename(tmp_path / "previous")
    (tmp_path / "next").rename(tmp_path / "current")
    (tmp_path / "current" / "DEPLOYED").write_text("v2")
    assert last_ns() > before_ns


def test_files_beside_a_parent_do_not_make_a_model_younger(tmp_path: Path) -> None:
    write(tmp_path / "models" / "one", config_DOT_json=b"{}", model_DOT_safetensors=b"one")
    states = loaded_files(config_of(tmp_path / "models" / "one")).states()
    before_ns = files.last_change(states)[1]
    write(tmp_path / "models" / "two", config_DOT_json=b"{}", model_DOT_safetensors=b"two")
    assert files.last_change(states)[1] == before_ns


def test_the_start_of_a_process_is_known() -> None:
    code = "from headwater.integrations.vllm.before import process_start_ns; print(process_start_ns())"
    earliest = time.time_ns()
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert earliest - 50_000_000 < int(said) < time.time_ns()
    assert process_start_ns() < earliest


def test_random_weights_are_those_of_one_server(model: Path) -> None:
    one = config_of(model, load_format="dummy", instance_id="1")
    two = config_of(model, load_format="dummy", instance_id="2")
    names = [name_weights(config, OPTIONS) for config in (one, one, two)]
    assert names[0] == names[1] != names[2]
    assert weights.server_name(one) != weights.server_name(two)
