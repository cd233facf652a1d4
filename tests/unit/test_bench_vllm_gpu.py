"""`headwater bench vllm --device cuda` without a GPU and without vLLM: the figures, the records, and a whole run with
engines that compute nothing but use real processes and real pools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.bench import vllm_fair
from headwater.bench.vllm_engine import EngineProcess
from headwater.bench.vllm_gpu import engines, figures, merge, records, run, sides, stages
from headwater.bench.vllm_gpu.model import LLAMA_8B
from headwater.bench.vllm_gpu.plan import PARTS, SIDES, TRIAL, GpuPlan
from headwater.bench.vllm_gpu.process import LOAD_TIME, BusCommands
from headwater.bench.vllm_gpu.prompts import Prompts, make_prompt
from headwater.bench.vllm_gpu.tiers import FileReader
from headwater.bench.vllm_gpu.timeline import moments, steps_between
from headwater.connector.metrics import POOL_METRICS
from headwater.errors import EngineConfigError, EngineError

import fake_vllm
from support import wait_until

RUN = {
    "kind": "run",
    "format": 1,
    "run": "a",
    "machine": {},
    "machine_id": "m",
    "versions": {"gpu": "H200"},
    "sizes": {"device": "cuda", "is_quick": False},
    "pairs": 9,
}


def measured(measure: str, stage: str, **body: Any) -> dict[str, Any]:
    return {"kind": "measured", "mode": "eager", "measure": measure, "stage": stage, **body}


def hits(stage: str, tokens: int, seconds: dict[str, float], **more: Any) -> dict[str, Any]:
    found = {name: tokens for name in seconds if name not in ("again", "bus")}
    times = {name: [one] * 9 for name, one in seconds.items()}
    return measured("hits", stage, tokens=tokens, seconds=times, found=found) | more


# ---- figures ----------------------------------------------------------------------------------------------------
def test_the_worse_prompt_length_is_the_figure_and_its_noise_the_largest() -> None:
    report = figures.report(
        [
            RUN,
            hits("lmcache", 8192, {"headwater": 0.9, "lmcache": 1.0, "again": 0.9, "bus": 0.2}),
            hits("lmcache", 32768, {"headwater": 0.95, "lmcache": 1.0, "again": 0.96, "bus": 0.2}),
        ]
    )
    assert report["gpu_ttft_vs_lmcache"] == pytest.approx(0.95)
    assert report["bars"]["gpu_ttft_vs_lmcache"]["noise"] == pytest.approx(0.96 / 0.95 - 1)
    assert report["bars"]["gpu_ttft_vs_lmcache"]["verdict"] == "met"
    assert report["modes"]["eager"]["ms"]["hit 8192"]["lmcache"] == pytest.approx(
        {"headwater": 900, "lmcache": 1000, "again": 900, "bus": 200}
    )
    assert report["gpu_ttft_vs_offloading"] is None
    assert report["bars"]["gpu_ttft_vs_offloading"]["verdict"] == "not measured"


def test_times_are_lower_quartiles() -> None:
    record = hits("offloading", 8192, {"headwater": 1, "offloading": 1, "again": 1, "bus": 1})
    record["seconds"]["headwater"] = [9, 9, 9, 9, 9, 9, 1, 1, 1]
    record["seconds"]["offloading"] = [2] * 9
    assert figures.report([RUN, record])["gpu_ttft_vs_offloading"] == 0.5


@pytest.mark.parametrize(
    ("side", "share", "compared"), [("headwater", 0.999, False), ("lmcache", 0.98, True), ("lmcache", 0.9, False)]
)
def test_a_hit_that_was_none_is_not_compared(side: str, share: float, compared: bool) -> None:
    record = hits("lmcache", 8192, {"headwater": 0.9, "lmcache": 1.0, "again": 0.9, "bus": 0.2})
    record["found"][side] = 8192 * share
    report = figures.report([RUN, record])
    assert (report["gpu_ttft_vs_lmcache"] is not None) == compared
    assert bool(report["modes"]["eager"]["notes"]) != compared


def test_of_eager_and_compiled_runs_the_worse_one_counts_and_both_are_told() -> None:
    share = {"hits": {"1024": {"found": 1024, "whole": 1024}, "8192": {"found": 8192, "whole": 8192}}}
    half = {"hits": {"1024": {"found": 1024, "whole": 1024}, "8192": {"found": 4096, "whole": 8192}}}
    report = figures.report(
        [
            RUN,
            measured("share", "lmcache", side="headwater", **share),
            {**measured("share", "lmcache", side="headwater", **half), "mode": "compiled"},
        ]
    )
    assert report["gpu_hit_share"] == 5120 / 9216
    assert report["bars"]["gpu_hit_share"]["verdict"] == "missed"
    assert report["modes"]["eager"]["gpu_hit_share"] == 1.0
    assert report["modes"]["compiled"]["hit_shares"]["headwater"]["8192"] == 0.5


def test_every_figure_is_computed_from_its_record() -> None:
    nine = {name: [value] * 9 for name, value in {"headwater": 2.0, "plain": 1.6, "lmcache": 3.0, "again": 2.0}.items()}
    pair = {name: nine[name] for name in ("headwater", "plain", "again")}
    peers = {name: nine[name] for name in ("headwater", "lmcache", "again")}
    report = figures.report(
        [
            RUN,
            measured("local", "plain", tokens=8192, cold=pair, local={**pair, "plain": [1.0] * 9}),
            measured("local", "lmcache", tokens=8192, cold=nine, local=nine),
            measured("throughput", "plain", seconds=pair),
            measured("reuse", "reuse_plain", seconds={**pair, "plain": [8.0] * 9}, num_tokens=16, found={}),
            measured("reuse", "reuse_lmcache", seconds=peers, num_tokens=16, found={}),
            measured(
                "burst",
                "lmcache",
                tokens=3,
                bytes=120,
                bus_bytes=10,
                found={"headwater": 3},
                seconds={**nine, "bus": [0.1] * 9},
            ),
            measured(
                "tiers",
                "tiers",
                tokens=3,
                bytes=10,
                threads=4,
                found={"headwater": 3},
                seconds={**nine, "file": [1.0] * 9},
            ),
            measured("equal", "lmcache", side="headwater", compared=256, equal=255, not_compared=0),
        ]
    )
    assert report["gpu_cold_cost"] == 1.25
    assert report["gpu_local_cost"] == 2.0
    assert report["gpu_throughput_cost"] == 1.25
    assert report["gpu_reuse_throughput"] == 4.0
    assert report["gpu_reuse_vs_lmcache"] == 1.5
    assert report["modes"]["eager"]["reuse_tokens_per_s"]["reuse_plain"]["plain"] == 2.0
    assert report["gpu_burst_share"] == pytest.approx(0.6)
    assert report["modes"]["eager"]["burst_shares"] == pytest.approx({"headwater": 0.6, "plain": 0.75, "lmcache": 0.4})
    assert report["gpu_tier_share"] == 0.5
    assert report["gpu_tokens_equal"] == 255 / 256
    assert report["bars"]["gpu_tokens_equal"]["verdict"] == "missed"


@pytest.mark.parametrize(("cost", "verdicts"), [(1.05, ["met", "missed"]), (1.2, ["missed"] * 2), (1.02, ["met"] * 2)])
def test_costs_over_plain_vllm_have_bars(cost: float, verdicts: list[str]) -> None:
    seconds = {"headwater": [cost] * 9, "plain": [1.0] * 9, "again": [1.0] * 9}
    report = figures.report(
        [
            RUN,
            measured("local", "plain", tokens=8192, cold=seconds, local=seconds),
            measured("throughput", "plain", seconds=seconds),
        ]
    )
    bars = [report["bars"][name] for name in ("gpu_local_cost", "gpu_throughput_cost")]
    assert bars == [
        {"limit": limit, "noise": 0.0, "verdict": verdict} for limit, verdict in zip((1.1, 1.03), verdicts, strict=True)
    ]


def test_a_record_that_cannot_be_used_costs_no_other_figure() -> None:
    good = hits("offloading", 8192, {"headwater": 0.5, "offloading": 1.0, "again": 0.5, "bus": 0.1})
    report = figures.report([RUN, measured("throughput", "plain", seconds={"plain": [1.0]}), good])
    assert report["gpu_ttft_vs_offloading"] == 0.5
    assert report["gpu_throughput_cost"] is None
    assert "plain throughput" in report["modes"]["eager"]["notes"][0]


def test_a_side_that_was_absent_at_first_and_measured_later_is_not_absent() -> None:
    absent = [{"kind": "absent", "mode": "eager", "side": side, "reason": "no"} for side in ("lmcache", "offloading")]
    record = hits("lmcache", 8192, {"headwater": 0.9, "lmcache": 1.0, "again": 0.9, "bus": 0.2}, sides=["lmcache"])
    assert figures.report([RUN, *absent, record])["absent"] == {"offloading": "no"}


@pytest.mark.parametrize(
    ("limit", "value", "noise", "verdict"),
    [
        (0.95, 0.9, 0.01, "met"),
        (0.95, 0.97, 0.01, "missed"),
        (0.95, 0.9, 0.06, "not judged: too noisy"),
        (1.0, 0.97, 0.01, "met"),
        (1.0, 1.03, 0.01, "missed"),
        (1.0, 1.01, 0.02, "not judged: too noisy"),
        (1.0, 0.99, 0.02, "not judged: too noisy"),
        (None, 1.0, 0.0, "no bar"),
    ],
)
def test_a_bar_nearer_to_one_than_the_noise_is_not_judged(
    limit: float | None, value: float, noise: float, verdict: str
) -> None:
    figure = figures.Figure("ratio", False, limit, "")
    assert figure.judge(value, noise, is_quick=False) == verdict
    assert figure.judge(None, None, is_quick=False) == "not measured"


def test_a_share_of_exactly_one_is_met_without_noise() -> None:
    figure = next(figure for figure in figures.FIGURES if figure.name == "gpu_hit_share")
    assert figure.judge(1.0, None, is_quick=False) == "met"
    assert figure.judge(0.9999, None, is_quick=False) == "missed"
    assert figure.judge(1.0, None, is_quick=True).startswith("not judged")


# ---- records ----------------------------------------------------------------------------------------------------
def test_results_of_a_killed_run_are_read_up_to_the_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "out"
    journal = records.Journal(path, RUN)
    journal.add(measured("share", "lmcache", side="headwater", hits={}))
    with path.open("a") as file:
        file.write('{"kind": "measured", "mode": "ea')
    again = records.Journal(path, {**RUN, "run": "b"})
    assert again.is_done({"mode": "eager", "measure": "share", "stage": "lmcache", "side": "headwater"})
    assert not again.is_done({"mode": "compiled", "measure": "share", "stage": "lmcache", "side": "headwater"})
    assert [record["run"] for record in records.read_records([path]) if record["kind"] != "run"] == ["a"]


def test_a_line_that_was_cut_does_not_swallow_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "out"
    records.Journal(path, RUN)
    with path.open("a") as file:
        file.write('{"kind": "measured", "mode": "ea')
    later = records.Journal(path, {**RUN, "run": "b"})
    later.add(measured("share", "lmcache", side="headwater", hits={}))
    assert [record["run"] for record in records.read_records([path])] == ["a", "b", "b"]


def test_what_was_measured_is_measured_again_only_if_asked(tmp_path: Path) -> None:
    path, key = tmp_path / "out", {"mode": "eager", "measure": "burst", "stage": "lmcache", "tokens": 3}
    records.Journal(path, RUN).add({"kind": "failed", **key, "reason": "no"})
    assert not records.Journal(path, RUN).is_done(key)
    records.Journal(path, RUN).add({"kind": "measured", **key})
    assert records.Journal(path, RUN).is_done(key)
    assert not records.Journal(path, RUN, again=True).is_done(key)
    assert [record["kind"] for record in records.latest(records.read_records([path]))] == ["measured"]


def test_what_was_measured_without_a_side_is_measured_again_with_it(tmp_path: Path) -> None:
    key = {"mode": "eager", "measure": "burst", "stage": "lmcache", "tokens": 3}
    journal = records.Journal(tmp_path / "out", RUN)
    journal.add({"kind": "measured", **key, "sides": ["headwater"]})
    assert journal.is_done({**key, "sides": ["headwater"]})
    assert not journal.is_done({**key, "sides": ["headwater", "lmcache"]})
    journal.add({"kind": "measured", **key, "sides": ["headwater", "lmcache"]})
    assert journal.is_done({**key, "sides": ["headwater", "lmcache"]})
    assert len(records.latest(journal.records)) == 2


def test_of_two_results_the_last_counts() -> None:
    first = hits("offloading", 8192, {"headwater": 0.5, "offloading": 1.0, "again": 0.5, "bus": 0.1})
    second = hits("offloading", 8192, {"headwater": 0.6, "offloading": 1.0, "again": 0.6, "bus": 0.1})
    assert figures.report([RUN, first, RUN, second])["gpu_ttft_vs_offloading"] == 0.6


def test_results_of_two_machines_are_put_together_only_if_asked(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    records.Journal(one, RUN)
    records.Journal(other, {**RUN, "machine_id": "n"}).add(
        hits("offloading", 8192, {"headwater": 0.5, "offloading": 1.0, "again": 0.5, "bus": 0.1})
    )
    with pytest.raises(EngineConfigError, match="another machine"):
        merge([one, other])
    with pytest.raises(EngineConfigError, match="another machine"):
        records.Journal(one, {**RUN, "machine_id": "n"})
    report = merge([one, other], mixed=True)
    assert report["gpu_ttft_vs_offloading"] == 0.5
    assert report["num_machines"] == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no results"),
        ("nonsense\n{}\n", "line 1"),
        (json.dumps({**RUN, "format": 9}) + "\n{}\n", "format 9"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "out"
    path.write_text(text)
    with pytest.raises(EngineConfigError, match=match):
        merge([path])
    with pytest.raises(EngineConfigError, match="cannot be read"):
        merge([tmp_path / "missing"])


# ---- prompts, shapes, sides -------------------------------------------------------------------------------------
def test_prompts_differ_from_the_first_token_on_and_come_again_for_the_same_seed() -> None:
    prompts = Prompts(32000)
    made = [prompts.whole(512) for _ in range(50)]
    assert {len(prompt) for prompt in made} == {513}
    assert len({tuple(prompt[:4]) for prompt in made}) == 50
    assert min(map(min, made)) >= 3
    assert max(map(max, made)) < 32000
    assert make_prompt(7, 100, vocab_size=50) == make_prompt(7, 100, vocab_size=50)


def test_eighty_of_a_hundred_prompts_share_the_prefix_and_all_end_differently() -> None:
    prefix, prompts = Prompts(32000).sharing(100, 0.8, 64, 8)
    begins = [prompt[:64] == prefix for prompt in prompts]
    assert sum(begins) == 80
    assert max(sum(begins[i : i + 10]) for i in range(90)) <= 9
    assert {len(prompt) for prompt in prompts} == {72}
    assert len({tuple(prompt[64:]) for prompt in prompts}) == 100


def test_the_default_shape_has_128_kib_of_kv_a_token_and_the_weights_of_an_8b_model() -> None:
    assert GpuPlan().token_bytes == 128 << 10
    count = sum(size[0] * (size[1] if len(size) > 1 else 1) for _, sizes in LLAMA_8B.files() for size in sizes.values())
    assert 7e9 < count < 8e9
    assert GpuPlan().max_model_len > 32768 + 64


def test_a_checkpoint_is_the_same_for_the_same_seed_and_appears_whole(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from safetensors import safe_open

    from headwater.bench.vllm_gpu import model

    shape = TRIAL.shape
    for name in ("one", "two"):
        model.write_checkpoint(shape, tmp_path / name, dtype="float32", device="cpu")
    assert model.read_shape(tmp_path / "one") == shape
    index = json.loads((tmp_path / "one" / model.INDEX_FILE).read_text())["weight_map"]
    assert index == {name: file for file, sizes in shape.files() for name in sizes}
    for file, sizes in shape.files():
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
        with safe_open(tmp_path / "one" / file, "pt") as tensors:
            assert {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()} == dict(sizes)  # noqa: SIM118
    with pytest.raises(AttributeError):
        model.write_checkpoint(shape, tmp_path / "three", dtype="float33", device="cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_sides_differ_in_their_connector_alone() -> None:
    plan, places = GpuPlan(lmcache_path=Path(__file__).parents[1]), sides.Places(Path("/m"), Path("/t"), 30 << 30)
    with pytest.raises(EngineError, match="no LMCache"):
        sides.make_side(plan, places, "lmcache", sides.BASE)
    made = {name: sides.make_side(plan, places, name, sides.BASE) for name in SIDES if not name.startswith("lmcache")}
    transfers = {name: side.settings.pop("kv_transfer_config", None) for name, side in made.items()}
    assert len({json.dumps(side.settings, sort_keys=True) for side in made.values()}) == 1
    assert transfers["plain"] is None
    assert transfers["offloading"]["kv_connector_extra_config"]["cpu_bytes_to_use"] == 30 << 30
    assert set(transfers["headwater"]["kv_connector_extra_config"]) == {"pool", "sample_weights"}
    assert transfers["headwater_layerwise"]["kv_connector_extra_config"]["load_mode"] == "layerwise"
    assert made["headwater"].pool == made["headwater_layerwise"].pool


def test_lmcache_gets_its_own_packages_and_as_much_memory_as_the_others(tmp_path: Path) -> None:
    (tmp_path / "lmcache").mkdir()
    places = sides.Places(Path("/m"), Path("/t"), 30 << 30)
    side = sides.make_side(GpuPlan(lmcache_path=tmp_path), places, "lmcache", sides.BASE)
    assert side.environment["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "30"
    assert side.environment["LMCACHE_CHUNK_SIZE"] == "256"
    assert side.environment["PYTHONHASHSEED"] == "0"
    assert side.environment["PYTHONPATH"].split(os.pathsep)[1] == str(tmp_path)
    whole = sides.make_side(GpuPlan(lmcache_path=tmp_path), places, "lmcache_v3", sides.BASE)
    assert whole.environment == {**side.environment, "LMCACHE_USE_GPU_CONNECTOR_V3": "True"}


def test_wrong_answers_of_a_peer_are_noted_and_are_not_ours() -> None:
    report = figures.report(
        [
            RUN,
            measured("equal", "lmcache", side="headwater", compared=256, equal=256, not_compared=0),
            measured("equal", "lmcache", side="lmcache", compared=256, equal=9, not_compared=0),
            measured("equal", "lmcache_v3", side="lmcache_v3", compared=256, equal=256, not_compared=0),
        ]
    )
    assert report["gpu_tokens_equal"] == 1.0
    (note,) = report["modes"]["eager"]["notes"]
    assert note.startswith("lmcache: 9 of 256 tokens")


def test_pools_of_killed_runs_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    dead = 2**22 + 12345  # larger than any process number can be
    mine, alive = f"headwater-bench-gpu-{os.getpid()}", f"headwater-bench-gpu-{os.getppid()}"
    names = [
        f"headwater-bench-gpu-{dead}",
        f"headwater-bench-gpu-{dead}-tiers",
        mine,
        f"{mine}-tiers",
        alive,
        "headwater",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    keep = [f"shm:///{mine}?capacity=5"]
    assert len(sides.remove_pools(keep, tmp_path)) == 3
    assert {path.name for path in tmp_path.iterdir()} == {mine, alive, "headwater"}
    sides.remove_pools(root=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive, "headwater"}


def test_an_unknown_side_or_part_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="unknown side vlm; known are plain"):
        GpuPlan(sides=("vlm",))
    with pytest.raises(EngineConfigError, match="unknown part hit;"):
        GpuPlan(parts=("hit",))


# ---- stages -----------------------------------------------------------------------------------------------------
def test_two_engines_live_at_a_time_and_every_part_is_measured_once() -> None:
    found = list(stages.stages(GpuPlan()))
    assert max(len(stage.sides) for stage in found) == 2
    assert {one.part for stage in found for one in stage.measures} == set(PARTS)
    keys = [str(one.record("eager", stage.name, [])) for stage in found for one in stage.measures]
    assert len(keys) == len(set(keys))


def test_only_stages_whose_sides_are_wanted_are_run() -> None:
    assert [stage.name for stage in stages.stages(GpuPlan(sides=("headwater",), parts=("hits", "local")))] == [
        "lmcache",
        "large_steps",
        "default_capacity",
    ]
    only = list(stages.stages(GpuPlan(parts=("throughput",))))
    assert [stage.name for stage in only] == ["plain"]
    assert [one.name for one in only[0].measures] == ["throughput"]
    assert not list(stages.stages(GpuPlan(sides=("plain", "lmcache"))))
    profiles = list(stages.stages(GpuPlan(parts=(), profile=True)))
    assert [stage.name for stage in profiles] == ["profile_headwater", "profile_headwater_layerwise"]


# ---- the timeline -----------------------------------------------------------------------------------------------
def test_a_timeline_tells_a_hit_that_waits_outside_the_batch() -> None:
    events: list[list[Any]] = [["hash ends", 10.001, 0], ["request begins", 10.0, 0], ["request ends", 10.002, 0]]
    events += [["match ends", 10.003, -1], ["match ends", 10.004, 8192], ["allocation ends", 10.005, 8192]]
    events += [["schedule begins", 10.0025, 0], ["schedule ends", 10.006, 0]]
    events += [["load call begins", 10.007, 0], ["load call ends", 10.008, 0], ["arrival ends", 10.030, 1]]
    events += [["schedule begins", 10.031, 1], ["schedule ends", 10.032, 1], ["execute begins", 10.033, 1]]
    events += [["execute ends", 10.040, 1], ["sample ends", 10.041, 0], ["answer ends", 10.050, 1]]
    rows = {moment.what: round(moment.ms, 3) for moment in moments(events, load_seconds=0.02)}
    assert rows == {
        "request added": 0,
        "prompt hashed": 1,
        "matched (asked 2 times)": 4,
        "blocks allocated, load ordered": 5,
        "load begins on the worker": 7,
        "load call returns": 8,
        "load ends, by the worker's clock": 27,
        "load seen by the engine": 30,
        "step that computes: scheduling begins": 31,
        "step that computes: scheduled": 32,
        "step that computes: model begins": 33,
        "step that computes: model launched": 40,
        "sampling launched": 41,
        "first token out (1 steps without work)": 50,
    }
    assert [round(since, 3) for _, _, since in steps_between(moments(events))][:4] == [0, 1, 3, 1]
    assert moments([]) == []


def test_the_time_of_a_load_is_one_of_the_connectors_metrics() -> None:
    assert LOAD_TIME in {f"{metric.name}_sum" for metric in POOL_METRICS if metric.kind == "histogram"}


def test_a_timeline_tells_a_load_that_goes_along_with_its_step() -> None:
    events: list[list[Any]] = [["request begins", 1.0, 0], ["match ends", 1.002, 512], ["allocation ends", 1.003, 512]]
    events += [["schedule begins", 1.001, 1], ["schedule ends", 1.004, 1], ["execute begins", 1.005, 1]]
    events += [["load call begins", 1.006, 0], ["load call ends", 1.007, 0], ["execute ends", 1.02, 1]]
    rows = [moment.what for moment in moments(events)]
    assert rows[1] == "step that computes: scheduling begins"
    assert "load seen by the engine" not in rows
    assert rows[-1] == "step that computes: model launched"


# ---- reading a file ---------------------------------------------------------------------------------------------
def test_the_file_is_read_whole_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.bench.vllm_gpu.tiers.PIECE_BYTES", 1000)
    files = []
    for number, size in enumerate((2500, 4000)):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(os.urandom(size))
    reader = FileReader(files, 6000, 3)
    assert reader.read() > 0
    wanted = files[0].read_bytes() + files[1].read_bytes()[:3500]
    pieces = [wanted[:2500][i : i + 1000] for i in range(0, 2500, 1000)]
    pieces += [wanted[2500:][i : i + 1000] for i in range(0, 3500, 1000)]
    got = [bytes(buffer) for buffer in reader._buffers]
    assert got == [b"".join(pieces[first::3]) for first in range(3)]
    with pytest.raises(EngineError, match="500 bytes less"):
        FileReader(files, 7000, 3)


# ---- the processes ----------------------------------------------------------------------------------------------
def test_an_engine_does_not_outlive_a_benchmark_that_was_killed(tmp_path: Path) -> None:
    start = "from pathlib import Path; from headwater.bench.vllm_gpu.engines import start_bus"
    script = f"{start}; print(start_bus(Path({str(tmp_path / 'log')!r}), 'cpu').pid, flush=True); input()"
    environment = {**os.environ, "PYTHONPATH": str(Path(figures.__file__).parents[3])}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = Path("/proc", parent.stdout.readline().strip(), "stat")
        assert child.exists()
        parent.kill()
    wait_until(lambda: not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_process_that_was_never_begun_is_ended(tmp_path: Path) -> None:
    process = EngineProcess(tmp_path / "log", {}, command=("headwater.bench.vllm_process",), begin=False)
    process.close()
    assert process._process.returncode is not None
    process.close()


def test_a_process_that_does_not_start_says_why_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_vllm.__file__).parent))
    settings = {"enable_prefix_caching": True, "faults": {"plain": "start"}}
    process = EngineProcess(tmp_path / "log", settings, command=("fake_vllm", "engine", "0"), begin=False)
    with pytest.raises(RuntimeError, match="plain cannot start"):
        process.begin(30)
    assert process._process.returncode is not None


def test_the_bus_copies_as_many_bytes_as_it_is_told() -> None:
    pytest.importorskip("torch")
    bus = BusCommands({"device": "cpu"})
    assert bus.describe()["gpu"] is None
    assert bus.copy(1000) > 0
    assert bus.copy(5000) > 0
    assert bus._there.numel() == 5000


# ---- whole runs, with engines that compute nothing ---------------------------------------------------------------
@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GpuPlan:
    """A plan whose engines are those of `fake_vllm`, all of them there."""
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_vllm.__file__).parent))
    monkeypatch.setattr(engines, "_MODULE", "fake_vllm")
    monkeypatch.setattr(engines, "STALL_S", 1.0)
    monkeypatch.setattr(vllm_fair, "LOOK_S", 0.01)
    offloading = sides._offloading
    monkeypatch.setitem(
        sides._CONNECTORS,
        "offloading",
        lambda side, plan, places: offloading(side, replace(plan, device="cuda"), places),
    )
    (tmp_path / "lmcache").mkdir()
    return replace(TRIAL, lmcache_path=tmp_path, out=tmp_path / "out.jsonl")


def left_behind() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f"headwater-bench-gpu-{os.getpid()}" in name]


@pytest.mark.slow
def test_a_whole_run_measures_every_figure_and_leaves_nothing(fake: GpuPlan) -> None:
    notes: list[str] = []
    report = run(replace(fake, profile=True), notes.append)
    assert report["failures"] == [], notes
    assert report["absent"] == {}, notes
    assert report["interrupted"] is False
    assert all(report[figure.name] is not None for figure in figures.FIGURES), report

    def ratio(name: str, other: str, tokens: int) -> float:
        ours, theirs = (fake_vllm.BASE_S + fake_vllm.SECONDS_HIT[one] * tokens for one in (name, other))
        return ours / theirs

    assert report["gpu_hit_share"] == 1.0
    assert report["gpu_tokens_equal"] == 1.0
    assert report["gpu_ttft_vs_lmcache"] == pytest.approx(ratio("headwater", "lmcache", 512))
    assert report["gpu_ttft_vs_lmcache_layerwise"] == pytest.approx(ratio("headwater_layerwise", "lmcache", 512))
    assert report["gpu_ttft_vs_offloading"] == pytest.approx(ratio("headwater", "offloading", 512))
    assert report["gpu_local_cost"] == pytest.approx((1e-3 + 3e-6 * 1024) / (1e-3 + 1e-6 * 1024))
    assert report["gpu_throughput_cost"] == pytest.approx(1.0)
    burst = fake.burst_prompts * fake.burst_tokens
    rate = burst * fake.token_bytes / (1e-3 + 2e-6 * burst)
    assert report["gpu_burst_share"] == pytest.approx(rate / fake_vllm.BUS_BYTES_A_SECOND)
    assert report["gpu_reuse_throughput"] > 2
    assert report["modes"]["eager"]["tokens_equal"]["headwater"] == {"compared": 16, "equal": 16, "not_compared": 0}
    assert report["modes"]["eager"]["hit_shares"].keys() == {
        "headwater",
        "headwater_layerwise",
        "headwater@large_steps",
        "headwater@default_capacity",
    }
    assert report["modes"]["eager"]["profile"]["headwater@profiled"]["512"]["timeline"][0] == ["request added", 0.0]
    assert {bar["verdict"] for bar in report["bars"].values()} == {"no bar", "not judged: too small a run"}
    assert left_behind() == []
    assert fake.out is not None
    assert merge([fake.out])["gpu_burst_share"] == report["gpu_burst_share"]


@pytest.mark.slow
def test_a_second_run_goes_on_where_the_first_ended(fake: GpuPlan) -> None:
    assert fake.out is not None
    first = run(replace(fake, parts=("throughput",)), lambda text: None)
    assert first["gpu_throughput_cost"] is not None
    assert first["gpu_local_cost"] is None
    notes: list[str] = []
    second = run(replace(fake, parts=("throughput", "local"), sides=("plain", "headwater")), notes.append)
    assert second["gpu_throughput_cost"] == first["gpu_throughput_cost"]
    assert second["gpu_local_cost"] is not None
    assert not [note for note in notes if "throughput" in note]
    num_lines = len(fake.out.read_text().splitlines())
    notes.clear()
    run(replace(fake, parts=("throughput", "local"), sides=("plain", "headwater")), notes.append)
    assert "plain: measured before" in notes
    assert not [note for note in notes if "started" in note]
    assert len(fake.out.read_text().splitlines()) == num_lines + 1, "only that there was a run"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["start", "die", "raise"])
def test_a_side_that_fails_is_told_and_the_rest_goes_on(fake: GpuPlan, fault: str) -> None:
    plan = replace(fake, parts=("hits",), more_settings={"faults": {"offloading": fault}})
    report = run(plan, lambda text: None)
    assert report["gpu_ttft_vs_offloading"] is None
    assert report["gpu_ttft_vs_lmcache"] is not None
    assert report["gpu_hit_share"] == 1.0
    if fault == "start":
        assert "cannot start" in report["absent"]["offloading"]
    else:
        told = [failure for failure in report["failures"] if failure["stage"] == "offloading"]
        assert [failure["tokens"] for failure in told] == [512, 1024]
        assert ("as it was told" if fault == "raise" else "has ended") in told[0]["reason"]
    assert left_behind() == []


@pytest.mark.slow
def test_lost_tokens_are_seen_and_what_is_no_hit_is_not_timed_as_one(fake: GpuPlan) -> None:
    plan = replace(
        fake, parts=("hits",), sides=("headwater", "lmcache"), more_settings={"faults": {"headwater": "half"}}
    )
    report = run(plan, lambda text: None)
    assert report["gpu_hit_share"] == pytest.approx(512 / 1280)
    assert report["gpu_ttft_vs_lmcache"] is None
    assert any("found only" in note for note in report["modes"]["eager"]["notes"])
    assert report["modes"]["eager"]["tokens_equal"]["headwater"]["not_compared"] == 16


@pytest.mark.slow
def test_tokens_that_differ_are_counted(fake: GpuPlan) -> None:
    plan = replace(fake, parts=("hits",), sides=("headwater",), more_settings={"faults": {"headwater": "differ"}})
    report = run(plan, lambda text: None)
    assert report["modes"]["eager"]["tokens_equal"]["headwater"] == {"compared": 16, "equal": 14, "not_compared": 0}
    assert report["gpu_tokens_equal"] == 14 / 16


@pytest.mark.slow
def test_a_cache_that_is_not_forgotten_is_a_failure_and_no_hit(fake: GpuPlan) -> None:
    plan = replace(fake, parts=("hits",), sides=("headwater",), more_settings={"faults": {"headwater": "never reset"}})
    report = run(plan, lambda text: None)
    assert report["gpu_hit_share"] is None
    assert "does not give up its prefix cache" in report["failures"][0]["reason"]
    assert "left out after failures" in report["failures"][2]["reason"]


@pytest.mark.slow
def test_nothing_is_begun_that_would_not_end_in_time(fake: GpuPlan) -> None:
    notes: list[str] = []
    report = run(replace(fake, seconds=20.0, is_quick=False), notes.append)
    assert all(report[figure.name] is None for figure in figures.FIGURES)
    assert any("is not enough" in note for note in notes)
    assert not [note for note in notes if "started" in note]


@pytest.mark.slow
def test_an_interrupted_run_reports_what_it_has_and_stops_its_engines(fake: GpuPlan) -> None:
    seen: list[str] = []

    def note(text: str) -> None:
        seen.append(text)
        if "hits 512" in text:
            os.kill(os.getpid(), 15)

    report = run(replace(fake, parts=("hits",), sides=("headwater", "lmcache")), note)
    assert report["interrupted"] is True
    assert report["gpu_ttft_vs_lmcache"] is not None
    assert not [one for one in seen if "hits 1,024" in one]
    assert left_behind() == []
