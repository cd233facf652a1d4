"""How the CPU backend divides a step: which KV it gathers together, and how the parts become one result.

Decodes are cut into units of at most `UNIT_TOKENS` and computed several at a time, which keeps the gathered KV in the
processor's cache, and all threads busy, however few or long the requests are. The parts of one request are merged by
their log-sum-exp; so are the two parts of a prompt chunk. Only shapes and page numbers here, no KV.

    decode     [·······unit·······][·······unit·······][·····unit·····]
    prefill    [··········before, no mask·········][◣ chunk, causal ]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.kernels.attention.base import AttentionBatch

UNIT_TOKENS = 512
"""The most KV of one unit of decoding."""
GROUP_TOKENS = 2048
"""The most KV gathered at once for decodes: 3 MiB for 3 heads of 64 floats."""
_PADDING = 1.1
_PADDING_TOKENS = 256
"""How much more than its own KV a group may gather, to take units of different lengths together: a tenth, and a few
tokens that cost less than another call."""


@dataclass(frozen=True)
class GatheredTokens:
    """KV to gather: token j is in page `pages[j]` at `offsets[j]`."""

    pages: Tensor
    offsets: Tensor
    _rows: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, rows_per_page: int) -> Tensor:
        """The same as row numbers, where every page begins `rows_per_page` rows after the one before."""
        if rows_per_page not in self._rows:
            self._rows[rows_per_page] = self.pages * rows_per_page + self.offsets
        return self._rows[rows_per_page]


class Group(NamedTuple):
    """Units of decoding that are computed together, each padded to `length`."""

    units: slice
    length: int
    tokens: GatheredTokens
    mask: Tensor | None
    """[units, 1, 1, length]: 0, and -inf where padded; None where nothing is."""


class Merge(NamedTuple):
    """How the parts of each request become one: a table [requests, parts] of units, and each unit's place in it."""

    table: Tensor
    """Missing parts point to one unit more than there are."""
    place_of: Tensor

    def weights(self, lse: Tensor) -> Tensor:
        """How much each unit counts in its request, given its log-sum-exp [units, …]."""
        none = lse.new_full((1, *lse.shape[1:]), -math.inf)
        shares = torch.cat((lse, none))[self.table].softmax(1)
        return shares.flatten(0, 1)[self.place_of]


class DecodePlan(NamedTuple):
    """All requests with one query. Their units are in the order of their lengths."""

    num_requests: int
    request_of: Tensor
    groups: tuple[Group, ...]
    merge: Merge | None
    """None where every request is one unit."""


class PrefillPlan(NamedTuple):
    """One request with several queries: its last tokens, after `num_before` others."""

    rows: slice
    num_before: int
    tokens: GatheredTokens


@dataclass(frozen=True)
class CpuPlan:
    """One step. The row numbers in it are filled in by the first layer and serve the others."""

    decodes: DecodePlan | None
    prefills: tuple[PrefillPlan, ...]
    batch: AttentionBatch

    @property
    def num_rows(self) -> int:
        """Queries of all requests."""
        return sum(self.batch.query_lens_cpu)


def plan_step(batch: AttentionBatch) -> CpuPlan:
    """Divide one step. Costs a millisecond or two for dozens of requests."""
    return CpuPlan(
        decodes=_plan_decodes(batch),
        prefills=tuple(_plan_prefill(batch, i) for i in range(batch.num_decodes, batch.num_requests)),
        batch=batch,
    )


class _Unit(NamedTuple):
    length: int
    request: int
    start: int


def _plan_decodes(batch: AttentionBatch) -> DecodePlan | None:
    units: list[_Unit] = []
    for request, kv_len in enumerate(batch.kv_lens_cpu[: batch.num_decodes]):
        if kv_len == 0:  # a rank may hold none of a request's latents
            continue
        step = -(-kv_len // -(-kv_len // UNIT_TOKENS))
        units += (_Unit(min(step, kv_len - start), request, start) for start in range(0, kv_len, step))
    if not units:
        return None
    units.sort()
    groups: list[Group] = []
    begin = own = 0
    for end, unit in enumerate(units):
        padded = (end + 1 - begin) * unit.length
        if end > begin and (padded > GROUP_TOKENS or padded > (own + unit.length) * _PADDING + _PADDING_TOKENS):
            groups.append(_group(batch, units, begin, end))
            begin, own = end, 0
        own += unit.length
    groups.append(_group(batch, units, begin, len(units)))
    return DecodePlan(
        batch.num_decodes,
        torch.tensor([unit.request for unit in units]),
        tuple(groups),
        _merge(units, batch.num_decodes) if len(units) > len({unit.request for unit in units}) else None,
    )


def _group(batch: AttentionBatch, units: list[_Unit], begin: int, end: int) -> Group:
    members = units[begin:end]
    length = members[-1].length
    lengths, requests, starts = (torch.tensor(column).unsqueeze(1) for column in zip(*members, strict=True))
    places = torch.arange(length)
    # Padding repeats a unit's own last token: unlike whatever else lies in the pages, that is never NaN.
    positions = starts + torch.minimum(places, lengths - 1)
    columns = positions // batch.page_size
    pages = batch.page_table[requests, columns]
    mask = None
    if members[0].length < length:
        mask = torch.zeros(len(members), length).masked_fill_(places >= lengths, -math.inf)[:, None, None]
    tokens = GatheredTokens(pages.flatten().long(), (positions - columns * batch.page_size).flatten())
    return Group(slice(begin, end), length, tokens, mask)


def _merge(units: list[_Unit], num_requests: int) -> Merge:
    units_of: list[list[int]] = [[] for _ in range(num_requests)]
    for number, unit in enumerate(units):
        units_of[unit.request].append(number)
    width = max(map(len, units_of))
    table = [numbers + [len(units)] * (width - len(numbers)) for numbers in units_of]
    place_of = [0] * len(units)
    for request, numbers in enumerate(units_of):
        for part, number in enumerate(numbers):
            place_of[number] = request * width + part
    return Merge(torch.tensor(table), torch.tensor(place_of))


def _plan_prefill(batch: AttentionBatch, request: int) -> PrefillPlan:
    num_queries, kv_len = batch.query_lens_cpu[request], batch.kv_lens_cpu[request]
    start = sum(batch.query_lens_cpu[:request])
    positions = torch.arange(kv_len)
    pages = batch.page_table[request].long()[positions // batch.page_size]
    return PrefillPlan(
        slice(start, start + num_queries), kv_len - num_queries, GatheredTokens(pages, positions % batch.page_size)
    )
