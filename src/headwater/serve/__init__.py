"""The OpenAI-compatible server in front of the engine."""
