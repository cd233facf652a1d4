"""Which weights made a piece of KV, and how they were run: what two servers must agree on before they share.

An identity is compared by its digest, which is part of every chunk key, so servers that disagree in any field
simply never meet. Names are labels, not identities: the same name can stand for other weights tomorrow. Shapes
are not here (see `spec`), and neither is the reading of weight files (see `checkpoint`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headwater.errors import IdentityError
from headwater.kv.checkpoint import Progress, checkpoint_label, digest_checkpoint
from headwater.kv.files import FileState
from headwater.kv.spec import DTYPE_BYTES

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

MAX_FIELD_CHARS = 4096
MAX_ROPE_DEPTH = 8

DTYPE_ALIASES: dict[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
"""Other spellings of the names in `DTYPE_BYTES`. A bare "fp8" is missing on purpose: it says not which one."""

QUANTISED_KV = frozenset({"fp8_e4m3", "fp8_e5m2", "int8"})

_WEIGHTS = re.compile(r"(?:sampled-)?sha256:[0-9a-f]{64}")
_SCALES = re.compile(r"none|sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The weights, and everything about running them that changes the KV they produce.

    Construction costs microseconds and raises IdentityError for anything that does not name the KV with certainty.
    """

    weights: str
    """From `digest_checkpoint`: "sha256:…" (every byte) or "sampled-sha256:…" (opt-in)."""
    run_dtype: str
    """What the weights are *run* in, whatever they are stored in."""
    quantization: str = "none"
    kv_dtype: str
    kv_scales: str = "none"
    """From `digest_scales`. Quantised KV needs it: scales that are chosen while running differ between servers."""
    rope: str = ""
    """From `canonical_rope`: the settings as run, with every override, not as the checkpoint's config has them."""
    settings: str = ""
    """From `canonical_settings`: what else of the model's config changes activations, such as the norms' epsilon."""
    epoch: int = 0
    """Raised by whoever changes weights in place (reinforcement learning), once per change."""
    label: str = field(default="", compare=False)
    """A name for people. Not part of the identity."""

    def __post_init__(self) -> None:
        for name in ("weights", "run_dtype", "quantization", "kv_dtype", "kv_scales", "rope", "settings", "label"):
            _check_text(name, getattr(self, name))
        for name in ("run_dtype", "kv_dtype"):
            object.__setattr__(self, name, _normal_dtype(name, getattr(self, name)))
        if not _WEIGHTS.fullmatch(self.weights):
            raise IdentityError(
                f"weights is {self.weights!r}; expected 'sha256:' or 'sampled-sha256:' and 64 hex digits, all lower "
                "case. A model's name is not enough: use digest_checkpoint(path)"
            )
        if not self.quantization:
            raise IdentityError("quantization is empty; use 'none' for weights that run unquantised")
        self._check_scales()
        if type(self.epoch) is not int or not 0 <= self.epoch < 1 << 63:
            raise IdentityError(f"epoch is {self.epoch!r}; expected an integer from 0 to 2**63 - 1")

    def _check_scales(self) -> None:
        if not _SCALES.fullmatch(self.kv_scales):
            raise IdentityError(
                f"kv_scales is {self.kv_scales!r}; expected 'none' or what digest_scales(scales) returns"
            )
        if self.kv_dtype in QUANTISED_KV and self.kv_scales == "none":
            raise IdentityError(
                f"kv_dtype is {self.kv_dtype} without static scales, so two servers would read the same bytes as "
                "different values. Pass kv_scales=digest_scales(the scales, 1.0 where none are applied), or do not "
                "quantise the KV"
            )
        if self.kv_dtype not in QUANTISED_KV and self.kv_scales != "none":
            raise IdentityError(
                f"kv_scales is given but kv_dtype {self.kv_dtype} applies none; leave kv_scales at 'none'"
            )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        files: Collection[str] | None = None,
        before: Sequence[FileState] | None = None,
        run_dtype: str,
        kv_dtype: str | None = None,
        quantization: str = "none",
        kv_scales: str = "none",
        rope: Mapping[str, Any] | str | None = None,
        settings: Mapping[str, Any] | str | None = None,
        epoch: int = 0,
        sample: bool = False,
        progress: Progress | None = None,
        threads: int | None = None,
        cache: bool = True,
    ) -> Identity:
        """The identity of the checkpoint at `path`, labelled with its name.

        `files`, `before`, and cost and failures of the reading are those of `digest_checkpoint`. The other fields are
        checked first, so that a wrong one is not found out after minutes of reading.
        """
        known: dict[str, Any] = {
            "run_dtype": run_dtype,
            "kv_dtype": run_dtype if kv_dtype is None else kv_dtype,
            "quantization": quantization,
            "kv_scales": kv_scales,
            "rope": canonical_rope(rope) if isinstance(rope, Mapping) else rope or "",
            "settings": canonical_settings(settings) if isinstance(settings, Mapping) else settings or "",
            "epoch": epoch,
            "label": checkpoint_label(path),
        }
        cls(weights="sha256:" + "0" * 64, **known)
        weights = digest_checkpoint(
            path, files=files, before=before, sample=sample, threads=threads, progress=progress, cache=cache
        )
        return cls(weights=weights, **known)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over every field but the label, each with its length before it; part of every chunk key.

        Settings come last, and only where there are any: identities that have none are what they were before."""
        texts = [
            self.weights,
            self.run_dtype,
            self.quantization,
            self.kv_dtype,
            self.kv_scales,
            self.rope,
            str(self.epoch),
        ] + [self.settings] * bool(self.settings)
        sha = hashlib.sha256(b"headwater identity v1\0")
        for text in texts:
            data = text.encode()
            sha.update(struct.pack("<I", len(data)) + data)
        return sha.digest()

    def canonical(self) -> dict[str, Any]:
        """The identity as plain JSON data, label included; `from_canonical` reads it back. Settings are left out where
        there are none, as in the digest."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings" or self.settings}

    @classmethod
    def from_canonical(cls, data: Mapping[str, Any]) -> Identity:
        """Read what `canonical` wrote. Raises IdentityError on anything else, a field that is not known included:
        ignoring one could make two different identities equal."""
        try:
            return cls(**data)
        except TypeError as error:
            raise IdentityError(f"not an identity: {error}") from error

    def __str__(self) -> str:
        name = self.label or self.weights
        epoch = f", epoch {self.epoch}" if self.epoch else ""
        return f"{name} ({self.run_dtype}, KV {self.kv_dtype}{epoch}) {self.digest.hex()[:12]}"


