"""Orders and reports as JSON data and integer arrays, for ranks that talk over sockets. Bounded, and never unpickled.

Keys, sizes and block numbers of all jobs travel as four arrays, so that the JSON part stays small however long the
prompts are. What cannot be orders is an InvalidArgumentError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.connector.orders import (
    ORDER_MODES,
    FlushOrder,
    JobGroup,
    LoadOrder,
    PushOrder,
    SaveOrder,
    StepOrders,
    StepReport,
    TransferJob,
)
from headwater.errors import InvalidArgumentError
from headwater.kv.hashing import KEY_BYTES, ChunkRef
from headwater.pool.wait import Wait

MAX_CHUNKS = 1 << 20
"""In one message: 268 million tokens."""
MAX_TOKENS = 1 << 40
"""In one request: beyond any position, and far from where 64 bits end."""
MAX_SECONDS = 86400.0
WORDS_PER_KEY = KEY_BYTES // 8
_NO_BLOCKS = np.empty(0, np.int32)

Arrays = list[npt.NDArray[Any]]
Wire = tuple[dict[str, Any], Arrays]


def orders_to_wire(orders: StepOrders) -> Wire:
    """The orders as JSON data and four arrays."""
    every: list[SaveOrder | LoadOrder] = [*orders.before, *orders.during, *orders.loads]
    groups = [group for order in every for group in order.job.groups]
    groups += [JobGroup(push.chunks, _NO_BLOCKS) for push in orders.pushes]
    chunks = [chunk for group in groups for chunk in group.chunks]
    fields = {
        "epoch": orders.epoch,
        "before": [_save_fields(order) for order in orders.before],
        "during": [_save_fields(order) for order in orders.during],
        "loads": [_load_fields(order) for order in orders.loads],
        "pushes": [_push_fields(push) for push in orders.pushes],
        "flushes": [list(flush) for flush in orders.flushes],
        "cancelled": list(orders.cancelled),
        "is_idle": orders.is_idle,
    }
    keys = np.frombuffer(b"".join([chunk.key for chunk in chunks]), dtype="<i8").astype(np.int64)
    sizes = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
    block_ids = np.concatenate([np.empty(0, np.int32), *(group.block_ids for group in groups)]).astype(np.int32)
    return fields, [keys, sizes, block_ids, np.array(sorted(orders.wrong_blocks), dtype=np.int32)]


def orders_from_wire(fields: dict[str, Any], arrays: Arrays) -> StepOrders:
    """Read what `orders_to_wire` wrote. Raises InvalidArgumentError for anything else."""
    try:
        reader = _Reader(*arrays)
        orders = StepOrders(
            epoch=None if fields["epoch"] is None else int(fields["epoch"]),
            before=tuple(reader.save_orders(fields["before"])),
            during=tuple(reader.save_orders(fields["during"])),
            loads=tuple(reader.load_orders(fields["loads"])),
            pushes=tuple(reader.push_orders(fields["pushes"])),
            flushes=tuple(FlushOrder(str(who), str(what), _seconds(end_s)) for who, what, end_s in fields["flushes"]),
            cancelled=tuple(str(request_id) for request_id in fields["cancelled"]),
            wrong_blocks=frozenset(arrays[3].tolist()),
            is_idle=bool(fields["is_idle"]),
        )
        reader.check_end()
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(f"these are not the orders of a step: {error}") from error
    return orders


def report_to_wire(report: StepReport) -> dict[str, Any]:
    """The report as JSON data."""
    ended = {request_id: list(counts) for request_id, counts in report.ended.items()}
    pushed = {request_id: list(counts) for request_id, counts in report.pushed.items()}
    fields = {"ended": ended, "unsaved": dict(report.unsaved), "declined": report.declined, "pushed": pushed}
    return fields | {"misfits": [key.hex() for key in report.misfits]}


def report_from_wire(fields: dict[str, Any]) -> StepReport:
    """Read what `report_to_wire` wrote. Raises InvalidArgumentError for anything else."""
    try:
        ended = {str(key): tuple(_number(count) for count in counts) for key, counts in fields["ended"].items()}
        unsaved = {str(key): _number(first) for key, first in fields["unsaved"].items()}
        pushed = {str(key): tuple(_number(count) for count in counts) for key, counts in fields["pushed"].items()}
        misfits = tuple(bytes.fromhex(key) for key in fields["misfits"])
        if any(len(key) != KEY_BYTES for key in misfits):
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        return StepReport(ended, unsaved, str(fields["declined"]), pushed, misfits)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(f"this is not the report of a step: {error}") from error


def _number(value: Any) -> int:
    """A position or a count. Raises ValueError for one that cannot be."""
    number = int(value)
    if not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"{number} is out of range; expected 0 to {MAX_TOKENS}")
    return number


def _seconds(value: Any) -> float:
    """A duration. Raises ValueError for one that cannot be."""
    seconds = float(value)
    if not 0.0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"a duration of {seconds} s is out of range; expected 0 to {MAX_SECONDS} s")
    return seconds


def _order_fields(order: SaveOrder | LoadOrder) -> dict[str, Any]:
    job = order.job
    return {
        "request_id": job.request_id,
        "tenant": order.tenant.hex(),
        "adapter": order.adapter.hex(),
        "groups": [_group_fields(group) for group in job.groups],
    }


def _save_fields(order: SaveOrder) -> dict[str, Any]:
    return _order_fields(order) | {"raw": list(order.raw)}


def _load_fields(order: LoadOrder) -> dict[str, Any]:
    wait = None if order.wait is None else list(order.wait)
    return _order_fields(order) | {"num_local": order.num_local, "mode": order.mode, "wait": wait}


def _push_fields(push: PushOrder) -> dict[str, Any]:
    return {
        "request_id": push.request_id,
        "transfer": push.transfer,
        "peer": push.peer,
        "tenant": push.tenant.hex(),
        "adapter": push.adapter.hex(),
        "groups": [_group_fields(JobGroup(push.chunks, _NO_BLOCKS))],
    }


def _group_fields(group: JobGroup) -> list[Any]:
    """A chunk's parent is the chunk before it, so that only the first one's is sent."""
    first = group.chunks[0]
    place = [first.root.hex(), first.parent.hex(), first.number, first.first_token]
    return [*place, len(group.chunks), len(group.block_ids)]


class _Reader:
    """Takes the jobs out of the arrays, one after another."""

    def __init__(self, keys: Any, sizes: Any, block_ids: Any, wrong_blocks: Any) -> None:
        for array in (keys, sizes, block_ids, wrong_blocks):
            if array.ndim != 1 or array.dtype.kind != "i":
                raise ValueError(f"got an array of {array.dtype} in {array.ndim} dimensions; expected integers in one")
        if len(sizes) > MAX_CHUNKS or len(keys) != len(sizes) * WORDS_PER_KEY:
            raise ValueError(f"{len(sizes)} chunks came with {len(keys)} words of keys")
        self._keys = keys.astype("<i8").tobytes()
        self._sizes = sizes.tolist()
        self._block_ids = block_ids
        self._num_chunks = self._num_blocks = 0

    def save_orders(self, orders: Iterable[dict[str, Any]]) -> Iterator[SaveOrder]:
        for fields in orders:
            job, raw = self._job(fields), tuple(_number(at) for at in fields["raw"])
            if raw and max(raw) >= len(job.chunks):
                raise ValueError(f"chunk {max(raw)} of a job of {len(job.chunks)} is to be raw")
            yield SaveOrder(job, bytes.fromhex(fields["tenant"]), bytes.fromhex(fields["adapter"]), raw)

    def load_orders(self, orders: Iterable[dict[str, Any]]) -> Iterator[LoadOrder]:
        for fields in orders:
            mode, tenant, adapter = (
                str(fields["mode"]),
                bytes.fromhex(fields["tenant"]),
                bytes.fromhex(fields["adapter"]),
            )
            if mode not in ORDER_MODES:
                raise ValueError(f"unknown load mode {mode!r}")
            wait = None if fields["wait"] is None else Wait(*map(_seconds, fields["wait"]))
            yield LoadOrder(self._job(fields), _number(fields["num_local"]), tenant, adapter, mode, wait)

    def push_orders(self, orders: Iterable[dict[str, Any]]) -> Iterator[PushOrder]:
        for fields in orders:
            tenant, adapter, job = bytes.fromhex(fields["tenant"]), bytes.fromhex(fields["adapter"]), self._job(fields)
            yield PushOrder(job.request_id, str(fields["transfer"]), str(fields["peer"]), job.chunks, tenant, adapter)

    def check_end(self) -> None:
        if self._num_chunks != len(self._sizes) or self._num_blocks != len(self._block_ids):
            raise ValueError("some chunks or blocks belong to no job")

    def _job(self, fields: dict[str, Any]) -> TransferJob:
        groups = tuple(self._group(*group) for group in fields["groups"])
        if not groups:
            raise ValueError("a job has no groups")
        return TransferJob(str(fields["request_id"]), groups)

    def _group(
        self, root: str, parent: str, number: int, first_token: int, num_chunks: int, num_blocks: int
    ) -> JobGroup:
        root_key, key, number, token = bytes.fromhex(root), bytes.fromhex(parent), _number(number), _number(first_token)
        at, end = self._num_chunks, self._num_chunks + _number(num_chunks)
        blocks_end = self._num_blocks + _number(num_blocks)
        if not at < end <= len(self._sizes) or not self._num_blocks <= blocks_end <= len(self._block_ids):
            raise ValueError(f"a group has {num_chunks} chunks and {num_blocks} blocks, more than were sent")
        if len(root_key) != KEY_BYTES or len(key) != KEY_BYTES:
            raise ValueError(f"a group's root and parent must be keys of {KEY_BYTES} bytes")
        chunks = []
        for i, num_tokens in enumerate(self._sizes[at:end]):
            if num_tokens < 1:
                raise ValueError(f"a chunk has {num_tokens} tokens; expected at least 1")
            own = self._keys[(at + i) * KEY_BYTES : (at + i + 1) * KEY_BYTES]
            chunks.append(ChunkRef(own, key, number + i, token, num_tokens, root_key))
            key, token = own, token + num_tokens
        block_ids = self._block_ids[self._num_blocks : blocks_end]
        self._num_chunks, self._num_blocks = end, blocks_end
        return JobGroup(tuple(chunks), block_ids)
