"""Models and their weights: Llama, Qwen, Mixtral, OLMoE and GLM from Hugging Face checkpoints, and Llama and Qwen from
GGUF files, too."""
