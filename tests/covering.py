"""Covering arrays: few combinations of settings in which every possible pair of values occurs at least once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

CANDIDATES_PER_ROW = 40


def covering_array(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True, seed: int = 0
) -> list[Row]:
    """Rows that cover every pair of values that `allowed` permits; it is asked about partial rows too. Deterministic.

    Greedy: each row begins with a pair that is missing and is filled, factor by factor, with what covers most.
    """
    rng = random.Random(seed)
    missing = set(all_pairs(factors, allowed))
    rows: list[Row] = []
    while missing:
        candidates = [_fill(factors, allowed, missing, rng) for _ in range(CANDIDATES_PER_ROW)]
        best = max(candidates, key=lambda row: len(missing.intersection(pairs_of(row))))
        rows.append({name: best[name] for name in factors})
        missing -= set(pairs_of(best))
    return rows


def all_pairs(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Pair]:
    """Every pair of values of different factors that may occur together."""
    return [
        ((one, a), (other, b))
        for one, other in combinations(sorted(factors), 2)
        for a in factors[one]
        for b in factors[other]
        if allowed({one: a, other: b})
    ]


def pairs_of(row: Row) -> list[Pair]:
    """The pairs in one row, in the form of `all_pairs`."""
    return list(combinations(sorted(row.items()), 2))


def _fill(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], missing: set[Pair], rng: random.Random
) -> Row:
    row = dict(rng.choice(sorted(missing, key=repr)))
    rest = [name for name in factors if name not in row]
    rng.shuffle(rest)
    for name in rest:
        values = [value for value in factors[name] if allowed({**row, name: value})]
        rng.shuffle(values)
        row[name] = max(values, key=lambda value: len(missing.intersection(pairs_of({**row, name: value}))))
    return row
