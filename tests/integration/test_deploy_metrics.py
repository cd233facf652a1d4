"""The dashboard and the alerts ask for what is really exported: by a live exporter beside a pool of two tiers, and by
the page of `headwater serve`. promtool reads every expression."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("msgspec")
pytest.importorskip("yaml")
pytest.importorskip("httpx")

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headwater.connector.metrics import Source, snapshot
from headwater.connector.published import Publisher, figures
from headwater.connector.stats import TransferStats
from headwater.pool.pool import open_pool
from headwater.serve.messages import Stats
from headwater.serve.metrics import ServerMetrics

from exporter_process import ExporterProcess
from metric_cases import STORE, TRANSFER
from servers import free_port, listens
from support import wait_until

pytestmark = pytest.mark.slow

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/headwater.json").read_text(encoding="utf-8"))
ALERTS: dict[str, Any] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
VARIABLES = {"$__rate_interval": "5m", "$job": ".*", "$instance": ".*"}
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds to every sample."""
SERVE_ONLY = re.compile(r"headwater_(peer|engine)_")
EXPORTER_ONLY = re.compile(r"headwater_store_(up|engine_processes)")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here (Debian: apt-get install prometheus)"
)


def panels() -> list[dict[str, Any]]:
    found = []
    for panel in DASHBOARD["panels"]:
        found += [panel, *panel.get("panels", [])]
    return found


def dashboard_expressions() -> list[str]:
    """Without Grafana's variables."""
    found = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    for name, value in VARIABLES.items():
        found = [expression.replace(name, value) for expression in found]
    return found


def expressions() -> list[str]:
    return [*dashboard_expressions(), *(rule["expr"] for rule in RULES)]


def names(expression: str) -> set[str]:
    return set(re.findall(r"headwater_[a-z0-9_]+", expression))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """What a live exporter shows: the labels of each sample, by name."""
    home = tmp_path_factory.mktemp("pool")
    url = f"file://{home}/a?capacity=8MiB,file://{home}/b?capacity=8MiB"
    with open_pool(url) as pool:
        publisher = Publisher(pool, engine="vllm", model="m")
        publisher.add("rank 0", lambda: figures(TRANSFER, Source.WORKER))
        publisher.add("scheduler", lambda: figures(TRANSFER, Source.SCHEDULER))
        publisher.flush()
        exporter = ExporterProcess(url)
        try:
            yield samples(exporter.http.get("/metrics").text)
        finally:
            exporter.close()
            publisher.close()


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """The same of `headwater serve`."""
    stats = Stats(pool=snapshot(TransferStats(), STORE))
    return samples(ServerMetrics(lambda: stats, {"version": "1", "model": "m"}).render()[0].decode())


