"""Text to token ids and back, through `transformers`, which is imported when the first tokenizer is loaded.

Nothing here knows of requests: `headwater.serve` finds stop strings and counts tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headwater.errors import ModelError, RequestError
from headwater.models.config import ModelConfig
from headwater.models.text_bound import TextBound, text_bound
from headwater.models.token_bytes import TokenBytes

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer:
    """The tokenizer of one checkpoint, with its chat template."""

    def __init__(self, backend: Any, config: ModelConfig, label: str) -> None:
        self._backend = backend
        self._label = label
        own = backend.eos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(sorted({*config.eos_token_ids, *([] if own is None else [own])}))
        """Of the checkpoint's configs and of the tokenizer itself."""
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1
        """The largest id that has a text, plus one; the model's own vocabulary may be padded beyond it."""
        fast = getattr(backend, "backend_tokenizer", None)
        known = None if fast is None else TokenBytes(fast)
        self._bytes = known if known is not None and known.is_known else None

    @property
    def backend(self) -> Any:
        """The `transformers` tokenizer."""
        return self._backend

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._backend.chat_template)

    def text_bound(self) -> TextBound | None:
        """Bytes of text that one token stands for at most; None where that has no limit. Parses the vocabulary."""
        rust = getattr(self._backend, "backend_tokenizer", None)
        return None if rust is None else text_bound(json.loads(rust.to_str()))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text, begun as the model was trained to have it unless `add_special` is False."""
        return list(self._backend.encode(text, add_special_tokens=add_special))

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids, exactly: no spaces are tidied away. Ids that the tokenizer lacks give nothing."""
        known = [token_id for token_id in token_ids if token_id < self.vocab_size]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return text

    def token_text(self, token_id: int) -> str:
        """One token for people, special ones too; U+FFFD where it is part of a character only."""
        return self.decode([token_id], skip_special=False)

    def token_bytes(self, token_id: int, *, begins_text: bool = False) -> bytes | None:
        """The bytes that one token adds to a text, also where they are part of a character only; None if it adds none,
        as special tokens do. The first token of a text may lose a space: `begins_text`."""
        if self._bytes is not None:
            return self._bytes.of(token_id, begins_text=begins_text)
        text = self.decode([token_id])
        return text.encode() if text and REPLACEMENT not in text else None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Token ids of a conversation, ready for the model's answer: `encode` of `render_chat`, which see."""
        rendered = self.render_chat(messages, add_generation_prompt, **options)
        # The template writes the special tokens itself.
        return self.encode(rendered, add_special=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The text of a conversation, ready for the model's answer and for `encode` without special tokens; `options`
        go to the template.

        Raises ModelError where the checkpoint has no template, and RequestError where the template does not accept
        these messages.
        """
        if not self.has_chat_template:
            raise ModelError(
                f"{self._label} has no chat template, so it cannot be used for chat; use completions, or a checkpoint "
                "of an instruction-tuned model"
            )
        try:
            rendered: str = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **options,
            )
        except Exception as error:  # a template is a program of the checkpoint's, and raises what programs raise
            reason = str(error) or type(error).__name__
            text = f"the chat template does not accept these messages: {reason}"
            raise RequestError(text, param="messages") from error
        return rendered


def load_tokenizer(folder: Path, config: ModelConfig, gguf_file: str | None = None) -> Tokenizer:
    """Load from a directory, or from the GGUF file of that name inside it. Nothing is downloaded, and no code of the
    checkpoint is run. Raises ModelError where there is no tokenizer, or one that cannot be read."""
    where = folder / gguf_file if gguf_file else folder
    if gguf_file is None and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{str(folder)!r} holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ModelError("tokenizers need the transformers package: pip install transformers") from error
    # A GGUF file holds no class name to choose by, and AutoTokenizer would first parse all of its metadata, which takes
    # ten times as long as the tokenizer itself.
    kind = PreTrainedTokenizerFast if gguf_file else AutoTokenizer
    options = {"gguf_file": gguf_file} if gguf_file else {"trust_remote_code": False}
    try:
        backend = kind.from_pretrained(str(folder), local_files_only=True, **options)
    except Exception as error:  # it raises whatever its many parsers raise
        raise ModelError(f"cannot load the tokenizer of {str(where)!r}: {error}") from error
    return Tokenizer(backend, config, where.name)


class Decodes(Protocol):
    """What a StreamDecoder needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids."""
        ...


class StreamDecoder:
    """Token ids to text as they come: all that `push` and `finish` return, joined, is the `decode` of all ids.

    Only a few tokens are decoded again for each new one. Text is settled up to `read`; the tokens before it from
    `start` on are kept because some decoders treat the first token of a text differently:

        ids   … | start … read | pending …
                  context        text not settled, e.g. the first bytes of a character

    No half of a character is ever returned.
    """

    MAX_PENDING = 8
    """A character takes four tokens at most; more that end in U+FFFD are bytes that are no text."""

    def __init__(self, tokenizer: Decodes, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []  # from `start` on
        self._num_context = 0  # read - start
        self._context_text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; the text that is now final. Costs the decoding of a few tokens for each."""
        pieces = []
        for token_id in token_ids:
            self._ids.append(token_id)
            pieces.append(self._settle())
        return "".join(pieces)

    def finish(self) -> str:
        """What is left: at most an incomplete character, as U+FFFD. The decoder can then be used anew."""
        rest = self._decode(len(self._ids))[len(self._context_text) :]
        self._ids, self._num_context, self._context_text = [], 0, ""
        return rest

    def _settle(self) -> str:
        text = self._decode(len(self._ids))
        if text == self._context_text:
            if self._num_context or len(self._ids) > self.MAX_PENDING or self._is_special(self._ids[-1]):
                self._ids.pop()
            # Else a decoder took the first space of the text from it, and takes no other if it stays.
            return ""
        if not text.endswith(REPLACEMENT):
            return self._advance(len(self._ids), text)
        if len(self._ids) - self._num_context > self.MAX_PENDING:
            # Where one more token lengthened the text and changed nothing before it, what is before it is final.
            for end in range(len(self._ids) - 1, self._num_context, -1):
                head = self._decode(end)
                if len(self._context_text) < len(head) < len(text) and text.startswith(head):
                    return self._advance(end, head)
        return ""

    def _advance(self, end: int, text: str) -> str:
        """Text is settled up to `end`; what was pending becomes the context."""
        fresh = text[len(self._context_text) :]
        del self._ids[: self._num_context]
        self._num_context = end - self._num_context
        self._context_text = self._decode(self._num_context)
        return fresh

    def _is_special(self, token_id: int) -> bool:
        return bool(self._tokenizer.decode([token_id], False))

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[:end], self._skip_special)
