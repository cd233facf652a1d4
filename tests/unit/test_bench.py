"""The benchmark runs and reports; how fast it came out is not a test's business."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headwater.bench import fleet, packed_link, push, push_hosts, push_layers, push_nixl, store, vllm_handoff
from headwater.cli import run as run_cli
from headwater.errors import InvalidArgumentError, StoreError
from headwater.stores.embedded import store_directory
from headwater.stores.url import parse_url

FIGURES = [
    "read_gbps",
    "write_gbps",
    "memcpy_gbps",
    "read_vs_ceiling",
    "write_vs_ceiling",
    "read_gbps_2t",
    "write_gbps_2t",
]
FIGURES += ["hash_ms", "match_ms", "match_ratio", "overhead_ratio", "import_ms", "file_read_gbps", "file_write_gbps"]


@pytest.mark.slow
def test_a_quick_run_reports_every_figure_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []
    opened = store.open_pool
    monkeypatch.setattr(store, "open_pool", lambda url: (urls.append(url), opened(url))[1])
    report = store.run(store.QUICK)
    assert all(report[name] > 0 for name in FIGURES), report
    assert report["import_torch"] is False
    assert report["verified_clean"] is True
    assert report["match_chunks"] >= 4000
    assert report["redis_read_gbps"] or report["redis_reason"]
    for name in ("redis", "mooncake"):
        assert report[f"{name}_read_ratio"] or report[f"{name}_remote_reason"]
        assert report[f"{name}_write_ratio"] or report[f"{name}_remote_reason"]
    ratios = {f"{name}_{verb}_ratio" for name in ("redis", "mooncake") for verb in ("read", "write")}
    assert set(report["bars"]) == {"read_vs_ceiling", "write_vs_ceiling", "match_ratio", "overhead_ratio"} | ratios
    assert len(urls) == 3
    assert not any(Path(store_directory(parse_url(url))).exists() for url in urls)


def test_an_existing_pool_is_not_emptied(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="exists already"):
        store.run(store.StoreBench(url=f"file://{tmp_path}", tiles_bytes=8 << 20, num_chunks=1, pairs=1, redis=False))


def test_a_bar_nearer_to_one_than_the_noise_is_not_judged() -> None:
    bar = store.Bar("ratio", True, 0.9, "noise")
    assert bar.judge({"ratio": 0.95, "noise": 0.01}) == "met"
    assert bar.judge({"ratio": 0.85, "noise": 0.01}) == "missed"
    assert bar.judge({"ratio": 0.85, "noise": 0.2}).startswith("not judged")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server on the PATH")
def test_fleet_smoke() -> None:
    report = fleet.run(fleet.QUICK)
    assert report["wrong_bytes"] == 0
    assert report["detected"] == report["injected"] == 60
    assert 10 < report["injected_packed"] < 50
    assert report["compared_tiles"] > 0
    assert report["verified_clean"]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("headwater-fleet-")]


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or None in [shutil.which(name) for name in ("ip", "tc", "redis-server")],
    reason="a limited link needs root, ip and tc, and a Redis server",
)
def test_a_quick_run_through_a_limited_link_reports_every_figure_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    report = packed_link.run(packed_link.QUICK, lambda text: None)
    ways = {way: report[f"packed_{way}_1g"] for way in packed_link.WAYS}
    assert min(ways.values()) > 0
    assert report["packed_fetch_1g"] == max(ways.values())
    assert report["packed_fetch_worst_1g"] in ways
    assert 0.74 < report["packed_size_ratio"] < 0.8
    assert report["link_gbps_1g"] > 0
    made = [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("hwbench-")]
    assert not [name for name in made if not os.path.exists(f"/proc/{name.split('-')[1]}")], "not others' that run now"
    mine = re.compile(rf"10\.78\.{os.getpid() % 250}\.")
    for line in subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout.split("\n"):
        if line.startswith("hwb"):
            shown = subprocess.run(["ip", "-n", line.split()[0], "addr"], check=False, capture_output=True, text=True)
            assert not mine.search(shown.stdout), f"{line} is left"


def test_a_run_of_peers_without_time_says_so() -> None:
    report = push_layers.bench_layers(push_layers.LayersCase(), 0, lambda text: None)
    assert report["push_layerwise_reason"] == "there was no time left"
    assert [report[figure] for figure in push_layers.FIGURES] == [None] * len(push_layers.FIGURES)


def test_hosts_that_cannot_be_made_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    report = push_hosts.bench_hosts(push.QUICK.hosts, 1, lambda text: None)
    assert report["hosts_reason"] == "network namespaces need root and `ip`, a limited link also `tc`"
    assert [report[figure] for figure in push_hosts.FIGURES] == [None] * len(push_hosts.FIGURES)


@pytest.mark.slow
def test_layers_that_decode_did_not_get_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the transfer needs torch")
    from headwater.bench.push_decode import BenchCache

    monkeypatch.setattr(BenchCache, "digest", lambda self: "another")
    with pytest.raises(StoreError, match="other bytes"):
        push_layers.bench_layers(push.QUICK.layers, 1, lambda text: None)


@pytest.mark.slow
def test_a_quick_run_of_peers_reports_every_figure_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    report = push.run(push.QUICK, lambda text: None)
    for case in push.QUICK.cases:
        assert report[f"push_ratio_{case.name}"] > 0
        assert report[f"push_gbps_{case.name}"] > 0
        assert report[f"push_noise_{case.name}"] >= 0
    assert report["push_layerwise_reason"] is None
    for figure in push_layers.FIGURES:
        assert report[figure] >= 0
    assert report["push_layerwise_ratio"] > 0
    for figures, reason in ((push_nixl.FIGURES, "nixl_reason"), (push_hosts.FIGURES, "hosts_reason")):
        assert all(report[figure] is None if report[reason] else report[figure] >= 0 for figure in figures)
    assert report["step_cost"] > 0
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("hwbench")]


def test_what_is_missing_for_vllm_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(vllm_handoff, "find_spec", lambda name: None)
    assert run_cli(("bench", "peers", "--vllm", "--json")) == 1
    shown = capsys.readouterr()
    assert "vLLM is not installed in this environment" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["kind"] == "EngineConfigError"


def test_the_handoff_is_shown_to_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"ttft_headwater_s": 1.25, "ttft_nixl_s": 2.5, "after_prefill_headwater_s": -0.01}
    figures |= {"after_prefill_nixl_s": 0.125, "ttft_vs_nixl": 0.5, "ttft_noise": 0.03, "prompt_len": 512}
    figures |= {"killed_tokens_headwater": 4, "killed_tokens_nixl": 0}
    monkeypatch.setattr(vllm_handoff, "why_not", lambda: None)
    monkeypatch.setattr(vllm_handoff, "run", lambda plan, note: figures)
    assert run_cli(("bench", "peers", "--vllm", "--quick")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert ["headwater", "1.250", "-0.010", "4", "of", "4"] in lines
    assert ["nixl", "2.500", "0.125", "0", "of", "4"] in lines
    assert ["ttft_vs_nixl", "0.50", "(noise", "0.03)"] in lines
