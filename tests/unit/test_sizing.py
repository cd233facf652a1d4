"""From measured memory to a number of pages: the arithmetic, its limits, and what is said when it cannot work."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine.sizing import MemoryReport, PagePlan, activation_peak, free_memory, plan_pages
from headwater.errors import EngineConfigError, MemoryBudgetError

GIB = 1 << 30
MIB = 1 << 20
# 0.5 × 10 GiB - 2 GiB of weights - 1 GiB of activations = 2 GiB: 2,048 pages of 1 MiB, one of them the dummy page
USUAL = MemoryReport(10 * GIB, 8 * GIB, GIB)


def plan(*reports: MemoryReport, **changed: Any) -> PagePlan:
    settings: dict[str, Any] = {
        "page_bytes": MIB,
        "memory_ratio": 0.5,
        "page_size": 16,
        "max_model_len": None,
        "model_max_len": 4096,
        "max_num_seqs": 64,
    }
    return plan_pages(reports or [USUAL], **settings | changed)


def test_the_formula() -> None:
    made = plan()
    assert (made.num_pages, made.max_model_len) == (2047, 4096)
    assert made.explanation == (
        "0.5 × 10.0 GiB free before loading - 2.0 GiB taken by loading - 1.0 GiB activation peak = 2.0 GiB for KV; "
        "a page of 16 tokens takes 1.0 MiB; 2,047 pages fit, besides the dummy page"
    )


def test_the_rank_with_the_least_decides_and_each_is_shown() -> None:
    made = plan(USUAL, MemoryReport(10 * GIB, 7 * GIB, GIB))
    assert made.num_pages == 1023
    assert "rank 0: 0.5 × 10.0 GiB" in made.explanation
    assert "rank 1: 0.5 × 10.0 GiB free before loading - 3.0 GiB taken" in made.explanation


def test_what_stands_between_cache_and_pool_is_set_aside() -> None:
    made = plan(staging_bytes=GIB)
    assert made.num_pages == 1023
    assert "- 1.0 GiB between KV and pool = 1.0 GiB for KV" in made.explanation
    assert (
        plan(USUAL, USUAL, shared=True, staging_bytes=GIB // 4, memory_ratio=0.8).num_pages
        == plan(USUAL, USUAL, shared=True, memory_ratio=0.8).num_pages - 256
    )


def test_no_more_pages_than_all_requests_could_use() -> None:
    made = plan(max_num_seqs=3, max_model_len=100)
    assert made.num_pages == 3 * 7
    assert "21 are enough for 3 requests of 100 tokens" in made.explanation


def test_max_model_len_is_lowered_to_what_fits_and_the_reason_given() -> None:
    made = plan(model_max_len=131_072)
    assert (made.num_pages, made.max_model_len) == (2047, 2047 * 16)
    assert "2,047 pages hold 32,752 tokens, so max_model_len is that, not 131,072" in made.explanation
    assert plan(model_max_len=2047 * 16).max_model_len == 2047 * 16


def test_a_given_max_model_len_is_not_lowered() -> None:
    assert plan(max_model_len=2047 * 16, model_max_len=131_072).max_model_len == 2047 * 16
    with pytest.raises(MemoryBudgetError) as refused:
        plan(max_model_len=2047 * 16 + 1, model_max_len=131_072)
    message = str(refused.value)
    assert "one request of 32,753 tokens needs 2,048 pages, there are 2,047" in message
    assert "0.5 × 10.0 GiB free before loading - 2.0 GiB taken by loading - 1.0 GiB activation peak" in message
    assert "a page of 16 tokens takes 1.0 MiB" in message
    for option in ("--memory-ratio", "--max-model-len", "--num-pages"):
        assert option in message


def test_no_room_for_one_page() -> None:
    for report in (MemoryReport(10 * GIB, 5 * GIB, 0), MemoryReport(10 * GIB, 8 * GIB, 3 * GIB - 2 * MIB + 1)):
        with pytest.raises(MemoryBudgetError, match=r"single page of KV.*The arithmetic: .*raise --memory-ratio"):
            plan(report)
    assert plan(MemoryReport(10 * GIB, 8 * GIB, 3 * GIB - 2 * MIB)).num_pages == 1


def test_an_explicit_number_overrides_the_ratio_and_the_cap() -> None:
    assert plan(explicit=7).num_pages == 7
    assert plan(explicit=7).max_model_len == 112
    assert plan(explicit=5000, max_num_seqs=1, max_model_len=16) == PagePlan(
        5000,
        16,
        "8.0 GiB free after loading - 1.0 GiB activation peak = 7.0 GiB for KV; a page of 16 tokens takes 1.0 MiB; "
        "7,167 pages fit, besides the dummy page; 5,000 were asked for",
    )


def test_an_explicit_number_is_still_checked() -> None:
    assert plan(explicit=7167).num_pages == 7167
    with pytest.raises(MemoryBudgetError, match=r"--num-pages 7,168 is more than fits.*7\.0 GiB for KV.*use fewer"):
        plan(explicit=7168)
    with pytest.raises(MemoryBudgetError, match=r"1,600 tokens needs 100 pages, there are 99.*--num-pages to 100"):
        plan(explicit=99, max_model_len=1600)


def test_ranks_that_differ_too_much_are_refused_with_all_numbers() -> None:
    assert plan(USUAL, MemoryReport(int(7.5 * GIB), int(5.5 * GIB), 0)).num_pages == 1791
    with pytest.raises(MemoryBudgetError) as refused:
        plan(USUAL, MemoryReport(7 * GIB, 5 * GIB, 0), USUAL)
    message = str(refused.value)
    assert "rank 0 10.0 GiB, rank 1 7.0 GiB, rank 2 10.0 GiB" in message
    assert "3.0 GiB apart; at most 25% of the larger" in message
    assert plan(USUAL, MemoryReport(7 * GIB, 5 * GIB, 0), explicit=10).num_pages == 10


def test_ranks_on_one_host_share_its_memory() -> None:
    # 5 GiB may be used, loading took 2 GiB of it, both peaks count, and each page is there twice.
    made = plan(USUAL, MemoryReport(9 * GIB, 9 * GIB, GIB), shared=True)
    assert made.num_pages == 511
    assert "1.0 MiB in each of 2 ranks that share this memory" in made.explanation
    assert plan(USUAL, shared=True) == plan(USUAL)


def test_memory_that_others_freed_meanwhile_is_not_counted_on() -> None:
    assert plan(MemoryReport(10 * GIB, 12 * GIB, 0)).num_pages == 5 * 1024 - 1


def test_longer_than_the_model_allows() -> None:
    with pytest.raises(EngineConfigError, match="--max-model-len is 5,000; the model allows at most 4,096"):
        plan(max_model_len=5000)


@given(
    st.lists(
        st.builds(MemoryReport, st.integers(800, 1000), st.integers(100, 800), st.integers(0, 300)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 50),
    st.floats(0.05, 1.0),
    st.integers(1, 20),
    st.none() | st.integers(1, 100),
    st.integers(1, 5),
    st.none() | st.integers(1, 100),
    st.booleans(),
)
def test_no_plan_ever_takes_more_than_there_is(
    reports: list[MemoryReport],
    page_bytes: int,
    ratio: float,
    page_size: int,
    length: int | None,
    seqs: int,
    explicit: int | None,
    shared: bool,
) -> None:
    try:
        made = plan_pages(
            reports,
            page_bytes=page_bytes,
            memory_ratio=ratio,
            page_size=page_size,
            max_model_len=length,
            model_max_len=100,
            max_num_seqs=seqs,
            explicit=explicit,
            shared=shared,
        )
    except MemoryBudgetError:
        return
    size = (made.num_pages + 1) * page_bytes
    for report in reports:
        assert size <= report.free_after - report.activation_peak
        if explicit is None:
            assert size + report.free_before - report.free_after + report.activation_peak <= ratio * report.free_before
    if shared:
        total = len(reports) * size + sum(report.activation_peak for report in reports)
        assert total <= min(report.free_after for report in reports)
    assert made.num_pages * page_size >= made.max_model_len >= 1
    assert made.max_model_len == (length if length is not None else min(100, made.num_pages * page_size))
    assert explicit in (None, made.num_pages)


# ---- measuring ------------------------------------------------------------------------------------------------------
def fake_root(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8388608 kB\n", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 8 * GIB, id="no control groups"),
        pytest.param({"proc/self/cgroup": "0::/\n"}, 8 * GIB, id="v2 without the memory controller"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": f"{4 * GIB}\n",
                f"{V2}/memory.current": f"{3 * GIB}\n",
                f"{V2}/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 7\n",
            },
            2 * GIB,
            id="v2 container, file cache can be dropped",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/a/b/memory.max": "max\n",
                f"{V2}/a/b/memory.current": f"{GIB}\n",
                f"{V2}/a/memory.max": f"{4 * GIB}\n",
                f"{V2}/a/memory.current": f"{3 * GIB}\n",
            },
            GIB,
            id="v2, the limit is further up",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../x\n",
                f"{V2}/memory.max": f"{2 * GIB}\n",
                f"{V2}/memory.current": f"{3 * GIB}\n",
            },
            0,
            id="v2, over its limit, path outside of the namespace",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/docker/abc\n0::/\n",
                f"{V1}/memory.limit_in_bytes": f"{6 * GIB}\n",
                f"{V1}/memory.usage_in_bytes": f"{2 * GIB}\n",
                f"{V1}/memory.stat": f"total_inactive_file {GIB}\n",
            },
            5 * GIB,
            id="v1, the path is the host's",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "2:memory:/\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1}/memory.usage_in_bytes": "1\n",
            },
            8 * GIB,
            id="v1 without a limit",
        ),
    ],
)
def test_free_memory_of_a_cpu(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert free_memory("cpu", root=fake_root(tmp_path, files)) == expected
    assert free_memory(torch.device("cpu"), root=tmp_path) == expected


def test_unknown_memory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="set --num-pages"):
        free_memory("cpu", root=fake_root(tmp_path, {"proc/meminfo": "MemTotal: 5 kB\n"}))


def test_free_memory_here_is_some() -> None:
    assert 10 * MIB < free_memory("cpu") < 1 << 50


def test_a_gpu_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    used = iter([100, 750])

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 7 * GIB, 8 * GIB

    fake = SimpleNamespace(
        mem_get_info=mem_get_info,
        synchronize=lambda device: None,
        reset_peak_memory_stats=lambda device: None,
        memory_allocated=lambda device: next(used),
        max_memory_allocated=lambda device: next(used),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    assert free_memory("cuda:1") == 7 * GIB
    assert asked == [torch.device("cuda:1")]
    assert activation_peak(lambda: None, "cuda:1") == 650


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system keeps no resettable peak")
def test_activation_peak_of_a_cpu_sees_what_was_freed_again() -> None:
    peak = activation_peak(lambda: torch.ones(96 * MIB // 4).sum(), "cpu")
    assert 90 * MIB < peak < 200 * MIB
    assert activation_peak(lambda: None, "cpu") < 32 * MIB
