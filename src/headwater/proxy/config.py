"""Every setting of the proxy and the router, each default written once; the command line reads them here."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headwater.errors import ConfigError
from headwater.serve.addresses import is_loopback

OPTIONS = ("peer", "weight", "events", "replay", "pool")


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """One server behind the proxy, as the command line names it: `URL[,peer=HOST:PORT][,weight=N][,events=…]…`."""

    url: str
    peer: str | None = None
    """Where its host receives KV; None: its /health says so, if anything does."""
    weight: float = 1.0
    """How much of the work it takes, compared with the others."""
    events: str | None = None
    """Where vLLM publishes KV events (ZMQ)."""
    replay: str | None = None
    """Where vLLM repeats them."""
    pool: str | None = None
    """The pool of this host that a Headwater server saves to."""

    @classmethod
    def parse(cls, text: str) -> ServerSpec:
        """Raises ConfigError. `pool=` comes last, since a pool of several tiers has commas of its own."""
        head, has_pool, pool = text.partition(",pool=")
        url, *options = head.split(",")
        given: dict[str, str] = {}
        for option in options:
            name, equals, value = option.partition("=")
            if name not in OPTIONS or not equals or not value or name in given:
                known = ", ".join(f"{known}=" for known in OPTIONS)
                raise ConfigError(f"{text!r}: {option!r} is not an option of a server; expected {known} once each")
            given[name] = value
        if has_pool:
            if not pool:
                raise ConfigError(f"{text!r}: pool= is empty; expected the URL of a pool on this host")
            given["pool"] = pool
        return cls(
            url=_checked_url(url),
            peer=_checked_peer(given.get("peer")),
            weight=_checked_weight(given.get("weight", "1")),
            events=_checked_events("events", given.get("events")),
            replay=_checked_events("replay", given.get("replay")),
            pool=given.get("pool"),
        )

    def __post_init__(self) -> None:
        if self.replay is not None and self.events is None:
            raise ConfigError(f"{self.url}: replay= needs events=, the address of the events that it replays")
        if self.pool is not None and self.events is not None:
            raise ConfigError(
                f"{self.url}: pool= and events= are two sources of the same information; give one of them"
            )


@dataclass(frozen=True, kw_only=True)
class ProxyConfig:
    """Every setting besides the servers'. Raises ConfigError for what would be unsafe or cannot work."""

    decode: tuple[ServerSpec, ...]
    prefill: tuple[ServerSpec, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = field(default=None, repr=False)
    """What clients must send. It goes on to the servers as it came."""
    admin_key: str | None = field(default=None, repr=False)
    insecure: bool = False
    policy: str = "cost"
    """`cost`, or `round-robin` to compare with."""
    tokenizer: str | None = None
    """The model's directory or GGUF file; None: prompts are told apart by their text."""
    min_prefill_tokens: int = 256
    """A prompt with fewer uncached tokens on its decode server is always prefilled there: it is less than a chunk."""
    skip_prefill_tokens: int = 2048
    skip_prefill_share: float = 0.7
    """A prompt with fewer uncached tokens on its decode server, and no larger uncached share, is prefilled there."""
    wait_s: float = 30.0
    """How long decode waits for KV that prefill was asked to push."""
    start_s: float = 2.0
    """Of that, how long it waits for the first sign of it, where nothing is queued at the prefill server."""
    max_attempts: int = 3
    """Decode servers that one request is sent to, one after the other, while nothing of an answer has come."""
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 300.0
    """How long an answer may pause once it has begun."""
    health_interval_s: float = 1.0
    health_timeout_s: float = 2.0
    drain_timeout_s: float = 600.0
    """How long streams may go on after SIGTERM."""
    max_requests: int = 1024
    """At a time; more are refused with status 429."""
    max_body_bytes: int = 16 << 20
    max_total_body_bytes: int = 256 << 20
    max_connections: int = 2048
    header_timeout_s: float = 10.0
    history_blocks: int = 200_000
    """Blocks of prompts that are remembered, at most; half of them may be older than the rest."""
    history_age_s: float = 1800.0
    upstream_ca: str | None = None
    """Certificates to trust for servers that speak HTTPS."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("there is no server to send requests to; give the URL of at least one")
        for specs in (self.decode, self.prefill):
            urls = [spec.url for spec in specs]
            if twice := sorted({url for url in urls if urls.count(url) > 1}):
                raise ConfigError(f"{twice[0]} is given twice; use weight=2 to send it more requests")
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy is {self.policy!r}; expected one of {', '.join(POLICIES)}")
        if self.max_total_body_bytes < self.max_body_bytes:
            raise ConfigError("--max-total-body-bytes must be at least --max-body-bytes")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        for name, key in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if key is not None and not (key and key.isascii() and key.isprintable()):
                raise ConfigError(f"{name} must be printable ASCII and not empty")
        if not (self.api_key or self.insecure or is_loopback(self.host)):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines; give --api-key (or HEADWATER_API_KEY), "
                "or --insecure if the servers check keys themselves"
            )


POLICIES = ("cost", "round-robin")


def _checked_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{text!r} is not the URL of a server: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ConfigError(f"{text!r} is not the URL of a server; expected http://HOST:PORT or https://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("a server's URL must not contain a password; clients' API keys are passed on")
    return text.rstrip("/").removesuffix("/v1")


def _checked_peer(text: str | None) -> str | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"peer={text!r} is not an address; expected HOST:PORT")
    return text


def _checked_events(name: str, text: str | None) -> str | None:
    """An address that ZMQ can connect to. vLLM binds to `*`, which only it can."""
    if text is None:
        return None
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    is_tcp = scheme == "tcp" and bool(host) and host != "*" and port.isdecimal() and 0 < int(port) < 1 << 16
    if not (is_tcp or (scheme == "ipc" and rest)):
        raise ConfigError(f"{name}={text!r} is no address of KV events; expected tcp://HOST:PORT or ipc://FILE")
    return text


def _checked_weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0.001 <= weight <= 1000:
        raise ConfigError(f"weight={text!r} is not a weight; expected a number from 0.001 to 1000")
    return weight
