"""Options are checked; requests are named by everything their KV depends on."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater.connector.tracker import Inputs
from headwater.errors import EngineConfigError, HeadwaterError
from headwater.integrations.vllm import adapters as adapters_module
from headwater.integrations.vllm.adapters import Adapters, adapter_rules, check_loaded, watch_loads
from headwater.integrations.vllm.declined import LOGGER, DeclinedError
from headwater.integrations.vllm.inputs import request_inputs
from headwater.integrations.vllm.options import read_options


def test_what_nothing_is_said_of_has_its_default() -> None:
    options = read_options({}, "kv_both")
    assert options.connector.pool == "shm:///headwater"
    assert options.connector.load_mode == "auto"
    assert options.connector.saves
    assert options.connector.loads
    assert options.load_failure_policy == "recompute"


@pytest.mark.parametrize(
    ("role", "more", "saves", "loads"),
    [
        ("kv_both", {}, True, True),
        ("kv_producer", {}, True, False),
        ("kv_consumer", {}, False, True),
        ("kv_consumer", {"consumer_is_to_put": True}, True, True),
        ("kv_consumer", {"consumer_is_to_load": False}, False, False),
    ],
)
def test_roles(role: str, more: dict[str, Any], saves: bool, loads: bool) -> None:
    connector = read_options(more, role).connector
    assert (connector.saves, connector.loads) == (saves, loads)


def test_a_receiver_needs_a_secret_where_other_hosts_reach_it(tmp_path: Path) -> None:
    secret = tmp_path / "peers"
    assert read_options({"peer_listen": "127.0.0.1:7700"}, "kv_consumer").peer_listen == "127.0.0.1:7700"
    given = {"peer_listen": "0.0.0.0:7700", "peer_secret_file": str(secret)}
    with pytest.raises(HeadwaterError, match="cannot be read"):
        read_options(given, "kv_consumer")
    secret.write_text("a secret of all servers")
    options = read_options(given, "kv_consumer")
    assert options.peer_listen == "0.0.0.0:7700"
    assert options.connector.peer_secret_file == str(secret)


def test_tls_files_of_peers_are_looked_at_when_vllm_starts(tmp_path: Path) -> None:
    for name in ("peer_tls_cert", "peer_tls_ca"):
        with pytest.raises(HeadwaterError, match="TLS files cannot be used"):
            read_options({name: str(tmp_path / "none.pem")}, "kv_producer")
    assert read_options({"peer_carrier": "tcp"}, "kv_producer").connector.peer_carrier == "tcp"


def test_sizes_and_lists() -> None:
    options = read_options({"staging": "64MiB", "pool": ["shm:///a", "file:///b"], "load_deadline_s": 1}, "kv_both")
    assert options.connector.staging_bytes == 64 << 20
    assert options.connector.pool == "shm:///a,file:///b"
    assert options.connector.load_deadline_s == 1


@pytest.mark.parametrize(
    "extra",
    [
        {"pol": "shm:///a"},
        {"peer_listen": "here"},
        {"peer_listen": "0.0.0.0:7700"},
        {"peer_listen": 7700},
        {"peer_secret_file": True},
        {"peer_carrier": "rdma"},
        {"peer_tls_key": "key.pem", "peer_listen": "127.0.0.1:0"},
        {"pool": 3},
        {"pool": []},
        {"pool": [""]},
        {"load_mode": "later"},
        {"min_load_tokens": True},
        {"min_load_tokens": 0},
        {"save_decoded": 1},
        {"load_deadline_s": 0},
        {"chunk_tokens": 0},
        {"staging": "much"},
        {"load_failure_policy": "pray"},
    ],
)
def test_what_cannot_be_meant_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(HeadwaterError):
        read_options(extra, "kv_both")


@pytest.mark.parametrize("pool", [["redis://u:SECRET@h", 5], {"url": "redis://u:SECRET@h"}])
def test_a_refusal_shows_no_password(pool: Any) -> None:
    with pytest.raises(EngineConfigError) as caught:
        read_options({"pool": pool}, "kv_both")
    assert "SECRET" not in str(caught.value)


def test_a_role_is_needed() -> None:
    with pytest.raises(EngineConfigError, match="kv_role"):
        read_options({}, None)


def request(**changes: Any) -> Any:
    fields: dict[str, Any] = {"cache_salt": None, "lora_request": None, "mm_features": [], "prompt_embeds": None}
    return SimpleNamespace(
        **{**fields, "prompt_is_token_ids": None, "num_prompt_tokens": 4, "resumable": False, **changes}
    )


def image(identifier: str | None, offset: int = 1) -> Any:
    position = SimpleNamespace(offset=offset, length=2)
    return SimpleNamespace(identifier=identifier, modality="image", mm_position=position)


def test_everything_that_changes_kv_changes_the_name() -> None:
    embeds = torch.ones(4, 2)
    inputs = [
        request_inputs(request(**changes), Adapters())
        for changes in (
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"cache_salt": "c" * 2000},
            {"cache_salt": "d" * 2000},
            {"mm_features": [image("x")]},
            {"mm_features": [image("y")]},
            {"mm_features": [image("x", 2)]},
            {"prompt_embeds": embeds},
            {"prompt_embeds": embeds * 2},
            {"prompt_embeds": embeds.half()},
            {"prompt_embeds": embeds, "prompt_is_token_ids": [True, False, False, False]},
        )
    ]
    assert None not in inputs
    assert len(set(inputs)) == len(inputs)
    assert request_inputs(request(), Adapters()) == Inputs()


def test_a_session_that_takes_tokens_back_is_private() -> None:
    assert request_inputs(request(resumable=True), Adapters()) is None


def test_an_image_without_a_hash_makes_a_request_private() -> None:
    assert request_inputs(request(mm_features=[image(None)]), Adapters()) is None


def save_lora(path: Path, weights: bytes, alpha: int = 16) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
    return path


def lora(path: Path, number: int = 1, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_path=str(path), lora_name="x", load_inplace=load_inplace)


def later() -> Adapters:
    """Of a server that starts long after the adapters were written."""
    return Adapters(started_ns=time.time_ns() + 3600 * 10**9)


def test_an_adapter_is_its_weights_and_its_config(tmp_path: Path) -> None:
    one, same = save_lora(tmp_path / "a", b"weights"), save_lora(tmp_path / "b", b"weights")
    other, scaled = save_lora(tmp_path / "c", b"WEIGHTS"), save_lora(tmp_path / "d", b"weights", alpha=32)
    adapters = later()
    digests = [adapters.digest(lora(path, number)) for number, path in enumerate((one, same, other, scaled), 1)]
    assert digests[0] == digests[1]
    (one / "adapter_model.bin").write_bytes(b"vLLM does not look at it")
    assert adapters.digest(lora(one)) == digests[0]
    fused = SimpleNamespace(**vars(lora(one, 9)), is_3d_lora_weight=True)
    half = Adapters(rules="float16", started_ns=time.time_ns() + 3600 * 10**9)
    digests += [adapters.digest(fused), half.digest(lora(one))]
    assert len(set(digests)) == 5


def test_the_settings_of_adapters_count_and_the_room_for_them_does_not() -> None:
    from vllm.config import LoRAConfig

    rules = adapter_rules(LoRAConfig(max_lora_rank=8, lora_dtype="float16"))
    assert rules == adapter_rules(LoRAConfig(max_lora_rank=16, lora_dtype="float16", max_loras=4))
    assert rules != adapter_rules(LoRAConfig(lora_dtype="bfloat16"))
    assert rules != adapter_rules(LoRAConfig(lora_dtype="float16", target_modules=["q_proj"]))
    assert adapter_rules(None) == "[]"


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_is_replaced_has_no_name_until_a_restart(tmp_path: Path, file: str) -> None:
    """vLLM keeps what it loaded, until it needs the room, and then reads what lies there."""
    path, adapters = save_lora(tmp_path / "a", b"weights"), later()
    before = adapters.digest(lora(path))
    assert adapters.digest(lora(path)) == before
    old = (path / file).read_bytes()
    (path / "new").write_bytes(old.replace(b"w", b"W").replace(b"16", b"32"))
    os.replace(path / "new", path / file)
    for number, inplace in ((1, False), (1, True)):
        assert request_inputs(request(lora_request=lora(path, number, inplace)), adapters) is None
    (path / file).write_bytes(old)
    assert request_inputs(request(lora_request=lora(path)), adapters) is None, "which of the two runs?"
    assert later().digest(lora(path)) == before
    (path / file).write_bytes(old.replace(b"w", b"W").replace(b"16", b"32"))
    assert later().digest(lora(path)) != before, "a new server names what is there"


def test_an_adapter_younger_than_the_server_is_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may have been loaded, and then replaced, before the first request with it comes."""
    adapters, logger = Adapters(), logging.getLogger(LOGGER)
    logger.addHandler(caplog.handler)  # vLLM's loggers do not pass anything on
    logger.propagate = False
    try:
        given = request(lora_request=lora(save_lora(tmp_path / "a", b"weights")))
        assert [request_inputs(given, adapters) for _ in range(3)] == [None] * 3
    finally:
        logger.removeHandler(caplog.handler)
        logger.propagate = True
    assert caplog.text.count("younger than this server") == 1


