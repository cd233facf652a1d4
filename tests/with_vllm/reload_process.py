"""An engine process that can load other weights in place, as vLLM's own remote call does it."""

from __future__ import annotations

from headwater.bench.vllm_process import Commands, serve


class Reloading(Commands):
    """One more command."""

    def reload(self, path: str) -> bool:
        """Load the weights of another directory into the running model."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        return True


if __name__ == "__main__":
    serve(Reloading)
