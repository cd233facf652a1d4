"""Roles, other connectors beside this one, adapters, events, and models that it must leave alone."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.bench.vllm_engine import engine
from headwater.integrations.vllm.adapters import Adapters, adapter_rules
from headwater.kv.identity import Identity
from headwater.pool.pool import open_pool

from pool_waits import spaces
from support import wait_until
from vllm_models import QWEN3, hit_tokens, random_tokens, settings_of, wait_for_hits, wait_for_metrics

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

NUM_NEW = 8
PROMPT = random_tokens(700, 600)
HIT = hit_tokens(PROMPT)


def test_a_producer_saves_and_a_consumer_loads(qwen3: Path, pool_url: str, log_file: Path) -> None:
    with engine(log_file, settings_of(qwen3, pool_url, role="kv_consumer", extra={"epoch": 1})) as consumer:
        said = consumer.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert said["external"] == 0
        assert not consumer.ask("metrics").get("headwater_pool_saved_bytes"), "a consumer saved"
    with engine(log_file, settings_of(qwen3, pool_url, role="kv_producer", extra={"epoch": 1})) as producer:
        for _ in range(2):
            made = producer.ask("generate", prompts=[PROMPT], max_tokens=1)
            assert made["external"] == 0, "a producer loaded"
            assert producer.ask("reset")
            wait_for_hits(pool_url, [PROMPT], epoch=1)
        wait_for_metrics(producer, lambda found: found.get("headwater_pool_saved_bytes", 0) > 0)
    with engine(log_file, settings_of(qwen3, pool_url, role="kv_consumer", extra={"epoch": 1})) as consumer:
        hit = consumer.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert hit["external"] == HIT
        assert hit["tokens"] == said["tokens"]


def test_beside_another_connector(qwen3: Path, pool_url: str, log_file: Path, tmp_path: Path) -> None:
    """Inside MultiConnector, before one that has whole blocks of the same prompts, it loads, saves and counts."""
    settings = settings_of(qwen3, pool_url, extra={"epoch": 2})
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    settings["kv_transfer_config"] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [settings["kv_transfer_config"], example]},
    }
    with engine(log_file, settings) as both:
        cold = both.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        wait_for_hits(pool_url, [PROMPT], epoch=2)  # MultiConnector asks the other one for what this one has not yet
        assert both.ask("reset")
        hit = both.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert hit["external"] == HIT
        assert hit["tokens"] == cold["tokens"]
        metrics = wait_for_metrics(both, lambda found: found.get("headwater_pool_saved_bytes", 0) > 0)
        assert metrics["headwater_pool_loaded_tokens"] == HIT


def test_what_another_connector_loaded_is_not_saved(qwen3: Path, pool_url: str, log_file: Path, tmp_path: Path) -> None:
    """ExampleConnector names KV by its tokens alone: what it brings may be that of any model."""
    ours = settings_of(qwen3, pool_url, extra={"epoch": 7})
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    with engine(log_file, {**ours, "kv_transfer_config": example}) as other:
        other.ask("generate", prompts=[PROMPT], max_tokens=1)
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [example, ours["kv_transfer_config"]]},
    }
    alone = random_tokens(701, 600)
    with engine(log_file, {**ours, "kv_transfer_config": both}) as running:
        assert running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)["external"] > 0, "nothing was loaded"
        running.ask("generate", prompts=[PROMPT + alone[:300]], max_tokens=NUM_NEW)  # shares blocks
        running.ask("generate", prompts=[alone], max_tokens=NUM_NEW)
        wait_for_hits(pool_url, [alone], epoch=7)
    with open_pool(pool_url) as pool:
        found = [space for space in spaces(pool) if space.identity.epoch == 7]
        assert found
        assert all(space.match(space.keys(PROMPT)).num_tokens == 0 for space in found)


def save_lora(directory: Path, seed: int) -> Path:
    """A LoRA for the attention of the random Qwen3."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    directory.mkdir(parents=True)
    hidden, width, kv_width = QWEN3["hidden_size"], 8 * QWEN3["head_dim"], 2 * QWEN3["head_dim"]
    tensors = {}
    for layer in range(QWEN3["num_hidden_layers"]):
        for name, size in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(8, hidden)
            tensors[f"{key}.lora_B.weight"] = torch.randn(size, 8)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "task_type": "CAUSAL_LM"}))
    return directory


