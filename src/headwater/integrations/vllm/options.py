"""What `kv_connector_extra_config` may say, checked. No vLLM here: the options are plain data.

A wrong option ends the start of vLLM: it was meant to do something.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwater.connector.config import AUTO, ConnectorConfig
from headwater.connector.peering import peer_options
from headwater.errors import EngineConfigError, InvalidArgumentError
from headwater.integrations.vllm.declined import LOGGER
from headwater.kv.hashing import DEFAULT_CHUNK_TOKENS, check_chunk_tokens
from headwater.peers.address import is_loopback, parse_address
from headwater.stores.url import DEFAULT_URL, parse_size

log = logging.getLogger(LOGGER)

ROLES = {"kv_both": "both", "kv_producer": "producer", "kv_consumer": "consumer"}
FAILURE_POLICIES = ("recompute", "unchanged")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The connector's own settings, and those that only vLLM has."""

    connector: ConnectorConfig
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    """Tokens in a chunk. All servers that share must agree."""
    load_failure_policy: str = "recompute"
    """"recompute" sets vLLM's own `kv_load_failure_policy`, whose default fails the request; "unchanged" leaves it."""
    sample_weights: bool = False
    """Name the weights by samples of them instead of every byte: quick to start, and it may miss a small change."""
    peer_listen: str | None = None
    """HOST:PORT at which other servers push KV into this one's pool; None: nowhere."""
    epoch: int = 0
    """Which state of weights that change in place this server starts with; servers with other epochs never share."""


_TYPES: dict[str, type | tuple[type, ...]] = {
    "pool": (str, list),
    "chunk_tokens": int,
    "consumer_is_to_put": bool,
    "consumer_is_to_load": bool,
    "save_decoded": bool,
    "load_mode": str,
    "min_load_tokens": int,
    "load_deadline_s": (int, float),
    "save_deadline_s": (int, float),
    "staging": (str, int),
    "load_failure_policy": str,
    "sample_weights": bool,
    "epoch": int,
    "peer_listen": str,
    "peer_secret_file": str,
    "peer_tls_cert": str,
    "peer_tls_key": str,
    "peer_tls_ca": str,
    "peer_carrier": str,
}


def read_options(extra: Mapping[str, Any], kv_role: str | None) -> Options:
    """Raises EngineConfigError, or what the pool's URL is refused with, for anything that cannot be meant."""
    for name, value in extra.items():
        if name not in _TYPES:
            raise EngineConfigError(f"kv_connector_extra_config has {name!r}; known are {', '.join(sorted(_TYPES))}")
        expected = _TYPES[name]
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            wanted = " or ".join(kind.__name__ for kind in (expected if isinstance(expected, tuple) else (expected,)))
            raise EngineConfigError(f"kv_connector_extra_config: {name} is a {type(value).__name__}; expected {wanted}")
    settings = dict(extra)
    own = {name: settings.pop(name) for name in ("sample_weights", "epoch", "peer_listen") if name in settings}
    chunk_tokens = check_chunk_tokens(settings.pop("chunk_tokens", DEFAULT_CHUNK_TOKENS))
    policy = settings.pop("load_failure_policy", "recompute")
    if policy not in FAILURE_POLICIES:
        raise EngineConfigError(f"load_failure_policy is {policy!r}; expected one of {', '.join(FAILURE_POLICIES)}")
    if "staging" in settings:
        staging = settings.pop("staging")
        settings["staging_bytes"] = parse_size(staging) if isinstance(staging, str) else staging
    settings["pool"] = _pool_url(settings.get("pool", DEFAULT_URL))
    if kv_role not in ROLES:
        raise EngineConfigError(f"kv_role is {kv_role!r}; expected one of {', '.join(ROLES)}")
    connector = ConnectorConfig(role=ROLES[kv_role], **settings)
    # Here and now: later they would only be missed.
    peer_options(connector).check(receives=own.get("peer_listen") is not None)
    if own.get("peer_listen") is not None:
        _check_peer(own["peer_listen"], connector.peer_secret_file)
    return Options(connector=connector, chunk_tokens=chunk_tokens, load_failure_policy=policy, **own)


def _check_peer(listen: str, secret_file: str | None) -> None:
    try:
        host = parse_address(listen).host
    except InvalidArgumentError as error:
        raise EngineConfigError(f"kv_connector_extra_config: peer_listen: {error}") from error
    if secret_file is None and not is_loopback(host):
        raise EngineConfigError(
            f"kv_connector_extra_config: peer_listen {listen!r} can be reached from other hosts; give a "
            "peer_secret_file, with a secret that all servers share"
        )


def settle_load_mode(options: Options, why_outside: str) -> Options:
    """The options as they can be used in a vLLM whose requests must wait for their loads outside the batch, if there is
    a reason for that. The log says so."""
    mode = options.connector.load_mode
    if not why_outside or mode == "async":
        return options
    level = logging.INFO if mode == AUTO else logging.WARNING
    log.log(level, "Headwater: load_mode is async instead of %s in this vLLM: %s", mode, why_outside)
    return replace(options, connector=replace(options.connector, load_mode="async"))


def _pool_url(pool: str | list[Any]) -> str:
    """One URL, or several, fastest first, as a list or with commas between them."""
    urls = pool if isinstance(pool, list) else [pool]
    if not urls or not all(isinstance(url, str) and url for url in urls):
        raise EngineConfigError("kv_connector_extra_config: pool must be a URL or a list of them")
    return ",".join(urls)
