"""From a parallel layout to the shard of KV that each rank holds, and which rank writes which tile.

Ranks are named by (pp_rank, pcp_rank, tp_rank). Tensor parallelism divides heads, or replicates them when there
are more ranks than heads; pipeline stages divide layers; decode context parallelism (dcp) divides the tokens of a
head among the tp ranks that would otherwise hold copies of it; prefill context parallelism (pcp) adds ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headwater.errors import TopologyError
from headwater.kv.spec import KVSpec

MAX_RANKS = 4096
MAX_INTERLEAVE = 1 << 20


@dataclass(frozen=True, slots=True)
class Split:
    """How the tokens of a tile are divided: token i belongs to part `(i // interleave) % parts`."""

    parts: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= MAX_RANKS or not 1 <= self.interleave <= MAX_INTERLEAVE:
            raise TopologyError(
                f"parts is {self.parts} and interleave {self.interleave}; "
                f"expected 1 to {MAX_RANKS} and 1 to {MAX_INTERLEAVE}"
            )
        if self.parts == 1:
            object.__setattr__(self, "interleave", 1)  # one part is one part, however it is dealt

    @property
    def period(self) -> int:
        """Tokens after which the division repeats."""
        return self.parts * self.interleave

    def rows(self, part: int, first_token: int, num_tokens: int) -> npt.NDArray[np.intp]:
        """Row numbers, inside a chunk that starts at `first_token`, of the tokens in `part`, ascending."""
        positions = np.arange(first_token, first_token + num_tokens)
        return np.flatnonzero((positions // self.interleave) % self.parts == part)

    def count(self, part: int, first_token: int, num_tokens: int) -> int:
        """How many rows `part` has in that chunk, without listing them."""
        if not 0 <= part < self.parts:
            return 0
        return self._below(part, first_token + num_tokens) - self._below(part, first_token)

    def _below(self, part: int, token: int) -> int:
        cycles, rest = divmod(token, self.period)
        return cycles * self.interleave + min(max(rest - part * self.interleave, 0), self.interleave)


WHOLE = Split()
"""Tiles in one piece: no context parallelism."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds: layers × heads × one part of the tokens, and its place among equal replicas."""

    layers: range
    heads: range
    split: Split = WHOLE
    part: int = 0
    replicas: int = 1
    replica: int = 0

    def __post_init__(self) -> None:
        ranges = self.layers.start >= 0 and self.layers.step >= 1 and self.heads.start >= 0 and self.heads.step == 1
        if not ranges or not 0 <= self.part < self.split.parts or not 0 <= self.replica < self.replicas:
            raise TopologyError(
                f"no rank holds layers {self.layers}, heads {self.heads}, part {self.part} of {self.split.parts}, "
                f"replica {self.replica} of {self.replicas}: layers ascend, heads are consecutive, numbers count from 0"
            )

    def writes(self, chunk_index: int, layer: int) -> bool:
        """Whether this rank is the one, of the replicas that hold the same rows, that writes this layer's tiles."""
        return (chunk_index + layer) % self.replicas == self.replica

    def owned(self, chunk_index: int) -> tuple[Shard, int, int]:
        """What this rank writes of one chunk: that shard, and its layers as (first, step) among this shard's own."""
        if self.replicas == 1:
            return self, 0, 1
        first = (self.replica - chunk_index - self.layers.start) % self.replicas
        mine = replace(self, layers=self.layers[first :: self.replicas], replicas=1, replica=0)
        return mine, first, self.replicas

    @property
    def num_tiles(self) -> int:
        """Tiles (or parts of tiles) of one chunk in this shard."""
        return len(self.layers) * len(self.heads)

    def num_rows(self, first_token: int, num_tokens: int) -> int:
        """Tokens of that chunk which this shard holds."""
        return num_tokens if self.split.parts == 1 else self.split.count(self.part, first_token, num_tokens)

    def local_shape(self, spec: KVSpec, first_token: int, num_tokens: int) -> tuple[int, int, int]:
        """Shape in bytes of this shard's piece of a chunk: (layers, heads, bytes of one tile part)."""
        rows = self.num_rows(first_token, num_tokens)
        return len(self.layers), len(self.heads), rows * spec.row_bytes


def whole_shard(spec: KVSpec) -> Shard:
    """The shard of a single rank that holds everything."""
    return Shard(range(spec.num_layers), range(spec.num_kv_heads))


