"""How an engine uses the pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.errors import EngineConfigError

ROLES = ("both", "producer", "consumer")
AUTO = "auto"
CARRIERS = ("tcp", "nixl")
LOAD_MODES = (AUTO, "async", "layerwise", "blocking")
"""How a request waits for its load: as suits; outside the batch; layer by layer, in the step that needs it; before that
step."""


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig:
    """Which pool, and what to do with it. Raises EngineConfigError for what cannot be."""

    pool: str = field(default="", repr=False)
    """A pool URL, say shm:///headwater?capacity=8GiB, for the process that opens it; an engine that hands an open pool
    to both sides leaves it out. It may hold a password, so it is not shown."""
    role: str = "both"
    """"producer" only saves, "consumer" only loads (see the two options below), "both" does both."""
    consumer_is_to_put: bool = False
    """Let a consumer save as well: what it decodes is then there for the next turn."""
    consumer_is_to_load: bool = True
    """Let a consumer load; off, it does not even look prompts up (for measuring)."""
    save_decoded: bool = True
    """Save what was generated, too, and not only prompts."""
    load_mode: str = AUTO
    """"async": a request waits outside the batch until its KV is there. "layerwise": it computes the rest of its prompt
    at once, each layer as soon as its KV is there. "blocking": the whole engine waits for it. "auto": layerwise if
    nobody else would wait for it, otherwise async. KV that is not in the pool's first tier is loaded asynchronously in
    any case."""
    min_load_tokens: int = 32
    """Fewer tokens than this are computed faster than fetched."""
    load_deadline_s: float = 5.0
    """For one request's KV, once to fetch it from lower tiers and once to bring it into the engine's blocks; what is
    not there by then is computed."""
    save_deadline_s: float = 2.0
    group_bytes: int | None = None
    """Layers that move while others are computed go together until they have so many bytes; None: 8 MiB on a CPU, 32
    on a GPU."""
    staging_bytes: int | None = None
    """Memory between the engine and the pool, per rank and direction, on the device of the cache; None: 256 MiB on a
    CPU, 512 on a GPU. When it is full, saves are dropped."""
    save_staging_bytes: int | None = None
    """What saves get instead, where that is not the same."""
    peer_secret_file: str | None = None
    """What other hosts are shown before KV is pushed to them; None: only receivers of this host are pushed to."""
    peer_tls_cert: str | None = None
    """The certificate chain that this server shows to peers, whether it pushes or receives."""
    peer_tls_key: str | None = None
    """Its key, if that is in a file of its own."""
    peer_tls_ca: str | None = None
    """Who has signed the certificates of peers. Given this or a certificate, connections between peers are TLS."""
    peer_carrier: str = "tcp"
    """How KV travels to peers: `tcp`, or `nixl` where both ends name it."""

    def __post_init__(self) -> None:
        _one_of("role", self.role, ROLES)
        _one_of("load_mode", self.load_mode, LOAD_MODES)
        _one_of("peer_carrier", self.peer_carrier, CARRIERS)
        for name in ("min_load_tokens", "group_bytes", "staging_bytes", "save_staging_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise EngineConfigError(f"{name} is {value}; expected at least 1")
        if self.load_deadline_s <= 0 or self.save_deadline_s <= 0:
            raise EngineConfigError("deadlines must be above 0 s")

    @property
    def saves(self) -> bool:
        """Whether this engine writes to the pool."""
        return self.role != "consumer" or self.consumer_is_to_put

    @property
    def loads(self) -> bool:
        """Whether this engine reads from the pool."""
        return self.role == "both" or (self.role == "consumer" and self.consumer_is_to_load)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise EngineConfigError(f"{name} is {value!r}; expected one of {', '.join(known)}")
