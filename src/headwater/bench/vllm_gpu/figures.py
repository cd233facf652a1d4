"""From records to figures: ratios of lower quartiles, their noise, and whether bars are met. Pure.

Every ratio comes from one record, whose sides took turns; nothing is divided by what another run measured. Of several
prompt lengths, and of eager and compiled runs, the worse one is the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headwater.bench.measure import Rounds
from headwater.bench.vllm_gpu.plan import HEADWATER, LAYERWISE, LMCACHE, LMCACHE_V3, OFFLOADING, PACKED, PLAIN, UNPACKED
from headwater.bench.vllm_gpu.records import ABSENT, FAILED, MEASURED, RUN, Record, latest

PEER_LEAST = 0.97
"""Of a prompt's tokens another connector must find to be compared; Headwater must find all."""
AGAIN = "again"
BUS = "bus"
FILE = "file"
MODES = ("eager", "compiled")
PROFILE = "profile"


class Figure(NamedTuple):
    """One field of the report, and its bar if it has one."""

    name: str
    at_least: bool
    """Whether more is better."""
    limit: float | None
    what: str

    def worse(self, values: Sequence[float]) -> float:
        """The one that counts."""
        return min(values) if self.at_least else max(values)

    def judge(self, value: float | None, noise: float | None, *, is_quick: bool) -> str:
        """`met`, `missed`, or why neither is said. A bar closer to 1 than the noise is not judged; of a bar that is 1,
        a figure that is closer to it than the noise."""
        if value is None:
            return "not measured"
        if self.limit is None:
            return "no bar"
        if is_quick:
            return "not judged: too small a run"
        distance = abs(value - 1) if self.limit == 1 else abs(self.limit - 1)
        if noise is not None and distance <= noise:
            return "not judged: too noisy"
        return "met" if (value >= self.limit if self.at_least else value <= self.limit) else "missed"


FIGURES = (
    Figure("gpu_hit_share", True, 1.0, "tokens found, of the whole chunks of prompts"),
    Figure("gpu_ttft_vs_lmcache", False, 1.0, "first token of a pool hit, over LMCache's"),
    Figure("gpu_ttft_vs_lmcache_v3", False, 1.0, "the same, over LMCache's with use_gpu_connector_v3"),
    Figure("gpu_ttft_vs_lmcache_layerwise", False, 0.95, "the same, loaded layer by layer"),
    Figure("gpu_ttft_vs_offloading", False, 0.95, "first token of a pool hit, over OffloadingConnector's"),
    Figure("gpu_packed_ttft_vs_raw", False, None, "first token of a pool hit with packing=on, over packing=off"),
    Figure("gpu_packed_gain_ms", True, 12.0, "how much sooner that is, of the longest prompt, ms"),
    Figure("gpu_local_cost", False, 1.10, "first token of a local hit after a prefill, over plain vLLM's"),
    Figure("gpu_cold_cost", False, None, "first token of a computed prompt, over plain vLLM's"),
    Figure("gpu_throughput_cost", False, 1.03, "time of prompts that share nothing, over plain vLLM's"),
    Figure("gpu_reuse_throughput", True, None, "tokens/s of requests that share a prefix, over plain vLLM's"),
    Figure("gpu_reuse_vs_lmcache", True, None, "the same, over LMCache's"),
    Figure("gpu_burst_share", True, 0.8, "bytes/s of many hits at once, over the bus alone"),
    Figure("gpu_tier_share", True, 0.8, "bytes/s of a hit in a file, over reading the file alone"),
    Figure("gpu_tokens_equal", True, 1.0, "tokens of a pool hit that equal a local hit's"),
)


