"""`headwater bench packing` runs and reports, and counts what it says it counts; how fast is not a test's business."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from typer.testing import CliRunner  # noqa: E402

from headwater.bench import packing, packing_codes, packing_rivals  # noqa: E402
from headwater.bench.measure import next_of  # noqa: E402
from headwater.bench.packing_codes import count_codes, pack_sample  # noqa: E402
from headwater.bench.packing_kv import FAMILIES, Sample, random_kv  # noqa: E402
from headwater.cli.app import app  # noqa: E402
from headwater.errors import EngineError  # noqa: E402
from headwater.kv.packing import unpack_tiles  # noqa: E402

from support import gqa  # noqa: E402

TOKENS = 256


def sample_of(below: np.ndarray, *, chunks: int = 1) -> Sample:
    """Tiles of one head of 4: powers of two so far below the largest one of their channel, [tile][token]."""
    values = np.exp2(3.0 - below).astype(np.float32)
    tiles = np.repeat(values[:, :, None], 8, axis=2)  # four channels of k, and four of v
    planes = np.concatenate([tiles[..., :4].reshape(len(below), -1), tiles[..., 4:].reshape(len(below), -1)], axis=1)
    return Sample(gqa(layers=len(below) // chunks, heads=1, dim=4, dtype="float32"), planes)


def test_codes_are_counted_over_values_and_over_tiles() -> None:
    """Two tiles: half of the first lies 1 below; of the second one token in 64 lies 7 below and one in 256 lies 20."""
    below = np.zeros((2, TOKENS))
    below[0, ::2] = 1
    below[1, 1::64] = 7
    below[1, 2] = 20
    found = count_codes(sample_of(below))
    assert found["three_bit_escapes"] == pytest.approx((0 + 5 / TOKENS) / 2)
    assert found["three_bit_escapes_worst"] == pytest.approx(5 / TOKENS)
    assert found["three_bit_share"] == pytest.approx((11 + 8 / TOKENS + 32 * 5 / TOKENS) / 16)
    assert found["escapes_k"] == found["escapes_v"] == pytest.approx(1 / TOKENS / 2)
    shares = np.array([251, 4, 1]) / TOKENS
    entropy = (1 - (shares * np.log2(shares)).sum()) / 2
    assert found["exponent_bits"] == pytest.approx(entropy)
    assert found["entropy_share"] == pytest.approx((8 + entropy + 8 / TOKENS) / 16)
    assert found["sign_mantissa_bits"] == 0
    assert found["float16_share"] == pytest.approx(15 / 16, abs=0.01)
    assert found["float16_entropy_share"] == pytest.approx((11 + entropy) / 16, abs=0.01)


def test_a_chunk_with_one_tile_that_does_not_fit_is_counted_raw() -> None:
    below = np.zeros((6, TOKENS))
    below[3, ::2] = 20
    packed, found = pack_sample(sample_of(below, chunks=3))
    share = packed.packed.shape[1] / packed.raw.shape[1]
    assert (found["tiles"], found["misfit_tiles"]) == (6, 1)
    assert found["packed_share"] == pytest.approx((2 * share + 1) / 3)
    assert found["escapes"] == pytest.approx(1 / 12)
    assert found["escapes_worst"] == pytest.approx(1 / 2)


def test_bytes_that_come_back_as_others_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(spec: object, num_tokens: int, packed: np.ndarray, out: np.ndarray) -> np.ndarray:
        readable = unpack_tiles(spec, num_tokens, packed, out)  # type: ignore[arg-type]
        out[-1, -1] ^= 1
        return readable

    monkeypatch.setattr(packing_codes, "unpack_tiles", wrong)
    with pytest.raises(EngineError, match="came back as others"):
        pack_sample(sample_of(np.zeros((2, TOKENS))))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_random_weights_of_every_family_give_kv_with_its_planes(family: str) -> None:
    sample = random_kv(family, TOKENS)
    widths = {plane.name: plane.width for plane in sample.spec.planes}
    assert widths == ({"latent": 512, "rope": 64} if family == "deepseek_v2" else {"k": 128, "v": 128})
    assert len(sample.exact) == sample.spec.num_tiles
    assert np.isfinite(sample.exact).all()
    assert (sample.exact.std(axis=1) > 0.01).all()
    _, found = pack_sample(sample)
    assert found["packed_share"] < 0.76


def test_rivals_are_named_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(packing_rivals, "import_module", missing)
    found = packing_rivals.bench_rivals(np.zeros((8, 65536), np.uint8), 1)
    assert found["zipnn_reason"] == "not measured: No module named 'zipnn'"
    assert found["zipnn_share"] is None
    assert 0 < found["zlib_share"] < 0.01
    assert found["zlib_gbps_cpu"] > 0 < found["unzlib_gbps_cpu"]


@pytest.mark.parametrize("flipped", [0, 1])
def test_a_rival_is_measured_and_must_give_the_same_bytes_back(monkeypatch: pytest.MonkeyPatch, flipped: int) -> None:
    class Half:
        """Of every byte that comes twice it keeps one."""

        def __init__(self, **_: object) -> None:
            pass

        def compress(self, data: bytearray) -> bytearray:
            return data[::2]

        def decompress(self, data: bytearray) -> bytes:
            back = np.repeat(np.frombuffer(data, np.uint8), 2)
            back[-1] ^= flipped
            return back.tobytes()

    monkeypatch.setattr(packing_rivals, "import_module", lambda name: SimpleNamespace(ZipNN=Half))
    monkeypatch.setattr(packing_rivals, "version", lambda name: "9")
    tiles = np.repeat(np.random.default_rng(0).integers(0, 256, (9, 32768), np.uint8), 2, axis=1)
    if flipped:
        with pytest.raises(EngineError, match="zipnn gave other bytes back"):
            packing_rivals.bench_rivals(tiles, 1)
        return
    found = packing_rivals.bench_rivals(tiles, 1)
    assert (found["zipnn_share"], found["zipnn_version"], found["zipnn_reason"]) == (0.5, "9", None)


def test_repetitions_take_the_next_work_and_begin_again() -> None:
    run = next_of([lambda: 1.0, lambda: 2.0])
    assert [run() for _ in range(5)] == [1.0, 2.0, 1.0, 2.0, 1.0]


@pytest.mark.slow
def test_a_quick_run_measures_everything_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    result = CliRunner().invoke(app, ["bench", "packing", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    if report["model_reason"] is not None:
        pytest.skip(f"no model: {report['model_reason']}")
    assert all(report[name] is not None for name in (*packing.SIZE_FIGURES, *packing.SPEED_FIGURES)), report
    assert report["tokens"] == 3 * packing.QUICK.tokens_each
    assert 0.75 < report["packed_share"] < 0.76 < 15 / 16 < report["float16_share"]
    assert 0 < report["escapes"] < report["three_bit_escapes"] < report["three_bit_escapes_worst"] < 0.1
    assert report["entropy_share"] < report["packed_share"] < report["three_bit_share"]
    assert report["misfit_tiles"] == report["misfit_tiles_qwen3"] == 0
    assert {bar["verdict"] for bar in report["bars"].values()} == {"not judged: too small a run"}
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("headwater-bench")]


@pytest.mark.slow
def test_without_the_model_the_rest_is_measured_and_the_reason_given(tmp_path: object) -> None:
    bench = replace(packing.QUICK, model=str(tmp_path))
    report = packing.run(bench)
    assert report["model_reason"]
    assert report["packed_share"] is None
    assert report["packed_share_qwen3"] < 0.76
    table = CliRunner().invoke(app, ["bench", "packing", "--quick", "--model", str(tmp_path)])
    assert table.exit_code == 0, table.output
    assert "KV of a model" in table.stdout
