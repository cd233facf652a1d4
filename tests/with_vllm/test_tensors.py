"""A checkpoint that holds a parameter twice, or in part, has no name: which numbers run depends on how it is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_settings import engine
from torch import Tensor
from vllm.distributed import parallel_state

from headwater.integrations.vllm import startup
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.options import read_options
from headwater.integrations.vllm.weights import check_loaded_tensors

from vllm_models import save_experts

Tensors = dict[str, Tensor]
ATTENTION = "model.layers.0.self_attn."
MLP = "model.layers.1.mlp."


def edited(model: Path, folder: Path, edit: Callable[[Tensors], object]) -> Path:
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def add(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(1)})


def remove(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def experts(tensors: Tensors) -> list[str]:
    """The gates of the experts of the first layer that has some."""
    return sorted(name for name in tensors if ".experts." in name and "gate_proj" in name)


def test_a_whole_checkpoint_is_not_declined(qwen3: Path, moe: Path, smollm2: Path) -> None:
    for model in (qwen3, moe, smollm2):
        check_loaded_tensors(engine(model))


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("deepseek_v2", "q_a_proj"),
        ("deepseek_v2", "kv_a_proj_with_mqa"),
        ("deepseek_v2, greedy", "kv_a_proj_with_mqa"),
        ("deepseek_v2, greedy", "q_proj"),
    ],
)
def test_latent_attention_with_and_without_a_latent_of_queries(family: str, missing: str, tmp_path: Path) -> None:
    model = save_experts(tmp_path / "model", family)
    check_loaded_tensors(engine(model))
    folder = edited(model, tmp_path / "other", remove(f"{ATTENTION}{missing}.weight"))
    with pytest.raises(DeclinedError, match="complete"):
        check_loaded_tensors(engine(folder))


def test_a_tensor_in_two_files(qwen3: Path, tmp_path: Path) -> None:
    """vLLM's sequential loader takes the one of the last file, its threads that of the file which is read last."""
    folder = tmp_path / "model"
    shutil.copytree(qwen3, folder)
    name = f"{ATTENTION}k_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensors[name].flip(0).contiguous()}, folder / "more.safetensors")
    with pytest.raises(DeclinedError, match=f"{name} is in model.safetensors and in more.safetensors"):
        check_loaded_tensors(engine(folder))
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_loaded_tensors(engine(folder))  # a file that the index does not name is not loaded


def test_a_tensor_in_two_pickles(qwen3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(qwen3, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model-1.bin")
    check_loaded_tensors(engine(folder))
    torch.save(tensors, folder / "pytorch_model-2.bin")
    with pytest.raises(DeclinedError, match=r"pytorch_model-1\.bin and in pytorch_model-2\.bin"):
        check_loaded_tensors(engine(folder))


@pytest.mark.parametrize("name", [f"{ATTENTION}qkv_proj.weight", f"{MLP}gate_up_proj.weight"])
def test_a_fused_tensor_beside_its_parts(qwen3: Path, tmp_path: Path, name: str) -> None:
    """They are read in the order of the file, or in that of a hash map, as --safetensors-load-strategy says."""
    with pytest.raises(DeclinedError, match="are for one parameter of vLLM"):
        check_loaded_tensors(engine(edited(qwen3, tmp_path / "model", add(name))))


def test_fused_experts_beside_single_ones(moe: Path, tmp_path: Path) -> None:
    names: list[str] = []
    edited(moe, tmp_path / "a", lambda tensors: names.extend(experts(tensors)))
    layer = names[0].partition(".experts.")[0]
    for number, fused in enumerate(("gate_up_proj.weight", "down_proj.weight")):
        path = edited(moe, tmp_path / f"b{number}", add(f"{layer}.experts.{fused}"))
        with pytest.raises(DeclinedError, match="are for one parameter of vLLM"):
            check_loaded_tensors(engine(path))


@pytest.mark.parametrize("name", [f"{ATTENTION}k_proj.weight", f"{MLP}up_proj.weight"])
def test_a_part_of_a_fused_parameter_is_missing(qwen3: Path, tmp_path: Path, name: str) -> None:
    """vLLM takes the parameter for loaded and computes with whatever memory held."""
    with pytest.raises(DeclinedError, match=f"no {name}"):
        check_loaded_tensors(engine(edited(qwen3, tmp_path / "model", remove(name))))


def test_a_bias_of_one_part(qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(DeclinedError, match=f"no {ATTENTION}q_proj.bias"):
        check_loaded_tensors(engine(edited(qwen3, tmp_path / "model", add(f"{ATTENTION}k_proj.bias"))))


@pytest.mark.parametrize("which", [0, -1])
def test_an_expert_is_missing(moe: Path, tmp_path: Path, which: int) -> None:
    def drop(tensors: Tensors) -> None:
        layer, _, rest = experts(tensors)[which].partition(".experts.")
        number = rest.split(".")[0]
        for name in [name for name in tensors if name.startswith(f"{layer}.experts.{number}.")]:
            del tensors[name]

    with pytest.raises(DeclinedError, match=r"complete|fewer experts"):
        check_loaded_tensors(engine(edited(moe, tmp_path / "model", drop)))


def test_workers_look_before_they_name_the_weights(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0, world_size=1))
    options = read_options({}, "kv_both")
    monkeypatch.setattr(startup, "name_weights", lambda config, options: "a name")
    assert startup._weights_of_all_ranks(engine(qwen3), options) == "a name"
    path = edited(qwen3, tmp_path / "model", remove(f"{ATTENTION}k_proj.weight"))
    with pytest.raises(DeclinedError, match="complete"):
        startup._weights_of_all_ranks(engine(path), options)


def test_an_unchecked_load(qwen3: Path) -> None:
    with pytest.raises(DeclinedError, match="enable_weights_track"):
        check_loaded_tensors(engine(qwen3, model_loader_extra_config={"enable_weights_track": False}))
