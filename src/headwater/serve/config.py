"""Every setting of the server besides the engine's, each default written once; the command line reads them here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headwater.engine.config import EngineConfig
from headwater.errors import EngineConfigError, InvalidArgumentError
from headwater.peers.address import parse_address
from headwater.serve.addresses import is_loopback


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Every setting of the server besides the engine's. Raises EngineConfigError for what would be unsafe."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    """None: the last part of the engine's `model`."""
    api_key: str | None = field(default=None, repr=False)
    insecure: bool = False
    """Serve a network without asking for a key."""
    max_waiting: int = 256
    """Sequences that may wait besides the `max_num_seqs` that run; more are refused with 429."""
    requires_cache_salt: bool = False
    """Refuse requests that would share KV with everybody."""
    max_body_bytes: int = 16 << 20
    """Of one request."""
    max_total_body_bytes: int = 64 << 20
    """Of all requests that are not tokenised yet."""
    max_connections: int = 512
    header_timeout_s: float = 10.0
    """How long a connection may take to send the headers of a request, and to begin one."""
    engine_timeout_s: float = 60.0
    """After so long without a sign of life from the engine, /health answers 503."""
    peer_listen: str | None = None
    """HOST:PORT at which other servers push KV into this one's pool; None: nowhere."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or Path(self.engine.model).resolve().name

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise EngineConfigError("the API key must be printable ASCII and not empty")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise EngineConfigError("--ssl-keyfile needs --ssl-certfile")
        if self.max_total_body_bytes < self.max_body_bytes:
            raise EngineConfigError(
                f"--max-total-body-bytes is {self.max_total_body_bytes}; expected at least --max-body-bytes, "
                f"{self.max_body_bytes}"
            )
        if self.peer_listen is not None:
            self._check_peer(self.peer_listen)
        if not (self.api_key or self.insecure or is_loopback(self.host)):
            raise EngineConfigError(
                f"--host {self.host} can be reached from other machines; give --api-key (or HEADWATER_API_KEY), "
                "or --insecure to serve anyone"
            )

    def _check_peer(self, listen: str) -> None:
        try:
            address = parse_address(listen)
        except InvalidArgumentError as error:
            raise EngineConfigError(f"--peer-listen: {error}") from error
        if self.engine.peer_secret_file is None and not is_loopback(address.host):
            raise EngineConfigError(
                f"--peer-listen {listen} can be reached from other machines; give --peer-secret-file, a file with a "
                "secret that all servers share"
            )
