"""The whole of an embedded store for people who look: what is in it, and which prefixes are being loaded.

Looks at all records at once, in columns and without the lock: about 1 µs a chunk. Records are not verified for that,
so that a sum may include one that is being written or removed at that moment; whatever is shown by name is verified.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.stores.embedded.core import Core
from headwater.stores.embedded.index import MAX_HITS, Entry, Index
from headwater.stores.embedded.layout import (
    CELL,
    CHUNK,
    COMPLETE,
    FIXED_OFFSET,
    HITS,
    ID_WORD,
    KIND_WORD,
    LENGTH_WORD,
    NUMBER_WORD,
    PARENT_WORD,
    ROOT,
    TOKENS_WORD,
    WORDS_PER_CELL,
)
from headwater.stores.stats import HitInfo, HolderInfo, PrefixInfo

_LOW = np.uint64(0xFFFF_FFFF)
_HIGH = np.uint64(32)
_MAX_DEPTH = 1 << 20
_MAX_TEXT = 200

Ints = npt.NDArray[np.int64]


class Nodes(NamedTuple):
    """Roots and complete chunks, one row each, in the order of their cells."""

    cell: Ints
    word: npt.NDArray[np.uint64]
    """The state word: as long as that stands there, it is the same record."""
    id: npt.NDArray[np.uint64]
    is_chunk: npt.NDArray[np.bool_]
    is_tail: npt.NDArray[np.bool_]
    number: Ints
    num_tokens: Ints
    chunk_tokens: Ints
    num_bytes: Ints
    parent: Ints
    """Row of the parent; of a root, its own."""
    root: Ints
    """Row of the root."""


class Surveyor:
    """Not thread-safe. `refresh` looks at everything; the others are about what it saw."""

    def __init__(self, core: Core, use: Callable[[], AbstractContextManager[Core]]) -> None:
        self._core = core
        self._use = use
        self._nodes: Nodes | None = None
        self._told: Ints = np.zeros(0, np.int64)
        """By row: the hits that were told, or that were there when the record was first seen by the first look."""
        self._roots: dict[int, dict[str, Any]] = {}

    @property
    def num_chunks(self) -> int:
        """Chunks that the last `refresh` saw."""
        return 0 if self._nodes is None else int(self._nodes.is_chunk.sum())

    def refresh(self) -> None:
        """Look at all records. About a millisecond for a thousand chunks, a second for a million. Call `hits` before:
        what happened to records that are not there any more, only it can tell."""
        with self._use() as core:
            old, nodes = self._nodes, _nodes_of(core.index)
            hits = _hits_of(core.index, nodes.cell)
        # Of a record that is new, all hits are news.
        self._told = hits if old is None else np.where(np.isin(nodes.id, old.id), hits, 0)
        self._nodes = nodes
        self._roots.clear()

    def hits(self, limit: int) -> list[HitInfo]:
        """Which prefixes were hit since the last call, of the chunks that the last `refresh` saw; the most hit ones."""
        nodes = self._nodes
        if nodes is None:
            return []
        with self._use() as core:
            is_gone = core.index.state_column[nodes.cell * WORDS_PER_CELL] != nodes.word
            now = np.where(is_gone, 0, _hits_of(core.index, nodes.cell))
            news = now - self._told
            if is_gone.any():  # an evicted chunk leaves its hits to the chunk before it, where they are no news
                heir = _ends(np.where(is_gone, nodes.parent, np.arange(len(nodes.cell))))
                np.subtract.at(news, heir[is_gone], self._told[is_gone])
            self._told = now
            rows = np.flatnonzero((news > 0) & nodes.is_chunk & ~is_gone)
            found = []
            for row in rows[np.argsort(-news[rows], kind="stable")][:limit].tolist():
                entry = self._entry(core, row)
                if entry is not None:
                    record, root = entry.record, self._root(core, int(nodes.root[row]))
                    found.append(HitInfo(record.key, root, record.first_token + record.num_tokens, int(news[row])))
            return found

    def prefixes(self, limit: int) -> list[PrefixInfo]:
        """The largest, the most hit and the last used stretches, at most so many of each; the largest first."""
        nodes = self._nodes
        if nodes is None or not nodes.is_chunk.any():
            return []
        with self._use() as core:
            used = core.index.ages_of(nodes.cell, time.time_ns(), keep=False)
            hits, used = _below(nodes, _hits_of(core.index, nodes.cell) * nodes.is_chunk, used)
            stretch, heads, branches = _stretches(nodes)
            chunks = np.flatnonzero(nodes.is_chunk)
            place = np.searchsorted(heads, stretch[chunks])
            num_bytes = np.bincount(place, nodes.num_bytes[chunks], len(heads)).astype(np.int64)
            num_chunks = np.bincount(place, minlength=len(heads))
            ends = nodes.number * nodes.chunk_tokens + nodes.num_tokens
            last = np.zeros(len(heads), np.int64)
            order = chunks[np.argsort(ends[chunks], kind="stable")]
            last[np.searchsorted(heads, stretch[order])] = order  # the deepest of each is written last
            chosen: dict[int, None] = {}
            for column in (num_bytes, hits[heads], used[heads]):
                take = min(limit, len(heads))
                best = np.argpartition(column, len(heads) - take)[len(heads) - take :]
                chosen |= dict.fromkeys(best.tolist())
            found = []
            for i in sorted(chosen, key=lambda i: (-num_bytes[i], heads[i])):
                head, deepest = int(heads[i]), int(last[i])
                first, entry = self._entry(core, head), self._entry(core, deepest)
                if first is not None and entry is not None:
                    found.append(
                        PrefixInfo(
                            key=entry.record.key,
                            root=self._root(core, int(nodes.root[head])),
                            first_token=first.record.first_token,
                            num_tokens=int(ends[deepest]),
                            num_chunks=int(num_chunks[i]),
                            num_bytes=int(num_bytes[i]),
                            branches=int(branches[i]),
                            hits=int(hits[head]),
                            last_used_ns=int(used[head]),
                        )
                    )
            return found

    def holders(self, limit: int) -> list[HolderInfo]:
        """What each model, tenant and adapter have, the largest first."""
        nodes = self._nodes
        if nodes is None:
            return []
        with self._use() as core:
            roots = np.flatnonzero(~nodes.is_chunk)
            chunks = np.flatnonzero(nodes.is_chunk)
            place = np.searchsorted(roots, nodes.root[chunks])
            sums = [
                np.bincount(place, column[chunks], len(roots)).astype(np.int64)
                for column in (nodes.num_tokens, nodes.num_bytes, _hits_of(core.index, nodes.cell))
            ]
            num_chunks, used = np.bincount(place, minlength=len(roots)), np.zeros(len(roots), np.int64)
            np.maximum.at(used, place, core.index.ages_of(nodes.cell[chunks], time.time_ns(), keep=False))
            tokens, num_bytes, hits = sums
            order = [i for i in np.argsort(-num_bytes, kind="stable")[:limit].tolist() if num_chunks[i]]
            return [
                HolderInfo(
                    self._root(core, int(roots[i])),
                    *(int(column[i]) for column in (num_chunks, tokens, num_bytes, hits, used)),
                )
                for i in order
            ]

    def _entry(self, core: Core, row: int) -> Entry | None:
        """The record of a row, verified, if it is still the same."""
        assert self._nodes is not None
        entry = core.index.entry(int(self._nodes.cell[row]))
        is_same = entry is not None and entry.state == COMPLETE and entry.record.id == int(self._nodes.id[row])
        return entry if is_same else None

    def _root(self, core: Core, row: int) -> dict[str, Any]:
        """The description of a root: a few short texts."""
        assert self._nodes is not None
        cell = int(self._nodes.cell[row])
        if cell not in self._roots:
            entry = self._entry(core, row)
            raw = core.index.payload(entry) if entry is not None else None
            try:
                said = json.loads(raw or b"{}")
            except ValueError:
                said = {}
            texts = {name: said.get(name) for name in ("label", "tenant", "adapter")} if isinstance(said, dict) else {}
            self._roots[cell] = {name: str(text)[:_MAX_TEXT] for name, text in texts.items() if text}
        return self._roots[cell]


def _nodes_of(index: Index) -> Nodes:
    heads = index.heads(index.cells.used())
    cell = np.sort(heads.cell[heads.state == COMPLETE])
    kinds = _fixed_word(index, cell, KIND_WORD)
    kind = (kinds >> np.uint64(16)) & np.uint64(0xFF)
    is_node = (kind == ROOT) | (kind == CHUNK)
    cell, kind, chunk_tokens = cell[is_node], kind[is_node], kinds[is_node] >> _HIGH
    tokens = _fixed_word(index, cell, TOKENS_WORD)
    above, num_tokens = (tokens & _LOW).astype(np.int64), (tokens >> _HIGH).astype(np.int64)
    ids, is_chunk = _fixed_word(index, cell, ID_WORD), kind == CHUNK
    number = (_fixed_word(index, cell, NUMBER_WORD) & _LOW).astype(np.int64)
    rows = np.arange(len(cell))
    parent = np.minimum(np.searchsorted(cell, above), max(len(cell) - 1, 0))
    # A chunk continues a root, or the chunk before it: anything else is noise, and could be a circle.
    before = np.where(is_chunk[parent], number[parent] + 1, 0) if len(cell) else number
    is_linked = (cell[parent] == above) & (ids[parent] == _fixed_word(index, cell, PARENT_WORD)) & (number == before)
    parent = np.where(is_chunk, parent, rows)
    is_good = ~is_chunk | (is_linked & (number < _MAX_DEPTH))
    root = _ends(np.where(is_good, parent, rows))
    keep = np.flatnonzero(~is_chunk[root])
    moved = np.zeros(len(cell), np.int64)
    moved[keep] = np.arange(len(keep))
    lengths = np.minimum(_fixed_word(index, cell, LENGTH_WORD), np.uint64(1 << 48)).astype(np.int64)
    chunk_tokens = chunk_tokens.astype(np.int64)
    return Nodes(
        cell=cell[keep],
        word=index.state_column[cell[keep] * WORDS_PER_CELL],
        id=ids[keep],
        is_chunk=is_chunk[keep],
        is_tail=(is_chunk & (num_tokens < chunk_tokens))[keep],
        number=number[keep],
        num_tokens=num_tokens[keep],
        chunk_tokens=chunk_tokens[keep],
        num_bytes=lengths[keep],
        parent=moved[parent[keep]],
        root=moved[root[keep]],
    )


def _fixed_word(index: Index, cells: Ints, word: int) -> npt.NDArray[np.uint64]:
    """One of the sixteen words of the fixed parts of many records."""
    column: npt.NDArray[np.uint64] = index.state_column[(cells + FIXED_OFFSET // CELL) * WORDS_PER_CELL + word]
    return column


def _hits_of(index: Index, cells: Ints) -> Ints:
    """`Index.hits` of many records."""
    column: npt.NDArray[np.uint64] = index.state_column[cells * WORDS_PER_CELL + HITS // 8]
    return np.minimum(column, np.uint64(MAX_HITS)).astype(np.int64)


def _ends(above: Ints) -> Ints:
    """Where each row comes to when it goes up until a row that is its own. No circles: numbers fall on the way."""
    while True:
        further = above[above]
        if np.array_equal(further, above):
            return above
        above = further


def _stretches(nodes: Nodes) -> tuple[Ints, Ints, Ints]:
    """(the first row of the stretch that each row belongs to; all first rows; how many stretches continue each)."""
    rows = np.arange(len(nodes.cell))
    is_full = nodes.is_chunk & ~nodes.is_tail
    children = np.bincount(nodes.parent[is_full], minlength=len(rows))
    under_root = ~nodes.is_chunk[nodes.parent]
    is_head = nodes.is_chunk & (under_root | (is_full & (children[nodes.parent] != 1)))
    stretch = _ends(np.where(nodes.is_chunk & ~is_head, nodes.parent, rows))
    heads = np.flatnonzero(is_head)
    inner = heads[~under_root[heads]]
    branches = np.bincount(np.searchsorted(heads, stretch[nodes.parent[inner]]), minlength=len(heads))
    return stretch, heads, branches


def _below(nodes: Nodes, hits: Ints, used: Ints) -> tuple[Ints, Ints]:
    """Of each row and all below it: the sum of hits, and the last use."""
    hits, used = hits.copy(), used.copy()
    chunks = np.flatnonzero(nodes.is_chunk)
    order = chunks[np.argsort(nodes.number[chunks], kind="stable")]
    levels = np.flatnonzero(np.diff(nodes.number[order])) + 1
    for rows in reversed(np.split(order, levels)):
        parents = nodes.parent[rows]
        np.add.at(hits, parents, hits[rows])
        np.maximum.at(used, parents, used[rows])
    return hits, used
