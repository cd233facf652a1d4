"""What an engine's configuration says about peers. Apart from `config`, which is read before anything is imported."""

from __future__ import annotations

from typing import Protocol

from headwater.peers.options import PeerOptions


class PeerFields(Protocol):
    """The fields, which the connector's configuration and the reference engine's both have."""

    @property
    def peer_secret_file(self) -> str | None: ...
    @property
    def peer_tls_cert(self) -> str | None: ...
    @property
    def peer_tls_key(self) -> str | None: ...
    @property
    def peer_tls_ca(self) -> str | None: ...
    @property
    def peer_carrier(self) -> str: ...


def peer_options(config: PeerFields) -> PeerOptions:
    """The same in the words of `peers`."""
    return PeerOptions(
        secret_file=config.peer_secret_file,
        tls_cert=config.peer_tls_cert,
        tls_key=config.peer_tls_key,
        tls_ca=config.peer_tls_ca,
        carrier=config.peer_carrier,
    )
