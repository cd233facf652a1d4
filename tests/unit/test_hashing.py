"""Chunk keys: a prefix has one name however it was put together, and every input of the KV changes the name."""

from __future__ import annotations

import hashlib
import itertools
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.errors import InvalidArgumentError, TokenError
from headwater.kv.hashing import (
    DEFAULT_CHUNK_TOKENS,
    MAX_CHUNK_TOKENS,
    ChunkKeys,
    ChunkRef,
    Extra,
    check_chunk_tokens,
    root_key,
)

ROOT = bytes(range(32))
IMAGE = Extra("image", b"\xaa" * 32, 2, 4)

TOKENS = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1)), max_size=40)
SIZES = st.integers(1, 9)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[int], list[Extra]]:
    """(chunk_tokens, tokens, extras): at least one token, and extras that lie inside."""
    tokens = draw(TOKENS.filter(bool))
    extras = []
    for _ in range(draw(st.integers(0, 3))):
        offset = draw(st.integers(0, len(tokens) - 1))
        length = draw(st.integers(1, len(tokens) - offset))
        extras.append(
            Extra(
                draw(st.sampled_from(["image", "audio", "é"])), draw(st.binary(min_size=1, max_size=3)), offset, length
            )
        )
    return draw(SIZES), tokens, extras


def keys_of(size: int, tokens: Any, extras: Any = (), root: bytes = ROOT) -> ChunkKeys:
    return ChunkKeys(root, size, tokens, extras)


def all_keys(keys: ChunkKeys) -> list[bytes]:
    """Every name that a prompt can have: full chunks, and all tails under them."""
    size = keys.chunk_tokens
    tails = [
        keys.tail_ref(index, length).key
        for index in range(len(keys.full) + 1)
        for length in range(1, min(size, keys.num_tokens - index * size + 1))
    ]
    return [*keys.full, *tails]


