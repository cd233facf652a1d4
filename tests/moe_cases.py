"""Random experts and choices, and the checks that Triton's kernels equal their references; for CPU and GPU tests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.kernels.moe_reference import ExpertRows, route_torch, run_experts_torch, sort_pairs_torch
from headwater.kernels.moe_triton import (
    ExpertsConfig,
    GemmConfig,
    grouped_gate_up,
    run_experts_triton,
    sort_pairs,
)
from headwater.kernels.route_triton import route_triton
from headwater.kernels.routing import RoutingRule

from kernel_cases import relative_error, tolerance

CHOICES = ("uniform", "skewed", "one", "foreign", "all-foreign")
SMALL = ExpertsConfig(16, GemmConfig(32, 32, 4, 2), GemmConfig(32, 32, 4, 2))


@dataclass
class ExpertsCase:
    """Arguments of `run_experts`. Experts that nobody chose are NaN, and so is memory between strided rows."""

    rows: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    choice: str
    seed: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.ids = self._choose().int().contiguous().to(self.device)
        self.weights = torch.rand(self.rows, self.top_k, device=self.device) + 0.1
        self.x = self._filled(self.rows, self.hidden + 8)[:, : self.hidden]
        self.gate_up = self._filled(self.experts, 2 * self.inner, self.hidden) * self.hidden**-0.5
        self.down = self._filled(self.experts, self.hidden, self.inner) * self.inner**-0.5
        unused = torch.ones(self.experts, dtype=torch.bool)
        chosen = self.ids.flatten().cpu().long()
        unused[chosen[(chosen >= 0) & (chosen < self.experts)]] = False
        self.gate_up[unused.to(self.device)] = float("nan")
        self.down[unused.to(self.device)] = float("nan")

    def _filled(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def _choose(self) -> Tensor:
        if self.choice == "one":  # every row's every choice is one expert: more than a router would do
            return torch.full((self.rows, self.top_k), self.experts - 1)
        if self.choice == "all-foreign":
            return torch.full((self.rows, self.top_k), -1)
        odds = torch.ones(self.experts)
        if self.choice == "skewed":
            odds = 1.0 / torch.arange(1, self.experts + 1) ** 2
        ids = torch.multinomial(odds.expand(max(self.rows, 1), -1), self.top_k)[: self.rows]
        if self.choice == "foreign":
            foreign = torch.rand(ids.shape) < 0.4
            ids = torch.where(foreign, torch.where(torch.rand(ids.shape) < 0.5, -1, self.experts + 3), ids)
        return ids

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.x, self.ids, self.weights, self.gate_up, self.down


def random_experts_case(
    rng: random.Random, *, device: str = "cpu", dtype: torch.dtype = torch.float32, max_rows: int = 60
) -> ExpertsCase:
    """Any shape that a model might have, and odd ones."""
    experts = rng.choice((1, 4, 7, 16, 33))
    return ExpertsCase(
        rows=rng.choice((1, 2, 3, rng.randint(1, max_rows))),
        experts=experts,
        top_k=rng.randint(1, min(experts, 6)),
        hidden=rng.choice((8, 32, 48, 72)),
        inner=rng.choice((8, 24, 32, 40)),
        choice=rng.choice(CHOICES),
        seed=rng.randrange(2**31),
        device=device,
        dtype=dtype,
    )


def check_experts(rng: random.Random, device: str, dtype: torch.dtype) -> None:
    """Both ways to the result, whichever the number of pairs would choose, and the same bits twice."""
    case = random_experts_case(rng, device=device, dtype=dtype)
    expected = run_experts_torch(*case.args)
    for config in (None, SMALL):
        got = run_experts_triton(*case.args, config)
        assert got.is_contiguous()
        assert got.dtype == dtype
        assert relative_error(got, expected) < tolerance(dtype), (case, config)
        assert torch.equal(run_experts_triton(*case.args, config), got)


def check_sorting(rng: random.Random, device: str, dtype: torch.dtype) -> None:
    """Order, counts and tiles: every row of every expert in exactly one tile, and nothing behind them."""
    case = random_experts_case(rng, device=device, dtype=dtype, max_rows=1500)
    block_rows = rng.choice((16, 64))
    pairs = sort_pairs(case.ids, case.experts, block_rows)
    order, counts = sort_pairs_torch(case.ids, case.experts)
    num_own = int(counts.sum())
    assert torch.equal(pairs.counts, counts)
    assert torch.equal(pairs.order[:num_own].long(), order[:num_own])
    expected, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        expected += [(expert, first, start + count) for first in range(start, start + count, block_rows)]
        start += count
    tiles = list(zip(*pairs.tiles.tolist(), strict=True))
    assert tiles[: len(expected)] == expected
    assert all(tile[0] == -1 for tile in tiles[len(expected) :])


def check_gate_up(rng: random.Random, device: str, dtype: torch.dtype) -> None:
    """`grouped_gate_up` alone, in the sorted order."""
    case = random_experts_case(rng, device=device, dtype=dtype)
    pairs = sort_pairs(case.ids, case.experts, 16)
    got = grouped_gate_up(case.x, pairs, case.gate_up, SMALL.gate_up)
    order, counts = sort_pairs_torch(case.ids, case.experts)
    start = 0
    for expert, count in enumerate(counts.tolist()):
        rows = order[start : start + count] // case.top_k
        gate, up = (case.x[rows].float() @ case.gate_up[expert].float().T).chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
        assert count == 0 or relative_error(got[start : start + count], expected) < tolerance(dtype), case
        start += count


def check_route(rng: random.Random, device: str, dtype: torch.dtype) -> None:
    """The choice and weights of some rules, row by row, against sorting the scores in Python."""
    for _ in range(8):
        _check_rule(rng, device)


def _check_rule(rng: random.Random, device: str) -> None:
    num_groups, size = rng.choice(((1, 8), (1, 60), (4, 5), (8, 8), (3, 2)))
    kept = rng.randint(1, num_groups)
    rule = RoutingRule(
        top_k=rng.randint(1, min(kept * size, 8)),
        scores=rng.choice(("softmax", "sigmoid")),
        num_groups=num_groups,
        groups_kept=kept,
        group_score=rng.choice(("max", "top2")),
        renormalise=rng.random() < 0.5,
        scaling=rng.choice((1.0, 2.5)),
    )
    torch.manual_seed(rng.randrange(2**31))
    logits = torch.randn(5, num_groups * size, device=device) * 2
    bias = torch.randn(num_groups * size, device=device) * 0.3 if rng.random() < 0.5 else None
    live = rng.randint(0, 6)
    counted = [
        ExpertRows(
            torch.full((num_groups * size,), 2**33, device=device),
            torch.tensor([live], dtype=torch.int32, device=device),
        )
        for _ in range(2)
    ]
    ids, weights = route_triton(logits, rule, bias, counted[0])
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    found, in_torch = (
        torch.zeros_like(logits).scatter_(1, chosen.long(), weighed)
        for chosen, weighed in ((ids, weights), route_torch(logits, rule, bias, counted[1]))
    )
    torch.testing.assert_close(found, in_torch, rtol=1e-4, atol=1e-6)
    expected_counts = ids[:live].flatten().long().bincount(minlength=num_groups * size) + 2**33
    for rows in counted:
        assert torch.equal(rows.counts, expected_counts), (live, rule)
    for row in range(len(logits)):
        expected = _route_row(logits[row].cpu(), None if bias is None else bias.cpu(), rule)
        assert ids[row].tolist() == [expert for expert, _ in expected], rule
        wanted = torch.tensor([weight for _, weight in expected])
        torch.testing.assert_close(weights[row].cpu(), wanted, rtol=1e-4, atol=1e-6)


def _route_row(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> list[tuple[int, float]]:
    score = logits.double().softmax(0) if rule.scores == "softmax" else logits.double().sigmoid()
    choice = (score if bias is None else score + bias.double()).tolist()
    size = len(choice) // rule.num_groups
    groups = [range(start, start + size) for start in range(0, len(choice), size)]
    of_group = 2 if rule.group_score == "top2" else 1
    groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:of_group]))
    candidates = sorted((e for group in groups[: rule.groups_kept] for e in group), key=lambda e: -choice[e])
    best = candidates[: rule.top_k]
    total = sum(float(score[e]) for e in best) if rule.renormalise else 1.0
    return [(e, float(score[e]) / total * rule.scaling) for e in best]


CHECKS = (check_experts, check_sorting, check_gate_up, check_route)
