"""Small random checkpoints of every family, and what `transformers` says to them: the oracle of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 512
NUM_TOKENS = 64
TIE = 1e-4
"""Two logits closer than this may swap places between two correct implementations."""

# heads, KV heads → the tensor-parallel sizes they allow
SHAPES: dict[str, dict[str, int]] = {
    "llama": {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
}
_WIDE: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "num_experts_per_tok": 3,
}
_EXPERTS = _WIDE | {"moe_intermediate_size": 36}
_GROUPS = {"n_routed_experts": 12, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
EXPERT_SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": _WIDE | {"num_local_experts": 8, "intermediate_size": 36},
    "qwen2_moe": _EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 44, "mlp_only_layers": [0]},
    "qwen3_moe": _EXPERTS | {"num_experts": 8, "norm_topk_prob": True, "head_dim": 24},
    "olmoe": _WIDE | {"num_experts": 8, "intermediate_size": 36},
    "glm4_moe": _EXPERTS | _GROUPS | {"head_dim": 32, "use_qk_norm": True, "first_k_dense_replace": 1},
}
_LATENTS = (_EXPERTS | _GROUPS) | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 512,
}
LATENT_SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENTS | {"topk_method": "group_limited_greedy", "rope_parameters": _YARN},
    "deepseek_v2, greedy": _LATENTS | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v3": _LATENTS,
    "deepseek_v3, yarn": _LATENTS | {"q_lora_rank": None, "rope_parameters": _YARN},
    "glm4_moe_lite": _LATENTS | {"n_group": 1, "topk_group": 1},
}
"""Multi-head latent attention: every rank holds all latents, so any number of ranks that divides the heads will do."""
EXPERT_SHAPES |= LATENT_SHAPES
TP_SIZES = {"smollm2": (1, 3), "llama": (1, 2, 3), "qwen2": (1, 2, 4), "qwen3": (1, 2, 4)}
TP_SIZES |= dict.fromkeys(EXPERT_SHAPES, (1, 2)) | dict.fromkeys(LATENT_SHAPES, (1, 2, 4))


def save_random_checkpoint(family: str, directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint of that family with random weights, large enough that logits are far apart."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": family in ("qwen2", "qwen3"),
        **(SHAPES | EXPERT_SHAPES)[family],
    }
    if family == "qwen3":
        common["head_dim"] = 16
    common |= overrides
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family.partition(",")[0], **common)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # transformers starts them at zero, which would hide them
            torch.nn.init.normal_(parameter, std=0.1)
        elif family in EXPERT_SHAPES and "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    model.save_pretrained(directory, safe_serialization=True)
    return directory


@dataclass(frozen=True)
class Reference:
    """Greedy continuation of one prompt, and how far the best token was ahead at each step."""

    prompt: list[int]
    token_ids: list[int]
    margins: list[float]


@dataclass
class Comparison:
    """How many tokens were compared, and how many differed where the reference had a tie."""

    num_tokens: int = 0
    num_ties: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, where: str, reference: Reference, token_ids: list[int]) -> None:
        """Compare up to the first difference: after one, the contexts differ and nothing can be said."""
        for step, (wanted, got) in enumerate(zip(reference.token_ids, token_ids, strict=True)):
            self.num_tokens += 1
            if wanted == got:
                continue
            if reference.margins[step] < TIE:
                self.num_ties += 1
            else:
                self.wrong.append(
                    f"{where}: token {step} is {got}, expected {wanted} (ahead by {reference.margins[step]:.5f})"
                )
            return


def report_rows(
    request: pytest.FixtureRequest, title: str, rows: Sequence[Mapping[str, Any]], totals: Comparison
) -> Iterator[None]:
    """The body of a fixture that prints, after a module's tests, its rows and ties, and bounds the latter."""
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{title}:")
        for number, row in enumerate(rows):
            print(f"  {number:2}  " + "  ".join(f"{name}={value}" for name, value in row.items()))
        print(f"  {totals.num_tokens} tokens compared, {totals.num_ties} differed at a tie (margin below {TIE})")
    assert totals.num_ties * 1000 <= totals.num_tokens


@torch.inference_mode()
def greedy_reference(model: Any, prompt: list[int], num_tokens: int = NUM_TOKENS) -> Reference:
    """What `transformers` generates, one token at a time with its own cache."""
    ids, past = torch.tensor([prompt]), None
    tokens, margins = [], []
    for _ in range(num_tokens):
        result = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = result.past_key_values
        best = result.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        ids = torch.tensor([[tokens[-1]]])
    return Reference(prompt, tokens, margins)


def load_transformers(path: Path) -> Any:
    """The checkpoint in `transformers`: a directory, or a GGUF file."""
    import transformers

    where = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
