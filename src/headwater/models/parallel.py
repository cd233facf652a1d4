"""The groups that a rank belongs to, by name: its part of each dimension, and the collectives that layers need.

Heads are divided by `headwater.kv.topology`, so that a rank's attention and its KV cache always agree. A group of one
is the null object: layers call it like any other, and it does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwater.errors import ModelError
from headwater.kv.topology import Topology
from headwater.models.config import ModelConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class HeadShare(NamedTuple):
    """The heads of one rank: its query heads read its KV heads and no others."""

    query: range
    kv: range


class ParallelGroup:
    """Rank `rank` of `size`. `group` is a process group of that size, torch's default one or one of its own."""

    def __init__(self, rank: int = 0, size: int = 1, group: ProcessGroup | None = None) -> None:
        if size < 1 or not 0 <= rank < size or (size > 1 and group is None):
            raise ModelError(
                f"rank is {rank} of {size}; expected 0 to {size - 1}, and a process group for more than one"
            )
        self.rank = rank
        self.size = size
        self._group = group

    def share(self, total: int) -> range:
        """This rank's part of a dimension. Parts are consecutive and differ by one at most: any width can be split."""
        return self._share_of(self.rank, total)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on every rank; in place."""
        if self._group is not None:
            self._group.allreduce([x]).wait()
        return x

    def broadcast(self, x: Tensor) -> None:
        """Make `x` on every rank what it is on rank 0; in place."""
        if self._group is not None:
            self._group.broadcast(x, 0).wait()

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        """Join the ranks' shares of a last dimension of `total`; each passes its own `share(total)` wide part."""
        if self._group is None:
            return x
        shares = [len(self._share_of(rank, total)) for rank in range(self.size)]
        # Collectives want equal sizes; the first share is the widest.
        padded = x.new_zeros(*x.shape[:-1], shares[0])
        padded[..., : x.shape[-1]] = x
        parts = [torch.empty_like(padded) for _ in shares]
        self._group.allgather([parts], [padded]).wait()
        return torch.cat([part[..., :width] for part, width in zip(parts, shares, strict=True)], dim=-1)

    def _share_of(self, rank: int, total: int) -> range:
        base, extra = divmod(total, self.size)
        start = rank * base + min(rank, extra)
        return range(start, start + base + (rank < extra))


class TensorParallel(ParallelGroup):
    """The group that divides heads, the width of MLPs and the vocabulary."""

    def heads(self, config: ModelConfig) -> HeadShare:
        """This rank's heads. KV heads are replicated where there are more ranks than heads. Raises TopologyError
        where the KV heads cannot be divided, and ModelError where the query heads cannot."""
        kv = Topology(tp=self.size).shard(config.kv_spec("float32"), tp_rank=self.rank).heads
        num_heads = config.attention.num_heads
        if num_heads % self.size:
            raise ModelError(
                f"{num_heads} attention heads cannot be divided over tensor_parallel_size={self.size}; it must divide "
                "their number"
            )
        share = num_heads // self.size
        return HeadShare(range(self.rank * share, (self.rank + 1) * share), kv)


_NOT_DIVIDED = ParallelGroup()
_ONE_RANK = TensorParallel()


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's place in every group. A group that is not given has one rank."""

    tp: TensorParallel = _ONE_RANK
    ep: ParallelGroup = _NOT_DIVIDED
    """Divides experts."""
    dcp: ParallelGroup = _NOT_DIVIDED
    """Divides the tokens of the KV cache (decode context parallelism)."""
    pcp: ParallelGroup = _NOT_DIVIDED
    """Divides the tokens of a prompt (prefill context parallelism)."""

    def __post_init__(self) -> None:
        for name in ("ep", "dcp", "pcp"):
            if (size := getattr(self, name).size) > 1:
                raise ModelError(f"{name} has {size} ranks; this engine divides a model by tensor parallelism only")


ALONE = Ranks()
"""No parallelism: every share is the whole, and the collectives return what they are given."""
