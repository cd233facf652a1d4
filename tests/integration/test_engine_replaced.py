"""A deployment replaces the model while a server starts: KV of one model is never found under the name of another."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.engine import engine as engine_module
from headwater.engine.config import EngineConfig
from headwater.engine.device import DevicePlacement, choose_placement
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams

pytest.importorskip("transformers")

from engine_models import save_random_checkpoint

pytestmark = pytest.mark.slow

PROMPT = [3 + i * 7 % 500 for i in range(600)]
NUM_NEW = 8


def rename_over(current: Path, new: Path) -> None:
    """One file at a time, as `rsync` does."""
    shutil.copy(new / "model.safetensors", current / "incoming")
    os.replace(current / "incoming", current / "model.safetensors")


def swap_version(current: Path, new: Path) -> None:
    """All at once: the current version is a link."""
    current.with_name("incoming").symlink_to(new)
    os.replace(current.with_name("incoming"), current)


def new_config(current: Path, new: Path) -> None:
    """Ranks read the config for themselves."""
    os.replace(shutil.copy(current / "config.json", current / "incoming"), current / "config.json")


def two_versions_in_one(current: Path, new: Path) -> None:
    """Halfway through a deployment the directory does not say what its weights are."""
    shutil.copy(new / "model.safetensors", current / "model-00001-of-00001.safetensors")
    (current / "model.safetensors").unlink()
    (current / "model.safetensors.index.json").write_text("{")


def answer(config: EngineConfig, at_the_end: Callable[[], None] = lambda: None) -> tuple[list[int], str, int]:
    """The tokens, why there is no pool, and how much of the prompt came from it."""
    calls = iter([at_the_end])

    def loaded(done: int, total: int) -> None:
        if done == total:
            next(calls, lambda: None)()

    with Engine(config, progress=loaded) as engine:
        assert next(calls, None) is None, "the weights were not loaded"
        engine.add("r", PROMPT, SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True))
        tokens: list[int] = []
        num_cached = 0
        while engine.has_work:
            for output in engine.step():
                tokens += output.token_ids
                num_cached = output.num_cached_tokens
        assert engine.drain_saves(30.0)
        return tokens, engine.declined, num_cached


def test_half_a_deployment_leaves_a_server_without_a_pool(tmp_path: Path) -> None:
    current = save_random_checkpoint("llama", tmp_path / "current", seed=1)
    config = EngineConfig(
        model=str(current),
        device="cpu",
        num_threads=1,
        num_pages=64,
        max_model_len=1024,
        pool=f"file://{tmp_path}/pool?capacity=64MiB",
    )
    _, declined, _ = answer(config, lambda: two_versions_in_one(current, current))
    assert "restart the server" in declined


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("deploy", [rename_over, swap_version, new_config], ids=lambda f: f.__name__)
def test_a_model_replaced_during_the_start_is_not_named_by_the_new_files(
    tmp_path: Path, num_ranks: int, deploy: Callable[[Path, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    old = save_random_checkpoint("llama", tmp_path / "old", seed=1)
    new = save_random_checkpoint("llama", tmp_path / "new", seed=2)
    current = tmp_path / "current"
    current.symlink_to(old)
    config = EngineConfig(
        model=str(current),
        device="cpu",
        tensor_parallel_size=num_ranks,
        num_threads=1,
        num_pages=128,
        max_model_len=1024,
        pool=f"file://{tmp_path}/pool?capacity=64MiB",
    )
    with caplog.at_level(logging.WARNING, "headwater.engine"):
        _, declined, _ = answer(config, lambda: deploy(current, new))
    assert "replaced or changed while the server started" in declined
    assert declined in caplog.text
    found = [answer(config) for _ in range(2)]
    assert found[0][2] == 0, "the first start left nothing"
    assert found[1][2] >= 512, "the next one uses the pool"
    alone, _, _ = answer(replace(config, pool=None))
    assert [(tokens, why) for tokens, why, _ in found] == [(alone, "")] * 2


def test_random_weights_of_all_ranks_are_those_of_the_config_that_the_first_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no file whose state would tell that two ranks run two models; the config alone names them."""
    model = save_random_checkpoint("llama", tmp_path / "model", seed=1)
    config = EngineConfig(
        model=str(model),
        device="cpu",
        load_format="dummy",
        tensor_parallel_size=2,
        num_threads=1,
        num_pages=128,
        max_model_len=1024,
        pool=f"file://{tmp_path}/pool?capacity=64MiB",
    )
    alone, _, _ = answer(replace(config, pool=None))

    def deploy(placed: EngineConfig) -> DevicePlacement:
        old = json.loads((model / "config.json").read_text())
        (model / "incoming").write_text(json.dumps(old | {"rms_norm_eps": 0.5}))
        os.replace(model / "incoming", model / "config.json")
        return choose_placement(placed)

    monkeypatch.setattr(engine_module, "choose_placement", deploy)
    assert answer(config) == (alone, "", 0)