def test_two_adapters_of_one_name_do_not_share(qwen3: Path, pool_url: str, log_file: Path, tmp_path: Path) -> None:
    import torch
    from vllm.config import LoRAConfig

    adapters = [save_lora(tmp_path / str(seed) / "adapter", seed) for seed in (0, 1)]
    lora = [{"lora_name": "adapter", "lora_int_id": 1 + i, "lora_path": str(path)} for i, path in enumerate(adapters)]
    said = []
    for number in (0, 1):
        settings = settings_of(qwen3, pool_url, extra={"epoch": 3}, enable_lora=True, max_lora_rank=8)
        rules = adapter_rules(LoRAConfig(max_lora_rank=8, lora_dtype=torch.float32))
        adapter = SimpleNamespace(**lora[number], load_inplace=False)
        digest = Adapters(rules=rules, started_ns=time.time_ns() + 10**12).digest(adapter)
        with engine(log_file, settings) as running:
            bare = running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
            assert bare["external"] == HIT * number, "without an adapter the second server finds the first one's KV"
            cold = running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW, lora=lora[number])
            assert cold["external"] == 0, "another adapter's KV was found"
            wait_for_hits(pool_url, [PROMPT], epoch=3)
            wait_for_hits(pool_url, [PROMPT], epoch=3, adapter=digest)
            assert running.ask("reset")
            hit = running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW, lora=lora[number])
            assert hit["external"] == HIT
            assert hit["tokens"] == cold["tokens"]
            said.append(cold["tokens"])
    assert said[0] != said[1], "the adapters do nothing: this test tested nothing"


def test_events_tell_what_the_pool_has(qwen3: Path, pool_url: str, log_file: Path) -> None:
    """A router that listens hears of each chunk, with its tokens, its parent and its owner."""
    import msgspec
    import zmq

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": ""}
    settings = settings_of(qwen3, pool_url, extra={"epoch": 4})
    settings["kv_events_config"] = events
    heard: list[Any] = []
    stored: list[Any] = []
    stop = threading.Event()

    def listen() -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as sock:
            sock.bind(endpoint)  # vLLM's side connects where the address has no wildcard
            sock.subscribe("")
            while not stop.is_set():
                if sock.poll(50):
                    heard.append(msgspec.msgpack.decode(sock.recv_multipart()[-1]))

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        with engine(log_file, settings) as running:
            numbers = itertools.count(710)

            def is_told() -> bool:
                running.ask("generate", prompts=[PROMPT, random_tokens(next(numbers), 20)], max_tokens=NUM_NEW)
                stored[:] = [event for batch in heard for event in batch[1] if event.get("ownership") == "headwater"]
                return len(stored) >= 2

            wait_until(is_told, what="two chunks are announced")
    finally:
        stop.set()
        listener.join()
    assert [event["type"] for event in stored[:2]] == ["BlockStored"] * 2
    assert [event["token_ids"] for event in stored[:2]] == [PROMPT[:256], PROMPT[256:512]]
    assert stored[1]["parent_block_hash"] == stored[0]["block_hashes"][0], "the second chunk's parent is the first"


def save_windowed(directory: Path, family: str) -> Path:
    """A small model all of whose layers see a window, or one half of them."""
    import torch
    import transformers

    torch.manual_seed(0)
    common = {**QWEN3, "num_hidden_layers": 4, "sliding_window": 64}
    if family == "mistral":
        model: Any = transformers.MistralForCausalLM(transformers.MistralConfig(**common))
    else:
        kinds = ["full_attention", "sliding_attention"] * 2
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**common, layer_types=kinds))
    model.float().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_model_with_sliding_windows_runs_without_the_pool(
    family: str, pool_url: str, log_file: Path, tmp_path: Path
) -> None:
    """It is declined, said so, and vLLM works."""
    size = log_file.stat().st_size if log_file.exists() else 0
    with engine(log_file, settings_of(save_windowed(tmp_path / family, family), pool_url)) as running:
        first = running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert running.ask("reset")
        again = running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert first["tokens"] == again["tokens"]
        assert again["external"] == 0
    assert "Headwater is off" in log_file.read_text()[size:]


def test_random_weights_are_nobody_elses(qwen3: Path, pool_url: str, log_file: Path) -> None:
    seen = set[str]()

    def is_new(identity: Identity) -> bool:
        return identity.epoch == 6 and identity.weights not in seen

    for _ in range(2):
        with engine(log_file, settings_of(qwen3, pool_url, load_format="dummy", extra={"epoch": 6})) as running:
            assert running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)["external"] == 0
            wait_for_hits(pool_url, [PROMPT], whose=is_new)
            with open_pool(pool_url) as pool:
                seen |= {space.identity.weights for space in spaces(pool)}
            assert running.ask("reset")
            assert running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)["external"] == HIT


def test_two_dtypes_do_not_share(qwen3: Path, pool_url: str, log_file: Path) -> None:
    """What a server of one dtype computed another reads only if it runs in that dtype, too."""
    hits = list[list[int]]()
    for dtype in ("float32", "float16", "float32"):
        with engine(log_file, settings_of(qwen3, pool_url, extra={"epoch": 5}, dtype=dtype)) as running:
            first = running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
            wait_for_hits(
                pool_url, [PROMPT], whose=lambda found, dtype=dtype: found.epoch == 5 and found.run_dtype == dtype
            )
            assert running.ask("reset")
            again = running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
            assert again["tokens"] == first["tokens"]
            hits.append([first["external"], again["external"]])
    assert hits == [[0, HIT], [0, HIT], [HIT, HIT]]
