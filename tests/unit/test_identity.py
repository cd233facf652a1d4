"""Identity: what makes two servers' KV the same, and what is refused because it would make it wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine.identity import PRECISION_VARIABLES, engine_identity
from headwater.errors import IdentityError
from headwater.kv.identity import MAX_FIELD_CHARS, Identity, canonical_rope, canonical_settings, digest_scales
from headwater.models.checkpoint import open_checkpoint

from models_support import save_tiny

WEIGHTS = "sha256:" + "0123456789abcdef" * 4
SCALES = digest_scales([0.5, 2.0])


def identity(**changes: Any) -> Identity:
    return Identity(**{"weights": WEIGHTS, "run_dtype": "bfloat16", "kv_dtype": "bfloat16", **changes})


def test_digest_is_the_documented_encoding_and_never_changes() -> None:
    one = identity(rope='{"theta":10000.0}', epoch=7, label="not part of it")
    texts = (WEIGHTS, "bfloat16", "none", "bfloat16", "none", '{"theta":10000.0}', "7")
    encoded = b"".join(struct.pack("<I", len(text)) + text.encode() for text in texts)
    assert one.digest == hashlib.sha256(b"headwater identity v1\0" + encoded).digest()
    # A change here cuts every user off from everything stored: it needs a new format version.
    assert one.digest.hex() == "9d10d2b18dbb41a8831890cd8fa24852a9f1c8bb2486c71dd768de1898aa6d6b"
    assert one.digest is one.digest


CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"weights": "sha256:" + "f" * 64},
    "weights scheme": {"weights": "sampled-" + WEIGHTS},
    "run_dtype": {"run_dtype": "float16"},
    "quantization": {"quantization": "awq-int4-g128"},
    "kv_dtype": {"kv_dtype": "float16"},
    "quantised kv": {"kv_dtype": "fp8_e4m3", "kv_scales": SCALES},
    "other quantised kv": {"kv_dtype": "fp8_e5m2", "kv_scales": SCALES},
    "kv_scales": {"kv_dtype": "fp8_e4m3", "kv_scales": digest_scales([0.5, 2.5])},
    "rope": {"rope": canonical_rope({"theta": 1e6})},
    "settings": {"settings": canonical_settings({"norm_eps": 1e-6})},
    "rope's text as settings": {"settings": canonical_rope({"theta": 1e6})},
    "epoch": {"epoch": 1},
}


def test_every_field_but_the_label_changes_the_digest() -> None:
    variants = [identity(), *(identity(**change) for change in CHANGES.values())]
    assert len({one.digest for one in variants}) == len(set(variants)) == len(variants)
    covered = {name for change in CHANGES.values() for name in change}
    assert covered | {"label"} == {f.name for f in dataclasses.fields(Identity)}


def test_the_label_is_no_part_of_it() -> None:
    assert identity(label="a") == identity(label="b")
    assert hash(identity(label="a")) == hash(identity(label="b"))
    assert identity(label="a").digest == identity(label="b").digest


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_moving_text_between_fields_changes_the_digest(a: str, b: str, c: str, d: str) -> None:
    one, two = identity(quantization="q" + a, rope=b), identity(quantization="q" + c, rope=d)
    assert (one.digest == two.digest) == ((a, b) == (c, d)) == (one == two)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("float8_e4m3fn", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("float8_e5m2", "fp8_e5m2"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("int8", "int8"),
    ],
)
def test_dtype_spellings_are_one_identity(spelling: str, name: str) -> None:
    scales = SCALES if name.startswith(("fp8", "int8")) else "none"
    one = identity(run_dtype=spelling, kv_dtype=spelling, kv_scales=scales)
    assert (one.run_dtype, one.kv_dtype) == (name, name)
    assert one.digest == identity(run_dtype=name, kv_dtype=name, kv_scales=scales).digest


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8", "float8_e4m3fn"])
def test_quantised_kv_without_static_scales_is_refused(dtype: str) -> None:
    with pytest.raises(IdentityError, match="without static scales"):
        identity(kv_dtype=dtype)
    assert identity(kv_dtype=dtype, kv_scales=SCALES).kv_scales == SCALES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "meta-llama/Llama-3.1-8B"}, "digest_checkpoint"),
        ({"weights": ""}, "weights is ''"),
        ({"weights": WEIGHTS.upper()}, "lower case"),
        ({"weights": WEIGHTS + "0"}, "64 hex"),
        ({"weights": WEIGHTS + "\n"}, "64 hex"),
        ({"weights": "sha256:" + "a" * 63}, "and 64"),
        ({"weights": "hf-commit:" + "a" * 40}, "and 64"),
        ({"weights": "xxh3-128:" + "a" * 32}, "and 64"),
        ({"weights": b"sha256:"}, "expected text"),
        ({"run_dtype": "float12"}, "run_dtype is 'float12'; known are float32"),
        ({"kv_dtype": "fp8"}, "kv_dtype is 'fp8'; known are"),
        ({"kv_dtype": None}, "expected text"),
        ({"quantization": ""}, "use 'none'"),
        ({"quantization": "x" * (MAX_FIELD_CHARS + 1)}, "4097 characters"),
        ({"quantization": "\ud800"}, "not valid Unicode"),
        ({"rope": {"theta": 1e4}}, "rope is a dict"),
        ({"rope": "x" * (MAX_FIELD_CHARS + 1)}, "4097 characters"),
        ({"label": "x" * (MAX_FIELD_CHARS + 1)}, "4097 characters"),
        ({"kv_scales": "1.0"}, "digest_scales"),
        ({"kv_scales": SCALES}, "applies none"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": 1 << 63}, "expected an integer"),
        ({"epoch": 1.0}, "expected an integer"),
        ({"epoch": True}, "expected an integer"),
    ],
)
def test_what_does_not_name_the_kv_is_refused_with_a_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        identity(**change)


def test_limits_are_inclusive() -> None:
    identity(epoch=(1 << 63) - 1, quantization="x" * MAX_FIELD_CHARS)


def test_canonical_round_trip_through_json() -> None:
    one = identity(kv_dtype="int8", kv_scales=SCALES, rope=canonical_rope({"theta": 1e6}), epoch=2**62, label="é")
    two = Identity.from_canonical(json.loads(json.dumps(one.canonical())))
    assert two == one
    assert two.digest == one.digest
    assert two.label == one.label
    assert "settings" not in one.canonical(), (
        "spaces that were stored before there were settings keep their description"
    )
    with_settings = identity(settings=canonical_settings({"norm_eps": 1e-6}))
    assert Identity.from_canonical(with_settings.canonical()) == with_settings


def test_from_canonical_refuses_other_fields() -> None:
    with pytest.raises(IdentityError, match="not an identity"):
        Identity.from_canonical({**identity().canonical(), "sliding_window": 4096})
    with pytest.raises(IdentityError, match="not an identity"):
        Identity.from_canonical({"weights": WEIGHTS})


# -- rope ---------------------------------------------------------------------------------------------------------


def test_canonical_rope_is_sorted_and_compact() -> None:
    settings = {"theta": 500000.0, "scaling": {"type": "yarn", "factor": 8, "truncate": False, "mscale": None}}
    expected = '{"scaling":{"factor":8.0,"mscale":null,"truncate":false,"type":"yarn"},"theta":500000.0}'
    assert canonical_rope(settings) == expected
    assert canonical_rope({"short_factor": (1, 1.05)}) == '{"short_factor":[1.0,1.05]}'
    assert canonical_rope({}) == ""


def test_engines_that_read_a_number_as_another_type_still_share() -> None:
    assert canonical_rope({"theta": 10000, "x": 0}) == canonical_rope({"theta": 10000.0, "x": -0.0})
    assert canonical_rope({"flag": 1}) != canonical_rope({"flag": True})


ROPE_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=5), ROPE_VALUES, min_size=1, max_size=4))
def test_canonical_rope_keeps_every_value_and_no_order(settings: dict[str, Any]) -> None:
    text = canonical_rope(settings)
    assert json.loads(text) == settings
    assert canonical_rope(dict(reversed(settings.items()))) == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"theta": float("nan")}, "rope.theta is nan; expected a finite"),
        ({"scaling": {"factor": float("inf")}}, "rope.scaling.factor is inf"),
        ({"theta": 2**53 + 1}, "holds exactly"),
        ({"theta": 10**400}, "expected a finite"),
        ({1: 2.0}, "the key 1 is a int"),
        ({"theta": object()}, "rope.theta is a object"),
        ({"factors": [1.0, {2}]}, r"rope.factors\[1\] is a set"),
        ([1, 2], "expected a mapping"),
    ],
)
def test_rope_that_cannot_be_written_exactly_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        canonical_rope(settings)


def test_rope_with_a_cycle_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises(IdentityError, match="nested deeper"):
        canonical_rope(loop)


# -- scales -------------------------------------------------------------------------------------------------------


def test_scales_digest_depends_on_values_order_and_shape_only() -> None:
    values = [0.5, 0.25, 3.0, 1.0]
    assert digest_scales(values) == digest_scales(np.array(values, dtype=np.float32)) == digest_scales(tuple(values))
    assert digest_scales(np.array(values, dtype=">f8")) == digest_scales(values)
    assert digest_scales(np.array([values, values]).T) == digest_scales([[v, v] for v in values])
    different: list[Any] = [
        values,
        values[::-1],
        values[:3],
        [values],
        [[0.5, 0.25], [3.0, 1.0]],
        [0.5, 0.25, 3.0, 1.0000001],
    ]
    assert len({digest_scales(v) for v in different}) == len(different)
    encoded = b"headwater scales v1\0" + struct.pack("<QQd", 1, 1, 1.0)
    assert digest_scales([1.0]) == "sha256:" + hashlib.sha256(encoded).hexdigest()


@pytest.mark.parametrize("scales", [[], [0.0], [-1.0], [float("nan")], [float("inf")], ["x"], [[1.0], [1.0, 2.0]]])
def test_scales_that_scale_nothing_are_refused(scales: Any) -> None:
    with pytest.raises(IdentityError, match="KV scales must be"):
        digest_scales(scales)


# -- from a checkpoint --------------------------------------------------------------------------------------------


def test_from_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    one = Identity.from_checkpoint(folder, run_dtype="bf16", rope={"theta": 10000}, epoch=3, cache=False)
    assert (one.run_dtype, one.kv_dtype, one.epoch, one.label) == ("bfloat16", "bfloat16", 3, "my-model")
    assert one.rope == '{"theta":10000.0}'
    assert one != (two := Identity.from_checkpoint(folder, run_dtype="bf16", rope=one.rope, epoch=3, settings={"a": 1}))
    assert two.settings == '{"a":1.0}'
    assert one.weights.startswith("sha256:")
    assert one == Identity.from_checkpoint(folder, run_dtype="bf16", rope=one.rope, epoch=3, threads=1, cache=False)

    other = Identity.from_checkpoint(
        folder, run_dtype="bf16", kv_dtype="int8", kv_scales=SCALES, quantization="awq", sample=True, cache=False
    )
    assert (other.kv_dtype, other.kv_scales, other.quantization, other.rope) == ("int8", SCALES, "awq", "")
    assert other.weights.startswith("sampled-sha256:")


def test_from_checkpoint_checks_the_settings_before_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("read the weights although the settings are wrong")

    monkeypatch.setattr("headwater.kv.identity.digest_checkpoint", unexpected)
    with pytest.raises(IdentityError, match="without static scales"):
        Identity.from_checkpoint(tmp_path, run_dtype="bf16", kv_dtype="int8")


def test_str_is_for_people() -> None:
    text = str(identity(label="Llama", epoch=2))
    assert text.startswith("Llama (bfloat16, KV bfloat16, epoch 2) ")
    assert WEIGHTS in str(identity())


@pytest.mark.parametrize("variable", PRECISION_VARIABLES)
def test_float32_of_less_precision_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Some images let CUDA round products of float32 to TF32, and shared KV with servers that do not."""
    for name in PRECISION_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    save_tiny(tmp_path, "llama")
    checkpoint = open_checkpoint(tmp_path)

    def digest(dtype: str = "float32") -> bytes:
        return engine_identity(checkpoint, dtype, "auto").digest

    plain, half = digest(), digest("bfloat16")
    monkeypatch.setenv(variable, "0")
    assert digest() == plain
    monkeypatch.setenv(variable, "BF16" if "FPMATH" in variable else "1")
    assert digest() != plain
    assert digest("bfloat16") == half


def test_a_setting_of_torch_that_takes_precision_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama")
    checkpoint = open_checkpoint(tmp_path)
    plain = engine_identity(checkpoint, "float32", "auto").digest
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert engine_identity(checkpoint, "float32", "auto").digest != plain


def test_a_router_of_less_precision_has_another_name_in_every_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are chosen by products of float32, whatever the model's dtype: TF32 would choose others."""
    for name in PRECISION_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    save_tiny(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    checkpoint = open_checkpoint(tmp_path)
    plain = engine_identity(checkpoint, "bfloat16", "auto").digest
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert engine_identity(checkpoint, "bfloat16", "auto").digest != plain