def report(records: Sequence[Record]) -> dict[str, Any]:
    """Everything the records say; plain data for JSON. At least one of them must be of a run."""
    runs = [record for record in records if record["kind"] == RUN]
    last = latest(records)
    modes = {mode: found for mode in MODES if (found := _mode(last, mode))}
    is_quick = any(run["sizes"]["is_quick"] for run in runs)
    made: dict[str, Any] = {"bench": "vllm", "device": runs[-1]["sizes"]["device"], **runs[-1]["versions"]}
    made |= {"machine": runs[-1]["machine"], "num_machines": len({run["machine_id"] for run in runs})}
    made |= {"sizes": runs[-1]["sizes"], "pairs": runs[-1]["pairs"]}
    made["bars"] = {}
    for figure in FIGURES:
        name = figure.name
        values = [mode[name] for mode in modes.values() if name in mode]
        value = figure.worse(values) if values else None
        noise = max((mode["noise"][name] for mode in modes.values() if name in mode["noise"]), default=None)
        made[name] = value
        verdict = figure.judge(value, noise, is_quick=is_quick)
        made["bars"][name] = {"limit": figure.limit, "noise": noise, "verdict": verdict}
    made["modes"] = modes
    present = {side for record in last if record["kind"] == MEASURED for side in record.get("sides", ())}
    made["absent"] = {
        record["side"]: record["reason"]
        for record in last
        if record["kind"] == ABSENT and record["side"] not in present
    }
    made["failures"] = [
        {name: record.get(name) for name in ("mode", "stage", "measure", "tokens", "side", "reason")}
        for record in last
        if record["kind"] == FAILED
    ]
    return made


def _mode(records: Sequence[Record], mode: str) -> dict[str, Any]:
    """Figures, their noise and the raw times of eager or of compiled runs; empty where there were none."""
    measured = [record for record in records if record["kind"] == MEASURED and record["mode"] == mode]
    found: dict[str, Any] = {"noise": {}, "ms": {}, "notes": []}
    for record in measured:
        try:
            _MEASURES[record["measure"]](record, found)
        except (ArithmeticError, LookupError, ValueError) as error:  # the other figures are not lost for it
            what = " ".join(str(record.get(name)) for name in ("stage", "measure", "tokens"))
            found["notes"].append(f"{what}: cannot be used: {type(error).__name__}: {error}")
    return found if measured else {}


# ---- one record -------------------------------------------------------------------------------------------------
def _put(found: dict[str, Any], name: str, value: float, noise: float | None = None) -> None:
    """Note a figure, unless another record was worse already."""
    figure = next(figure for figure in FIGURES if figure.name == name)
    found[name] = figure.worse([value, found[name]]) if name in found else value
    if noise is not None:
        found["noise"][name] = max(noise, found["noise"].get(name, 0.0))


def _times(found: dict[str, Any], record: Record, rounds: Rounds, what: str) -> None:
    """Milliseconds, by what was measured beside what."""
    label = f"{what} {record['tokens']}" if record.get("tokens") else what
    row = found["ms"].setdefault(label, {}).setdefault(record["stage"], {})
    row |= {name: 1000 * rounds.time(name) for name in rounds.seconds}


_TTFT = {
    LMCACHE: (HEADWATER, LMCACHE, "gpu_ttft_vs_lmcache"),
    LMCACHE_V3: (HEADWATER, LMCACHE_V3, "gpu_ttft_vs_lmcache_v3"),
    LAYERWISE: (LAYERWISE, LMCACHE, "gpu_ttft_vs_lmcache_layerwise"),
    OFFLOADING: (HEADWATER, OFFLOADING, "gpu_ttft_vs_offloading"),
    PACKED: (PACKED, UNPACKED, "gpu_packed_ttft_vs_raw"),
}
"""By stage: whose hits are divided by whose."""


def _hits(record: Record, found: dict[str, Any]) -> None:
    rounds = Rounds(record["seconds"])
    _times(found, record, rounds, "hit")
    ours, theirs, name = _TTFT[record["stage"]]
    if theirs not in rounds.seconds:
        return
    for side, least in ((ours, 1.0), (theirs, PEER_LEAST)):
        if record["found"][side] < record["tokens"] * least:
            hit = f"{side} found only {record['found'][side]:,.0f} of {record['tokens']:,} tokens"
            found["notes"].append(f"{name}: not compared, since {hit}")
            return
    _put(found, name, rounds.ratio(ours, theirs), rounds.noise(AGAIN, ours))
    if theirs == UNPACKED:
        _put(found, "gpu_packed_gain_ms", 1000 * (rounds.time(theirs) - rounds.time(ours)))


def _share(record: Record, found: dict[str, Any]) -> None:
    hits = record["hits"].values()
    share = sum(one["found"] for one in hits) / sum(one["whole"] for one in hits)
    found.setdefault("hit_shares", {})[record["side"]] = {
        "share": share,
        **{tokens: one["found"] / one["whole"] for tokens, one in record["hits"].items()},
    }
    _put(found, "gpu_hit_share", share)


