"""`headwater serve`, `generate` and `chat`: options and defaults come from the configs, and help stays cheap."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headwater.cli.chat import chat
from headwater.cli.engine_options import DEFAULT_MODEL, OPTIONS, needs_extra
from headwater.cli.generate import generate
from headwater.cli.serve import serve
from headwater.cli.usage import WrongUsageError
from headwater.engine.config import EngineConfig
from headwater.errors import ConfigError, EngineConfigError, EngineError, InvalidArgumentError, UrlError
from headwater.extras import install_hint
from headwater.serve.config import ServerConfig

app = typer.Typer()
for function in (serve, generate, chat):
    app.command()(function)
POOL = "shm:///the-pool-of-this-user"
DEFAULTS = ServerConfig(engine=EngineConfig(model=DEFAULT_MODEL, pool=POOL))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """What would have been served."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    pytest.importorskip("msgspec")
    from headwater.serve import default_pool, server

    monkeypatch.setattr(default_pool, "choose_pool", lambda **_: default_pool.PoolChoice(POOL, "made up"))
    seen: list[ServerConfig] = []

    def run_server(config: ServerConfig, **_: Any) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(server, "run_server", run_server)
    return seen


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, args)


def test_every_setting_of_the_engine_is_an_option() -> None:
    assert list(OPTIONS) == [field.name for field in fields(EngineConfig)]


def test_defaults_are_those_of_the_configs(served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_API_KEY", raising=False)
    assert invoke("serve").exit_code == 0
    assert served == [DEFAULTS]


def test_options_arrive(served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_API_KEY", "sesame")
    args = "--host 0.0.0.0 --port 1 --served-model-name x --max-waiting 2 --model m --page-size 8 --memory-ratio 0.5"
    args += " --require-cache-salt --no-cuda-graphs --overlap --tensor-parallel-size 2"
    assert invoke("serve", *args.split()).exit_code == 0
    engine = EngineConfig(
        model="m", page_size=8, memory_ratio=0.5, cuda_graphs=False, overlap=True, tensor_parallel_size=2, pool=POOL
    )
    server: dict[str, Any] = {"host": "0.0.0.0", "port": 1, "served_model_name": "x", "max_waiting": 2}
    server |= {"api_key": "sesame", "requires_cache_salt": True}
    assert served == [replace(DEFAULTS, engine=engine, **server)]


def test_bounds_and_certificates_arrive(served: list[ServerConfig]) -> None:
    args = "--ssl-certfile c --ssl-keyfile k --max-body-bytes 5 --max-total-body-bytes 6 --max-connections 7"
    assert invoke("serve", *args.split(), "--header-timeout", "1.5", "--engine-timeout", "30").exit_code == 0
    server = {"ssl_certfile": "c", "ssl_keyfile": "k", "max_body_bytes": 5, "max_total_body_bytes": 6}
    times = {"max_connections": 7, "header_timeout_s": 1.5, "engine_timeout_s": 30.0}
    assert served == [replace(DEFAULTS, **server, **times)]


@pytest.mark.parametrize(
    ("args", "warning"),
    [
        ([], ""),
        (["--api-key", "k"], ""),
        (["--host", "0.0.0.0", "--api-key", "k"], "the API key crosses the network in plain text"),
        (["--host", "0.0.0.0", "--api-key", "k", "--ssl-certfile", "c"], ""),
        (["--host", "0.0.0.0", "--insecure"], "anyone who can reach this address"),
    ],
)
def test_what_crosses_a_network_unprotected_is_said(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, args: list[str], warning: str
) -> None:
    monkeypatch.delenv("HEADWATER_API_KEY", raising=False)
    said = invoke("serve", *args).stderr
    assert ("warning:" in said) == bool(warning)
    assert warning in said


@pytest.mark.parametrize(
    ("args", "pool"),
    [
        ([], POOL),
        (["--no-pool"], None),
        (["--pool", "file:///x?capacity=1GiB"], "file:///x?capacity=1GiB"),
        (["--pool", "shm:///x?capacity=1GiB,redis://u:p@h/0"], "shm:///x?capacity=1GiB,redis://u:p@h/0"),
        (["--pool", "fleet"], "fleet"),
    ],
)
def test_a_pool_is_used_unless_told_otherwise(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, args: list[str], pool: str | None
) -> None:
    monkeypatch.setenv("HEADWATER_POOL_FLEET", "shm:///x,redis://h/0")
    assert invoke("serve", *args).exit_code == 0
    assert [config.engine.pool for config in served] == [pool]


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (["serve", "--pool", "shm:///x", "--no-pool"], InvalidArgumentError),
        (["serve", "--pool", "shem:///x"], UrlError),
        (["serve", "--pool", "nowhere"], ConfigError),
        (["serve", "--pool", "redis://h/0"], UrlError),
        (["serve", "--pool", "memory://", "--tensor-parallel-size", "2"], EngineConfigError),
        (["serve", "--pool", "memory://,redis://h/0", "--tensor-parallel-size", "2"], EngineConfigError),
        (["serve", "--memory-ratio", "0"], EngineConfigError),
        (["serve", "--host", "0.0.0.0"], EngineConfigError),
        (["serve", "--ssl-keyfile", "k"], EngineConfigError),
        (["serve", "--peer-tls-key", "k"], InvalidArgumentError),
        (["serve", "--peer-tls-cert", "/nowhere/c", "--peer-tls-ca", "/nowhere/ca"], InvalidArgumentError),
        (["serve", "--peer-listen", "127.0.0.1:0", "--peer-tls-ca", "ca"], InvalidArgumentError),
        (["serve", "--max-body-bytes", "9", "--max-total-body-bytes", "8"], EngineConfigError),
        (["generate", ""], InvalidArgumentError),
        (["generate", "x", "--raw", "--system", "y"], InvalidArgumentError),
        (["generate", "x", "--temperature", "-1"], InvalidArgumentError),
        (["chat", "--max-tokens", "0"], InvalidArgumentError),
    ],
)
def test_bad_options_are_errors_of_ours(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, args: list[str], kind: type[Exception]
) -> None:
    monkeypatch.delenv("HEADWATER_API_KEY", raising=False)
    exception = invoke(*args).exception
    assert isinstance(exception.cause if isinstance(exception, WrongUsageError) else exception, kind)
    assert served == []


