"""The first frames of a connection: who speaks, for which KV, and that both know the secret.

    listener  GREETING   version, nonce
    caller    HELLO      version, role, session, nonce, scope and description of the space, proof of the secret
    listener  WELCOME    proof of the secret, its limits         or REFUSE: why, and the connection is closed

The caller's first frame has everything, so whatever is wrong is refused there, before anything is allocated. A proof is
an HMAC over both nonces and everything that was said; the secret itself never travels. A *scope* is the key of the
nameless tenant's root: it covers the weights, the spec, the chunk size and the tenant secret, and nothing else.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

from headwater.errors import ConfigError, HeadwaterError, PeerRefusedError, WireError
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.peers.wire import VERSION, Cursor, Refusal
from headwater.pool.pool import Pool
from headwater.pool.space import Space

NONCE_BYTES = 32
PROOF_BYTES = 32
MIN_SECRET_BYTES = 16
MAX_LINK_CONNECTIONS = 4

_GREETING = struct.Struct("<HBx32s")
_HELLO = struct.Struct("<HBBBxxx16sQQ32s32sI")
_WELCOME = struct.Struct("<HBBIQ")
_CLIENT, _SERVER = b"headwater peer caller v1\0", b"headwater peer listener v1\0"
_NO_PROOF = bytes(PROOF_BYTES)


class CarrierBit(IntEnum):
    """How tiles travel, beside the connection itself: offered in a HELLO, chosen in the WELCOME. 0: in DATA frames.
    Who does not know a carrier neither offers nor chooses it."""

    NIXL = 1


class PeerRole(IntEnum):
    """What a connection is for."""

    PUSH = 1
    PULL = 2
    FOLLOW = 3


def read_secret(path: str) -> bytes:
    """A shared secret from its file, without white space around it. Raises ConfigError where it is no good."""
    try:
        with open(path, "rb") as file:
            secret = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"the peers' secret cannot be read from {path!r}: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"{path}: a secret of {len(secret)} bytes; expected at least {MIN_SECRET_BYTES}")
    return secret


@dataclass(frozen=True)
class Greeting:
    """What a listener says first."""

    nonce: bytes
    has_secret: bool
    version: int = VERSION

    def encode(self) -> bytes:
        """The meta part of a GREETING frame."""
        return _GREETING.pack(self.version, self.has_secret, self.nonce)

    @classmethod
    def decode(cls, meta: bytes) -> Greeting:
        """Read what `encode` wrote. Raises PeerRefusedError for another version, WireError for anything else."""
        _check_version(meta)
        if len(meta) != _GREETING.size:
            raise WireError("a greeting has the wrong size")
        version, has_secret, nonce = _GREETING.unpack(meta)
        return cls(nonce, bool(has_secret), version)


def new_greeting(secret: bytes | None) -> Greeting:
    """A greeting with a fresh nonce."""
    return Greeting(secrets.token_bytes(NONCE_BYTES), secret is not None)


@dataclass(frozen=True)
class Hello:
    """What a caller says first."""

    role: PeerRole
    session: bytes
    """16 random bytes: the connections of one caller to one listener are one session, and fail together."""
    server: int
    """The writer group of the caller's server: its ranks fill chunks together."""
    rank: int = 0
    """Which of the server's callers this is; a new session of the same one replaces the old."""
    number: int = 0
    nonce: bytes = b""
    scope: bytes = bytes(32)
    space: bytes = b""
    """Identity, spec and chunk size as JSON; empty where the role needs no space."""
    version: int = VERSION
    carriers: int = 0
    """Bits of `CarrierBit`."""

    @property
    def caller(self) -> tuple[PeerRole, int, int]:
        """Who it is: role, server and rank."""
        return self.role, self.server, self.rank

    def encode(self, greeting: bytes, secret: bytes | None) -> bytes:
        """The meta part of a HELLO frame, with the proof that answers a greeting."""
        body = self._body()
        return prove(secret, _CLIENT, greeting, body) + body

    def _body(self) -> bytes:
        fixed = (
            self.version,
            self.role,
            self.number,
            self.carriers,
            self.session,
            self.server,
            self.rank,
            self.nonce,
            self.scope,
        )
        return _HELLO.pack(*fixed, len(self.space)) + self.space

    @classmethod
    def decode(cls, meta: bytes, greeting: bytes, secret: bytes | None) -> Hello:
        """Read what `encode` wrote, and believe nothing of it before its proof was checked.

        Raises PeerRefusedError for another version or secret, WireError for anything else.
        """
        proof, body = meta[:PROOF_BYTES], meta[PROOF_BYTES:]
        _check_version(body)
        if not hmac.compare_digest(proof, prove(secret, _CLIENT, greeting, body)):
            if secret is None:
                reason = "the caller has a secret, and this peer has none"
            elif proof == _NO_PROOF:
                reason = "this peer wants a secret (secret_file=FILE in a URL, --peer-secret-file FILE of a server)"
            else:
                reason = "the caller's secret is not this peer's"
            raise PeerRefusedError(reason, Refusal.SECRET)
        cursor = Cursor(body)
        version, role, number, carriers, session, server, rank, nonce, scope, size = _HELLO.unpack(
            cursor.take(_HELLO.size)
        )
        space = cursor.take(size)
        cursor.end()
        if number >= MAX_LINK_CONNECTIONS:
            raise WireError(f"connection number {number}: a caller has at most {MAX_LINK_CONNECTIONS}")
        try:
            return cls(PeerRole(role), session, server, rank, number, nonce, scope, space, version, carriers)
        except ValueError as error:
            raise PeerRefusedError(f"unknown role {role}", Refusal.ROLE) from error