def covered(extra: Extra, size: int) -> set[int]:
    """The chunks an extra overlaps."""
    return {token // size for token in range(extra.offset, extra.offset + extra.num_tokens)}


# ---- what a key is ----------------------------------------------------------------------------------------------
def test_keys_are_the_documented_encoding() -> None:
    keys = keys_of(4, [1, 2, 3, 4, 5, 6], [IMAGE])
    encoded = bytes((5, 32)) + b"image" + b"\xaa" * 32 + struct.pack("<Q", 2)
    first = hashlib.sha256(ROOT + struct.pack("<5I", 4, 1, 2, 3, 4) + encoded).digest()
    tail = hashlib.sha256(first + struct.pack("<3I", 2, 5, 6) + encoded).digest()
    assert keys.full == [first]
    assert keys.chunks() == [ChunkRef(first, ROOT, 0, 0, 4, ROOT), ChunkRef(tail, first, 1, 4, 2, ROOT)]


def test_root_key_is_the_documented_encoding_and_never_changes() -> None:
    key = root_key(b"\1" * 32, b"\2" * 32, 256, b"ten", b"ad")
    body = struct.pack("<I32s32sII3sI2s", 1, b"\1" * 32, b"\2" * 32, 256, 3, b"ten", 2, b"ad")
    assert key == hashlib.sha256(b"headwater root\0" + body).digest()
    # A change here cuts every user off from everything stored: it needs a new format version.
    assert key.hex() == "89179180d1c756575a41ca9ed3a15d830ce6395aefef2236e03e96634c686731"


@given(prompts())
def test_refs_describe_the_chunks_and_chain(prompt: tuple[int, list[int], list[Extra]]) -> None:
    size, tokens, extras = prompt
    keys = keys_of(size, tokens, extras)
    refs = keys.chunks()
    assert sum(ref.num_tokens for ref in refs) == keys.num_tokens == len(tokens)
    assert [ref.number for ref in refs] == list(range(len(refs)))
    assert all(ref.first_token == ref.number * size and ref.root == ROOT for ref in refs)
    assert [ref.parent for ref in refs] == [ROOT, *(ref.key for ref in refs[:-1])]
    assert [ref.key for ref in refs[: len(keys.full)]] == keys.full
    assert keys.tail_tokens == len(tokens) % size
    assert len(keys.chunks(tail=False)) == len(keys.full) == len(tokens) // size


def test_no_tokens_are_no_chunks() -> None:
    keys = keys_of(4, [])
    assert (keys.chunks(), keys.num_tokens, keys.tail_tokens) == ([], 0, 0)
    keys.extend([])
    keys.extend(np.empty(0, np.int64))
    assert (keys.chunks(), keys.parent_of(0)) == ([], ROOT)


# ---- laws -------------------------------------------------------------------------------------------------------
@given(TOKENS, SIZES, st.lists(st.integers(0, 40), max_size=6))
@example(list(range(20)), 4, [4, 4, 8, 9])
def test_a_prompt_that_grows_has_the_keys_of_one_that_was_there_at_once(
    tokens: list[int], size: int, cuts: list[int]
) -> None:
    whole, growing = keys_of(size, tokens), keys_of(size, [])
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in itertools.pairwise(edges):
        growing.extend(tokens[start:end])
        assert growing.chunks() == keys_of(size, tokens[:end]).chunks()
    assert growing.chunks() == whole.chunks()
    assert all_keys(growing) == all_keys(whole)


@given(prompts(), st.lists(st.integers(0, 40), max_size=6))
def test_extras_may_come_with_the_tokens_they_stand_for(
    prompt: tuple[int, list[int], list[Extra]], cuts: list[int]
) -> None:
    size, tokens, extras = prompt
    whole, growing = keys_of(size, tokens, extras), keys_of(size, [])
    inside = {cut for cut in cuts if cut < len(tokens)}
    inside -= {cut for cut in inside for e in extras if e.offset < cut < e.offset + e.num_tokens}
    edges = [0, *sorted(inside), len(tokens)]
    for start, end in itertools.pairwise(edges):
        growing.extend(tokens[start:end], [extra for extra in extras if start <= extra.offset < end])
    assert all_keys(growing) == all_keys(whole)


@given(prompts(), st.randoms(use_true_random=False))
def test_the_order_in_which_extras_are_given_does_not_matter(
    prompt: tuple[int, list[int], list[Extra]], random: Any
) -> None:
    size, tokens, extras = prompt
    shuffled = list(extras)
    random.shuffle(shuffled)
    assert all_keys(keys_of(size, tokens, shuffled)) == all_keys(keys_of(size, tokens, extras))


@given(prompts(), st.data())
def test_an_extra_changes_the_chunks_it_overlaps_and_those_after_and_no_others(
    prompt: tuple[int, list[int], list[Extra]], data: st.DataObject
) -> None:
    size, tokens, extras = prompt
    offset = data.draw(st.integers(0, len(tokens) - 1))
    extra = Extra("video", b"new", offset, data.draw(st.integers(1, len(tokens) - offset)))
    before, after = keys_of(size, tokens, extras), keys_of(size, tokens, [*extras, extra])
    first = min(covered(extra, size))
    assert [a == b for a, b in zip(before.full, after.full, strict=True)] == [
        i < first for i in range(len(before.full))
    ]
    # Tails under a parent that is not affected tell exactly where it begins, token by token.
    room = min(size, len(tokens) - first * size + 1)
    for length in range(1, room):
        same = before.tail_ref(first, length).key == after.tail_ref(first, length).key
        assert same == (first * size + length <= extra.offset)


@given(prompts(), st.data())
def test_an_extra_is_hashed_into_each_chunk_it_overlaps(
    prompt: tuple[int, list[int], list[Extra]], data: st.DataObject
) -> None:
    """Under one fixed parent, so that the chain does not hide a chunk that was left out."""
    size, tokens, _ = prompt
    offset = data.draw(st.integers(0, len(tokens) - 1))
    extra = Extra("video", b"new", offset, data.draw(st.integers(1, len(tokens) - offset)))
    before, after = keys_of(size, tokens), keys_of(size, tokens, [extra])
    for index in range(len(before.full)):
        one, two = (keys._key(ROOT, index * size, size) for keys in (before, after))
        assert (one != two) == (index in covered(extra, size))


@pytest.mark.parametrize(
    "other",
    [
        IMAGE._replace(kind="imagf"),
        IMAGE._replace(digest=b"\xab" * 32),
        IMAGE._replace(digest=b"\xaa" * 31),
        IMAGE._replace(offset=1),
        IMAGE._replace(kind="image\xaa", digest=b"\xaa" * 31),
    ],
)
def test_every_field_of_an_extra_counts(other: Extra) -> None:
    tokens = list(range(8))
    assert keys_of(8, tokens, [IMAGE]).full != keys_of(8, tokens, [other]).full


@given(prompts(), st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8))
@example((2, [1, 2, 3], []), b"a", b"", b"", b"a")
@example((2, [1, 2, 3], []), b"ab", b"c", b"a", b"bc")
def test_another_tenant_or_adapter_shares_no_key(
    prompt: tuple[int, list[int], list[Extra]], tenant: bytes, adapter: bytes, tenant2: bytes, adapter2: bytes
) -> None:
    size, tokens, extras = prompt
    roots = [root_key(ROOT, ROOT, size, *names) for names in ((tenant, adapter), (tenant2, adapter2))]
    one, two = (set(all_keys(keys_of(size, tokens, extras, root))) for root in roots)
    if (tenant, adapter) == (tenant2, adapter2):
        assert one == two
    else:
        assert not one & two


