"""The bytes of tokens: joined, those of all tokens of an answer are the UTF-8 of its text, however it is streamed.

With the tokenizer of a real model (byte-level BPE), and with small ones made here the way SentencePiece does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from headwater.engine.params import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from headwater.errors import ModelError
from headwater.models.catalog import find_in_catalog
from headwater.models.token_bytes import BYTE_OF_CHAR, TokenBytes
from headwater.models.tokenizer import StreamDecoder, Tokenizer
from headwater.serve.output import TextOutput
from headwater.serve.replies import ChatReply, Choice, CompletionReply, Reply, Usage

END = 0
SPECIAL, ADDED = "<|end|>", "<tool>"
WORDS = ["▁", "▁▁", "▁Hello", "▁wor", "ld", "é", "漢", "a", "b", "▁a", "!"]
MANY_BYTES = ["grüße", "a€b", "👩‍👩‍👧 🇩🇪", "漢字かな", "e\u0301", " \u3000x", "\U0010ffff"]


def sentencepiece(decoder: Any) -> Tokenizer:
    """A tokenizer with byte fallback: all 256 bytes are tokens, and some words are."""
    from transformers import PreTrainedTokenizerFast

    vocab = {word: number for number, word in enumerate([SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *WORDS])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=None))
    backend.decoder = decoder
    backend.add_special_tokens([SPECIAL])
    backend.add_tokens([ADDED])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL)
    config: Any = SimpleNamespace(eos_token_ids=(END,))
    return Tokenizer(fast, config, "made here")


def llama() -> Tokenizer:
    """As Llama 2: the first space of a text goes."""
    strip = decoders.Strip(" ", 1, 0)
    return sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    )


def gguf() -> Tokenizer:
    """As `transformers` makes them from GGUF files of Llama: fused first, no space lost."""
    return sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]))


def metaspace() -> Tokenizer:
    """Every mark of the first token goes."""
    return sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def smollm2() -> Tokenizer:
    from headwater.models.checkpoint import open_checkpoint

    try:
        find_in_catalog("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    return open_checkpoint("smollm2").load_tokenizer()


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "smollm2": smollm2,
    "llama": llama,
    "gguf": gguf,
    "metaspace": metaspace,
}
SMOLLM2 = pytest.param("smollm2", marks=pytest.mark.slow)
NAMES = [SMOLLM2, "llama", "gguf", "metaspace"]
_made: dict[str, Tokenizer] = {}


def tokenizer_of(name: str) -> Tokenizer:
    if name not in _made:
        _made[name] = MAKERS[name]()
    return _made[name]


def stream(
    tokenizer: Tokenizer, ids: list[int], kind: type[Reply] = ChatReply, stop: tuple[str, ...] = ()
) -> tuple[str, list[Any]]:
    """The text of an answer of these tokens and the logprobs of its chunks, as a server streams them. (The whole answer
    must have the same.)"""
    params = SamplingParams(logprobs=2, ignore_eos=True, stop=stop)
    output = TextOutput(StreamDecoder(tokenizer), params, [END])
    replies = [kind("m", tokenizer, with_logprobs=True, include_usage=False) for _ in range(2)]
    text, chunks, whole = "", [], Choice()
    for number, token_id in enumerate(ids):
        top = [(token_id, -0.5), (END, -1.0)]
        reason = FinishReason.LENGTH if number == len(ids) - 1 else None
        delta = output.feed(RequestOutput("r", [token_id], [TokenLogprobs(token_id, -0.5, top)], reason, 1, 0))
        chunks.append(replies[0].chunk(0, delta)["choices"][0]["logprobs"])
        replies[1].add(0, whole, delta)
        text += delta.text
        if delta.finish_reason:
            break
    (choice,) = json.loads(b"".join(replies[1].whole([whole], Usage(1, 0, 1))))["choices"]
    assert text == (choice["message"]["content"] if kind is ChatReply else choice["text"])
    assert merged(chunks) == choice["logprobs"]
    return text, chunks


def merged(chunks: list[Any]) -> Any:
    names = [name for name, value in chunks[0].items() if value is not None]
    return chunks[0] | {name: [item for chunk in chunks for item in chunk[name]] for name in names}


def joined(chunks: list[Any]) -> bytes:
    return b"".join(bytes(entry["bytes"] or ()) for entry in merged(chunks)["content"])


# No U+FFFD: a stream takes it for the beginning of a character.
chars = st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}")
parts = st.sampled_from([*MANY_BYTES, " ", "a", "\n", "\0"])
texts = st.text(chars, max_size=20) | st.lists(parts, max_size=8).map("".join)


@pytest.mark.parametrize("name", NAMES)
def test_the_decoder_is_known(name: str) -> None:
    assert TokenBytes(tokenizer_of(name).backend.backend_tokenizer).is_known


@pytest.mark.parametrize("name", NAMES)
@given(text=texts)
@example("".join(MANY_BYTES))
@example("  a")
@settings(deadline=None)
def test_the_bytes_of_all_tokens_are_the_utf8_of_the_text(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    if not (ids := tokenizer.encode(text, add_special=False)):
        return
    said, chunks = stream(tokenizer, ids)
    assert said == tokenizer.decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in said:  # SmolLM2 has no tokens for a few bytes
        assert joined(chunks) == said.encode()


@pytest.mark.parametrize("name", [SMOLLM2, "gguf"])
@pytest.mark.parametrize("text", [*MANY_BYTES, "a\N{REPLACEMENT CHARACTER}b"])
def test_texts_of_many_bytes_come_back(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    said, chunks = stream(tokenizer, tokenizer.encode(text, add_special=False))
    assert (said, joined(chunks)) == (text, text.encode())


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(deadline=None)
def test_any_tokens_at_all(name: str, data: st.DataObject) -> None:
    """Bytes that are no text are shown as they are; the text has U+FFFD in their place."""
    tokenizer = tokenizer_of(name)
    ids = data.draw(st.lists(st.integers(0, min(tokenizer.vocab_size + 1, 500)), min_size=1, max_size=30))
    said, chunks = stream(tokenizer, ids)
    data_bytes = joined(chunks)
    try:
        assert data_bytes.decode() == said
    except UnicodeDecodeError:
        assert "\N{REPLACEMENT CHARACTER}" in said
        if name == "smollm2":
            assert data_bytes.decode(errors="replace") == said
    assert len(merged(chunks)["content"]) == len(ids)


@pytest.mark.slow
def test_parts_of_a_character_have_bytes_of_their_own() -> None:
    tokenizer = tokenizer_of("smollm2")
    ids = tokenizer.encode("字🇩🇪", add_special=False)
    _, chunks = stream(tokenizer, ids)
    entries = merged(chunks)["content"]
    assert any(bytes(entry["bytes"]).decode(errors="ignore") == "" for entry in entries), "no character was cut"
    for entry in entries:
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
        assert bytes(entry["bytes"]) in "字🇩🇪".encode()
        if entry["token"].startswith("\\x"):
            assert entry["token"] == "".join(f"\\x{byte:02x}" for byte in entry["bytes"])


def test_completions_name_parts_of_characters_by_their_bytes_and_their_characters_place() -> None:
    tokenizer = tokenizer_of("gguf")
    ids = tokenizer.encode("a€b", add_special=False)
    text, chunks = stream(tokenizer, ids, CompletionReply)
    logprobs = merged(chunks)
    assert text == "a€b"
    assert logprobs["tokens"] == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]
    assert [sorted(best) for best in logprobs["top_logprobs"]] == [
        sorted([token, SPECIAL]) for token in logprobs["tokens"]
    ]


def test_special_tokens_have_a_name_and_no_bytes() -> None:
    tokenizer = tokenizer_of("llama")
    hello = tokenizer.backend.convert_tokens_to_ids("▁Hello")
    text, chunks = stream(tokenizer, [END, hello, END, hello])
    entries = merged(chunks)["content"]
    assert text == "Hello Hello"
    assert [(entry["token"], entry["bytes"]) for entry in entries] == [
        (SPECIAL, None), ("Hello", list(b"Hello")), (SPECIAL, None), (" Hello", list(b" Hello")),
    ]  # fmt: skip
    added = tokenizer.backend.convert_tokens_to_ids(ADDED)
    assert tokenizer.token_bytes(added) == ADDED.encode()
    assert tokenizer.token_bytes(100_000) is None


@pytest.mark.parametrize("stop", ["€", "€b", "b"])
def test_at_a_stop_string_no_part_of_a_character_is_left_over(stop: str) -> None:
    tokenizer = tokenizer_of("gguf")
    ids = tokenizer.encode("a€b", add_special=False)
    text, chunks = stream(tokenizer, ids, stop=(stop,))
    assert text == "a€b".partition(stop)[0]
    assert joined(chunks) == text.encode()


def test_a_decoder_that_nobody_knows_gives_what_the_text_has() -> None:
    tokenizer = sentencepiece(decoders.WordPiece())
    hello = tokenizer.backend.convert_tokens_to_ids("▁Hello")
    assert tokenizer.token_bytes(hello) == "▁Hello".encode()
    assert tokenizer.token_bytes(END) is None


def test_the_table_is_gpt2s() -> None:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert BYTE_OF_CHAR.keys() == set(split.alphabet())
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    for code in (*range(0x800), 0x1000, 0x8000, 0xFFFF, 0x10000, 0x80000, 0x10FFFF, *range(0x800, 0xD800, 0x1000)):
        ((piece, _),) = split.pre_tokenize_str(chr(code))
        assert bytes(BYTE_OF_CHAR[char] for char in piece) == chr(code).encode()