@dataclass(frozen=True)
class Welcome:
    """A listener's answer: it is the one that has the secret, and these are its limits."""

    silence_ms: int
    """A session that has begun chunks and is not heard for so long has failed."""
    share_bytes: int
    """What all peers together may have pending here."""
    carrier: int = 0
    """One of `CarrierBit`, or 0."""
    encodings: int = 0
    """`encoding_bits` of the tiles that it takes and sends. 0: it has never heard of them, so that no frame to it may
    name one; all tiles are raw."""

    def encode(self, greeting: bytes, hello: bytes, secret: bytes | None) -> bytes:
        """The meta part of a WELCOME frame."""
        body = _WELCOME.pack(VERSION, self.carrier, self.encodings, self.silence_ms, self.share_bytes)
        return prove(secret, _SERVER, greeting + hello, body) + body

    @classmethod
    def decode(cls, meta: bytes, greeting: bytes, hello: bytes, secret: bytes | None) -> Welcome:
        """Read what `encode` wrote. Raises PeerRefusedError where the listener does not know the secret."""
        proof, body = meta[:PROOF_BYTES], meta[PROOF_BYTES:]
        _check_version(body)
        if not hmac.compare_digest(proof, prove(secret, _SERVER, greeting + hello, body)):
            raise PeerRefusedError(
                "the listener has another secret; give both ends the same secret file", Refusal.SECRET
            )
        if len(body) != _WELCOME.size:
            raise WireError("a welcome has the wrong size")
        _, carrier, encodings, silence_ms, share_bytes = _WELCOME.unpack(body)
        return cls(silence_ms, share_bytes, carrier, encodings)


def prove(secret: bytes | None, end: bytes, received: bytes, sent: bytes) -> bytes:
    """Proof that the end which sends `sent` after `received` has the secret; zeros if there is none."""
    if secret is None:
        return _NO_PROOF
    sized = struct.pack("<I", len(received)) + received + sent
    return hmac.new(secret, end + sized, "sha256").digest()


def _check_version(body: bytes) -> None:
    version = int.from_bytes(body[:2], "little")
    if len(body) < 2 or version != VERSION:
        raise PeerRefusedError(
            f"the other end speaks version {version} of the peer protocol; expected {VERSION}", Refusal.VERSION
        )


# ---- which KV ---------------------------------------------------------------------------------------------------
def scope_of(space: Space) -> bytes:
    """32 bytes that two hosts have in common if and only if they may exchange this space's KV."""
    return space.root().key


def describe_space(space: Space) -> bytes:
    """Identity, spec and chunk size for a HELLO: what another host needs to open the same space."""
    described = {"identity": space.identity.canonical(), "spec": space.spec.canonical()}
    return json.dumps(described | {"chunk_tokens": space.chunk_tokens}, sort_keys=True).encode()


def open_space(pool: Pool, hello: Hello, accepted: Collection[bytes] = ()) -> Space:
    """The space that a caller speaks of, in this pool. `accepted`: the only scopes that are taken, if there are any.

    Raises PeerRefusedError where this host could not use the caller's KV. Changes nothing in the pool.
    """
    if accepted and not any(hmac.compare_digest(hello.scope, scope) for scope in accepted):
        raise PeerRefusedError(
            "this receiver accepts KV of another model, spec, chunk size or tenant secret only", Refusal.SPACE
        )
    try:
        described = json.loads(hello.space)
        identity = Identity.from_canonical(described["identity"])
        spec, chunk_tokens = KVSpec.from_canonical(described["spec"]), described["chunk_tokens"]
        space = pool.space(identity, spec, chunk_tokens=chunk_tokens)
    except HeadwaterError as error:
        raise PeerRefusedError(f"no such space: {error}", Refusal.SPACE) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PeerRefusedError("the description of the space cannot be read", Refusal.SPACE) from error
    if not hmac.compare_digest(hello.scope, scope_of(space)):
        raise PeerRefusedError("the caller has another tenant secret; give both ends the same one", Refusal.TENANTS)
    return space
