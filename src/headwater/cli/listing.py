"""From a scan of single chunks to what people ask about: one row per root, chosen by tenant or identity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headwater.cli.output import plural
from headwater.errors import InvalidArgumentError, SpecError
from headwater.kv.spec import KVSpec
from headwater.pool.tenants import tenant_tag
from headwater.stores.stats import ChunkInfo

_MIN_DIGITS = 4


@dataclass(frozen=True)
class Selection:
    """Which roots are meant. `identity` is a label, or the first digits of a weights digest (with or without its
    kind); `tenant` is the tenant's own text, or its tag as listings show it."""

    tenant: str | None = None
    identity: str | None = None

    def __post_init__(self) -> None:
        if self.identity == "":
            raise InvalidArgumentError("the identity is empty; give a label, or the first digits of a weights digest")

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return self.tenant is None and self.identity is None

    def __call__(self, space: dict[str, Any], root: dict[str, Any]) -> bool:
        if self.tenant is not None and root.get("tenant", "") not in {self.tenant, tenant_tag(self.tenant.encode())}:
            return False
        return self.identity is None or root.get("label") == self.identity or self.names_weights(weights_of(space))

    def names_weights(self, weights: str) -> bool:
        """Whether `identity` is the beginning of this digest. Fewer than four digits name nothing."""
        wanted = (self.identity or "").lower()
        digits = wanted.rpartition(":")[2]
        known = weights if ":" in wanted else weights.rpartition(":")[2]
        return len(digits) >= _MIN_DIGITS and known.startswith(wanted)


def weights_of(space: dict[str, Any]) -> str:
    """The weights digest in a space's description; empty where the description did not verify."""
    identity = space.get("identity")
    return str(identity.get("weights", "")) if isinstance(identity, dict) else ""


def spec_of(space: dict[str, Any]) -> str:
    """A spec in a few words: `16 layers × 8 heads × (64 + 64) bfloat16`."""
    try:
        spec = KVSpec.from_canonical(space.get("spec", {}))
    except SpecError:
        return "?"
    widths, dtypes = " + ".join(str(p.width) for p in spec.planes), "/".join(sorted({p.dtype for p in spec.planes}))
    return f"{plural(spec.num_layers, 'layer')} × {plural(spec.num_kv_heads, 'head')} × ({widths}) {dtypes}"


@dataclass
class RootRow:
    """What one root holds. Pinned and leased count chunks that are so themselves; their ancestors are safe too."""

    space: dict[str, Any]
    root: dict[str, Any]
    chunks: int = 0
    tokens: int = 0
    bytes: int = 0
    pinned: int = 0
    leased: int = 0
    last_used_ns: int = 0

    def add(self, chunk: ChunkInfo) -> None:
        """Count one chunk."""
        self.chunks += 1
        self.tokens += chunk.num_tokens
        self.bytes += chunk.num_bytes
        self.pinned += chunk.pinned
        self.leased += chunk.leased
        self.last_used_ns = max(self.last_used_ns, chunk.last_used_ns)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**self.root, **self.space, **{name: getattr(self, name) for name in _COUNTS}}


_COUNTS = ("chunks", "tokens", "bytes", "pinned", "leased", "last_used_ns")


def by_root(chunks: Iterable[ChunkInfo]) -> list[RootRow]:
    """One row per root, the most recently used first."""
    rows: dict[str, RootRow] = {}
    for chunk in chunks:
        name = repr((chunk.space, chunk.root))
        rows.setdefault(name, RootRow(chunk.space, chunk.root)).add(chunk)
    return sorted(rows.values(), key=lambda row: -row.last_used_ns)


def check_unambiguous(selection: Selection, rows: Iterable[RootRow]) -> None:
    """Refuse digits that begin several digests: what is removed must be what was meant."""
    meant = sorted({w for row in rows if selection.names_weights(w := weights_of(row.space))})
    if len(meant) > 1:
        raise InvalidArgumentError(
            f"{selection.identity!r} matches {len(meant)} digests: {', '.join(meant)}; give more digits"
        )


def chunk_as_dict(chunk: ChunkInfo) -> dict[str, Any]:
    """Plain data for JSON."""
    place = {"key": chunk.key.hex(), "number": chunk.number, "tokens": chunk.num_tokens, "bytes": chunk.num_bytes}
    state = {"is_tail": chunk.is_tail, "pinned": chunk.pinned, "leased": chunk.leased}
    described = {"weights": weights_of(chunk.space), "label": chunk.root.get("label", "")}
    described |= {"tenant": chunk.root.get("tenant", ""), "adapter": chunk.root.get("adapter", "")}
    return place | state | {"last_used_ns": chunk.last_used_ns, "hits": chunk.hits} | described
