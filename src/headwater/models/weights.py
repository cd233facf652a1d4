"""Where the tensors of a checkpoint go, and the loop that puts them there.

A model publishes its targets, a checkpoint its tensors; each tensor is read once, straight into the rows or columns
that this rank holds, so that loading needs little memory beyond the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from headwater.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class WeightTarget(NamedTuple):
    """`destination` takes the `part` of a tensor of `shape`, counted along `dim`."""

    destination: Tensor
    shape: tuple[int, ...]
    dim: int
    part: range


class TensorHandle(Protocol):
    """One tensor of a checkpoint, not read yet."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""
        ...

    @property
    def num_bytes(self) -> int:
        """What reading all of it costs."""
        ...

    def read_into(self, destination: Tensor, dim: int, part: range) -> None:
        """Copy `part` along `dim` into `destination`, converting its dtype. Holds a few MiB beside it."""
        ...


class TensorSource(Protocol):
    """What `load_weights` needs of a checkpoint."""

    @property
    def label(self) -> str:
        """A name for people."""
        ...

    def tensors(self) -> Iterator[tuple[str, TensorHandle]]:
        """Every tensor, by its Hugging Face name."""
        ...


class HasTargets(Protocol):
    """What `load_weights` needs of a model."""

    def targets(self) -> dict[str, WeightTarget]:
        """Every tensor the model needs, by its Hugging Face name."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a tensor that the model does not need may be there."""
        ...


def load_weights(model: HasTargets, source: TensorSource, progress: Progress | None = None) -> None:
    """Fill the model's parameters. Names and shapes are checked before a byte is read, so that a checkpoint which does
    not fit fails at once. Raises ModelError naming the tensors that are missing, unexpected or misshapen."""
    targets = model.targets()
    handles = dict(source.tensors())
    spare = [name for name in handles if name not in targets and not model.ignores(name)]
    unexpected = [name for name in spare if not is_redundant(name, targets)]
    if missing := [name for name in targets if name not in handles]:
        raise ModelError(f"{source.label} lacks {_some(missing)}, which this model needs; is the checkpoint complete?")
    if unexpected:
        raise ModelError(
            f"{source.label} holds {_some(unexpected)}, which this model has no place for; does the config fit it?"
        )
    for name, target in targets.items():
        shape = handles[name].shape
        if shape != target.shape:
            raise ModelError(
                f"{source.label}: {name} has shape {list(shape)}; the config asks for {list(target.shape)}"
            )
    wanted = {name: handle for name, handle in handles.items() if name in targets}
    total = sum(handle.num_bytes for handle in wanted.values())
    done = 0
    for name, handle in wanted.items():
        target = targets[name]
        handle.read_into(target.destination, target.dim, target.part)
        done += handle.num_bytes
        if progress is not None:
            progress(done, total)


def is_redundant(name: str, targets: dict[str, WeightTarget]) -> bool:
    """Whether a checkpoint may hold this tensor though the model does not need it: tables that can be computed, and
    an output matrix beside embeddings that serve as one."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in targets)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
