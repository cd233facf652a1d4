"""The bytes that a token stands for, read from the tokenizer's own decoder: half a character has bytes and no text.

Covers the decoders of byte-level BPE (GPT-2's table) and of SentencePiece (`▁`, byte fallback as `<0xE2>`). Joined,
the bytes of all tokens of a text are its UTF-8, which is what a test checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of single tokens of a `tokenizers.Tokenizer`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._steps = _steps(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else None

    @property
    def is_known(self) -> bool:
        """Whether the decoder is one whose bytes are known; `of` may be called only then."""
        return self._steps is not None

    def of(self, token_id: int, *, begins_text: bool = False) -> bytes | None:
        """Its bytes; None for special tokens, which no text shows, and for ids without a token.

        Some decoders take a space from the first token of a text: `begins_text` asks for what is left of it.
        """
        assert self._steps is not None, "no bytes are known for this decoder"
        piece = None if token_id in self._special else self._backend.id_to_token(token_id)
        if piece is None:
            return None
        data: bytes | str = piece
        for step in self._steps:
            data = step(data, begins_text)
        return data if isinstance(data, bytes) else data.encode()


_Step = Callable[[bytes | str, bool], bytes | str]


def _steps(decoder: dict[str, Any]) -> list[_Step] | None:
    """What a decoder does with one token, from its description; None where it is not one of those above."""
    match decoder:
        case {"type": "Sequence", "decoders": [*parts]}:
            found = [_steps(part) for part in parts]
            return None if None in found else [step for steps in found for step in steps or ()]
        case {"type": "ByteLevel"}:
            return [_byte_level]
        case {"type": "ByteFallback"}:
            return [_byte_fallback]
        case {"type": "Fuse"}:
            return []
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return [lambda data, _: data.replace(pattern, content) if isinstance(data, str) else data]
        case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
            return [lambda data, begins_text: _stripped(data, start) if begins_text else data]
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            strips = scheme != "never"
            return [lambda data, begins_text: _spaced(data, mark, "" if strips and begins_text else " ")]
        case _:
            return None


def _byte_level(data: bytes | str, _: bool) -> bytes | str:
    try:
        return bytes(BYTE_OF_CHAR[char] for char in data) if isinstance(data, str) else data
    except KeyError:
        return data  # a token that was added as plain text


def _byte_fallback(data: bytes | str, _: bool) -> bytes | str:
    found = BYTE_TOKEN.fullmatch(data) if isinstance(data, str) else None
    return bytes([int(found[1], 16)]) if found else data


def _stripped(data: bytes | str, count: int) -> bytes:
    data = data if isinstance(data, bytes) else data.encode()
    return data[min(count, len(data) - len(data.lstrip(b" "))) :]


def _spaced(data: bytes | str, mark: str, space: str) -> bytes | str:
    return data.replace(mark, space) if isinstance(data, str) else data


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable bytes of Latin-1 stand for themselves, the others for what follows U+00FF, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
