"""What `headwater bench engine` is compared with: `transformers` on the same weights, in the same process.

Static batches (left padding, everyone waits for the longest answer), its continuous batching, and a bare forward pass
for the prompt alone. All greedy, and no end-of-sequence token ends anything: all sides produce equally many tokens.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwater.errors import HeadwaterError


class Job(NamedTuple):
    """One request: its prompt, and exactly how many tokens to answer with."""

    prompt: list[int]
    num_outputs: int


class EnginePeerError(HeadwaterError):
    """The peer could not do it; the message becomes the reason in the report."""


def load_transformers(path: Path) -> Any:
    """The checkpoint as a `transformers` model, float32 with SDPA. Raises PeerError where that is not possible."""
    transformers = _transformers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True, **options
            )
    except (ImportError, OSError, ValueError) as error:
        raise EnginePeerError(f"transformers cannot load the model: {error}") from error
    # No end of sequence in it, unlike in the checkpoint's.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model.eval()


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise EnginePeerError(f"transformers is not installed ({error})") from error


class StaticBatches:
    """`generate` over batches of one size, prompts sorted by length."""

    def __init__(self, model: Any, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size

    @torch.inference_mode()
    def serve(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Each job's tokens. A batch runs until its longest answer is complete; the surplus of others is cut off."""
        answers: list[list[int]] = [[] for _ in jobs]
        order = sorted(range(len(jobs)), key=lambda i: len(jobs[i].prompt))
        for first in range(0, len(order), self._batch_size):
            members = order[first : first + self._batch_size]
            width = max(len(jobs[i].prompt) for i in members)
            ids = torch.zeros(len(members), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(members):
                ids[row, width - len(jobs[i].prompt) :] = torch.tensor(jobs[i].prompt)
                mask[row, width - len(jobs[i].prompt) :] = 1
            longest = max(jobs[i].num_outputs for i in members)
            produced = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest)
            for row, i in enumerate(members):
                answers[i] = produced[row, width : width + jobs[i].num_outputs].tolist()
        return answers


class ContinuousBatches:
    """`transformers`' continuous batching, kept running between calls. It changes the model: give it one of its own."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._number = 0

    def serve(self, jobs: Sequence[Job], give_up_s: float = float("inf")) -> list[list[int]] | None:
        """Each job's tokens; None if that took longer than `give_up_s`. Raises PeerError where a request fails."""
        deadline = time.perf_counter() + give_up_s
        index = {}
        for i, job in enumerate(jobs):
            self._number += 1
            name = f"bench-{self._number}"
            self._manager.add_request(job.prompt, request_id=name, max_new_tokens=job.num_outputs, eos_token_id=-1)
            index[name] = i
        answers: list[list[int]] = [[] for _ in jobs]
        while index:
            if time.perf_counter() > deadline:
                for name in index:
                    self._manager.cancel_request(name)
                return None
            result = self._manager.get_result(timeout=0.5)
            if result is None:
                if not self._manager.is_running():
                    raise EnginePeerError("transformers' continuous batching stopped by itself")
                continue
            if result.error is not None:
                raise EnginePeerError(f"transformers' continuous batching failed: {result.error}")
            if result.is_finished() and result.request_id in index:
                answers[index.pop(result.request_id)] = list(result.generated_tokens)
        return answers


PEER_PAGE_SIZE = 256


@contextlib.contextmanager
def continuous_batches(model: Any, jobs: Sequence[Job]) -> Iterator[ContinuousBatches]:
    """A running manager with room for all jobs at once. Raises PeerError where this version has none for CPUs."""
    transformers = _transformers()
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        raise EnginePeerError(f"transformers {transformers.__version__} has no continuous batching as of version 5")
    pages = sum(-(-(len(job.prompt) + job.num_outputs) // PEER_PAGE_SIZE) + 1 for job in jobs)
    config = transformers.ContinuousBatchingConfig(
        page_size=PEER_PAGE_SIZE,
        num_blocks=pages,
        max_batch_tokens=max(2048, max(len(job.prompt) for job in jobs)),
        max_requests_per_batch=len(jobs),
    )
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
        manager.start()
    except Exception as error:  # whatever it is, it is the peer's
        raise EnginePeerError(f"transformers' continuous batching does not start: {error}") from error
    try:
        yield ContinuousBatches(manager)
    finally:
        manager.stop(block=True, timeout=30)


def forward_prompt(model: Any, prompt: Sequence[int]) -> int:
    """One pass over a prompt, keeping its KV; the best next token."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())
