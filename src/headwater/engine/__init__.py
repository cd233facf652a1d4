"""The reference engine: paged KV cache, prefix cache, scheduler, runner and sampler. Small, and real."""
