"""A server's receiver: what is refused before it starts, and where /health says that it is."""

from __future__ import annotations

import pytest

pytest.importorskip("msgspec")

from headwater.engine.config import EngineConfig
from headwater.errors import EngineConfigError
from headwater.serve.config import ServerConfig
from headwater.serve.peers import NO_PEERS, reachable


@pytest.mark.parametrize("listen", ["7700", "host", "host:port", "127.0.0.1:70000"])
def test_an_address_that_is_none(listen: str) -> None:
    with pytest.raises(EngineConfigError, match="--peer-listen"):
        ServerConfig(engine=EngineConfig(model="m"), peer_listen=listen)


def test_a_receiver_that_others_reach_needs_a_secret() -> None:
    with pytest.raises(EngineConfigError, match="--peer-secret-file"):
        ServerConfig(engine=EngineConfig(model="m"), peer_listen="0.0.0.0:7700")
    engine = EngineConfig(model="m", peer_secret_file="/etc/headwater/peers")
    assert ServerConfig(engine=engine, peer_listen="0.0.0.0:7700").peer_listen == "0.0.0.0:7700"
    assert ServerConfig(engine=EngineConfig(model="m"), peer_listen="127.0.0.1:0").peer_listen == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("listens", "host", "shown"),
    [
        ("10.0.0.2:7700", "10.0.0.9", "10.0.0.2:7700"),
        ("0.0.0.0:7700", "10.0.0.9", "10.0.0.9:7700"),
        ("[::]:7700", "fd00::1", "[fd00::1]:7700"),
        ("0.0.0.0:7700", None, "0.0.0.0:7700"),
        ("decode:7700", "10.0.0.9", "decode:7700"),
        (NO_PEERS.address, "10.0.0.9", ""),
    ],
)
def test_one_that_listens_everywhere_is_where_its_server_was_reached(
    listens: str, host: str | None, shown: str
) -> None:
    assert reachable(listens, host) == shown