def test_a_server_that_is_refused_for_its_settings_has_made_no_pool(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater.serve import default_pool

    monkeypatch.setattr(default_pool, "choose_pool", lambda **_: pytest.fail("it was about to make one"))
    result = invoke("serve", "--ssl-keyfile", "nothing.pem")
    assert isinstance(result.exception, WrongUsageError)
    assert "--ssl-certfile" in str(result.exception)
    assert not served


@pytest.mark.parametrize(
    "args", [("--peer-tls-key", "k"), ("--peer-listen", "127.0.0.1:0", "--peer-tls-ca", "ca")], ids=["key", "ca"]
)
def test_peer_tls_without_its_certificate_is_wrong_usage(served: list[ServerConfig], args: tuple[str, ...]) -> None:
    exception = invoke("serve", *args).exception
    assert isinstance(exception, WrongUsageError)
    assert str(exception).endswith("needs --peer-tls-cert")
    assert not served


def test_a_missing_package_is_named_with_its_remedy() -> None:
    with (
        pytest.raises(EngineError, match=r"package torch is not installed; pip install 'headwater\[serve\]'"),
        needs_extra(),
    ):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    with pytest.raises(ModuleNotFoundError), needs_extra():
        raise ModuleNotFoundError("a bug of ours", name="headwater.nothing")


def test_the_commands_cost_nothing_until_they_run() -> None:
    heavy = "{'torch', 'transformers', 'starlette', 'uvicorn', 'msgspec', 'numpy'}"
    code = f"import sys; import headwater.cli.chat, headwater.cli.serve; print({heavy} & set(sys.modules))"
    path = str(Path(__file__).parents[2] / "src")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


WITHOUT_TORCH = """
import sys
from headwater.cli import run

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, Missing())
print([run(["bench", name]) for name in ("engine", "transfer", "ttft")])
"""


def test_benchmarks_without_torch_say_what_to_install() -> None:
    path = str(Path(__file__).parents[2] / "src")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[1, 1, 1]"
    lines = done.stderr.splitlines()
    assert lines == [f"error: the package torch is not installed; {install_hint('engine')}"] * 3
