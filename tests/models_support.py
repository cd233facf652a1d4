"""What the tests of models share: tiny checkpoints made by `transformers`, and a decoder run on a stub of a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from headwater.kernels.attention.base import AttentionBackend, AttentionBatch
from headwater.kernels.attention.reference import ReferenceAttention
from headwater.models.checkpoint import open_checkpoint
from headwater.models.config import ModelConfig
from headwater.models.context import StepContext
from headwater.models.decoder import Decoder, build_model
from headwater.models.parallel import Ranks, TensorParallel
from headwater.models.weights import load_weights

torch.set_num_threads(1)  # these models are so small that threads only wait for each other

PAGE_SIZE = 4
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 96,
}


def save_tiny(path: Path, family: str, **changes: Any) -> Any:
    """Save a random model of a family under `path` and return it; all its weights, norms and biases too, are random."""
    import transformers

    name = "".join(part.capitalize() for part in family.split("_"))
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.3 if "norm" in key else 0.15)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(path)
    return model


class StubCache:
    """Planes of zeros for the KV heads of one rank."""

    def __init__(self, config: ModelConfig, num_pages: int, num_kv_heads: int) -> None:
        widths = [plane.width for plane in config.kv_spec("float32").planes]
        shape = (num_pages, PAGE_SIZE, num_kv_heads)
        self._planes = [tuple(torch.zeros(*shape, width) for width in widths) for _ in range(config.num_layers)]

    def planes(self, layer: int) -> tuple[Tensor, ...]:
        return self._planes[layer]

    def tokens(self, layer: int, total: int) -> tuple[Tensor, ...]:
        """The planes of a sequence that `run_tokens` has run, [total, heads, width] each."""
        return tuple(plane.flip(0).flatten(0, 1)[:total] for plane in self._planes[layer])


def stub_cache(model: Decoder, total: int) -> StubCache:
    """A cache for one sequence of `total` tokens."""
    return StubCache(model.config, -(-total // PAGE_SIZE), len(model.ranks.tp.heads(model.config).kv))


def run_tokens(
    model: Decoder,
    token_ids: list[int],
    chunk: int | None = None,
    *,
    backend: AttentionBackend | None = None,
    cache: StubCache | None = None,
) -> Tensor:
    """Logits of every position of one sequence, computed in chunks; its pages lie in reverse order."""
    total = len(token_ids)
    cache = cache or stub_cache(model, total)
    pages = torch.arange(-(-total // PAGE_SIZE) - 1, -1, -1)
    backend = backend or ReferenceAttention()
    found = []
    for start in range(0, total, chunk or total):
        stop = min(total, start + (chunk or total))
        positions = torch.arange(start, stop)
        batch = AttentionBatch(
            query_starts=torch.tensor([0, stop - start], dtype=torch.int32),
            kv_lens=torch.tensor([stop], dtype=torch.int32),
            page_table=pages.int()[None],
            query_lens_cpu=(stop - start,),
            kv_lens_cpu=(stop,),
            num_decodes=int(stop - start == 1),
            page_size=PAGE_SIZE,
        )
        slots = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        ctx = StepContext(positions, slots, backend, batch, backend.plan(batch), cache)
        found.append(model.logits(model.forward(torch.tensor(token_ids[start:stop]), ctx)))
    return torch.cat(found)


def load_model(path: Path | str, parallel: TensorParallel | None = None, **options: Any) -> Decoder:
    """Open, build and load."""
    checkpoint = open_checkpoint(path, **options)
    model = build_model(checkpoint.config, Ranks(tp=parallel or TensorParallel()))
    load_weights(model, checkpoint)
    return model


class ThreadGroup:
    """A process group whose ranks are threads: they meet at a barrier, and sums are made in rank order."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._board, self._barrier = rank, board, barrier

    def allreduce(self, tensors: list[Tensor]) -> ThreadGroup:
        (x,) = tensors
        x.copy_(torch.stack(self._exchange(x)).sum(dim=0))
        return self

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> ThreadGroup:
        for output, x in zip(outputs[0], self._exchange(inputs[0]), strict=True):
            output.copy_(x)
        return self

    def wait(self) -> None:
        """The work is done already."""

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._board[self._rank] = x.clone()
        self._barrier.wait(60)
        everything = list(self._board)
        self._barrier.wait(60)
        return everything


def run_ranks(size: int, work: Callable[[TensorParallel], Any]) -> list[Any]:
    """Run `work` on every rank of a group of threads; results by rank."""
    board: list[Any] = [None] * size
    results: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> None:
        try:
            group = cast(Any, ThreadGroup(rank, board, barrier))
            results[rank] = work(TensorParallel(rank, size, group))
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def assert_same_tensors(folder: Path, other: Path) -> None:
    """Two checkpoints of one file each have the same tensors, under the same names."""
    from safetensors.torch import load_file

    found, wanted = (load_file(where / "model.safetensors") for where in (folder, other))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
