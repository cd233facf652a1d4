"""How many bytes of text one token can stand for at most: a prompt with more can be refused before it is tokenised.

The bound is derived from a tokenizer's own parts (`tokenizer.json`). Where a part may swallow text without limit (a
normalizer that strips, an unknown token for a whole word), there is no bound, and None is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

NUM_BYTES = 256
UNICODE_SHRINK = 4
"""Unicode's normal forms and lower case give at least a byte for every four: 𝟎 (4 bytes) becomes 0, three jamo of
3 bytes a syllable of 3."""

_LETTERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
_KEEPING_NORMALIZERS = frozenset({"Prepend", "ByteLevel"})
_KEEPING_SPLITTERS = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts"})


class TextBound(NamedTuple):
    """A text of more bytes than `num_tokens * max_bytes_per_token`, silent ones left out, has more tokens."""

    max_bytes_per_token: int
    silent_bytes: bytes = b""
    """Bytes that give no token: some vocabularies lack control characters."""

    def num_bytes(self, text: bytes) -> int:
        """Bytes of a text that count."""
        return len(text.translate(None, self.silent_bytes) if self.silent_bytes else text)


def text_bound(tokenizer: Mapping[str, Any]) -> TextBound | None:
    """The bound of a tokenizer, given as tokenizer.json has it; None where a token may stand for any amount of text."""
    normalizers = list(_parts(tokenizer.get("normalizer"), "normalizers"))
    splitters = list(_parts(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    is_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *splitters))
    shrink = _shrink(normalizers)
    silent = _silent_bytes(model, is_byte_level)
    if (
        shrink is None
        or silent is None
        or (silent and shrink > 1)
        or not all(map(_keeps_text, splitters))
        or any(token["lstrip"] or token["rstrip"] for token in added)  # these swallow the white space beside them
    ):
        return None
    # In a byte-level vocabulary a character is one byte; in others the characters are those of the text.
    longest = max(len(text) if is_byte_level else len(text.encode()) for text in model["vocab"])
    longest_added = max((len(token["content"].encode()) for token in added), default=1)
    return TextBound(shrink * max(longest, longest_added), silent)


def _shrink(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """How many bytes of text may become one byte of normalized text; None: any number."""
    shrink = 1
    for part in normalizers:
        kind = part["type"]
        if kind in _LETTERS:
            shrink = UNICODE_SHRINK
        elif kind == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(part["content"].encode()) < len(pattern.encode()):
                return None
        elif kind not in _KEEPING_NORMALIZERS:
            return None
    return shrink


def _silent_bytes(model: Mapping[str, Any], is_byte_level: bool) -> bytes | None:
    """Bytes for which there is no token; None where runs of unknown text may become one token."""
    if model.get("type") != "BPE" or model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        return None
    vocab = model["vocab"]
    if is_byte_level:
        silent = bytes(byte for byte, name in enumerate(_byte_names()) if name not in vocab)
        return None if silent and model.get("unk_token") is not None else silent
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(NUM_BYTES)):
        return b""
    return None


def _byte_names() -> list[str]:
    """The character that each byte has in a byte-level vocabulary: itself if it is visible, else one from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    names, num_hidden = [], 0
    for byte in range(NUM_BYTES):
        names.append(chr(byte if byte in visible else NUM_BYTES + num_hidden))
        num_hidden += byte not in visible
    return names


def _keeps_text(splitter: Mapping[str, Any]) -> bool:
    return splitter["type"] in _KEEPING_SPLITTERS and splitter.get("behavior") != "Removed"


def _parts(component: Mapping[str, Any] | None, sequence: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, sequences flattened."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for part in component[sequence]:
            yield from _parts(part, sequence)
    else:
        yield component
