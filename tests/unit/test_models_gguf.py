"""GGUF files: read to the same logits as the checkpoint they came from, converted back to one, refused when damaged."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.cli.convert import convert
from headwater.errors import ModelError
from headwater.models.catalog import find_in_catalog
from headwater.models.checkpoint import open_checkpoint
from headwater.models.checkpoint.gguf import _LAYER_PARTS, _NAMES
from headwater.models.checkpoint.gguf_file import read_gguf_header
from headwater.models.convert import convert_gguf
from headwater.models.rope import RopeConfig
from headwater.models.tokenizer import StreamDecoder

from models_support import load_model, run_tokens, save_tiny

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
TEMPLATE = "{% for m in messages %}{{ '<s>' + m['content'] }}{% endfor %}"


def write_gguf(path: Path, model: Any, kind: str = "F32", factors: Any = None, **metadata: Any) -> Path:
    """Write a `transformers` model as llama.cpp's converter does, with a tokenizer of single bytes."""
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_value_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in metadata.items():
        writer.add_key_value(name.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    _write_tokenizer(writer, config.vocab_size)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    back = {hf: name for name, hf in _NAMES.items()} | {hf: name for name, hf in _LAYER_PARTS.items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name in back:
            new = back[name]
        else:
            _, _, layer, part = name.split(".", 3)
            stem, _, ending = part.rpartition(".")
            new = f"blk.{layer}.{back[stem]}.{ending}"
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        if family == "llama" and (count := heads.get(new.split(".")[-2])):
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        quantised = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        writer.add_tensor(new, gguf.quants.quantize(tensor.contiguous().numpy(), quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: Any, vocab_size: int) -> None:
    shown = [chr(i) if 33 <= i < 127 else chr(256 + i) for i in range(vocab_size - 2)]
    shown[0] = "yz"  # the readers of tokenizers want at least one merge
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*shown, "<s>", "</s>"])
    writer.add_token_types([1] * (vocab_size - 2) + [3, 3])
    writer.add_token_merges(["y z"])
    writer.add_bos_token_id(vocab_size - 2)
    writer.add_eos_token_id(vocab_size - 1)
    writer.add_chat_template(TEMPLATE)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_is_the_model_it_came_from(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    model = save_tiny(tmp_path / "hf", family, **changes)
    path = write_gguf(tmp_path / "m.gguf", model)
    config = open_checkpoint(path).config
    assert (config.eos_token_ids, config.bos_token_id, config.stored_dtype) == ((130,), 129, "F32")
    expected = run_tokens(load_model(tmp_path / "hf"), TOKENS)
    torch.testing.assert_close(run_tokens(load_model(path), TOKENS), expected, rtol=0, atol=1e-5)

    made = convert_gguf(path, tmp_path / "converted")
    assert made.num_files == 1
    torch.testing.assert_close(run_tokens(load_model(tmp_path / "converted"), TOKENS), expected, rtol=0, atol=1e-5)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    with torch.no_grad():
        theirs = again(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_quantised_types_are_dequantised(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
    model = save_tiny(tmp_path / "hf", "llama", **sizes)
    path = write_gguf(tmp_path / "m.gguf", model, kind)
    assert open_checkpoint(path).config.stored_dtype == kind
    found = load_model(path)
    held = found.layers[1].mlp.down.weight
    original = model.model.layers[1].mlp.down_proj.weight
    assert 0 < (held - original).abs().max() < 0.2
    quantised = gguf.quants.quantize(original.detach().numpy(), gguf.GGMLQuantizationType[kind])
    exact = torch.from_numpy(gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType[kind]).copy())
    assert torch.equal(held, exact)


def test_small_blocks_do_not_change_the_reordering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwater.models.checkpoint import gguf as reader

    path = write_gguf(tmp_path / "m.gguf", save_tiny(tmp_path / "hf", "llama", attention_bias=True))
    handle = dict(open_checkpoint(path).tensors())["model.layers.0.self_attn.q_proj.weight"]
    whole = torch.empty(48, 48)
    handle.read_into(whole, 0, range(48))
    monkeypatch.setattr(reader, "BLOCK_BYTES", 1)
    for part in (range(48), range(5, 43), range(8, 16)):
        found = torch.empty(len(part), 48)
        handle.read_into(found, 0, part)
        assert torch.equal(found, whole[part.start : part.stop])


def test_rope_factors_are_read_and_written_back_as_llama3(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = llama3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    model = save_tiny(tmp_path / "hf", "llama", rope_parameters=rope)
    plain = RopeConfig(dim=8, theta=500000.0).inverse_frequencies()
    factors = plain / open_checkpoint(tmp_path / "hf").config.rope.inverse_frequencies()
    path = write_gguf(tmp_path / "m.gguf", model, factors=factors)
    convert_gguf(path, tmp_path / "converted")
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert config["rope_scaling"] == llama3 | {"original_max_position_embeddings": 8192}
    expected = run_tokens(load_model(tmp_path / "hf"), TOKENS)
    torch.testing.assert_close(run_tokens(load_model(path), TOKENS), expected, rtol=0, atol=1e-5)
    odd = write_gguf(tmp_path / "odd.gguf", model, factors=torch.tensor([1.0, 2.0, 1.0, 2.0]))
    with pytest.raises(ModelError, match="rotary factors"):
        convert_gguf(odd, tmp_path / "odd")
    wrong = write_gguf(tmp_path / "wrong.gguf", model, factors=torch.tensor([1.0, 0.0, 1.0, 2.0]))
    with pytest.raises(ModelError, match="divide no frequency"):
        open_checkpoint(wrong)


def test_conversion_in_shards_and_dtypes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", save_tiny(tmp_path / "hf", "llama"))
    seen: list[tuple[int, int]] = []
    advance = lambda done, total: seen.append((done, total))  # noqa: E731
    made = convert_gguf(path, tmp_path / "out", dtype="bfloat16", max_shard_bytes=20_000, progress=advance)
    assert made.num_files > 2
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) == made.num_files
    assert seen[-1] == (made.num_bytes, made.num_bytes)
    assert open_checkpoint(tmp_path / "out").config.stored_dtype == "bfloat16"
    model = load_model(tmp_path / "out")
    assert torch.equal(model.norm.weight, load_model(path).norm.weight.bfloat16().float())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        theirs = again(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(run_tokens(model, TOKENS), theirs, rtol=0, atol=1e-4)
    tokenizer = open_checkpoint(tmp_path / "out").load_tokenizer()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == [129, *b"ab"]
    assert tokenizer.eos_token_ids == (130,)


def test_nothing_is_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", save_tiny(tmp_path / "hf", "llama"))
    out = tmp_path / "out"
    convert_gguf(path, out, max_shard_bytes=20_000)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="--force"):
        convert(str(path), out)
    convert(str(path), out, force=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["files"] == 1
    assert (out / "notes.txt").read_text() == "mine"
    assert [file.name for file in out.glob("model*")] == ["model.safetensors"]
    load_model(out)
    (out / "config.json").unlink()
    with pytest.raises(ModelError, match="other things"):
        convert_gguf(path, out, force=True)
    with pytest.raises(ModelError, match="dtype is 'int8'"):
        convert_gguf(path, tmp_path / "x", dtype="int8")


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", save_tiny(tmp_path / "hf", "llama"))
    before = sorted(tmp_path.iterdir())

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(path, tmp_path / "out", progress=stop)
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    model = save_tiny(folder / "hf", "llama", num_hidden_layers=1)
    return write_gguf(folder / "m.gguf", model).read_bytes()


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_damage_is_an_error_and_not_a_crash(
    tmp_path_factory: pytest.TempPathFactory, small_file: bytes, data: st.DataObject
) -> None:
    """Whatever bytes of the header are changed or lost: a ModelError, or a file that happens to be well-formed."""
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    damaged = bytearray(small_file[: data.draw(st.integers(0, len(small_file)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            at = data.draw(st.integers(0, min(len(damaged) - 1, 4000)))
            damaged[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    path.write_bytes(bytes(damaged))
    try:
        handles = dict(open_checkpoint(path).tensors())
    except ModelError:
        return
    assert len(damaged) > 1000
    assert handles


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda raw: b"GGML" + raw[4:], "not a GGUF file"),
        (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "little-endian"),
        (lambda raw: raw[:8] + struct.pack("<Q", 1 << 40) + raw[16:], "damaged or truncated"),
        (lambda raw: raw[:-1], "is truncated: .* ends at byte"),
        (lambda raw: raw[:100], "damaged or truncated"),
        (
            lambda raw: raw.replace(b"ggml.eos_token_id", b"ggml.bos_token_id"),
            "names 'tokenizer.ggml.bos_token_id' twice",
        ),
        (lambda raw: raw.replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"), "damaged or truncated"),
        (lambda raw: b"", "not a GGUF file"),
    ],
)
def test_damage_is_named(tmp_path: Path, small_file: bytes, change: Any, what: str) -> None:
    (tmp_path / "m.gguf").write_bytes(change(small_file))
    with pytest.raises(ModelError, match=what):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_directory_with_gguf_files(tmp_path: Path, small_file: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(small_file)
    assert open_checkpoint(tmp_path).path.name == "a.gguf"
    assert open_checkpoint(tmp_path, "dummy").label == "a.gguf (random weights)"
    os.link(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ModelError, match="2 GGUF files"):
        open_checkpoint(tmp_path)


def _smollm2() -> Path:
    try:
        found = find_in_catalog("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    assert found is not None
    return found


def test_the_header_of_a_real_file() -> None:
    header = read_gguf_header(_smollm2())
    assert header.metadata["llama.block_count"] == 30
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert header.tensors["blk.0.ffn_down.weight"].shape == (576, 1536)


@pytest.mark.slow
def test_the_real_tokenizer_streams() -> None:
    tokenizer = open_checkpoint("smollm2" if _smollm2() else "").load_tokenizer()
    text = "Grüße 😀👩‍👩‍👧 \n\n  日本語 naïve <|im_end|> tab\t."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        ids = torch.randint(0, 49152, (40,), generator=generator).tolist() + tokenizer.encode(text)
        decoder = StreamDecoder(tokenizer)
        assert "".join(decoder.push([i]) for i in ids) + decoder.finish() == tokenizer.decode(ids)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(chat, skip_special=False).endswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_the_real_model_converted_and_in_transformers(tmp_path: Path) -> None:
    convert_gguf(_smollm2(), tmp_path / "out")
    ids = list(range(100, 132))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run_tokens(load_model("smollm2"), ids, 9), expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(run_tokens(load_model(tmp_path / "out"), ids), expected, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_the_real_model_as_transformers_reads_it() -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF weights only with accelerate")
    path = _smollm2()
    ids = list(range(100, 116))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run_tokens(load_model(path), ids), expected, rtol=0, atol=2e-4)
