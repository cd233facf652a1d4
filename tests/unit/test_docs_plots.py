"""The plots and tables of benchmarks.md are those that docs/tools/plots.py makes from the committed figures."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from types import ModuleType
from typing import Any

import pytest

from headwater.bench.engine import BARS as ENGINE
from headwater.bench.packing import BARS as PACKING
from headwater.bench.router import BARS as ROUTER
from headwater.bench.store import BARS as STORE
from headwater.bench.transfer import BARS as TRANSFER
from headwater.bench.ttft import BARS as TTFT

from docs_pages import ROOT

README = (
    ("store", "{read_low:.2f} to {read_high:.2f} of a bare loop of copy and checksum"),
    ("store", "{write_low:.2f} to {write_high:.2f} of the same loop"),
    ("store", "| index | {overhead_percent:.2f} % of the data"),
    ("ttft", "{pool_32k:.0f} ms instead of {computed_32k:,.0f} ms"),
    ("transfer", "matrix products beside it take {least_percent:.1f} to {most_percent:.1f} % longer"),
    ("transfer", "save {save_ratio}, load {load_ratio} of one large pinned copy"),
    ("transfer", "save {save_ratio_tp8} (the bar of 0.85 is missed), load {load_ratio_tp8} of one large pinned copy"),
    ("vllm-gpu", "{pool_8k} ms instead of {plain_8k} ms"),
    ("engine", "{decode_b1_roofline:.2f} / {decode_b64_roofline:.2f} of the memory bandwidth"),
    ("engine", "{prefill_mfu:.2f} of the matrix rate"),
    ("ttft-cpu", "{pool_4k_s:.2f} s instead of {computed_4k_s:.1f} s"),
    ("vllm", "{pool_s} s instead of {computed_s} s"),
    ("engine-cpu", "{cpu_tput_ratio_static:.1f} times its best static batches, {cpu_tput_ratio:.1f} times"),
)
"""What the README says, by the file that has the figures."""
FILES = sorted(path for path in (ROOT / "docs/benchmarks").glob("*.json") if path.stem != "machines")


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plots", ROOT / "docs/tools/plots.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_plots_and_tables_are_those_of_the_figures(plots: ModuleType) -> None:
    old = [
        str(path.relative_to(ROOT))
        for path, text in plots.draw_all().items()
        if not path.exists() or path.read_text() != text
    ]
    assert old == [], "run `make plots` and commit what it writes"


def test_no_plot_is_left_over(plots: ModuleType) -> None:
    assert set((ROOT / "docs/images").glob("bench-*.svg")) <= set(plots.draw_all())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_figures_say_where_they_come_from(path: Any) -> None:
    figures = json.loads(path.read_text())
    machines = json.loads((ROOT / "docs/benchmarks/machines.json").read_text())
    assert figures["machine"] in machines
    assert figures["command"].startswith("headwater bench ")
    assert len(figures["date"].split("-")) == 3
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert f"<!-- figures: {path.stem} -->" in page


def test_bars_are_those_of_the_commands() -> None:
    """A bar that is moved in the code is moved in the documentation, too."""
    bars = {bar.figure: bar for bar in (*STORE, *ENGINE, *TRANSFER, *TTFT, *ROUTER, *PACKING)}
    compared = 0
    for path in FILES:
        for figure in json.loads(path.read_text())["figures"]:
            if figure["name"] in bars and "bar" in figure:
                bar = bars[figure["name"]]
                higher = figure["better"] == "higher"
                assert (figure["bar"], higher) == (bar.limit, bar.at_least), f"{path.name}: {figure['name']}"
                compared += 1
    assert compared > 25


def test_pictures_are_xml_with_a_name_and_both_schemes() -> None:
    pictures = sorted((ROOT / "docs/images").glob("*.svg"))
    assert pictures
    for path in pictures:
        root = ElementTree.parse(path).getroot()
        assert root.get("aria-label"), path.name
        assert "prefers-color-scheme: dark" in path.read_text(), path.name
        outside = [value for node in root.iter() for name, value in node.items() if name.endswith("href")]
        assert outside == [], f"{path.name} fetches something"


def values_of(name: str) -> dict[str, float]:
    """The figures of a file by name, with what the README makes of them."""
    made = json.loads((ROOT / f"docs/benchmarks/{name}.json").read_text())
    values = {figure["name"]: figure["value"] for figure in made["figures"]}
    values |= {f"{key}_s": value / 1000 for key, value in values.items()}
    if name == "store":
        for figure in made["figures"][:2]:
            runs = [float(run) for run in figure["note"].removeprefix("median of ").split(", ")]
            kind = figure["name"].partition("_")[0]
            values |= {f"{kind}_low": min(runs), f"{kind}_high": max(runs)}
        values["overhead_percent"] = values["overhead_ratio"] * 100
    if name == "transfer":
        times = [machine["interference"] for machine in made["machines"] if "rebuilt" in machine["name"]]
        values |= {"least_percent": (min(times) - 1) * 100, "most_percent": (max(times) - 1) * 100}
    if name == "vllm":
        values |= {key: made["lengths"][-1][key] for key in ("pool_s", "computed_s")}
    return values


@pytest.mark.parametrize(("name", "text"), README)
def test_the_readme_has_the_current_figures(name: str, text: str) -> None:
    assert text.format(**values_of(name)) in (ROOT / "README.md").read_text()
