"""How `headwater bench vllm --device cuda` shows its figures to people."""

from __future__ import annotations

import sys
from typing import Any

from headwater.cli.output import table

_ASIDES = (
    ("hit_shares", "tokens found"),
    ("tokens_equal", "tokens compared"),
    ("reuse_tokens_per_s", "tokens a second, sharing a prefix"),
    ("bus_gbps", "the bus, GB/s"),
    ("burst_shares", "of it, many hits at once"),
    ("tier_gbps", "a hit in the lower tier, GB/s"),
)


def print_report(report: dict[str, Any], *, to_stderr: bool) -> None:
    """Tables of the figures and their bars, of the times behind them, and of a profile if there is one."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    out = Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else 200)
    out.print(_figures(report))
    for mode, found in report["modes"].items():
        out.print()
        out.print(_times(mode, found))
        for name, what in _ASIDES:
            if name in found:
                out.print(f"{what}: {_inline(found[name])}")
        for note in found["notes"]:
            out.print(note)
        for side, profiles in found.get("profile", {}).items():
            for tokens, profile in profiles.items():
                out.print()
                out.print(_profile(f"{mode}, {side}: a hit of {int(tokens):,} tokens", profile))
    out.print()
    for side, reason in report["absent"].items():
        out.print(f"without {side}: {_last_line(reason)}")
    for failure in report["failures"]:
        where = ", ".join(str(failure[name]) for name in ("mode", "stage", "measure", "tokens") if failure[name])
        out.print(f"failed: {where}: {_last_line(failure['reason'])}")
    versions = {name: report.get(name) for name in ("gpu", "vllm", "torch", "lmcache")} | report["machine"]
    out.print(", ".join(f"{name} {value}" for name, value in versions.items() if value is not None))


def _figures(report: dict[str, Any]) -> Any:
    from headwater.bench.vllm_gpu.figures import FIGURES

    rows = table("figure", ">measured", ">noise", ">bar", "verdict", "")
    for figure in FIGURES:
        bar = report["bars"][figure.name]
        limit = "" if bar["limit"] is None else f"{'≥' if figure.at_least else '≤'} {bar['limit']:g}"
        rows.add_row(figure.name, _short(report[figure.name]), _short(bar["noise"]), limit, bar["verdict"], figure.what)
    return rows


def _times(mode: str, found: dict[str, Any]) -> Any:
    """Milliseconds: what was measured, beside whom, and every side's."""
    sides = sorted({name for stages in found["ms"].values() for row in stages.values() for name in row})
    rows = table(f"{mode}, ms", "beside", *(f">{name}" for name in sides))
    for what, stages in found["ms"].items():
        for stage, row in stages.items():
            rows.add_row(what, stage, *(_short(row.get(name)) for name in sides))
    return rows


def _profile(title: str, profile: dict[str, Any]) -> Any:
    from headwater.bench.vllm_gpu.timeline import Moment, steps_between

    rows = table(title, ">ms", ">since the line before")
    for what, at, since in steps_between([Moment(*row) for row in profile["timeline"]]):
        rows.add_row(what, f"{at:.2f}", f"{since:.2f}")
    rows.add_row("the same from vLLM's own cache", f"{profile['local_ms']:.2f}")
    rows.add_row("one copy of the same bytes", f"{profile['bus_ms']:.2f}")
    return rows


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_inline(item)}" for name, item in value.items())
    return _short(value) if isinstance(value, (int, float)) else str(value)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1] if lines else "no reason given"
