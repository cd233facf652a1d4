"""The covering arrays that other tests rely on really cover."""

from __future__ import annotations

from covering import Row, all_pairs, covering_array, pairs_of

FACTORS = {"model": ["a", "b", "c"], "tp": [1, 2, 3], "page": [1, 16, 48], "overlap": [True, False]}


def allowed(row: Row) -> bool:
    return not (row.get("model") == "a" and row.get("tp", 1) == 3)


def test_every_allowed_pair_occurs_and_no_other() -> None:
    rows = covering_array(FACTORS, allowed)
    covered = {pair for row in rows for pair in pairs_of(row)}
    assert covered == set(all_pairs(FACTORS, allowed))
    assert all(allowed(row) for row in rows)


def test_it_is_much_smaller_than_all_combinations() -> None:
    rows = covering_array(FACTORS, allowed)
    assert 9 <= len(rows) <= 16


def test_equal_factors_give_equal_rows() -> None:
    assert covering_array(FACTORS, allowed) == covering_array(FACTORS, allowed)