@given(TOKENS.filter(bool), SIZES, st.data())
def test_another_token_changes_its_chunk_and_those_after_and_no_others(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = [
        *tokens[:place],
        data.draw(st.integers(0, 2**32 - 1).filter(lambda t: t != tokens[place])),
        *tokens[place + 1 :],
    ]
    one, two = keys_of(size, tokens), keys_of(size, other)
    assert [a == b for a, b in zip(one.full, two.full, strict=True)] == [
        i < place // size for i in range(len(one.full))
    ]


@given(TOKENS.filter(bool), SIZES)
def test_all_names_of_a_prompt_differ(tokens: list[int], size: int) -> None:
    """A tail is never taken for a full chunk, nor one tail for another, even where all tokens are alike."""
    names = all_keys(keys_of(size, [7] * len(tokens)))
    assert len(set(names)) == len(names)
    assert ROOT not in names


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_chunk_size_changes_every_root(one: int, two: int) -> None:
    assert (root_key(ROOT, ROOT, one) == root_key(ROOT, ROOT, two)) == (one == two)


def test_identity_and_spec_are_not_interchangeable() -> None:
    assert root_key(ROOT, bytes(32), 4) != root_key(bytes(32), ROOT, 4)


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", ">u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8"])
def test_tokens_are_numbers_whatever_integer_holds_them(dtype: str) -> None:
    tokens = [1, 2, 127, 0, 9]
    assert keys_of(2, np.array(tokens, dtype)).chunks() == keys_of(2, tokens).chunks()
    assert keys_of(2, np.array([tokens, tokens], dtype).T[:, 0]).chunks() == keys_of(2, tokens).chunks()
    assert keys_of(2, tuple(tokens)).chunks() == keys_of(2, tokens).chunks()


def test_the_callers_array_is_copied() -> None:
    tokens = np.arange(10, dtype=np.uint32)
    keys = keys_of(4, tokens)
    before = keys.chunks()
    tokens[:] = 0
    assert keys.chunks() == before


# ---- what is refused, and changes nothing -----------------------------------------------------------------------
BAD_TOKENS = {
    "negative": ([1, -1], "0 to 2**32 - 1, found -1"),
    "too large": ([1, 2**32], "found 4294967296"),
    "largest int64": (np.array([2**63 - 1]), "found 9223372036854775807"),
    "uint64": (np.array([2**64 - 1], np.uint64), "found 18446744073709551615"),
    "huge": ([2**70], "flat sequence of integers"),
    "float": ([1.0, 2.0], "flat sequence of integers, got shape (2,) of float64"),
    "nan": ([float("nan")], "of float64"),
    "one float among integers": ([1, 2.5], "of float64"),
    "bool": ([True, False], "of bool"),
    "text": (["a"], "flat sequence of integers"),
    "bytes": (b"abc", "got shape () of |S3"),
    "none": ([None, 1], "of object"),
    "two dimensions": (np.ones((2, 2), np.int64), "got shape (2, 2)"),
    "a number": (5, "got shape ()"),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_bad_tokens_are_refused_and_change_nothing(name: str) -> None:
    bad, fragment = BAD_TOKENS[name]
    keys = keys_of(4, list(range(6)), [IMAGE])
    before = (keys.chunks(), keys.num_tokens)
    with pytest.raises(TokenError) as caught:
        keys.extend(bad)
    assert fragment in str(caught.value)
    assert (keys.chunks(), keys.num_tokens) == before
    keys.extend([6, 7])
    assert keys.chunks() == keys_of(4, list(range(8)), [IMAGE]).chunks()
    with pytest.raises(TokenError):
        keys_of(4, bad)


BAD_EXTRAS = {
    "empty kind": (Extra("", b"x", 6, 1), "kind and digest must each be 1 to 255 bytes"),
    "long kind": (Extra("é" * 128, b"x", 6, 1), "kind and digest must each be 1 to 255 bytes"),
    "empty digest": (Extra("image", b"", 6, 1), "kind and digest must each be 1 to 255 bytes"),
    "long digest": (Extra("image", bytes(256), 6, 1), "kind and digest must each be 1 to 255 bytes"),
    "negative offset": (Extra("image", b"x", -1, 1), "offset ≥ 0 and num_tokens ≥ 1, got -1 and 1"),
    "no tokens": (Extra("image", b"x", 6, 0), "got 6 and 0"),
    "already hashed": (Extra("image", b"x", 3, 4), "covers tokens 3 to 6, but only 4 to 7 can still be described"),
    "beyond the end": (Extra("image", b"x", 6, 3), "covers tokens 6 to 8, but only 4 to 7"),
}


@pytest.mark.parametrize("name", BAD_EXTRAS)
def test_bad_extras_are_refused_and_change_nothing(name: str) -> None:
    bad, fragment = BAD_EXTRAS[name]
    keys = keys_of(4, list(range(6)))
    before = (keys.chunks(), keys.num_tokens)
    good = Extra("image", b"good", 6, 2)
    with pytest.raises(TokenError) as caught:
        keys.extend([6, 7], [good, bad])
    assert fragment in str(caught.value)
    assert (keys.chunks(), keys.num_tokens) == before
    keys.extend([6, 7])
    assert keys.chunks() == keys_of(4, list(range(8))).chunks(), "an extra of the refused call was kept"


def test_extras_at_the_limits_are_taken() -> None:
    keys = keys_of(4, list(range(5)), [Extra("é" * 127, bytes(255), 0, 5), Extra("k", b"d", 4, 1)])
    assert len(keys.chunks()) == 2


def test_an_extra_may_still_describe_what_is_not_hashed_yet() -> None:
    keys = keys_of(4, list(range(6)))
    keys.extend([], [Extra("image", b"x", 4, 2)])
    keys.extend([6, 7])
    assert keys.chunks() == keys_of(4, list(range(8)), [Extra("image", b"x", 4, 2)]).chunks()


@pytest.mark.parametrize(("index", "length"), [(0, 0), (0, 4), (0, 5), (0, -1), (1, 3), (2, 1)])
def test_tails_that_are_not_there_are_refused(index: int, length: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"no tail of {length} tokens after chunk {index - 1}"):
        keys_of(4, list(range(6))).tail_ref(index, length)


@pytest.mark.parametrize("size", [0, -1, MAX_CHUNK_TOKENS + 1])
def test_impossible_chunk_sizes_are_refused(size: int) -> None:
    for make in (check_chunk_tokens, lambda size: ChunkKeys(ROOT, size), lambda size: root_key(ROOT, ROOT, size)):
        with pytest.raises(InvalidArgumentError, match=f"chunk_tokens is {size}; expected 1 to 32768"):
            make(size)


def test_possible_chunk_sizes() -> None:
    assert [check_chunk_tokens(size) for size in (1, MAX_CHUNK_TOKENS)] == [1, MAX_CHUNK_TOKENS]
    assert DEFAULT_CHUNK_TOKENS == 256


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33)])
def test_digests_of_a_wrong_length_are_refused(digest: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=f"identity digest has {len(digest)} bytes; expected 32"):
        root_key(digest, ROOT, 4)
    with pytest.raises(InvalidArgumentError, match=f"spec digest has {len(digest)} bytes; expected 32"):
        root_key(ROOT, digest, 4)