@dataclass(frozen=True)
class Topology:
    """A parallel layout. `pp` is a number of stages or an explicit tuple of layers per stage.

    `pcp_splits_tokens` tells the two generations of prefill context parallelism apart: in the newer one its ranks
    hold the same KV (the default), in the older one tokens are divided over `pcp × dcp` parts.
    `block_size` is the engine's own; it shapes the paged cache and never the stored bytes.
    """

    tp: int = 1
    pp: int | tuple[int, ...] = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    block_size: int = 16
    pcp_splits_tokens: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "dcp", "pcp", "interleave", "block_size"):
            if getattr(self, name) < 1:
                raise TopologyError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.interleave > MAX_INTERLEAVE:
            raise TopologyError(f"interleave is {self.interleave}; expected at most {MAX_INTERLEAVE}")
        stages = (self.pp,) if isinstance(self.pp, int) else self.pp
        if not stages or min(stages) < 1:
            raise TopologyError(f"pp is {self.pp}; expected a number of stages or the layers of each, all at least 1")
        if self.num_ranks > MAX_RANKS:
            raise TopologyError(f"{self.num_ranks} ranks are more than the {MAX_RANKS} supported")
        if self.tp % self.dcp:
            raise TopologyError(f"dcp={self.dcp} reuses tensor-parallel ranks, so it must divide tp={self.tp}")

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self.pp if isinstance(self.pp, int) else len(self.pp)

    @property
    def num_ranks(self) -> int:
        """Processes that hold KV."""
        return self.num_stages * self.pcp * self.tp

    @property
    def split(self) -> Split:
        """How this topology divides the tokens of a tile."""
        parts = self.dcp * (self.pcp if self.pcp_splits_tokens else 1)
        return Split(parts, self.interleave) if parts > 1 else WHOLE

    def stage_layers(self, spec: KVSpec) -> tuple[range, ...]:
        """Layers of each stage. A bare number divides evenly, the remainder going to the stages before the last,
        whose sampler and embedding already weigh something."""
        counts = [spec.num_layers // self.num_stages] * self.num_stages if isinstance(self.pp, int) else list(self.pp)
        if isinstance(self.pp, int):
            for back in range(spec.num_layers % self.num_stages):
                counts[-2 - back] += 1
        if min(counts) < 1 or sum(counts) != spec.num_layers:
            raise TopologyError(f"pp={self.pp} gives stages of {counts} layers; the model has {spec.num_layers}")
        ends = np.cumsum(counts).tolist()
        return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))

    def shard(self, spec: KVSpec, *, tp_rank: int = 0, pp_rank: int = 0, pcp_rank: int = 0) -> Shard:
        """The shard of one rank. Raises TopologyError, saying why, where the layout cannot exist for this spec."""
        for name, rank, size in (
            ("tp_rank", tp_rank, self.tp),
            ("pp_rank", pp_rank, self.num_stages),
            ("pcp_rank", pcp_rank, self.pcp),
        ):
            if not 0 <= rank < size:
                raise TopologyError(f"{name} is {rank}; this topology has 0 to {size - 1}")
        layers = self.stage_layers(spec)[pp_rank]
        heads, copies, copy = self._heads(spec, tp_rank)
        # Copies of a head are consecutive tp ranks, and dcp divides their number, so that a dcp group never
        # straddles two heads:  head 0: [part 0, part 1, part 0, part 1]  head 1: [part 0, …]
        replicas, replica, part = copies // self.dcp, copy // self.dcp, copy % self.dcp
        if self.pcp_splits_tokens:
            part += pcp_rank * self.dcp
        else:
            replicas, replica = replicas * self.pcp, replica * self.pcp + pcp_rank
        return Shard(layers, heads, self.split, part, replicas, replica)

    def shards(self, spec: KVSpec) -> Iterator[Shard]:
        """Every rank's shard, ordered by (pp_rank, pcp_rank, tp_rank)."""
        for pp_rank in range(self.num_stages):
            for pcp_rank in range(self.pcp):
                for tp_rank in range(self.tp):
                    yield self.shard(spec, tp_rank=tp_rank, pp_rank=pp_rank, pcp_rank=pcp_rank)

    def _heads(self, spec: KVSpec, tp_rank: int) -> tuple[range, int, int]:
        """(heads of this rank, ranks that hold them, which of those this is)."""
        heads, tp = spec.num_kv_heads, self.tp
        if heads % tp == 0:
            if self.dcp > 1:
                raise TopologyError(
                    f"dcp={self.dcp} needs copies of a head to divide; tp={tp} over {heads} KV heads makes none"
                )
            share = heads // tp
            return range(tp_rank * share, (tp_rank + 1) * share), 1, 0
        if tp % heads:
            raise TopologyError(f"tp={tp} neither divides nor is a multiple of the {heads} KV heads")
        copies = tp // heads
        if copies % self.dcp:
            raise TopologyError(f"dcp={self.dcp} must divide the {copies} copies of each head that tp={tp} makes")
        return range(tp_rank // copies, tp_rank // copies + 1), copies, tp_rank % copies