def samples(page: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


# ---- the names ----------------------------------------------------------------------------------------------------
def test_every_name_is_on_the_exporters_page(exported: dict[str, set[str]]) -> None:
    wanted = {name for text in expressions() for name in names(text) if not SERVE_ONLY.match(name)}
    assert len(wanted) > 30
    assert wanted <= exported.keys()


def test_every_name_is_on_the_page_of_serve(served: dict[str, set[str]]) -> None:
    wanted = {name for text in expressions() for name in names(text) if not EXPORTER_ONLY.match(name)}
    assert wanted <= served.keys()


def test_every_metric_of_a_pool_is_shown_somewhere(exported: dict[str, set[str]]) -> None:
    """What the dashboard leaves out, it leaves out for a reason."""
    shown = {name for text in dashboard_expressions() for name in names(text)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    missing = families - {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert missing == {
        "headwater_pool_followed_loads_total",
        "headwater_pool_load_seconds_total",  # the histogram says more
        "headwater_pool_pushed_chunks_total",
        "headwater_store_capacity_bytes",
        "headwater_store_chunks",
    }


def test_labels_are_there(exported: dict[str, set[str]], served: dict[str, set[str]]) -> None:
    known = SCRAPED | {label for labels in (*exported.values(), *served.values()) for label in labels}
    for text in expressions():
        for group in re.findall(r"by \(([^)]*)\)", text):
            assert {label.strip() for label in group.split(",")} <= known, text
    for panel in panels():
        for target in panel.get("targets", []):
            grouped = {
                label.strip() for found in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in found.split(",")
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped, target


# ---- the dashboard ------------------------------------------------------------------------------------------------
def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    boxes = [(panel["title"], panel["gridPos"]) for panel in DASHBOARD["panels"]]
    for title, box in boxes:
        assert 0 <= box["x"] < box["x"] + box["w"] <= 24, title
        assert box["h"] > 0 <= box["y"], title
    for (one, a), (other, b) in combinations(boxes, 2):
        is_apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        is_apart |= a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert is_apart, f"{one!r} and {other!r} overlap"


def test_panels_say_what_they_show_and_ask_the_chosen_source() -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat", "gauge")
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == source
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["datasource"] == source
            selectors = re.findall(r"headwater_\w+(\{[^}]*\})?", target["expr"])
            assert all('job=~"$job",instance=~"$instance"' in selector for selector in selectors), target["expr"]


def test_the_dashboard_is_complete() -> None:
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert [*variables] == ["datasource", "job", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(DASHBOARD["panels"])))
    assert used <= variables.keys() | {"__rate_interval"}
    assert "id" not in DASHBOARD, "Grafana gives it one"


# ---- the alerts ---------------------------------------------------------------------------------------------------
def test_every_alert_says_what_happened_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert re.fullmatch(r"Headwater[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_every_alert_is_tested_both_ways() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    alerts = {rule["alert"] for rule in RULES}
    assert {case["alertname"] for case in cases if "exp_alerts" in case} == alerts
    assert {case["alertname"] for case in cases if "exp_alerts" not in case} == alerts


@needs_promtool
def test_promtool_accepts_configuration_and_rules() -> None:
    promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    promtool("test", "rules", str(PROMETHEUS / "alerts_test.yml"))


@needs_promtool
def test_promtool_can_read_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{i}", "expr": text} for i, text in enumerate(dashboard_expressions())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))
    rules.append({"record": "panel:bad", "expr": "sum by (instance (x))"})
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    with pytest.raises(AssertionError, match="parse error"):
        promtool("check", "rules", str(path))


# ---- all of it together -------------------------------------------------------------------------------------------
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus here (Debian: apt-get install prometheus)"
)
def test_a_real_prometheus_answers_every_panel(tmp_path: Path) -> None:
    """Scrapes a live exporter with the example's rules, then is asked what Grafana would ask."""
    url = f"file://{tmp_path}/a?capacity=8MiB,file://{tmp_path}/b?capacity=8MiB"
    num_asked = 0

    def collect() -> Any:
        nonlocal num_asked
        num_asked += 100
        counted = replace(TRANSFER, num_asked_tokens=num_asked, num_matched_tokens=num_asked // 4)
        return figures(counted, Source.SCHEDULER)

    with open_pool(url) as pool, ExitStack() as stack:
        publisher = Publisher(pool, engine="vllm", model="m", every_s=0.2)
        stack.callback(publisher.close)
        publisher.add("scheduler", collect)
        publisher.add("rank 0", lambda: figures(TRANSFER, Source.WORKER))
        exporter = ExporterProcess(url)
        stack.callback(exporter.close)
        ask = stack.enter_context(prometheus(tmp_path, exporter.said["listening"].removeprefix("http://")))
        wait_until(lambda: bool(ask("count_over_time(headwater_store_up[5m]) > 4")), what="five scrapes")
        unanswered = [text for text in expressions() if not SERVE_ONLY.search(text) and not ask(always(text))]
        assert not unanswered
        (rate,) = [panel for panel in panels() if panel["title"] == "Hit rate" and panel["type"] == "gauge"]
        (shown,) = ask(rate["targets"][0]["expr"].replace("$__rate_interval", "5m").replace('=~"$', '!~"$'))
        assert float(shown["value"][1]) == pytest.approx(0.25)
        (fill,) = ask("max(headwater_store_used_bytes / headwater_store_data_bytes)")
        assert float(fill["value"][1]) == 0


def always(expression: str) -> str:
    """An alert's expression gives something only where it fires; with `bool`, its comparisons always give something."""
    return re.sub(r"(==|>|<) (?=[0-9])", r"\1 bool ", expression)


@contextmanager
def prometheus(home: Path, target: str) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """A server of our own that scrapes one target every second; what a query gives."""
    port = free_port()
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (home / "prometheus.yml").write_text(yaml.safe_dump(config))
    options = {
        "config.file": home / "prometheus.yml",
        "storage.tsdb.path": home / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with (
        (home / "prometheus.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=home) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            wait_until(lambda: listens(port), what="Prometheus")
            wait_until(lambda: client.get("/-/ready").status_code == 200, what="a Prometheus that is ready")

            def ask(query: str) -> list[dict[str, Any]]:
                reply = client.get("/api/v1/query", params={"query": query})
                assert reply.status_code == 200, f"{query}: {reply.text}"
                found: list[dict[str, Any]] = reply.json()["data"]["result"]
                return found

            yield ask
            rules = client.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}, rules
        finally:
            process.terminate()
            process.wait(60)


def promtool(*args: str) -> str:
    done = subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
