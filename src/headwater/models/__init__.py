"""Models and their weights: Llama, Qwen2 and Qwen3 from Hugging Face checkpoints and GGUF files."""
