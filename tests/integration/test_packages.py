"""What `python -m build` makes, in an environment that holds nothing else: all that is needed, no more, and working."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

pytest.importorskip("build", reason="the package `build` is not installed")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headwater"
CORE = {"numpy", "xxhash", "typer", "rich"}
"""Everything that Headwater needs to be installed directly. It runs beside engines that pin their own versions."""
IN_SDIST = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "deploy/compose.yaml",
    "docs/install.md",
    "pyproject.toml",
    "src/headwater/py.typed",
    "tests/conftest.py",
)
BUILD_S = 300


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints. The environment is the user's, without what would lead Python to this repository."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and a wheel that was made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    (found,) = dist.glob("*.tar.gz")
    return found


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


# ---- what is in them --------------------------------------------------------------------------------------------
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Also what is no Python, such as a page's HTML: a wheel without it installs well and fails later."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        f"headwater/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".pyo")
    }
    assert "headwater/py.typed" in held
    assert held == wanted


def test_the_sdist_can_be_tested_and_built(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in IN_SDIST if name not in held]
    assert not [name for name in held if "__pycache__" in name or name.startswith((".venv", ".git/", "dist/"))]


def test_the_core_needs_four_packages(wheel: Path) -> None:
    needed = [line for line in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[^\w-]", line)[0] for line in needed} == CORE
    assert len(needed) == len(CORE)


def test_the_metadata_says_where_the_project_lives_and_what_it_runs_on(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shown = metadata(wheel)
    urls = dict(line.split(", ", 1) for line in shown.get_all("Project-URL", []))
    assert urls == project["urls"]
    assert shown["Requires-Python"] == ">=3.11"
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in shown.get_all("Classifier", [])
    assert "# Headwater" in shown.get_payload()


# ---- whether they work ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that holds Headwater's core and what that pulls."""
    folder = tmp_path_factory.mktemp(f"installed-{request.param}")
    # Without ensurepip, which Debian's Python lacks; the pip of these tests fills it.
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    package: Path = request.getfixturevalue(request.param)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", package, cwd=folder)
    return python.parent


@pytest.fixture
def pool_name() -> Iterator[str]:
    name = f"hwtest-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    for path in Path("/dev/shm", name).glob("*"):
        path.unlink()
    if Path("/dev/shm", name).exists():
        Path("/dev/shm", name).rmdir()


def test_the_command_runs_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(installed / "headwater", "--version", cwd=tmp_path) == f"headwater {version}\n"
    where = run(installed / "python", "-c", "import headwater; print(headwater.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_the_readme_example_runs_in_an_empty_environment(installed: Path, tmp_path: Path, pool_name: str) -> None:
    code, shown = readme_example()
    assert "shm:///quickstart" in code
    script = tmp_path / "example.py"
    script.write_text(code.replace("shm:///quickstart", f"shm:///{pool_name}"))
    assert run(installed / "python", script, cwd=tmp_path) == shown


def test_the_pool_demo_runs_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    report = json.loads(run(installed / "headwater", "pool", "demo", "--tokens", "600", "--json", cwd=tmp_path))
    assert report["correct"]
    assert [server.get("wrong_bytes") for server in report["servers"]][1:] == [0, 0]


def readme_example() -> tuple[str, str]:
    """The README's first Python block, and the block after it: what it prints."""
    found = re.search(r"```python\n(.*?)```\s*```\w*\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, "the README has no Python block that is followed by what it prints"
    return found[1], found[2]
