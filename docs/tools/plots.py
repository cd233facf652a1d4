"""Draws docs/images/bench-*.svg and writes the tables of docs/benchmarks.md from the figures in docs/benchmarks/*.json
(`make plots`). Python alone is enough.

Every plot is a list of rows with a bar each. The same input gives the same bytes, which a test holds against the
committed files. Colours come from a style sheet inside the picture that follows the reader's light or dark scheme.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent.parent
FIGURES = DOCS / "benchmarks"
IMAGES = DOCS / "images"

STYLE = """
  .paper { fill: #fbfcfd; stroke: #d5dce2 }
  text { font: 13px system-ui, sans-serif; fill: #1f2a33 }
  .title { font-weight: 600; font-size: 15px } .dim { fill: #5b6b78 } .num { text-anchor: end }
  .met { fill: #2a7f9e } .missed { fill: #c4552d } .open { fill: #98a6b1 } .other { fill: #98a6b1 }
  .line { stroke: #1f2a33; stroke-dasharray: 3 3 } .grid { stroke: #d5dce2 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #1d232a; stroke: #3a4651 }
    text { fill: #e3e9ee } .dim { fill: #9fb0bd }
    .met { fill: #5cb8d6 } .missed { fill: #f0875c } .open, .other { fill: #6d7c88 }
    .line { stroke: #e3e9ee } .grid { stroke: #3a4651 }
  }
"""
WIDTH, LABEL_END, BAR_START, BAR_END, ROW = 900, 396, 408, 690, 24


class Row(NamedTuple):
    """One bar. `share` is its length, of the whole."""

    label: str
    share: float
    text: str
    kind: str


def load(name: str) -> dict[str, Any]:
    """The figures of one command."""
    return dict(json.loads((FIGURES / f"{name}.json").read_text()))


def verdict(figure: dict[str, Any]) -> str:
    """met, missed, or open: reported and not judged."""
    if figure.get("judged", True) is False:
        return "open"
    value, bar = figure["value"], figure["bar"]
    return "met" if (value >= bar if figure["better"] == "higher" else value <= bar) else "missed"


def picture(
    title: str, subtitle: str, rows: Sequence[Row], mark: float | None, ticks: Sequence[tuple[float, str]]
) -> str:
    """A bar for each row; a dashed line at `mark`; `ticks` under the bars."""
    top = 62
    bottom = top + ROW * len(rows)
    height = bottom + (34 if ticks else 16)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        f'<text class="dim" x="16" y="45">{escape(subtitle)}</text>',
    ]
    for share, text in ticks:
        x = _x(share)
        lines.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top - 4}" y2="{bottom}"/>')
        lines.append(f'<text class="dim" x="{x}" y="{bottom + 18}" text-anchor="middle">{escape(text)}</text>')
    for number, row in enumerate(rows):
        y = top + ROW * number
        width = round(max(row.share, 0.004) * (BAR_END - BAR_START), 1)
        lines.append(f'<text class="num" x="{LABEL_END}" y="{y + 15}">{escape(row.label)}</text>')
        lines.append(f'<rect class="{row.kind}" x="{BAR_START}" y="{y + 4}" width="{width}" height="14" rx="2"/>')
        lines.append(f'<text x="{BAR_END + 12}" y="{y + 15}">{escape(row.text)}</text>')
    if mark is not None:
        x = _x(mark)
        lines.append(f'<line class="line" x1="{x}" x2="{x}" y1="{top - 6}" y2="{bottom + 4}"/>')
    return "\n".join([*lines, "</svg>", ""])


def against_bars(*names: str) -> str:
    """Each judged figure over its bar: what reaches the dashed line meets it. Longer is better, whatever the figure."""
    rows = []
    for name in names:
        for figure in load(name)["figures"]:
            if "bar" not in figure or not figure["bar"]:
                continue
            higher = figure["better"] == "higher"
            reach = figure["value"] / figure["bar"] if higher else figure["bar"] / max(figure["value"], 1e-9)
            kind = verdict(figure)
            sign, said = "≥" if higher else "≤", {"met": "", "missed": ", missed", "open": ", not judged"}[kind]
            rows.append(
                Row(
                    figure["label"],
                    min(reach, 2) / 2,
                    f"{_short(figure['value'])}  ({sign} {_short(figure['bar'])}{said})",
                    kind,
                )
            )
    first = load(names[0])
    subtitle = "how far each figure is from its bar (dashed): to the right of it is met; bars end at twice the bar"
    return picture(first["title"], subtitle, rows, 0.5, [])


def first_tokens() -> str:
    """Computed against loaded, on every machine, on a logarithmic scale."""

    def ms(name: str, figure: str) -> float:
        return float(next(f["value"] for f in load(name)["figures"] if f["name"] == figure))

    def speedup(name: str, computed: str, pool: str, printed: str = "") -> tuple[float, float, float]:
        return ms(name, computed), ms(name, pool), ms(name, printed) if printed else ms(name, computed) / ms(name, pool)

    heavy = load("vllm")["lengths"][-1]
    pairs = [
        ("Headwater's engine, H200, 32,768 tokens", *speedup("ttft", "computed_32k", "pool_32k", "gpu_speedup_32k")),
        ("vLLM, H200, 32,768 tokens", *speedup("vllm-gpu", "plain_32k", "pool_32k")),
        ("vLLM, H200, 8,192 tokens", *speedup("vllm-gpu", "plain_8k", "pool_8k")),
        ("Headwater's engine, 2 cores, 4,096 tokens", *speedup("ttft-cpu", "computed_4k", "pool_4k", "cpu_speedup_4k")),
        ("vLLM, 2 cores, 8,192 tokens", heavy["computed_s"] * 1000, heavy["pool_s"] * 1000, heavy["speedup"]),
    ]
    rows = []
    for label, computed, pool, times in pairs:
        rows.append(Row(f"{label}: computed", _log(computed), _time(computed), "other"))
        rows.append(Row("from the pool", _log(pool), f"{_time(pool)}, {times:.3g} times as fast", "met"))
    ticks = [(_log(t), _time(t)) for t in (10, 100, 1000, 10000)]
    return picture(
        "Time to the first token", "logarithmic; a prompt that another server has computed before", rows, None, ticks
    )


def lengths() -> str:
    """vLLM on two cores, by length of the prompt."""
    rows = []
    for point in load("vllm")["lengths"]:
        computed, pool = point["computed_s"] * 1000, point["pool_s"] * 1000
        rows.append(Row(f"{point['tokens']:,} tokens: computed", _log(computed), _time(computed), "other"))
        rows.append(Row("from the pool", _log(pool), f"{_time(pool)}, {point['speedup']} times as fast", "met"))
    ticks = [(_log(t), _time(t)) for t in (10, 100, 1000, 10000)]
    return picture("vLLM on two cores, by prompt length", "128 KiB of KV a token; logarithmic", rows, None, ticks)


def connectors() -> str:
    """Other connectors and Headwater beside them, each pair from the same rounds."""
    rows, most = [], 1.0
    for point in load("vllm")["first_token"][1:]:
        rows.append(Row(point["name"], point["heavy_s"] / most, _time(point["heavy_s"] * 1000), "other"))
        rows.append(
            Row("Headwater beside it", point["heavy_beside_s"] / most, _time(point["heavy_beside_s"] * 1000), "met")
        )
    ticks = [(share, _time(share * 1000)) for share in (0, 0.25, 0.5, 0.75, 1)]
    return picture(
        "A hit of 8,192 tokens in vLLM on two cores",
        "128 KiB of KV a token, 1 GiB in all; shorter is better",
        rows,
        None,
        ticks,
    )


def routing() -> str:
    """The p90 wait by policy, on both workloads."""
    rows = []
    for workload, key in (("conversations", "p90_wait_s"), ("prompts that begin alike", "alike_p90_wait_s")):
        for policy in load("router")["policies"]:
            ours = policy["name"].startswith("cost")
            rows.append(
                Row(
                    f"{workload}: {policy['name']}",
                    _log(policy[key] * 1000, 100, 200_000),
                    _time(policy[key] * 1000),
                    "met" if ours else "other",
                )
            )
    ticks = [(_log(t, 100, 200_000), _time(t)) for t in (100, 1000, 10_000, 100_000)]
    return picture(
        "Router: wait for the prompt, 90th percentile",
        "four simulated servers, 6,000 requests; logarithmic; shorter is better",
        rows,
        None,
        ticks,
    )


def packing() -> str:
    """What codes make of the same KV."""
    rows = [
        Row(code["name"], code["share"], f"{code['share']:.1%}", "met" if code["name"] == "packed" else "other")
        for code in load("packing")["codes"]
    ]
    ticks = [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
    return picture("KV in bfloat16, of its raw bytes", "SmolLM2, 1,536 tokens; shorter is better", rows, None, ticks)


def _x(share: float) -> float:
    return round(BAR_START + share * (BAR_END - BAR_START), 1)


def _log(value: float, low: float = 10, high: float = 30_000) -> float:
    return math.log(value / low) / math.log(high / low)


def _time(ms: float) -> str:
    return f"{ms / 1000:g} s" if ms >= 1000 else f"{ms:g} ms" if ms else "0"


def _short(value: float) -> str:
    return f"{value:g}"


PLOTS: dict[str, Callable[[], str]] = {
    "first-token": first_tokens,
    "store": lambda: against_bars("store"),
    "store-small": lambda: against_bars("store-small"),
    "engine": lambda: against_bars("engine"),
    "engine-cpu": lambda: against_bars("engine-cpu"),
    "engine-experts": lambda: against_bars("engine-experts"),
    "transfer": lambda: against_bars("transfer"),
    "ttft": lambda: against_bars("ttft", "ttft-cpu"),
    "packing": packing,
    "router": routing,
    "peers": lambda: against_bars("peers"),
    "peers-carriers": lambda: against_bars("peers-carriers"),
    "peers-packed": lambda: against_bars("peers-packed"),
    "vllm-connectors": connectors,
    "vllm-lengths": lengths,
    "vllm-gpu": lambda: against_bars("vllm-gpu"),
}


def table(name: str) -> str:
    """The figures of one command as a Markdown table."""
    lines = ["| figure | is | measured | noise | bar | |", "|---|---|---|---|---|---|"]
    for figure in load(name)["figures"]:
        note = f" ({figure['note']})" if "note" in figure else ""
        unit = f" {figure['unit']}" if "unit" in figure else ""
        bar, said = "", ""
        if "bar" in figure:
            # A space that does not break: the column is narrow.
            bar = f"{'≥' if figure['better'] == 'higher' else '≤'}\u00a0{figure['bar']:g}"
            said = {"met": "met", "missed": "**missed**", "open": "not judged"}[verdict(figure)]
        cells = [
            f"`{figure['name']}`",
            figure["label"],
            f"{figure['value']:,}{unit}{note}",
            figure.get("noise", ""),
            bar,
            said,
        ]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page with what stands between `<!-- figures: NAME -->` and `<!-- end -->` written anew."""
    return re.sub(
        r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{table(match[2])}\n\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


def draw_all() -> dict[Path, str]:
    """Every plot and the page with the tables, by the file it belongs into."""
    plots = {IMAGES / f"bench-{name}.svg": draw() for name, draw in PLOTS.items()}
    page = DOCS / "benchmarks.md"
    return {**plots, page: with_tables(page.read_text())}


def main() -> None:
    """Write them, and say which ones changed."""
    IMAGES.mkdir(exist_ok=True)
    for path, text in draw_all().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
