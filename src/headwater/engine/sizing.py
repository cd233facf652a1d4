"""How many pages the KV cache gets: measuring memory, and the arithmetic from measurements to a number of pages.

The arithmetic is pure, and its result explains itself; a budget that cannot work is refused with all of its numbers.
What one page weighs is said by `kvcache`.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headwater.errors import EngineConfigError, MemoryBudgetError
from headwater.stores.host import memory_limits, read_field
from headwater.stores.url import format_size

if TYPE_CHECKING:
    import torch

MAX_RANK_DIFFERENCE = 0.25
"""Ranks get equal caches, so a rank with less free memory than this part below the best wastes the others'."""


class MemoryReport(NamedTuple):
    """What one rank measured, in bytes."""

    free_before: int
    """Free on its device before the weights were loaded …"""
    free_after: int
    """… and after."""
    activation_peak: int
    """The most that a step took on top of the weights."""


class PagePlan(NamedTuple):
    """What was decided, and why."""

    num_pages: int
    """For requests; the cache adds its dummy page, which is already paid for."""
    max_model_len: int
    explanation: str


class _Room(NamedTuple):
    """Bytes for KV on one rank (or on one host that ranks share), and how that came about."""

    num_bytes: int
    arithmetic: str


def plan_pages(
    reports: Sequence[MemoryReport],
    *,
    page_bytes: int,
    memory_ratio: float,
    page_size: int,
    max_model_len: int | None,
    model_max_len: int,
    max_num_seqs: int,
    explicit: int | None = None,
    shared: bool = False,
    staging_bytes: int = 0,
) -> PagePlan:
    """Choose the number of pages, the same for every rank, from one report of each.

    On each rank, KV gets `memory_ratio` of what was free before loading, less what loading took, less the activation
    peak; the rank with the least decides. No more pages are taken than `max_num_seqs` requests of full length could
    use. `explicit` overrides all that, as long as it fits into what is free. `max_model_len=None` means
    `model_max_len`, or less where that does not fit. `shared`: all ranks take from one memory, as on a CPU.
    `staging_bytes`: what each rank will take later for KV on its way to and from the pool.

    Raises MemoryBudgetError, with the arithmetic, where not even one request fits or ranks differ too much, and
    EngineConfigError for a `max_model_len` that the model does not have.
    """
    if max_model_len is not None and max_model_len > model_max_len:
        raise EngineConfigError(f"--max-model-len is {max_model_len:,}; the model allows at most {model_max_len:,}")
    page = f"a page of {page_size} tokens takes {format_size(page_bytes)}"
    if shared and len(reports) > 1:
        page += f" in each of {len(reports)} ranks that share this memory"
        page_bytes, staging_bytes = page_bytes * len(reports), staging_bytes * len(reports)
        reports = [_merged(reports)]
    if explicit is None:
        _check_alike(reports)
    rooms = [_room(report, memory_ratio if explicit is None else None, staging_bytes) for report in reports]
    # One page of what fits is the dummy page.
    fits = max(0, min(room.num_bytes for room in rooms) // page_bytes - 1)
    lines = [*_labelled(rooms), page, f"{fits:,} pages fit, besides the dummy page"]
    wanted_len = model_max_len if max_model_len is None else max_model_len
    pages_per_request = -(-wanted_len // page_size)

    if explicit is not None:
        num_pages = explicit
        lines.append(f"{explicit:,} were asked for")
        if explicit > fits:
            problem = f"--num-pages {explicit:,} is more than fits"
            raise MemoryBudgetError(_refusal(problem, lines, ["use fewer", "leave --num-pages out"]))
    else:
        num_pages = min(fits, max_num_seqs * pages_per_request)
        if num_pages < fits:
            lines.append(f"{num_pages:,} are enough for {max_num_seqs} requests of {wanted_len:,} tokens")

    if num_pages < (1 if max_model_len is None else pages_per_request):
        problem = f"one request of {wanted_len:,} tokens needs {pages_per_request:,} pages, there are {num_pages:,}"
        changes = ["lower --max-model-len", "raise --memory-ratio", "set --num-pages, which may use all that is free"]
        if max_model_len is None:
            problem, changes = "there is no room for a single page of KV", changes[1:]
        elif explicit is not None:
            changes = ["lower --max-model-len", f"raise --num-pages to {pages_per_request:,}"]
        raise MemoryBudgetError(_refusal(problem, lines, changes))
    chosen_len = min(wanted_len, num_pages * page_size)
    if chosen_len < wanted_len:
        lines.append(f"{num_pages:,} pages hold {chosen_len:,} tokens, so max_model_len is that, not {wanted_len:,}")
    return PagePlan(num_pages, chosen_len, "; ".join(lines))


def _room(report: MemoryReport, memory_ratio: float | None, staging_bytes: int) -> _Room:
    """What is left for KV of the part of memory we may use, or (no ratio) of all there is."""
    peak = report.activation_peak
    if memory_ratio is None:
        num_bytes = report.free_after - peak
        before = f"{format_size(report.free_after)} free after loading"
    else:
        taken = max(0, report.free_before - report.free_after)
        num_bytes = int(memory_ratio * report.free_before) - taken - peak
        before = f"{memory_ratio:g} × {format_size(report.free_before)} free before loading"
        before += f" - {format_size(taken)} taken by loading"
    before += f" - {format_size(peak)} activation peak"
    if staging_bytes:
        num_bytes -= staging_bytes
        before += f" - {format_size(staging_bytes)} between KV and pool"
    return _Room(num_bytes, f"{before} = {format_size(num_bytes)} for KV")


def _merged(reports: Sequence[MemoryReport]) -> MemoryReport:
    """Ranks that share a host see the same memory, at slightly different moments, and all of their peaks add up."""
    return MemoryReport(
        max(report.free_before for report in reports),
        min(report.free_after for report in reports),
        sum(report.activation_peak for report in reports),
    )


def _labelled(rooms: list[_Room]) -> list[str]:
    if len(rooms) == 1:
        return [room.arithmetic for room in rooms]
    return [f"rank {rank}: {room.arithmetic}" for rank, room in enumerate(rooms)]


def _check_alike(reports: Sequence[MemoryReport]) -> None:
    free = [report.free_before for report in reports]
    if max(free) - min(free) <= MAX_RANK_DIFFERENCE * max(free):
        return
    each = ", ".join(f"rank {rank} {format_size(number)}" for rank, number in enumerate(free))
    raise MemoryBudgetError(
        f"ranks have too different amounts of free memory before loading: {each}. They are "
        f"{format_size(max(free) - min(free))} apart; at most {MAX_RANK_DIFFERENCE:.0%} of the larger is allowed, "
        "since all get equal caches. Stop what else uses those devices, choose others, or set --num-pages"
    )


def _refusal(problem: str, lines: list[str], changes: list[str]) -> str:
    return f"{problem}. The arithmetic: {'; '.join(lines)}. What can be done: {', or '.join(changes)}"


# ---- measuring ------------------------------------------------------------------------------------------------------
def free_memory(device: torch.device | str, *, root: Path = Path("/")) -> int:
    """Bytes that this process could still allocate on `device`.

    On a CPU the smaller of what the machine has and what the process's control groups leave; `root` is where `proc`
    and `sys` are found.
    """
    kind = device if isinstance(device, str) else device.type
    if kind.partition(":")[0] == "cpu":
        return min([_available(root), *(max(0, group.limit - group.used) for group in memory_limits(root=root))])
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def activation_peak(run: Callable[[], object], device: torch.device | str) -> int:
    """The most bytes that `run` had allocated at once, on top of what was there before it.

    On a CPU this is resident memory, to the page; memory that the allocator kept from earlier runs is not seen again.
    """
    kind = device if isinstance(device, str) else device.type
    if kind.partition(":")[0] == "cpu":
        return _resident_peak(run)
    import torch

    where = torch.device(device)
    torch.cuda.synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_allocated(where)
    run()
    torch.cuda.synchronize(where)
    return int(torch.cuda.max_memory_allocated(where) - before)


def _resident_peak(run: Callable[[], object]) -> int:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except OSError:
        pass  # not allowed here: then a peak below an earlier one is not seen, and the memory ratio must cover it
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    number = read_field(Path("/proc/self/status"), f"{name}:")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if number is None else number * 1024


def _available(root: Path) -> int:
    kib = read_field(root / "proc/meminfo", "MemAvailable:")
    if kib is None:
        raise MemoryBudgetError("no MemAvailable in /proc/meminfo: cannot tell how much is free; set --num-pages")
    return kib * 1024
