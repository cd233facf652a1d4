"""The plots and tables of benchmarks.md are those that docs/tools/plots.py makes from the committed figures."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from types import ModuleType
from typing import Any

import pytest

from headwater.bench.engine import BARS as ENGINE
from headwater.bench.router import BARS as ROUTER
from headwater.bench.store import BARS as STORE
from headwater.bench.transfer import BARS as TRANSFER
from headwater.bench.ttft import BARS as TTFT

from docs_pages import ROOT

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
    bars = {bar.figure: bar for bar in (*STORE, *ENGINE, *TRANSFER, *TTFT, *ROUTER)}
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
