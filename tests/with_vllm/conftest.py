"""Models and pools for the tests in real vLLM. Without vLLM in this environment nothing here is collected."""

from __future__ import annotations

import importlib.util
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_models import save_moe, save_qwen3

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model as a safetensors directory, as `headwater convert` makes it."""
    from headwater.errors import ModelError
    from headwater.models.catalog import find_in_catalog
    from headwater.models.convert import convert_gguf

    try:
        source = find_in_catalog("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    assert source is not None
    directory = tmp_path_factory.mktemp("models") / "smollm2"
    convert_gguf(source, directory, dtype="float32")
    return directory


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with two KV heads."""
    return save_qwen3(tmp_path_factory.mktemp("models") / "qwen3", seed=0)


@pytest.fixture(scope="session")
def qwen3_twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random Qwen3 of the same name and shape."""
    return save_qwen3(tmp_path_factory.mktemp("others") / "qwen3", seed=1)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE that the reference engine does not run: its config has a key that only forks know."""
    return save_moe(tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture(scope="module")
def pool_url() -> Iterator[str]:
    """A pool of this module's own, deleted afterwards."""
    name = f"headwater-test-{uuid.uuid4().hex[:12]}"
    yield f"shm:///{name}?capacity=1GiB&deadline=60"
    shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the engines of this module print. vLLM leaves shared memory behind whose name it logs: deleted."""
    path = tmp_path_factory.mktemp("logs") / "engines.log"
    yield path
    for group in set(re.findall(r"vllm_dist_[0-9a-f]{32}", path.read_text() if path.exists() else "")):
        for left in Path("/dev/shm").glob(f"{group}-*"):
            left.unlink(missing_ok=True)
