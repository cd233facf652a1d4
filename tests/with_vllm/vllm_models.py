"""Small random models, and prompts for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def save_qwen3(directory: Path, seed: int, **changes: Any) -> Path:
    """A small random Qwen3."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**QWEN3, **changes})).float()
    model.save_pretrained(directory)
    return directory


def random_tokens(seed: int, count: int, vocab: int = 500) -> list[int]:
    """The same tokens for the same seed."""
    return [random.Random(f"{seed} {i}").randrange(3, vocab) for i in range(count)]


def hit_tokens(prompt: list[int], chunk_tokens: int = 256, min_tail: int = 32) -> int:
    """How many tokens of a prompt come from the pool when it was computed before: all but the last, which is computed
    in any case, or its whole chunks where what follows them is not worth a tail."""
    tail = len(prompt) % chunk_tokens
    return len(prompt) - 1 if tail >= min_tail or not tail else len(prompt) - tail
