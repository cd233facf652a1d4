"""`--help` of every command on a narrow terminal, completion in a real shell, and what wrong usage says."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.cli import run
from headwater.cli.app import command

SRC = str(Path(__file__).resolve().parents[2] / "src")
COLUMNS = 80


def tree(built: Any = None, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group, with its path of names."""
    built = command() if built is None else built
    yield names, built
    for name, child in getattr(built, "commands", {}).items():
        yield from tree(child, (*names, name))


ALL = dict(tree())


def shown(names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run([*names, "--help"]) == 0
    return capsys.readouterr().out


def visible(built: Any) -> list[Any]:
    return [parameter for parameter in built.params if not getattr(parameter, "hidden", False)]


def takes_no_value(parameter: Any) -> bool:
    return parameter.metavar is None


def in_order(words: list[str], page: list[str]) -> bool:
    """Whether the page has these words one after another: none broken, none left out."""
    return any(page[at : at + len(words)] == words for at in range(len(page) - len(words) + 1))


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERMINAL_WIDTH", str(COLUMNS))


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_help_shows_everything_at_80_columns(names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    page = shown(names, capsys)
    assert max(map(len, page.splitlines())) <= COLUMNS
    assert "…" not in page
    assert not re.search(r"\w\.\.\.$", page, re.MULTILINE)
    words = page.split()
    built = ALL[names]
    assert in_order((built.help or "").replace("\b", "").split(), words)
    for parameter in visible(built):
        assert in_order((parameter.help or "").split(), words), f"{parameter.name}: its help is broken or cut"
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("-"):
                places = [at for at, word in enumerate(words) if word.rstrip(",") == option]
                assert places, option
                assert takes_no_value(parameter) or any(parameter.metavar in words[at : at + 4] for at in places)
    for name, child in getattr(built, "commands", {}).items():
        assert in_order([name, *child.short_help.split()], words)


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_flags_are_shown_as_flags(names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    page = shown(names, capsys)
    assert not re.search(r"BOOLEAN|INTEGER|<\w+|\blist\[|RANGE\b", page)
    assert not re.search(r"--no-(json|insecure|quick|version|keep|yes)\b", page)


def test_help_is_quick() -> None:
    """Nothing of an engine, a server or numpy is loaded for it."""
    heavy = "{'torch', 'transformers', 'starlette', 'uvicorn', 'msgspec', 'numpy'}"
    code = f"import sys; from headwater.cli import run; run(['--help']); print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SRC}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "set()"


# ---- completion -------------------------------------------------------------------------------------------------
COMPLETE = """
eval "$(headwater --show-completion)"
complete -p headwater
for line in "headwater po" "headwater pool st" "headwater serve --pool-l" "headwater serve --pool-load a" \
    "headwater serve --log-format j"; do
    COMP_WORDS=($line); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
    _headwater_completion headwater
    echo "$line -> ${COMPREPLY[*]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    launcher = tmp_path / "headwater"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headwater "$@"\n')
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    env = os.environ | {"PYTHONPATH": SRC, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE], env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("complete ")
    assert lines[0].endswith(" headwater")
    assert lines[1:] == [
        "headwater po -> pool",
        "headwater pool st -> stats",
        "headwater serve --pool-l -> --pool-load",
        "headwater serve --pool-load a -> auto async",
        "headwater serve --log-format j -> json",
    ]


# ---- wrong usage ------------------------------------------------------------------------------------------------
WRONG = {
    ("serve", "--dtype", "int3"): "--dtype",
    ("serve", "--no-pool", "--pool-load", "fast"): "--pool-load",
    ("serve", "--page-size", "0"): "--page-size",
    ("serve", "--memory-ratio", "3"): "--memory-ratio is 3.0; expected above 0 and at most 1",
    ("serve", "--host", "0.0.0.0"): "--api-key",
    ("serve", "--ssl-keyfile", "k"): "--ssl-certfile",
    ("serve", "--pool", "shm:///x", "--no-pool"): "--no-pool",
    ("generate", "x", "--temperature", "-1"): "--temperature is -1.0; expected",
    ("generate", ""): "the prompt is empty",
    ("chat", "--max-tokens", "0"): "--max-tokens is 0; expected",
    ("router", "http://h:1,events=foo"): "events='foo' is no address of KV events; expected tcp://HOST:PORT",
    ("router", "http://h:1,events=tcp://*:5557"): "expected tcp://HOST:PORT",
    ("router", "http://h:1,events=tcp://h:1,replay=h:2"): "replay='h:2'",
    ("router", "http://h:1,pool=nowhere"): "'nowhere' is neither a URL nor a pool",
    ("router", "http://h:1,weight=heavy"): "weight='heavy'",
    ("router", "http://h:1", "--policy", "best"): "--policy",
    ("proxy", "--decode", "ftp://h"): "is not the URL of a server",
    ("pool", "receive", "--listen", "127.0.0.1:0", "--space", "zz"): "--space is 'zz'",
    ("pool", "receive", "--listen", "nowhere"): "nowhere",
    ("pool", "receive", "--listen", "127.0.0.1:0", "--tls-key", "k"): "--tls-cert",
    ("demo", "--tokens", "1"): "--tokens",
}


@pytest.mark.parametrize(("args", "said"), WRONG.items(), ids=[" ".join(args) for args in WRONG])
def test_wrong_values_are_wrong_usage_and_named_as_options(
    args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("msgspec", "starlette", "uvicorn"):
        pytest.importorskip(package)
    monkeypatch.delenv("HEADWATER_API_KEY", raising=False)
    # What is not refused must not begin to serve: a test that waits for ever says less than one that fails.
    for server in ("headwater.proxy.server.run_proxy", "headwater.serve.server.run_server"):
        monkeypatch.setattr(server, lambda *_, **__: 0)
    monkeypatch.setattr("headwater.cli.receive.open_pool", lambda url: pytest.fail(f"{url} was about to be served"))
    capsys.readouterr()
    assert run(args) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert said in err
    assert not re.search(r"\b(page_size|memory_ratio|pool_load|load_mode|max_tokens)\b", err)


def test_wrong_usage_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("pool", "receive", "--listen", "127.0.0.1:0", "--space", "zz", "--json")
    assert run(args) == 2
    assert '"kind": "InvalidArgumentError"' in capsys.readouterr().out
