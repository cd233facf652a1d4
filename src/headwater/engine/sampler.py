"""From logits to tokens: a pure function of the logits, the request's parameters, its seed and its position.

Randomness comes from a hash of (seed, position, token id) and not from a generator with a state. So a request draws
the same tokens whatever else is in its batch, after a preemption, and on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.engine.params import TokenLogprobs

if TYPE_CHECKING:
    from headwater.engine.request import Request, SampleRow

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the sampler needs to know of the rows of one step. Tensors are on the host until `sample` moves them."""

    all_greedy: bool
    temperatures: Tensor
    """float32 [n], 0 where greedy."""
    top_ks: Tensor | None
    """int64 [n], the vocabulary's size where all are kept; None if nobody asks."""
    top_ps: Tensor | None
    min_ps: Tensor | None
    noise_keys: Tensor
    """int64 [n, 2]: 32 bits each, from seed and position; empty where all are greedy."""
    penalties: tuple[tuple[int, SampleRow], ...]
    """Rows of requests with penalties, by number."""
    banned: tuple[tuple[int, tuple[int, ...]], ...]
    """(row, token ids) that must not be chosen: stop tokens before `min_tokens`."""
    logprobs: tuple[tuple[int, int], ...]
    """(row, how many of the best tokens as well) of those that asked."""


class Sampled(NamedTuple):
    """Tokens of one step, and log-probabilities for the rows that asked, all on the device."""

    token_ids: Tensor
    """int64 [n]."""
    logprobs: Tensor | None
    """float32 [rows that asked, 1 + k]: of the chosen token, then of the k best."""
    top_ids: Tensor | None
    """int64 [rows that asked, k]."""


def make_sampling_batch(rows: Sequence[SampleRow], vocab_size: int) -> SamplingBatch:
    """Collect the parameters of the rows that are sampled in this step."""
    params = [row.request.params for row in rows]
    all_greedy = all(p.is_greedy for p in params)
    drawn = () if all_greedy else rows
    return SamplingBatch(
        all_greedy=all_greedy,
        temperatures=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_ks=(
            torch.tensor([min(p.top_k, vocab_size) or vocab_size for p in params])
            if any(p.top_k and not p.is_greedy for p in params)
            else None
        ),
        top_ps=_column([p.top_p for p in params], 1.0),
        min_ps=_column([p.min_p for p in params], 0.0),
        noise_keys=_noise_keys(drawn),
        penalties=tuple((number, row) for number, row in enumerate(rows) if row.request.params.has_penalties),
        banned=tuple(
            (number, tuple(sorted(row.request.stop_ids)))
            for number, row in enumerate(rows)
            if row.num_outputs < row.request.params.min_tokens and row.request.stop_ids
        ),
        logprobs=tuple((number, p.logprobs) for number, p in enumerate(params) if p.logprobs is not None),
    )


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Choose a token for every row of `logits` [n, vocab]. Does not wait for the device."""
    raw = logits
    if batch.penalties or batch.banned:
        logits = logits.float().clone() if logits.dtype == torch.float32 else logits.float()
        for number, row in batch.penalties:
            _penalise(logits[number], row)
        for number, ids in batch.banned:
            logits[number, list(ids)] = -torch.inf
    token_ids = logits.argmax(dim=-1)
    if not batch.all_greedy:
        temperatures = batch.temperatures.to(logits.device, non_blocking=True)
        drawn = _draw(logits.float(), temperatures, batch)
        token_ids = torch.where(temperatures > 0, drawn, token_ids)
    if not batch.logprobs:
        return Sampled(token_ids, None, None)
    return _with_logprobs(raw, token_ids, batch)


def unpack_logprobs(batch: SamplingBatch, sampled: Sampled) -> dict[int, TokenLogprobs]:
    """The log-probabilities of one step by row, from tensors that are on the host already."""
    if sampled.logprobs is None or sampled.top_ids is None:
        return {}
    values, ids, found = sampled.logprobs.tolist(), sampled.top_ids.tolist(), {}
    for i, (row, k) in enumerate(batch.logprobs):
        top = list(zip(ids[i][:k], values[i][1 : 1 + k], strict=True))
        found[row] = TokenLogprobs(int(sampled.token_ids[row]), values[i][0], top)
    return found


def _column(values: list[float], neutral: float) -> Tensor | None:
    return torch.tensor(values, dtype=torch.float32) if any(v != neutral for v in values) else None


def _noise_keys(rows: Sequence[SampleRow]) -> Tensor:
    keys = [_noise_key(row.request.seed, row.num_outputs) for row in rows]
    return torch.tensor(keys, dtype=torch.int64).view(-1, 2)


def _noise_key(seed: int, position: int) -> tuple[int, int]:
    """64 bits that look nothing like their neighbours' (the finaliser of SplitMix64), in two halves."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    x ^= x >> 31
    return x & _MASK_32, x >> 32


