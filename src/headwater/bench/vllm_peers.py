"""The engines that `bench vllm` compares: plain vLLM, and vLLM with one connector each. Mooncake's master is started
here, for the benchmark alone, and stopped by its pid.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwater.errors import EngineError

_START_DEADLINE_S = 20.0


@dataclass(frozen=True)
class BenchModel:
    """A random Qwen3 whose KV is light or heavy for what it computes."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 8
    hidden_size: int = 512
    intermediate_size: int = 1536
    vocab_size: int = 4096

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for each token, in float32."""
        return 2 * 4 * self.num_layers * self.num_kv_heads * self.head_dim

    def save(self, directory: Path) -> Path:
        """Write the checkpoint."""
        import torch
        import transformers

        config = transformers.Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=16384,
            initializer_range=0.05,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        make: Any = transformers.Qwen3ForCausalLM
        make(config).float().save_pretrained(directory)
        return directory


LIGHT = BenchModel("light", num_heads=8, num_kv_heads=4, head_dim=64)
HEAVY = BenchModel("heavy", num_heads=16, num_kv_heads=16, head_dim=128)


@dataclass(frozen=True)
class Variant:
    """One way to run vLLM: its connector's settings, and what its process needs."""

    name: str
    transfer: dict[str, Any] | None
    environment: dict[str, str]


@contextlib.contextmanager
def headwater_variant(capacity_gib: int) -> Iterator[Variant]:
    """With a pool of its own in shared memory, deleted afterwards."""
    name = f"headwater-bench-{uuid.uuid4().hex[:12]}"
    transfer = {
        "kv_connector": "HeadwaterConnector",
        "kv_connector_module_path": "headwater.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"pool": f"shm:///{name}?capacity={capacity_gib}GiB"},
    }
    try:
        yield Variant("headwater", transfer, {})
    finally:
        shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)


@contextlib.contextmanager
def example_variant() -> Iterator[Variant]:
    """vLLM's debugging connector: files in shared memory, its own pages, never verified."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir="/dev/shm") as directory:
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": directory},
        }
        yield Variant("example", transfer, {})


@contextlib.contextmanager
def mooncake_variant(segment_gib: int, log: Path) -> Iterator[Variant]:
    """vLLM's MooncakeStoreConnector with a real master, over TCP. Raises EngineError where Mooncake is missing."""
    package = find_spec("mooncake")
    master = Path(package.origin or "").parent / "mooncake_master" if package is not None else None
    if master is None or not master.exists():
        raise EngineError("Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
    port, metrics_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory, log.open("a") as output:
        config = Path(directory, "mooncake.json")
        settings = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{port}",
            "protocol": "tcp",
            "device_name": "",
            "local_hostname": "127.0.0.1",
            "global_segment_size": segment_gib << 30,
            "local_buffer_size": 1 << 30,
        }
        config.write_text(json.dumps(settings))
        command = [str(master), "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
        command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}"]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _wait_for_port(port, process)
            transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
            environment = {"MOONCAKE_CONFIG_PATH": str(config), "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1"}
            yield Variant("mooncake", transfer, environment)
        finally:
            process.terminate()
            try:
                process.wait(_START_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise EngineError("mooncake_master did not start")