def test_an_adapter_that_cannot_be_read_makes_a_request_private(tmp_path: Path) -> None:
    assert request_inputs(request(lora_request=lora(tmp_path / "nowhere")), Adapters()) is None


def test_an_adapter_that_is_replaced_before_it_is_loaded_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around vLLM's own place of loading: what it loads is compared with what the request was named by."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    deployments: list[bytes] = []

    def load(manager: Any, given: Any) -> str:
        if deployments:
            (Path(given.lora_path) / "adapter_model.safetensors").write_bytes(deployments.pop())
        return "adapter"

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
    monkeypatch.setattr(adapters_module, "_loaded", {})
    for _ in range(2):
        watch_loads()
    manager: Any = object()
    paths = [save_lora(tmp_path / name, b"weights") for name in "abc"]
    named, adapters = {}, later()
    for number, path in enumerate(paths, 1):
        adapters.digest(lora(path, number))
        state = adapters.named_from(number)
        assert state is not None
        named[number] = state
    (paths[1] / "adapter_model.safetensors").write_bytes(b"WEIGHTS")  # between its request and its loading
    for number, path in enumerate(paths, 1):
        deployments += [b"during!"] * (number == 3)
        assert WorkerLoRAManager._load_adapter(manager, lora(path, number)) == "adapter"
    check_loaded({1: named[1]})
    for number in (2, 3, 4):
        with pytest.raises(DeclinedError, match="was replaced between"):
            check_loaded({number: named.get(number, b"")})
    assert Adapters().named_from(1) is None
