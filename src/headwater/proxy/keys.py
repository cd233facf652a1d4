"""Keys of a prompt's blocks, computed once a request: the servers' own where their tokenizer is at hand, else of text.

A scheme says how a server names blocks. Servers with the same scheme share one computation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headwater.kv.hashing import ChunkKeys
from headwater.kv.hashing import Tokens as TokenIds
from headwater.pool.space import Space
from headwater.pool.tenants import tenant_of
from headwater.proxy.calls import CallBody

TEXT_BLOCK_BYTES = 1024
TEXT_BYTES_PER_TOKEN = 4
"""What a token of text is taken for where there is no tokenizer."""
HISTORY_BLOCK_TOKENS = 128
MAX_KEYED_BYTES = 8 << 20
"""Of a longer prompt only the beginning is keyed."""


class Keyed(NamedTuple):
    """A prompt's blocks. Tokens are estimated where they come from text."""

    keys: Sequence[bytes]
    block_tokens: int
    num_tokens: int

    def cached_tokens(self, num_blocks: int) -> int:
        """Tokens that a server with so many of the blocks need not compute: never the last one."""
        return max(0, min(num_blocks * self.block_tokens, self.num_tokens - 1))


class PromptTokenizer(Protocol):
    """What is needed of a tokenizer. Calls come from one thread at a time."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...
    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str: ...


class Scheme(Protocol):
    """How servers name blocks."""

    @property
    def needs_tokens(self) -> bool: ...

    def keyed(self, call: CallBody, tokens: TokenIds | None) -> Keyed: ...


class TextScheme:
    """Blocks of the canonical text of a prompt. They know nothing of tokens, so only the router's own history can use
    them."""

    needs_tokens = False

    def keyed(self, call: CallBody, tokens: TokenIds | None = None) -> Keyed:
        """Costs one SHA-256 of a kilobyte a block."""
        data = canonical_text(call)
        num_tokens = -(-len(data) // TEXT_BYTES_PER_TOKEN)
        parent = hashlib.sha256(b"headwater text\0" + call.context).digest()
        keys = []
        view = memoryview(data[:MAX_KEYED_BYTES])
        for start in range(0, len(view) - TEXT_BLOCK_BYTES + 1, TEXT_BLOCK_BYTES):
            digest = hashlib.sha256(parent)
            digest.update(view[start : start + TEXT_BLOCK_BYTES])
            parent = digest.digest()
            keys.append(parent)
        return Keyed(keys, TEXT_BLOCK_BYTES // TEXT_BYTES_PER_TOKEN, num_tokens)


class TokenScheme:
    """Blocks of tokens under names of the router's own: for its history, and for servers whose events tell the tokens
    of a block (vLLM)."""

    needs_tokens = True

    def __init__(self, block_tokens: int = HISTORY_BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens

    def root(self, cache_salt: str | None = None, adapter: str | None = None) -> bytes:
        """Where the chains of a salt and an adapter begin."""
        text = msgspec.json.encode([self.block_tokens, cache_salt or None, adapter or None])
        return hashlib.sha256(b"headwater blocks\0" + text).digest()

    def keyed(self, call: CallBody, tokens: TokenIds | None) -> Keyed:
        """Costs one SHA-256 a block."""
        found = ChunkKeys(self.root(call.cache_salt), self.block_tokens, () if tokens is None else tokens)
        return Keyed(found.full, self.block_tokens, found.num_tokens)


class SpaceScheme:
    """The chunk keys of a Headwater pool. The space is learnt from the pool's listing, and may be unknown or change."""

    needs_tokens = True

    def __init__(self) -> None:
        self.space: Space | None = None

    def keyed(self, call: CallBody, tokens: TokenIds | None) -> Keyed:
        """As `Space.keys`. Without a space there is nothing to find, and nothing is keyed."""
        if self.space is None:
            return Keyed((), 1, len(() if tokens is None else tokens))
        found = self.space.keys(() if tokens is None else tokens, tenant=tenant_of(call.cache_salt))
        return Keyed(found.full, found.chunk_tokens, found.num_tokens)


TEXT = TextScheme()


class PromptKeys:
    """The keys of one request under every scheme that is asked for, each computed once."""

    def __init__(self, call: CallBody, tokens: TokenIds | None) -> None:
        self._call = call
        self._tokens = tokens
        self._keyed: dict[int, Keyed] = {}

    def of(self, scheme: Scheme) -> Keyed:
        """Where there are no tokens, the text stands for them: it finds what this router sent, and no events."""
        if scheme.needs_tokens and self._tokens is None:
            scheme = TEXT
        found = self._keyed.get(id(scheme))
        if found is None:
            found = self._keyed[id(scheme)] = scheme.keyed(self._call, self._tokens)
        return found


def canonical_text(call: CallBody) -> bytes:
    """A prompt such that a longer conversation begins with the shorter one's bytes."""
    prompt = call.prompt
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, list):
        return b"\n".join(msgspec.json.encode(item, order="sorted") for item in prompt)
    return b""


def tokens_of(call: CallBody, tokenizer: PromptTokenizer) -> list[int] | None:
    """The tokens that the servers will make of a prompt; None for prompts that are no plain text, such as images or
    calls of tools. Takes milliseconds for long prompts."""
    prompt = call.prompt
    try:
        if call.is_chat:
            if "tools" in call.fields or "chat_template" in call.fields or "chat_template_kwargs" in call.fields:
                return None
            messages = _plain_messages(prompt)
            if messages is None:
                return None
            return tokenizer.encode(tokenizer.render_chat(messages), add_special=False)
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, add_special=True)
        if isinstance(prompt, list) and all(type(item) is int and 0 <= item < 1 << 32 for item in prompt):
            return prompt
    except Exception:  # a template raises what it likes; the servers will say what is wrong with the prompt
        return None
    return None


def _plain_messages(messages: Any) -> list[dict[str, str]] | None:
    """Roles and texts, as `headwater serve` reads them."""
    if not isinstance(messages, list) or not messages:
        return None
    plain = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            return None
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
                return None
            content = "\n".join(str(part.get("text") or "") for part in content)
        if message.get("tool_calls") or not isinstance(content, str | None):
            return None
        plain.append({"role": "system" if role == "developer" else role, "content": content or ""})
    return plain


def load_tokenizer(path: str) -> PromptTokenizer:
    """The tokenizer of a checkpoint. Takes seconds; needs `headwater[engine]`."""
    from headwater.models.checkpoint import open_checkpoint

    return open_checkpoint(path).load_tokenizer()


LoadTokenizer = Callable[[str], PromptTokenizer]
