"""The parts that every decoder is made of: matrices divided over ranks, norms, the vocabulary at both ends.

A part allocates its parameters, applies them, and names the checkpoint tensors that fill them. On a CPU a matrix is
stored column by column: its product with a few dozen rows, a step of decoding, then takes half as long, and other
sizes no longer than before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from headwater.kernels.norm import add_rms_norm, rms_norm
from headwater.models.memory import empty
from headwater.models.parallel import Ranks
from headwater.models.weights import WeightTarget

Targets = Iterator[tuple[str, WeightTarget]]


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """Where parameters live, and which rank of which groups holds them."""

    ranks: Ranks
    dtype: torch.dtype
    device: torch.device

    def vector(self, length: int) -> Tensor:
        """An uninitialised parameter of one dimension."""
        return empty(length, dtype=self.dtype, device=self.device)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """An uninitialised [rows, columns] parameter for `linear`, in the order that its device likes."""
        if self.device.type == "cpu":
            return empty(columns, rows, dtype=self.dtype, device=self.device).t()
        return empty(rows, columns, dtype=self.dtype, device=self.device)

    def stack(self, count: int, rows: int, columns: int) -> Tensor:
        """Uninitialised matrices, [count, rows, columns], each in the order of `matrix`."""
        if self.device.type == "cpu":
            return empty(count, columns, rows, dtype=self.dtype, device=self.device).transpose(1, 2)
        return empty(count, rows, columns, dtype=self.dtype, device=self.device)

    def table(self, rows: int, columns: int) -> Tensor:
        """An uninitialised [rows, columns] parameter whose rows are looked up."""
        return empty(rows, columns, dtype=self.dtype, device=self.device)


class FusedRows(NamedTuple):
    """One checkpoint matrix inside a fused one: `part` of its `total` rows."""

    name: str
    total: int
    part: range


class FusedLinear:
    """Several matrices over the same input as one product; each rank holds some rows of each (column-parallel)."""

    def __init__(self, in_features: int, rows: Sequence[FusedRows], *, bias: bool, place: ParameterPlacement) -> None:
        out_features = sum(len(part) for _, _, part in rows)
        self.weight = place.matrix(out_features, in_features)
        self.bias = place.vector(out_features) if bias else None
        self._rows = tuple(rows)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def targets(self, prefix: str) -> Targets:
        """The rows of each matrix, one below the other."""
        start = 0
        for name, total, part in self._rows:
            here = slice(start, start + len(part))
            yield f"{prefix}.{name}.weight", WeightTarget(self.weight[here], (total, self.weight.shape[1]), 0, part)
            if self.bias is not None:
                yield f"{prefix}.{name}.bias", WeightTarget(self.bias[here], (total,), 0, part)
            start += len(part)


class RowLinear:
    """A matrix whose input is divided over the ranks, and whose output is their sum."""

    def __init__(self, total_in: int, part: range, out_features: int, *, bias: bool, place: ParameterPlacement) -> None:
        self.weight = place.matrix(out_features, len(part))
        self.bias = place.vector(out_features) if bias else None
        self._total_in = total_in
        self._part = part
        self._tp = place.ranks.tp

    def __call__(self, x: Tensor) -> Tensor:
        return self._tp.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's term of the sum."""
        # One rank adds the bias, or the sum would hold it once per rank.
        bias = self.bias if self._tp.rank == 0 else None
        return F.linear(x, self.weight, bias)

    def targets(self, prefix: str) -> Targets:
        """Some columns of the matrix, and all of the bias."""
        out_features = self.weight.shape[0]
        yield f"{prefix}.weight", WeightTarget(self.weight, (out_features, self._total_in), 1, self._part)
        if self.bias is not None:
            yield f"{prefix}.bias", WeightTarget(self.bias, (out_features,), 0, range(out_features))


class RMSNorm:
    """A norm over the whole width, the same on every rank."""

    def __init__(self, width: int, eps: float, place: ParameterPlacement) -> None:
        self.weight = place.vector(width)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def targets(self, prefix: str) -> Targets:
        """One vector."""
        yield f"{prefix}.weight", WeightTarget(self.weight, tuple(self.weight.shape), 0, range(self.weight.shape[0]))


class WidthNorm:
    """Norms over widths that are divided over the ranks: of queries and of keys, with one sum over the ranks."""

    def __init__(self, rows: Sequence[FusedRows], eps: float, place: ParameterPlacement) -> None:
        self.weights = [place.vector(len(part)) for _, _, part in rows]
        self.eps = eps
        self._rows = tuple(rows)
        self._tp = place.ranks.tp

    def __call__(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The norm of each [rows, width] part, in its dtype."""
        wide = [part.float() for part in parts]
        sums = self._tp.all_reduce(torch.stack([part.square().sum(dim=-1) for part in wide]))
        # All ranks hold as much as this one, and where heads are replicated the sum has counted them as often.
        widths = [self._tp.size * part.shape[-1] for part in wide]
        factors = [torch.rsqrt(total / width + self.eps) for total, width in zip(sums, widths, strict=True)]
        return [
            (part * factor.unsqueeze(-1)).to(weight.dtype) * weight
            for part, factor, weight in zip(wide, factors, self.weights, strict=True)
        ]

    def targets(self, prefix: str) -> Targets:
        """This rank's part of each vector."""
        for weight, (name, total, part) in zip(self.weights, self._rows, strict=True):
            yield f"{prefix}.{name}.weight", WeightTarget(weight, (total,), 0, part)


class VocabEmbedding:
    """Token ids to vectors; each rank holds the rows of some tokens."""

    def __init__(self, vocab_size: int, width: int, place: ParameterPlacement) -> None:
        self._tp = place.ranks.tp
        self._vocab_size = vocab_size
        self._part = place.ranks.tp.share(vocab_size)
        self.weight = place.table(len(self._part), width)

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return F.embedding(token_ids, self.weight)
        # Another rank's tokens look up any row and contribute nothing.
        local = token_ids - self._part.start
        foreign = (local < 0) | (local >= len(self._part))
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._tp.all_reduce(found.masked_fill_(foreign.unsqueeze(-1), 0.0))

    def targets(self, prefix: str) -> Targets:
        """The rows of this rank's tokens."""
        yield f"{prefix}.weight", WeightTarget(self.weight, (self._vocab_size, self.weight.shape[1]), 0, self._part)


class VocabHead:
    """Vectors to logits over the whole vocabulary, on every rank; `tied` shares the embedding's matrix."""

    def __init__(self, vocab_size: int, width: int, place: ParameterPlacement, tied: VocabEmbedding | None) -> None:
        self._tp = place.ranks.tp
        self._vocab_size = vocab_size
        self._part = place.ranks.tp.share(vocab_size)
        self._is_tied = tied is not None
        self.weight = tied.weight if tied is not None else place.matrix(len(self._part), width)

    def __call__(self, x: Tensor) -> Tensor:
        return self._tp.all_gather(_product(x, self.weight), self._vocab_size)

    def targets(self, prefix: str) -> Targets:
        """The rows of this rank's tokens; none where the embedding is loaded already."""
        if not self._is_tied:
            yield f"{prefix}.weight", WeightTarget(self.weight, (self._vocab_size, self.weight.shape[1]), 0, self._part)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear`, turned round where that is faster: a shared table is stored by rows, and on a CPU the product of
    such a matrix with 8 to 48 rows takes 1.2 to 2 times as long as the transposed one and its transposition."""
    if x.device.type == "cpu" and 8 <= x.shape[0] <= 48 and weight.stride(1) == 1:
        return torch.mm(weight, x.t()).t().contiguous()
    return F.linear(x, weight)
