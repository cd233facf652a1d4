"""The model classes of vLLM that are known best: every key of their configs was tried."""

from __future__ import annotations

SEARCHED = frozenset(
    {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "OlmoeForCausalLM",
        "Glm4MoeForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
    }
)
"""Classes of vLLM in which `make test-identity` has changed every key: those in `HARMLESS` and vLLM's max_model_len
change no number there (but in a rope type that reads it)."""