def _uniform(keys: Tensor, num_columns: int) -> Tensor:
    """float32 [n, num_columns] in (0, 1), a hash of (row's key, column): MurmurHash3's finaliser, keyed twice.

    32-bit arithmetic inside int64, whose products keep their low 32 bits whatever overflows above.
    """
    x = torch.arange(num_columns, device=keys.device, dtype=torch.int64).mul_(0x9E3779B1)
    x = (x[None, :] + keys[:, :1]).bitwise_and_(_MASK_32)
    x.bitwise_xor_(x >> 16).mul_(0x85EBCA6B).bitwise_and_(_MASK_32)
    x.bitwise_xor_(keys[:, 1:])
    x.bitwise_xor_(x >> 13).mul_(0xC2B2AE35).bitwise_and_(_MASK_32)
    x.bitwise_xor_(x >> 16)
    # 23 bits and a half: exact in float32, and never 0 or 1.
    return (x >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)


def _draw(logits: Tensor, temperatures: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample every row by the Gumbel trick: the best of logit + noise is a draw from the softmax."""
    device = logits.device
    # The best token at 0: then no temperature, however small, makes an infinity of it.
    centred = logits - logits.amax(dim=-1, keepdim=True)
    scaled = centred / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    if batch.min_ps is not None:
        # p ≥ min_p · p_max, in logarithms.
        floor = scaled.amax(dim=-1, keepdim=True) + batch.min_ps.to(device).log()[:, None]
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    if batch.top_ks is not None or batch.top_ps is not None:
        scaled = scaled.masked_fill(scaled < _cut(scaled, batch), -torch.inf)
    noise = _uniform(batch.noise_keys.to(device), logits.shape[-1])
    return scaled.sub_(noise.log_().neg_().log_()).argmax(dim=-1)


def _cut(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """[n, 1]: the smallest logit that top-k and top-p keep. Equal logits stay or go together."""
    ordered = scaled.sort(dim=-1, descending=True).values
    last = torch.full((len(scaled), 1), scaled.shape[-1] - 1, device=scaled.device)
    if batch.top_ks is not None:
        last = batch.top_ks.to(scaled.device)[:, None] - 1
        columns = torch.arange(scaled.shape[-1], device=scaled.device)
        ordered = ordered.masked_fill(columns[None, :] > last, -torch.inf)
    if batch.top_ps is not None:
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1).sub_(probabilities)
        kept = (before < batch.top_ps.to(scaled.device)[:, None]).sum(dim=-1, keepdim=True)
        last = torch.minimum(last, kept.clamp_(min=1) - 1)
    return ordered.gather(1, last)


class TokenCounts:
    """Which tokens a request was asked or has said, and how often it said them. Each token is looked at once: one more
    costs as much after a long context as after a short one."""

    def __init__(self, vocab_size: int) -> None:
        self._num_counted = 0
        self._seen = np.zeros(vocab_size, dtype=np.bool_)
        self._said = np.zeros(vocab_size, dtype=np.int32)

    def update(self, request: Request) -> tuple[Tensor, Tensor]:
        """Count what was added to the request's tokens. Returns bool [vocab], asked or said, and int32 [vocab], how
        often said; both change with the next update."""
        fresh = np.array(request.tokens[self._num_counted :], dtype=np.int64)
        self._seen[fresh] = True
        np.add.at(self._said, fresh[max(0, request.num_prompt - self._num_counted) :], 1)
        self._num_counted += len(fresh)
        return torch.from_numpy(self._seen), torch.from_numpy(self._said)


def _penalise(logits: Tensor, row: SampleRow) -> None:
    """Change one row's logits in place for what its request has said, and for repetition also what it was asked."""
    params = row.request.params
    seen, said = (counts.to(logits.device) for counts in _count(row, len(logits)))
    if params.repetition_penalty != 1.0:
        changed = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits.copy_(torch.where(seen, changed, logits))
    if params.presence_penalty or params.frequency_penalty:
        logits -= torch.where(said > 0, params.presence_penalty + params.frequency_penalty * said.to(logits.dtype), 0.0)


def _count(row: SampleRow, vocab_size: int) -> tuple[Tensor, Tensor]:
    """What was seen and said before a row, its drafts included; only tokens that were said are remembered."""
    request = row.request
    if request.counts is None:
        request.counts = TokenCounts(vocab_size)
    seen, said = request.counts.update(request)
    if row.drafted:
        drafted = torch.tensor(row.drafted)
        seen = seen.index_fill(0, drafted, True)
        said = said.index_add(0, drafted, torch.ones_like(drafted, dtype=said.dtype))
    return seen, said


def _with_logprobs(raw: Tensor, token_ids: Tensor, batch: SamplingBatch) -> Sampled:
    rows = torch.tensor([row for row, _ in batch.logprobs], device=raw.device)
    most = max(k for _, k in batch.logprobs)
    logprobs = raw[rows].float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[rows][:, None])
    top = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    return Sampled(token_ids, torch.cat([chosen, top.values], dim=1), top.indices)
