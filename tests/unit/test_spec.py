"""KVSpec and Plane: the sizes that follow from a spec, its digest, and what is refused as no possible KV."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidArgumentError, SpecError
from headwater.kv.spec import DTYPE_BYTES, MAX_KV_HEADS, MAX_LAYERS, MAX_WIDTH, KVSpec, Plane

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,31}", fullmatch=True)
PLANES = st.builds(Plane, NAMES, st.integers(1, MAX_WIDTH), st.sampled_from(sorted(DTYPE_BYTES)))
SPECS = st.builds(
    KVSpec,
    st.integers(1, MAX_LAYERS),
    st.integers(1, MAX_KV_HEADS),
    st.lists(PLANES, min_size=1, max_size=8, unique_by=lambda plane: plane.name).map(tuple),
)


def gqa(**changes: Any) -> KVSpec:
    return KVSpec.gqa(**{"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", **changes})


def canonical(**changes: Any) -> dict[str, Any]:
    return {**gqa().canonical(), **changes}


# ---- sizes ------------------------------------------------------------------------------------------------------
def test_gqa_is_keys_then_values() -> None:
    spec = gqa(v_head_dim=64)
    assert spec.planes == (Plane("k", 128, "bfloat16"), Plane("v", 64, "bfloat16"))
    assert gqa().planes[1].width == 128
    assert (spec.row_bytes, spec.num_tiles) == (2 * (128 + 64), 256)


def test_mla_is_one_head_of_latent_then_rope() -> None:
    spec = KVSpec.mla(num_layers=61, latent_dim=512, rope_dim=64, dtype="fp8_e4m3", rope_dtype="bfloat16")
    assert spec.planes == (Plane("latent", 512, "fp8_e4m3"), Plane("rope", 64, "bfloat16"))
    assert (spec.num_kv_heads, spec.num_tiles, spec.row_bytes) == (1, 61, 512 + 128)
    assert KVSpec.mla(num_layers=1, latent_dim=4, rope_dim=2, dtype="float16").planes[1].dtype == "float16"


def test_a_llama_token_has_128_kib() -> None:
    """32 layers × 8 heads × (128 + 128) × 2 bytes: the number people know."""
    assert gqa().token_bytes == 128 << 10
    assert gqa().extent_bytes(256) == 32 << 20


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("float32", 4), ("float16", 2), ("bfloat16", 2), ("fp8_e4m3", 1), ("fp8_e5m2", 1), ("int8", 1)],
)
def test_bytes_of_a_row(dtype: str, width: int) -> None:
    assert Plane("k", 10, dtype).row_bytes == 10 * width


@given(SPECS, st.integers(0, 32768))
def test_sizes_add_up(spec: KVSpec, num_tokens: int) -> None:
    assert spec.row_bytes == sum(plane.width * DTYPE_BYTES[plane.dtype] for plane in spec.planes)
    assert spec.tile_bytes(num_tokens) == num_tokens * spec.row_bytes
    assert spec.extent_bytes(num_tokens) == spec.num_layers * spec.num_kv_heads * spec.tile_bytes(num_tokens)
    assert spec.extent_bytes(1) == spec.token_bytes


# ---- the digest -------------------------------------------------------------------------------------------------
def test_digest_is_the_documented_encoding_and_never_changes() -> None:
    text = (
        '{"num_kv_heads":8,"num_layers":32,"planes":[{"dtype":"bfloat16","name":"k","width":128},'
        '{"dtype":"bfloat16","name":"v","width":128}]}'
    )
    assert gqa().digest == hashlib.sha256(b"headwater spec v1\0" + text.encode()).digest()
    assert gqa().digest.hex() == "bef0456be21f33951e0858ee3f90ee1f5bbe2bfefbcd1b41cd42535d259e02f7"


@given(SPECS)
def test_canonical_data_reads_back_through_json(spec: KVSpec) -> None:
    again = KVSpec.from_canonical(json.loads(json.dumps(spec.canonical())))
    assert again == spec
    assert again.digest == spec.digest
    assert hash(again) == hash(spec)


@given(SPECS, SPECS)
def test_digests_are_equal_exactly_where_specs_are(one: KVSpec, two: KVSpec) -> None:
    assert (one.digest == two.digest) == (one == two)


def test_every_part_of_a_spec_changes_its_digest() -> None:
    variants = [
        gqa(),
        gqa(num_layers=33),
        gqa(num_kv_heads=4),
        gqa(head_dim=64),
        gqa(v_head_dim=64),
        gqa(dtype="float16"),
        dataclasses.replace(gqa(), planes=gqa().planes[::-1]),
        dataclasses.replace(gqa(), planes=gqa().planes[:1]),
        dataclasses.replace(gqa(), planes=(Plane("key", 128, "bfloat16"), gqa().planes[1])),
    ]
    assert len({spec.digest for spec in variants}) == len(variants)


def test_a_spec_says_what_it_is() -> None:
    assert str(gqa()) == "32 layers × 8 heads × (k[128] bfloat16 + v[128] bfloat16)"


# ---- what is refused --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"num_layers": 0}, "num_layers is 0; expected an integer from 1 to 16384"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"num_layers": MAX_LAYERS + 1}, "num_layers is 16385"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; expected an integer from 1 to 16384"),
        ({"num_kv_heads": MAX_KV_HEADS + 1}, "num_kv_heads is 16385"),
        ({"head_dim": 0}, "width of plane 'k' is 0; expected an integer from 1 to 1048576"),
        ({"head_dim": MAX_WIDTH + 1}, "is 1048577; expected"),
        ({"v_head_dim": -2}, "width of plane 'v' is -2"),
        ({"dtype": "float64"}, "dtype 'float64'; known are float32, float16, bfloat16"),
        ({"dtype": "bf16"}, "dtype 'bf16'"),
        ({"dtype": ""}, "dtype ''"),
    ],
)
def test_impossible_specs_are_refused(changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(SpecError) as caught:
        gqa(**changes)
    assert fragment in str(caught.value)
    assert isinstance(caught.value, InvalidArgumentError)


def test_the_largest_spec_is_possible() -> None:
    spec = KVSpec(MAX_LAYERS, MAX_KV_HEADS, (Plane("x" * 32, MAX_WIDTH, "float32"),))
    assert spec.token_bytes == (1 << 28) * (4 << 20)


@pytest.mark.parametrize("name", ["", "1k", "k-v", "k v", "größe", "x" * 33, "k\n"])
def test_plane_names_that_another_language_could_not_spell_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="must be a short ASCII identifier"):
        Plane(name, 4, "float16")


def test_planes_must_be_one_to_eight_and_differ() -> None:
    plane = Plane("k", 4, "float16")
    with pytest.raises(SpecError, match="1 to 8 planes, not 0"):
        KVSpec(1, 1, ())
    with pytest.raises(SpecError, match="1 to 8 planes, not 9"):
        KVSpec(1, 1, tuple(Plane(f"p{i}", 4, "float16") for i in range(9)))
    with pytest.raises(SpecError, match=r"plane names must differ, got \['k', 'k'\]"):
        KVSpec(1, 1, (plane, plane))


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        "text",
        canonical(planes=None),
        canonical(planes=3),
        canonical(planes="kv"),
        canonical(planes=[["k", 128, "bfloat16"]]),
        canonical(planes=[{"name": "k", "width": 128}]),
        canonical(num_layers=None),
        canonical(num_layers="many"),
        canonical(num_layers=[1]),
        canonical(num_kv_heads=float("nan")),
    ],
    ids=repr,
)
def test_data_that_is_no_spec_is_refused(data: Any) -> None:
    with pytest.raises(SpecError, match="not a spec"):
        KVSpec.from_canonical(data)


def test_canonical_data_of_an_impossible_spec_says_what_is_wrong() -> None:
    with pytest.raises(SpecError, match="num_layers is 0"):
        KVSpec.from_canonical(canonical(num_layers=0))


# ---- bugs that were ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [2.9, float("inf")])
def test_a_broken_number_of_layers_is_not_rounded(layers: float) -> None:
    """2.9 layers in a stored description were read as 2, and infinity was an OverflowError."""
    with pytest.raises(SpecError, match="num_layers is"):
        KVSpec.from_canonical(canonical(num_layers=layers))


@pytest.mark.parametrize("number", [32.0, True, "32", np.int64(32)], ids=lambda value: type(value).__name__)
def test_numbers_that_json_would_write_otherwise_are_refused(number: Any) -> None:
    """32.0 equals 32, so the specs were equal, but their digests were not, and numpy's 32 had none at all."""
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        with pytest.raises(SpecError, match="expected an integer from 1 to"):
            gqa(**{name: number})


def test_a_value_width_of_zero_is_refused() -> None:
    """It meant the width of the keys."""
    with pytest.raises(SpecError, match="width of plane 'v' is 0"):
        gqa(v_head_dim=0)
