"""`headwater proxy` and `headwater router`: OpenAI's API in front of several servers. No engine is imported."""