@pytest.mark.parametrize("name", ["tenant", "adapter"])
@pytest.mark.parametrize("value", ["text", bytearray(b"x"), None, bytes(1025)], ids=lambda value: type(value).__name__)
def test_tenants_and_adapters_are_a_bounded_number_of_bytes(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} must be of type bytes, and at most 1024 long"):
        root_key(ROOT, ROOT, 4, **{name: value})
    root_key(ROOT, ROOT, 4, **{name: bytes(1024)})


# ---- bugs that were ---------------------------------------------------------------------------------------------
def test_ragged_tokens_are_a_token_error() -> None:
    """It was numpy's ValueError."""
    with pytest.raises(TokenError, match="tokens must be a flat sequence of integers"):
        keys_of(4, [[1], [2, 3]])


@pytest.mark.parametrize(
    "extra",
    [
        Extra("image", b"x", 2**64, 1),
        Extra("image", b"x", 1.0, 1),  # type: ignore[arg-type]
        Extra("\ud800", b"x", 1, 1),
        Extra("image", "x", 1, 1),  # type: ignore[arg-type]
    ],
    ids=["offset beyond 64 bits", "float offset", "kind that is no text", "digest that is no bytes"],
)
def test_extras_that_cannot_be_encoded_are_a_token_error(extra: Extra) -> None:
    """They were a struct.error, a UnicodeEncodeError or a TypeError."""
    keys = keys_of(4, list(range(6)))
    before = keys.chunks()
    with pytest.raises(TokenError, match=r"an extra needs offset|is not \(kind: str, digest: bytes"):
        keys.extend([6, 7], [extra])
    assert keys.chunks() == before


