"""deploy/ and .github/: what no test can run is at least valid, and agrees with itself and with the commands."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater.cli.app import command
from headwater.stores.url import parse_urls

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILES = sorted(DEPLOY.glob("Containerfile.*"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "vllm.yaml").read_text()))
SCHEMAS = {
    "deploy/compose.yaml": "vendor.compose-spec",
    ".github/workflows/test.yml": "vendor.github-workflows",
    ".github/ISSUE_TEMPLATE/bug.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/idea.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
}

in_a_checkout = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="an sdist has no .github")


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """(name, rest) of every instruction, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE))
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        yield name.upper(), rest.strip()


# ---- valid ------------------------------------------------------------------------------------------------------
@in_a_checkout
@pytest.mark.parametrize(("file", "schema"), SCHEMAS.items())
def test_the_file_is_what_its_reader_expects(file: str, schema: str) -> None:
    pytest.importorskip("check_jsonschema")
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(ROOT / file)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, "--no-color", str(path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")


# ---- images -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_an_image_copies_what_there_is_and_what_is_sent(path: Path) -> None:
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = [
        source
        for name, rest in instructions(path)
        if name == "COPY" and "--from=" not in rest
        for source in rest.split()[:-1]
    ]
    assert "src" in copied
    assert not [source for source in copied if not (ROOT / source).exists() or source not in sent]


def test_the_server_image_has_a_user_of_its_own_and_says_how_it_is() -> None:
    steps = list(instructions(DEPLOY / "Containerfile.serve"))
    last = [number for number, (name, _) in enumerate(steps) if name == "FROM"][-1]
    final = dict(steps[last:])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", final["USER"])
    assert "/health" in final["HEALTHCHECK"]
    assert json.loads(final["ENTRYPOINT"]) == ["headwater"]
    check_options(json.loads(final["CMD"]))


def test_the_vllm_image_is_the_one_that_was_given() -> None:
    steps = list(instructions(DEPLOY / "Containerfile.vllm"))
    assert steps[0][1].startswith("VLLM_IMAGE=")
    assert steps[1] == ("FROM", "${VLLM_IMAGE}")
    assert not {"ENTRYPOINT", "CMD", "USER"} & {name for name, _ in steps}, "the image starts as it did before"


# ---- compose ----------------------------------------------------------------------------------------------------
def check_options(args: list[str]) -> None:
    """That the command and every option exist."""
    known = command().commands[args[0]]
    names = {option for parameter in known.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert not [arg for arg in args if arg.startswith("--") and arg not in names]


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE["services"][name]
    return found


@pytest.mark.parametrize("name", ["server-a", "server-b", "router"])
def test_our_services_are_started_as_the_command_allows(name: str) -> None:
    made = service(name)
    check_options(made["command"])
    assert (ROOT / "deploy" / made["build"]["context"] / made["build"]["dockerfile"]).exists()
    assert ":?" in made["environment"]["HEADWATER_API_KEY"], "nobody starts it without a key by oversight"
    assert "/health" in made["healthcheck"]["test"][-1]
    compile(made["healthcheck"]["test"][-1], name, "exec")
    port = made["command"][made["command"].index("--port") + 1]
    assert made["environment"].get("HEADWATER_PORT", "8000") == port


def test_two_servers_share_through_redis_and_a_router_knows_both() -> None:
    for name in ("server-a", "server-b"):
        args = service(name)["command"]
        shm, redis = parse_urls(args[args.index("--pool") + 1])
        assert (shm.scheme, redis.scheme) == ("shm", "redis")
        assert str(redis).startswith("redis://redis:6379")
        assert {"front", "cache"} == set(service(name)["networks"])
    assert [arg for arg in service("router")["command"] if arg.startswith("http")] == [
        "http://server-a:8000",
        "http://server-b:8000",
    ]
    assert COMPOSE["networks"]["cache"] == {"internal": True}
    assert service("redis")["networks"] == ["cache"]


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [port for made in COMPOSE["services"].values() for port in made.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_mounted_file_is_there() -> None:
    mounted = [
        volume.split(":")[0]
        for made in COMPOSE["services"].values()
        for volume in made.get("volumes", [])
        if volume.startswith(".")
    ]
    assert "./grafana/headwater.json" in mounted
    assert not [path for path in mounted if not (DEPLOY / path).exists()]


def test_prometheus_asks_the_services_that_there_are() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "compose.yml").read_text())
    targets = [t for job in config["scrape_configs"] for group in job["static_configs"] for t in group["targets"]]
    for target in targets:
        name, port = target.split(":")
        args = service(name)["command"]
        assert args[args.index("--port") + 1] == port
    assert {job["authorization"]["credentials_file"] for job in config["scrape_configs"]} == {
        f"/run/secrets/{name}" for name in service("prometheus")["secrets"]
    }
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"


# ---- Kubernetes -------------------------------------------------------------------------------------------------
def test_kubernetes_needs_forty_lines_and_no_operator() -> None:
    lines = [line for line in (DEPLOY / "kubernetes" / "vllm.yaml").read_text().splitlines() if line.strip()]
    assert len(lines) <= 45
    assert [made["kind"] for made in KUBERNETES] == ["DaemonSet", "Service"]


def test_the_pods_share_the_memory_of_their_node() -> None:
    daemons, front = KUBERNETES
    template = daemons["spec"]["template"]
    assert daemons["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"] == front["spec"]["selector"]
    (container,) = template["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["hostPath"]["path"] == "/dev/shm"
    assert template["spec"]["securityContext"]["runAsUser"] > 0
    assert {port["targetPort"] for port in front["spec"]["ports"]} == {port["name"] for port in container["ports"]}


def test_the_pods_give_vllm_a_connector_that_exists() -> None:
    (container,) = KUBERNETES[0]["spec"]["template"]["spec"]["containers"]
    args = container["args"]
    config = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert importlib.util.find_spec(config["kv_connector_module_path"]) is not None
    source = (ROOT / "src" / Path(*config["kv_connector_module_path"].split(".")) / "__init__.py").read_text()
    assert config["kv_connector"] in source
    assert [url.scheme for url in parse_urls(config["kv_connector_extra_config"]["pool"])] == ["shm", "redis"]