def canonical_rope(settings: Mapping[str, Any]) -> str:
    """Rope settings as sorted, compact JSON: equal settings give equal text. No settings at all give "".

    Every number is written as a float, since one engine reads `"rope_theta": 10000` as an integer and the next one
    converts it. Raises IdentityError for NaN, infinity, keys that are not text, and values that JSON does not have.
    """
    return _canonical(settings, "rope")


def canonical_settings(settings: Mapping[str, Any]) -> str:
    """Other settings of a model in the same form as `canonical_rope`."""
    return _canonical(settings, "model")


def _canonical(settings: Mapping[str, Any], what: str) -> str:
    if not isinstance(settings, Mapping):
        raise IdentityError(f"{what} settings are a {type(settings).__name__}; expected a mapping of names to values")
    if not settings:
        return ""
    return json.dumps(_plain(settings, what), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_scales(scales: ArrayLike) -> str:
    """Digest of static KV scales, in the order and shape given: say [layer][k, v], or [layer][k, v][head].

    Values are widened to float64, so it does not matter in which float type they come. Raises IdentityError for
    none at all and for a scale that is not a positive finite number.
    """
    import numpy as np

    try:
        values = np.asarray(scales, dtype="<f8")
    except (TypeError, ValueError) as error:
        raise IdentityError(f"KV scales must be an array of floats on the CPU: {error}") from error
    if not values.size or not (np.isfinite(values).all() and (values > 0).all()):
        raise IdentityError("KV scales must be one or more positive finite numbers; 1.0 means not scaled")
    shape = struct.pack(f"<{1 + values.ndim}Q", values.ndim, *values.shape)
    return "sha256:" + hashlib.sha256(b"headwater scales v1\0" + shape + values.tobytes()).hexdigest()


def _normal_dtype(name: str, value: str) -> str:
    short = value.strip().lower().removeprefix("torch.")
    dtype = DTYPE_ALIASES.get(short, short)
    if dtype not in DTYPE_BYTES:
        raise IdentityError(f"{name} is {value!r}; known are {', '.join([*DTYPE_BYTES, *DTYPE_ALIASES])}")
    return dtype


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise IdentityError(f"{name} is a {type(value).__name__} ({value!r:.80}); expected text")
    if len(value) > MAX_FIELD_CHARS:
        raise IdentityError(f"{name} has {len(value)} characters; at most {MAX_FIELD_CHARS} are allowed: use a digest")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise IdentityError(f"{name} is not valid Unicode text: {error}") from error


def _plain(value: object, where: str, depth: int = 0) -> object:
    """JSON data equal to `value`; `where` is its path, for the message. The depth bound also stops cycles."""
    if depth > MAX_ROPE_DEPTH:
        raise IdentityError(f"{where}: nested deeper than {MAX_ROPE_DEPTH}; expected a few plain settings")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return _plain_number(value, where)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise IdentityError(f"{where}: the key {key!r:.80} is a {type(key).__name__}; expected text")
        return {str(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    raise IdentityError(f"{where} is a {type(value).__name__}; expected a number, text, a list or a mapping")


def _plain_number(value: int | float, where: str) -> float:
    try:
        number = float(value) + 0.0  # + 0.0 makes the two zeros one
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number != value:
        raise IdentityError(f"{where} is {value!r:.80}; expected a finite number that a float holds exactly")
    return number