@pytest.mark.parametrize("length", [-1, 0, 4, 9])
def test_tail_key_names_only_tokens_that_are_there(length: int) -> None:
    """It hashed memory beyond the tokens."""
    with pytest.raises(InvalidArgumentError, match=f"no tail of {length} tokens"):
        keys_of(10, [1, 2, 3]).tail_key(0, length)


# ---- what went wrong once ----------------------------------------------------------------------------------------
def test_extras_with_other_kinds_of_bytes_are_taken_or_change_nothing() -> None:
    keys = keys_of(4, [1, 2])
    extras = [Extra("image", memoryview(digest), 2, 1) for digest in (b"b", b"a")]  # type: ignore[arg-type]
    try:
        keys.extend([3, 4, 5], extras)
    except TokenError:
        assert keys.num_tokens == 2
    else:
        same = [extra._replace(digest=bytes(extra.digest)) for extra in extras]
        assert keys.chunks() == keys_of(4, [1, 2, 3, 4, 5], same).chunks()


def test_a_digest_that_its_owner_changes_changes_no_key() -> None:
    digest = bytearray(b"before")
    keys = keys_of(4, [1, 2], [Extra("image", digest, 0, 2)])  # type: ignore[arg-type]
    before = keys.chunks()
    digest[:] = b"after!"
    assert keys.chunks() == before