def _equal(record: Record, found: dict[str, Any]) -> None:
    found.setdefault("tokens_equal", {})[record["side"]] = {
        "compared": record["compared"],
        "equal": record["equal"],
        "not_compared": record["not_compared"],
    }
    if not record["compared"]:
        return
    if record["side"] in (HEADWATER, LAYERWISE, PACKED):
        _put(found, "gpu_tokens_equal", record["equal"] / record["compared"])
    elif record["equal"] < record["compared"]:
        share = f"{record['equal']:,} of {record['compared']:,} tokens"
        found["notes"].append(
            f"{record['side']}: {share} of its hits equal a local hit's: its times are of wrong answers"
        )


def _local(record: Record, found: dict[str, Any]) -> None:
    cold, local = Rounds(record["cold"]), Rounds(record["local"])
    _times(found, record, cold, "cold")
    _times(found, record, local, "local")
    if record["stage"] == PLAIN and PLAIN in cold.seconds:
        _put(found, "gpu_cold_cost", cold.ratio(HEADWATER, PLAIN), cold.noise(AGAIN, PLAIN))
        _put(found, "gpu_local_cost", local.ratio(HEADWATER, PLAIN), local.noise(AGAIN, PLAIN))


def _throughput(record: Record, found: dict[str, Any]) -> None:
    rounds = Rounds(record["seconds"])
    _times(found, record, rounds, "throughput")
    if PLAIN in rounds.seconds:
        _put(found, "gpu_throughput_cost", rounds.ratio(HEADWATER, PLAIN), rounds.noise(AGAIN, PLAIN))


def _reuse(record: Record, found: dict[str, Any]) -> None:
    rounds = Rounds(record["seconds"])
    rates = found.setdefault("reuse_tokens_per_s", {}).setdefault(record["stage"], {})
    rates |= {name: record["num_tokens"] / rounds.time(name) for name in rounds.seconds}
    found.setdefault("reuse_found", {})[record["stage"]] = record["found"]
    noise = rounds.noise(AGAIN, HEADWATER)
    for peer, name in ((PLAIN, "gpu_reuse_throughput"), (LMCACHE, "gpu_reuse_vs_lmcache")):
        if peer in rounds.seconds:
            _put(found, name, rounds.ratio(peer, HEADWATER), noise)


def _burst(record: Record, found: dict[str, Any]) -> None:
    rounds = Rounds(record["seconds"])
    _times(found, record, rounds, "burst")
    bus = record["bus_bytes"] / rounds.time(BUS)
    shares = {name: record["bytes"] / rounds.time(name) / bus for name in rounds.seconds if name not in (BUS, AGAIN)}
    found["burst_shares"], found["bus_gbps"] = shares, bus / 1e9
    if not _is_full(record, "gpu_burst_share", found):
        return
    _put(found, "gpu_burst_share", shares[HEADWATER], rounds.noise(AGAIN, HEADWATER))


def _tiers(record: Record, found: dict[str, Any]) -> None:
    rounds = Rounds(record["seconds"])
    _times(found, record, rounds, "tiers")
    found["tier_gbps"] = {name: record["bytes"] / rounds.time(name) / 1e9 for name in rounds.seconds}
    found["tier_threads"] = record["threads"]
    if not _is_full(record, "gpu_tier_share", found):
        return
    _put(found, "gpu_tier_share", rounds.ratio(FILE, HEADWATER), rounds.noise(AGAIN, HEADWATER))


def _is_full(record: Record, name: str, found: dict[str, Any]) -> bool:
    num_found, wanted = record["found"][HEADWATER], record["tokens"]
    if num_found < wanted:
        found["notes"].append(f"{name}: not computed, since {num_found:,.0f} of {wanted:,} tokens were found")
    return bool(num_found >= wanted)


def _profile(record: Record, found: dict[str, Any]) -> None:
    timeline = {name: record[name] for name in ("timeline", "bus_ms", "load_ms", "local_ms")}
    found.setdefault("profile", {}).setdefault(record["side"], {})[str(record["tokens"])] = timeline


_MEASURES: Mapping[str, Callable[[Record, dict[str, Any]], None]] = {
    "hits": _hits,
    "share": _share,
    "equal": _equal,
    "local": _local,
    "throughput": _throughput,
    "reuse": _reuse,
    "burst": _burst,
    "tiers": _tiers,
    PROFILE: _profile,
}
