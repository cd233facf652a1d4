"""Small random models, prompts for them, and engines with time: nothing is taken to be done by now, but waited for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from config_search import FAMILIES as SEARCH_FAMILIES
from headwater.bench import vllm_engine
from headwater.bench.vllm_engine import EngineProcess

from pool_waits import Whose, wait_saved
from support import wait_until

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


def save_moe(directory: Path) -> Path:
    """A small random Qwen3-MoE with a key that the reference engine does not know, and so refuses."""
    import torch
    import transformers

    torch.manual_seed(3)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**QWEN3, **experts})).float()
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"key_of_a_fork": True}))
    return directory


def save_experts(directory: Path, family: str, **changes: Any) -> Path:
    """A small random model of a family with experts, in which routing decides about tokens."""
    import torch
    import transformers

    searched = SEARCH_FAMILIES[family]
    torch.manual_seed(3)
    values = searched.config | {"max_position_embeddings": 4096, "initializer_range": 0.15} | changes
    if "factor" in values.get("rope_parameters", {}):
        values["rope_parameters"]["original_max_position_embeddings"] = 1024
    config = transformers.AutoConfig.for_model(searched.model_type, **values)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.3)
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


def settings_of(model: Path, pool: str | None, **more: Any) -> dict[str, Any]:
    """The settings of an engine whose saves and loads may take as long as a loaded machine needs."""
    extra = {"save_deadline_s": 60, "load_deadline_s": 60, **more.pop("extra", {})}
    return vllm_engine.settings_of(model, pool, extra=extra, **more)


def wait_for_hits(
    pool_url: str, prompts: Sequence[list[int]], *, epoch: int = 0, whose: Whose | None = None, **more: bytes
) -> None:
    """Wait until the pool has so much of each prompt that a request finds all it can of it."""
    wanted = [(prompt, hit_tokens(prompt)) for prompt in prompts]
    wait_saved(pool_url, wanted, whose=whose or (lambda identity: identity.epoch == epoch), **more)


def wait_for_metrics(
    engine: EngineProcess, is_there: Callable[[dict[str, float]], bool], vocab: int = 500
) -> dict[str, float]:
    """The engine's metrics, when they say what is waited for. Steps carry them out of the engine's processes, so a few
    tokens are generated between two looks."""
    found: dict[str, float] = {}

    def look() -> bool:
        found.update(engine.ask("metrics"))
        if is_there(found):
            return True
        engine.ask("generate", prompts=[random_tokens(5000, 16, vocab)], max_tokens=2)
        return False

    wait_until(look, what="what the metrics should say")
    return found
