"""The bound on the bytes of a token: no text that fits is ever refused by it, whatever the tokenizer does to text."""

from __future__ import annotations

import json
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headwater.models.text_bound import UNICODE_SHRINK, text_bound

CORPUS = [
    "the quick brown fox " * 20,
    "#" * 80,
    " " * 64,
    "naïve café 한국어 각각각 ÅΩ 12345 𝟎𝟏",
    "\n\n\n    return x\n",
] * 5


def byte_level(normalizer: Any = None, alphabet: list[str] | None = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=letters, special_tokens=["<|end|>"], show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def fallback() -> Tokenizer:
    """As Llama 2's: `▁` for spaces, and a token for every byte that has no other."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"▁": 257, "a": 258, "▁a": 259}
    made = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


BOUNDED = {
    "bytes": byte_level(),
    "nfc": byte_level(normalizers.NFC()),
    "nfkc": byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "silent": byte_level(alphabet=[c for c in pre_tokenizers.ByteLevel.alphabet() if c not in "ĀāĂăĄ"]),
    "fallback": fallback(),
}
pieces = st.sampled_from(
    ["a", " ", "#", "\x00\x01\x02", "각", "각", "\u212a", "𝟎", "한", "<|end|>", "é", "\n", "the quick ", "\u0130", "ｶﾞ"]
)
texts = st.lists(st.tuples(pieces, st.integers(1, 300)), max_size=6).map(lambda runs: "".join(p * n for p, n in runs))


@pytest.mark.parametrize("name", BOUNDED)
@given(text=texts | st.text())
@example(text="\x00\x01\x02" * 5000)
@example(text="#" * 8000)
@example(text=" " * 8000)
@example(text="𝟎" * 2000)
@example(text="각" * 2000)
def test_no_text_has_more_bytes_than_its_tokens_may_stand_for(name: str, text: str) -> None:
    tokenizer = BOUNDED[name]
    bound = text_bound(json.loads(tokenizer.to_str()))
    assert bound is not None
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert bound.num_bytes(text.encode()) <= num_tokens * bound.max_bytes_per_token


def test_the_bound_is_that_of_the_longest_token() -> None:
    found = {name: text_bound(json.loads(tokenizer.to_str())) for name, tokenizer in BOUNDED.items()}
    longest = max(len(token) for token in BOUNDED["bytes"].get_vocab())
    assert longest > 20
    assert found["bytes"] == (longest, b"")
    assert found["silent"] == (longest, b"\x00\x01\x02\x03\x04")
    nfc = max(len(token) for token in BOUNDED["nfc"].get_vocab())
    assert found["nfc"] == (UNICODE_SHRINK * nfc, b"")


def swallowing() -> dict[str, Tokenizer]:
    """Tokenizers with which any amount of text may be one token, or none."""
    found = {
        name: byte_level(part)
        for name, part in {
            "strip": normalizers.Strip(),
            "accents": normalizers.StripAccents(),
            "bert": normalizers.BertNormalizer(),
            "shorter": normalizers.Replace("  ", " "),
            "regex": normalizers.Replace(__import__("tokenizers").Regex(r"\s+"), "  "),
        }.items()
    }
    found["lstrip"] = byte_level()
    found["lstrip"].add_special_tokens([AddedToken("<mask>", lstrip=True)])
    found["word"] = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    found["piece"] = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    found["unigram"] = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False))
    found["unknown"] = Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    found["silent"] = Tokenizer(models.BPE({"a": 0}, []))
    found["removed"] = byte_level()
    found["removed"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )
    found["split"] = byte_level()
    found["split"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    return found


@pytest.mark.parametrize(
    ("name", "tokenizer"), swallowing().items(), ids=lambda item: item if isinstance(item, str) else ""
)
def test_where_text_can_be_swallowed_there_is_no_bound(name: str, tokenizer: Tokenizer) -> None:
    assert text_bound(json.loads(tokenizer.to_str())) is None


def test_unicode_shortens_no_text_by_more_than_is_said() -> None:
    letters = [letter for letter in map(chr, range(sys.maxunicode)) if unicodedata.category(letter)[0] != "C"]
    # Whatever composes does so from the parts of a canonical decomposition.
    parts = [text for letter in letters if (text := unicodedata.normalize("NFD", letter)) != letter]
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        for text in (*letters, *parts):
            assert len(text.encode()) <= UNICODE_SHRINK * len(unicodedata.normalize(form, text).encode())
    assert all(len(letter.encode()) <= UNICODE_SHRINK * len(letter.lower().encode()) for letter in letters)
