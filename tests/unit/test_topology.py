"""Topologies: whatever the layout, every row of every tile is held by somebody and written by exactly one rank."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headwater.errors import InvalidArgumentError, TopologyError
from headwater.kv.spec import KVSpec
from headwater.kv.topology import MAX_RANKS, WHOLE, Shard, Split, Topology, whole_shard

SPLITS = st.builds(Split, st.integers(1, 9), st.integers(1, 9))


def gqa(layers: int, heads: int) -> KVSpec:
    return KVSpec.gqa(num_layers=layers, num_kv_heads=heads, head_dim=4, dtype="float16")


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[KVSpec, Topology]:
    """Any layout that can exist, small enough to look at every row."""
    layers, heads = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 4, 6]))
    copies = draw(st.integers(1, 8))
    tp = heads * copies if copies > 1 else draw(st.sampled_from(divisors(heads)))
    dcp = draw(st.sampled_from(divisors(copies)))
    pp: int | tuple[int, ...] = draw(st.integers(1, layers))
    if draw(st.booleans()):
        cuts = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
        edges = [0, *sorted(cuts), layers]
        pp = tuple(end - start for start, end in itertools.pairwise(edges))
    topology = Topology(
        tp=tp,
        pp=pp,
        dcp=dcp,
        pcp=draw(st.integers(1, 3)),
        interleave=draw(st.sampled_from([1, 2, 3, 16])),
        pcp_splits_tokens=draw(st.booleans()),
    )
    return gqa(layers, heads), topology


# ---- splits -----------------------------------------------------------------------------------------------------
@given(SPLITS, st.integers(0, 500), st.integers(0, 60))
def test_parts_divide_the_rows(split: Split, first: int, num_tokens: int) -> None:
    rows = [split.rows(part, first, num_tokens).tolist() for part in range(split.parts)]
    assert sorted(itertools.chain(*rows)) == list(range(num_tokens))
    assert all(part == sorted(part) for part in rows)
    assert [split.count(part, first, num_tokens) for part in range(split.parts)] == [len(part) for part in rows]
    for part, some in enumerate(rows):
        assert all((first + row) // split.interleave % split.parts == part for row in some)


@given(SPLITS, st.integers(0, 500), st.integers(0, 30), st.integers(0, 30))
def test_the_pattern_goes_on_across_chunks(split: Split, first: int, one: int, two: int) -> None:
    """Two chunks one after the other have the rows of one chunk of both."""
    for part in range(split.parts):
        left, right = split.rows(part, first, one), split.rows(part, first + one, two) + one
        assert np.concatenate([left, right]).tolist() == split.rows(part, first, one + two).tolist()


def test_rows_of_two_ranks_with_interleave_two() -> None:
    split = Split(2, 2)
    assert [split.rows(part, 0, 5).tolist() for part in (0, 1)] == [[0, 1, 4], [2, 3]]
    assert [split.rows(part, 5, 5).tolist() for part in (0, 1)] == [[0, 3, 4], [1, 2]]


# ---- laws of layouts --------------------------------------------------------------------------------------------
@given(layouts(), st.integers(0, 40), st.integers(1, 40), st.integers(1, 24))
def test_every_row_of_every_tile_is_written_by_exactly_one_rank(
    layout: tuple[KVSpec, Topology], chunk: int, chunk_tokens: int, num_tokens: int
) -> None:
    spec, topology = layout
    num_tokens = min(num_tokens, chunk_tokens)
    written = np.zeros((spec.num_layers, spec.num_kv_heads, num_tokens), int)
    held = np.zeros_like(written)
    for shard in topology.shards(spec):
        rows = shard.split.rows(shard.part, chunk * chunk_tokens, num_tokens)
        mine, first, step = shard.owned(chunk)
        assert list(mine.layers) == [layer for layer in shard.layers if shard.writes(chunk, layer)]
        assert list(mine.layers) == list(shard.layers)[first::step]
        assert (mine.heads, mine.split, mine.part) == (shard.heads, shard.split, shard.part)
        for counts, layers in ((held, shard.layers), (written, mine.layers)):
            counts[np.ix_(np.array(layers, int), np.array(shard.heads, int), rows)] += 1
    assert (written == 1).all()
    # Held by as many as there are replicas: nowhere more, nowhere less.
    assert (held == next(topology.shards(spec)).replicas).all()


@given(layouts())
def test_the_union_of_all_shards_is_everything(layout: tuple[KVSpec, Topology]) -> None:
    spec, topology = layout
    shards = list(topology.shards(spec))
    parts = topology.split.parts
    places = Counter(
        (layer, head, shard.part, shard.replica) for shard in shards for layer in shard.layers for head in shard.heads
    )
    replicas = shards[0].replicas
    everything = itertools.product(range(spec.num_layers), range(spec.num_kv_heads), range(parts), range(replicas))
    assert places == Counter(everything), "each (layer, head, part, replica) is one rank's place"
    assert len(shards) == topology.num_ranks
    assert {(shard.replicas, shard.split) for shard in shards} == {(replicas, topology.split)}


@given(layouts(), st.integers(0, 50))
def test_replicas_write_equally_much(layout: tuple[KVSpec, Topology], first_chunk: int) -> None:
    spec, topology = layout
    groups: dict[Any, list[Shard]] = {}
    for shard in topology.shards(spec):
        groups.setdefault((shard.layers, shard.heads, shard.part), []).append(shard)
    for group in groups.values():
        replicas = group[0].replicas
        window = range(first_chunk, first_chunk + replicas)
        loads = [[len(shard.owned(chunk)[0].layers) for chunk in window] for shard in group]
        in_each_chunk = [[row[i] for row in loads] for i in range(replicas)]
        assert all(max(load) - min(load) <= 1 for load in in_each_chunk), "one layer more or less in any chunk"
        assert len({sum(row) for row in loads}) == 1, "and as many over a round of chunks"


@given(layouts(), st.integers(0, 500), st.integers(1, 40))
def test_local_shapes_add_up_to_the_extent(layout: tuple[KVSpec, Topology], first: int, num_tokens: int) -> None:
    spec, topology = layout
    total = 0
    for shard in topology.shards(spec):
        layers, heads, size = shard.local_shape(spec, first, num_tokens)
        assert layers * heads == shard.num_tiles
        assert size == shard.num_rows(first, num_tokens) * spec.row_bytes
        total += layers * heads * size
    assert total == spec.extent_bytes(num_tokens) * next(topology.shards(spec)).replicas


@given(layouts())
def test_stages_are_consecutive_and_none_is_empty(layout: tuple[KVSpec, Topology]) -> None:
    spec, topology = layout
    stages = topology.stage_layers(spec)
    assert len(stages) == topology.num_stages
    assert list(itertools.chain(*stages)) == list(range(spec.num_layers))
    assert min(len(stage) for stage in stages) >= 1
    if isinstance(topology.pp, int):
        assert max(len(stage) for stage in stages) - min(len(stage) for stage in stages) <= 1
        assert len(stages[-1]) == min(len(stage) for stage in stages)


@given(layouts(), st.integers(1, 64))
def test_the_block_size_and_unused_settings_change_no_shard(layout: tuple[KVSpec, Topology], block_size: int) -> None:
    spec, topology = layout
    assume(topology.split.parts == 1)
    other = Topology(topology.tp, topology.pp, 1, topology.pcp, 7, block_size, topology.pcp_splits_tokens)
    assert list(other.shards(spec)) == list(topology.shards(spec))


# ---- examples ---------------------------------------------------------------------------------------------------
def test_a_single_rank_holds_everything() -> None:
    spec = gqa(4, 8)
    assert list(Topology().shards(spec)) == [whole_shard(spec)]
    assert whole_shard(spec) == Shard(range(4), range(8), WHOLE, 0, 1, 0)
    assert whole_shard(spec).owned(17) == (whole_shard(spec), 0, 1)


def test_heads_are_divided_then_copied() -> None:
    spec = gqa(1, 4)
    divided = [shard.heads for shard in Topology(tp=2).shards(spec)]
    copied = [(shard.heads, shard.replica) for shard in Topology(tp=8).shards(spec)]
    assert divided == [range(2), range(2, 4)]
    assert copied == [(range(t // 2, t // 2 + 1), t % 2) for t in range(8)]


def test_dcp_divides_the_copies_of_a_head() -> None:
    """The drawing in docs/format.md."""
    shards = list(Topology(tp=8, dcp=2).shards(gqa(1, 2)))
    assert [shard.heads.start for shard in shards] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [shard.part for shard in shards] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [shard.replica for shard in shards] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {shard.replicas for shard in shards} == {2}


def test_the_two_generations_of_prefill_context_parallelism() -> None:
    spec = gqa(1, 1)
    copies, divides = (Topology(tp=2, dcp=2, pcp=2, pcp_splits_tokens=flag) for flag in (False, True))
    assert (copies.split.parts, divides.split.parts) == (2, 4)
    assert [(s.part, s.replica, s.replicas) for s in copies.shards(spec)] == [
        (0, 0, 2),
        (1, 0, 2),
        (0, 1, 2),
        (1, 1, 2),
    ]
    assert [(s.part, s.replica, s.replicas) for s in divides.shards(spec)] == [(i, 0, 1) for i in range(4)]


def test_uneven_stages() -> None:
    assert [len(stage) for stage in Topology(pp=4).stage_layers(gqa(10, 1))] == [2, 3, 3, 2]
    assert [len(stage) for stage in Topology(pp=4).stage_layers(gqa(11, 1))] == [3, 3, 3, 2]
    assert Topology(pp=(1, 3)).stage_layers(gqa(4, 1)) == (range(1), range(1, 4))


def test_who_writes_is_counted_in_layers_of_the_whole_model() -> None:
    """Otherwise stages would shift against each other, which is allowed, but is not what docs/format.md says."""
    shard = Topology(tp=2, pp=(1, 3)).shard(gqa(4, 1), pp_rank=1, tp_rank=1)
    assert [[layer for layer in shard.layers if shard.writes(chunk, layer)] for chunk in (0, 1)] == [[1, 3], [2]]
    assert shard.owned(0)[1:] == (0, 2)
    assert shard.owned(1)[1:] == (1, 2)


def test_interleave_means_nothing_where_tokens_are_not_divided() -> None:
    assert Topology(tp=2, interleave=64).split == WHOLE
    assert Topology(tp=2, dcp=2, interleave=64).split == Split(2, 64)


# ---- what is refused --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"tp": 0}, "tp is 0; expected at least 1"),
        ({"dcp": -1}, "dcp is -1"),
        ({"pcp": 0}, "pcp is 0"),
        ({"interleave": 0}, "interleave is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"pp": 0}, "pp is 0; expected a number of stages or the layers of each"),
        ({"pp": ()}, "pp is ()"),
        ({"pp": (3, 0)}, "pp is (3, 0)"),
        ({"tp": MAX_RANKS + 1}, "4097 ranks are more than the 4096 supported"),
        ({"tp": 64, "pp": 64, "pcp": 2}, "8192 ranks"),
        ({"tp": 6, "dcp": 4}, "dcp=4 reuses tensor-parallel ranks, so it must divide tp=6"),
        ({"dcp": 2}, "dcp=2 reuses tensor-parallel ranks"),
    ],
)
def test_layouts_that_cannot_be_are_refused(settings: dict[str, Any], fragment: str) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology(**settings)
    assert fragment in str(caught.value)
    assert isinstance(caught.value, InvalidArgumentError)


@pytest.mark.parametrize(
    ("layers", "heads", "settings", "fragment"),
    [
        (4, 8, {"tp": 3}, "tp=3 neither divides nor is a multiple of the 8 KV heads"),
        (4, 8, {"tp": 12}, "tp=12 neither divides"),
        (4, 8, {"tp": 4, "dcp": 2}, "dcp=2 needs copies of a head to divide; tp=4 over 8 KV heads makes none"),
        (4, 8, {"tp": 8, "dcp": 8}, "tp=8 over 8 KV heads makes none"),
        (4, 2, {"tp": 6, "dcp": 2}, "dcp=2 must divide the 3 copies of each head that tp=6 makes"),
        (3, 8, {"pp": 4}, "pp=4 gives stages of [1, 1, 1, 0] layers; the model has 3"),
        (4, 8, {"pp": (2, 1)}, "pp=(2, 1) gives stages of [2, 1] layers; the model has 4"),
        (4, 8, {"pp": (2, 3)}, "the model has 4"),
    ],
)
def test_layouts_that_cannot_be_for_a_model_say_why(
    layers: int, heads: int, settings: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology(**settings).shard(gqa(layers, heads))
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "fragment"),
    [
        ({"tp_rank": 4}, "tp_rank is 4; this topology has 0 to 3"),
        ({"tp_rank": -1}, "tp_rank is -1"),
        ({"pp_rank": 2}, "pp_rank is 2; this topology has 0 to 1"),
        ({"pcp_rank": 3}, "pcp_rank is 3; this topology has 0 to 2"),
    ],
)
def test_ranks_that_are_not_there_are_refused(ranks: dict[str, int], fragment: str) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology(tp=4, pp=2, pcp=3).shard(gqa(4, 8), **ranks)
    assert fragment in str(caught.value)


@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 14)
)
def test_a_layout_exists_for_all_its_ranks_or_for_none(
    layers: int, heads: int, tp: int, dcp: int, pcp: int, pp: int
) -> None:
    fits = (heads % tp == 0 and dcp == 1) or (tp % heads == 0 and tp > heads and (tp // heads) % dcp == 0)
    possible = fits and pp <= layers
    try:
        shards = list(Topology(tp=tp, pp=pp, dcp=dcp, pcp=pcp).shards(gqa(layers, heads)))
    except TopologyError:
        shards = []
    assert len(shards) == (tp * pp * pcp if possible else 0)


# ---- bugs that were ---------------------------------------------------------------------------------------------
def test_what_a_rank_owns_it_owns_whole() -> None:
    """What `owned` returned was itself one of two replicas: given to `write`, it lost every other layer."""
    mine, _, _ = Topology(tp=2).shard(gqa(4, 1)).owned(0)
    assert list(mine.owned(0)[0].layers) == list(mine.layers) == [0, 2]


def test_a_part_that_does_not_exist_has_no_rows() -> None:
    """`count` said 8 where `rows` had none."""
    for part in (-1, 2):
        assert Split(2, 2).count(part, 0, 16) == len(Split(2, 2).rows(part, 0, 16)) == 0
