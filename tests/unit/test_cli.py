"""The `headwater` command: what it prints, what it refuses, how it exits, and that looking never changes anything."""

import glob
import io
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from headwater import Identity, KVSpec, Pool, Status, Topology, open_pool, whole_shard
from headwater.cli import run
from headwater.cli.app import app
from headwater.cli.demo import run as demo_run
from headwater.cli.demo.cache import SPEC, PagedCache
from headwater.cli.demo.ranks import Rank, load, save
from headwater.cli.listing import Selection
from headwater.errors import SettingsMismatchError
from headwater.pool.tenants import tenant_tag
from headwater.stores.url import DEFAULT_URL

SRC = str(Path(__file__).resolve().parents[2] / "src")
SMALL = KVSpec.gqa(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float16")
INSPECTING = (["stats"], ["ls"], ["ls", "--chunks"], ["verify"], ["clear", "--yes"], ["clear", "--yes", "--remove"])


class Place:
    """A pool of a test's own, small, in shared memory."""

    def __init__(self, name: str) -> None:
        self.url = f"shm:///{name}"
        self.directory = Path("/dev/shm", name)

    def open(self) -> Pool:
        return open_pool(f"{self.url}?capacity=64MiB")

    def fill(self, num_tokens: int, *, model: str = "toy", weights: str = "11", tenant: bytes = b"") -> None:
        """Store a prompt of so many tokens in chunks of 16."""
        digest = "sha256:" + weights * (64 // len(weights))
        identity = Identity(weights=digest, run_dtype="float16", kv_dtype="float16", label=model)
        with self.open() as pool:
            space = pool.space(identity, SMALL, chunk_tokens=16)
            chunks = space.keys(range(num_tokens), tenant=tenant).chunks()
            tiles = [np.full(SMALL.extent_bytes(chunk.num_tokens), chunk.number, np.uint8) for chunk in chunks]
            assert space.write(chunks, whole_shard(SMALL), tiles) == [Status.OK] * len(chunks)

    def flip_a_byte(self, offset: int) -> None:
        (path,) = glob.glob(str(self.directory / "data-*"))
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place(f"hwtest-{os.getpid()}-{secrets.token_hex(4)}")
    yield place
    shutil.rmtree(place.directory, ignore_errors=True)


class Result:
    """What one command did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process."""

    def call(*args: str) -> Result:
        capsys.readouterr()
        code = run(args)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


def start(*args: str, code: str = "from headwater.cli import main; main()") -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [SRC, os.environ.get("PYTHONPATH")]))}
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, *args], env=env, text=True, **pipes)


def finish(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=120)
    return Result(process.returncode, out, err)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


# ---- the command itself -----------------------------------------------------------------------------------------
def test_version(cli: Cli) -> None:
    result = cli("--version")
    assert (result.code, result.out) == (0, "headwater 0.1.0\n")


@pytest.mark.parametrize("args", [(), ("pool",)])
def test_without_a_command_it_says_which_there_are(cli: Cli, args: tuple[str, ...]) -> None:
    result = cli(*args)
    assert result.code in (0, 2)  # Typer's answer changed with its version
    assert "Usage: headwater" in result.out + result.err


def test_help_is_quick_because_it_loads_no_numpy() -> None:
    code = "import sys; from headwater.cli import run; run(['pool', 'ls', '--help']); sys.exit('numpy' in sys.modules)"
    result = finish(start(code=code))
    assert (result.code, result.err) == (0, "")
    assert DEFAULT_URL in result.out


def test_python_m_headwater_cli() -> None:
    env = os.environ | {"PYTHONPATH": SRC}
    command = [sys.executable, "-m", "headwater", "--version"]
    assert subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout == "headwater 0.1.0\n"


@pytest.mark.parametrize("args", [(), ("pool",), ("bench",), ("config",)])
def test_a_group_alone_says_what_it_can_do(cli: Cli, args: tuple[str, ...]) -> None:
    alone, asked = cli(*args), cli(*args, "--help")
    assert asked.out.split() == (alone.out + alone.err).split()
    assert "***" not in asked.out


@pytest.mark.parametrize("args", [("nonsense",), ("pool", "ls", "--nonsense"), ("pool", "ls", "--limit", "-1")])
def test_wrong_usage_exits_2(cli: Cli, args: tuple[str, ...]) -> None:
    result = cli(*args)
    assert result.code == 2
    assert "Traceback" not in result.err


def test_an_error_is_one_line_and_in_json_an_object(cli: Cli) -> None:
    plain, as_json = cli("pool", "stats", "ftp://x"), cli("pool", "stats", "ftp://x", "--json")
    assert plain.code == as_json.code == 1
    assert plain.out == ""
    assert plain.err.startswith("error: unknown store scheme 'ftp'")
    assert plain.err.count("\n") == 1
    assert as_json.err == plain.err
    assert as_json.json["kind"] == "UrlError"
    assert as_json.json["error"] == plain.err.removeprefix("error: ").strip()


def test_an_unexpected_error_is_one_line_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("headwater.cli.inspection.show_stats", explode)
    result = cli("pool", "stats")
    assert result.code == 1
    assert result.err.startswith("error: unexpected RuntimeError: first")
    assert result.err.count("\n") == 1
    monkeypatch.setenv("HEADWATER_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        run(["pool", "stats"])


# ---- looking must not make ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", INSPECTING, ids=" ".join)
def test_a_pool_that_is_not_there_is_not_made(cli: Cli, place: Place, tmp_path: Path, command: list[str]) -> None:
    for url, directory in ((place.url, place.directory), (f"file://{tmp_path}/pool", tmp_path / "pool")):
        result = cli("pool", command[0], url, *command[1:])
        assert result.code == 1
        assert result.err.startswith(f"error: there is no pool at {url}")
        assert not directory.exists()


@pytest.mark.parametrize("command", INSPECTING, ids=" ".join)
def test_private_memory_cannot_be_inspected(cli: Cli, command: list[str]) -> None:
    result = cli("pool", command[0], "memory://", *command[1:])
    assert result.code == 1
    assert "private to the process" in result.err


def test_an_unreadable_pool_is_not_replaced(cli: Cli, place: Place) -> None:
    place.fill(40)
    index = place.directory / "index"
    broken = b"\xff" * index.stat().st_size
    index.write_bytes(broken)
    for command in (["stats"], ["ls"], ["verify"], ["clear", "--yes"]):
        result = cli("pool", command[0], place.url, *command[1:], "--json")
        assert result.code == 1
        assert result.json["kind"] == "StoreDamagedError"
        assert index.read_bytes() == broken
    assert cli("pool", "clear", place.url, "--yes", "--remove").code == 0
    assert not place.directory.exists()


def test_a_pool_of_others_says_permission(cli: Cli, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *_: object, **__: object) -> None:
        raise PermissionError(13, "no", path)

    monkeypatch.setattr("headwater.cli.target.os.stat", refuse)
    result = cli("pool", "stats", place.url, "--json")
    assert result.json["kind"] == "StorePermissionError"


# ---- stats ------------------------------------------------------------------------------------------------------
def test_stats(cli: Cli, place: Place) -> None:
    place.fill(40)
    figures = cli("pool", "stats", place.url, "--json").json
    assert figures["url"] == place.url
    assert (figures["chunks"], figures["stored"], figures["members"]) == (3, 3, 1)
    assert figures["capacity_bytes"] == 64 << 20
    human = cli("pool", "stats", place.url)
    assert human.code == 0
    assert human.out.startswith(place.url)
    rows = {line.split()[0]: line.split()[1:] for line in human.out.splitlines()[1:]}
    assert rows["capacity"][:2] == ["64.0", "MiB"]
    assert rows["chunks"][0] == rows["stored"][0] == "3"
    assert rows["processes"][0] == "0"


def test_stats_counts_the_other_processes(cli: Cli, place: Place) -> None:
    code = "import sys, headwater; p = headwater.open_pool(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    place.fill(16)
    env = os.environ | {"PYTHONPATH": SRC}
    command = [sys.executable, "-c", code, place.url]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        assert "processes" in (human := cli("pool", "stats", place.url).out)
        assert [line.split()[1] for line in human.splitlines() if line.startswith("processes")] == ["1"]
        refused = cli("pool", "clear", place.url, "--remove", "--yes")
        assert refused.code == 1
        assert "in use by 1 process;" in refused.err
        other.communicate()
    assert cli("pool", "clear", place.url, "--remove", "--yes").code == 0


# ---- ls ---------------------------------------------------------------------------------------------------------
def test_ls_has_a_row_per_root(cli: Cli, place: Place) -> None:
    place.fill(40, model="llama", weights="ab")
    place.fill(20, model="llama", weights="ab", tenant=b"acme")
    place.fill(16, model="qwen", weights="cd")
    listed = cli("pool", "ls", place.url, "--json").json
    assert listed["total"] == 3
    newest, middle, oldest = listed["roots"]
    assert newest["label"] == "qwen"
    assert (middle["label"], middle["tenant"], middle["chunks"], middle["tokens"]) == (
        "llama",
        tenant_tag(b"acme"),
        2,
        20,
    )
    assert (oldest["chunks"], oldest["tokens"], oldest["bytes"]) == (3, 40, SMALL.extent_bytes(40))
    assert KVSpec.from_canonical(oldest["spec"]) == SMALL
    assert oldest["identity"]["weights"] == "sha256:" + "ab" * 32
    assert (oldest["pinned"], oldest["leased"], oldest["chunk_tokens"]) == (0, 0, 16)

    human = cli("pool", "ls", place.url).out.splitlines()
    assert human[0].split()[:4] == ["model", "weights", "spec", "tenant"]
    assert len(human) == 4
    assert "2 layers × 2 heads × (8 + 8) float16" in human[1]
    assert "abababab" in human[2]
    assert tenant_tag(b"acme") in human[2]


def test_ls_counts_what_is_pinned_and_leased(cli: Cli, place: Place) -> None:
    place.fill(40)
    with place.open() as pool:
        identity = Identity(weights="sha256:" + "11" * 32, run_dtype="float16", kv_dtype="float16")
        space = pool.space(identity, SMALL, chunk_tokens=16)
        match = space.match(space.keys(range(40)))
        assert space.pin(match)
        with space.lease(match, "request"):
            (root,) = cli("pool", "ls", place.url, "--json").json["roots"]
            assert (root["pinned"], root["leased"]) == (1, 1)
            tail = cli("pool", "ls", place.url, "--chunks").out.splitlines()[1]
            assert "tail, pinned, leased" in tail


def test_ls_chunks(cli: Cli, place: Place) -> None:
    place.fill(40)
    listed = cli("pool", "ls", place.url, "--chunks", "--json").json
    assert sorted(c["number"] for c in listed["chunks"]) == [0, 1, 2]
    assert [c["tokens"] for c in listed["chunks"] if c["is_tail"]] == [8]
    assert all(len(bytes.fromhex(c["key"])) == 32 and c["label"] == "toy" for c in listed["chunks"])
    human = cli("pool", "ls", place.url, "--chunks").out.splitlines()
    assert human[0].split()[:2] == ["key", "model"]
    assert len(human) == 4


def test_ls_limit(cli: Cli, place: Place) -> None:
    place.fill(16 * 120)
    everything = cli("pool", "ls", place.url, "--chunks", "--json").json
    assert len(everything["chunks"]) == everything["total"] == 120
    some = cli("pool", "ls", place.url, "--chunks", "--json", "--limit", "7").json
    assert (len(some["chunks"]), some["total"]) == (7, 120)
    human = cli("pool", "ls", place.url, "--chunks").out.splitlines()
    assert len(human) == 102
    assert human[-1] == "… and 20 more (--limit 120 shows all)"
    assert len(cli("pool", "ls", place.url, "--chunks", "--limit", "120").out.splitlines()) == 121


def test_ls_of_a_selection(cli: Cli, place: Place) -> None:
    place.fill(16, model="llama", weights="ab", tenant=b"acme")
    place.fill(16, model="qwen", weights="cd")

    def labels(*options: str) -> list[str]:
        return sorted(root["label"] for root in cli("pool", "ls", place.url, "--json", *options).json["roots"])

    assert labels("--identity", "llama") == labels("--identity", "abab") == labels("--tenant", "acme") == ["llama"]
    assert labels("--tenant", tenant_tag(b"acme")) == ["llama"]
    assert labels("--tenant", "") == labels("--identity", "sha256:cdcd") == ["qwen"]
    assert labels("--identity", "lla") == []
    assert cli("pool", "ls", place.url, "--identity", "lla").out == f"{place.url} holds nothing to list\n"


def test_a_label_cannot_paint_the_terminal(cli: Cli, place: Place) -> None:
    place.fill(16, model="[red]evil[/red]\x1b[2J\n\x07")
    human = cli("pool", "ls", place.url)
    assert "[red]evil[/red]\N{REPLACEMENT CHARACTER}[2J" in human.out
    assert "\x1b" not in human.out + cli("pool", "ls", place.url, "--chunks").out
    assert len(human.out.splitlines()) == 2


@pytest.mark.parametrize("identity", ["toy", "abcd", "ABCD", "sha256:abcd", "abcd" * 16])
def test_what_names_an_identity(identity: str) -> None:
    space = {"identity": {"weights": "sha256:" + "abcd" * 16}}
    assert Selection(identity=identity)(space, {"label": "toy"})


@pytest.mark.parametrize("identity", ["to", "abc", "abce", "bcda", "sha256:", "sha256:ab", "sampled-sha256:abcd"])
def test_what_names_no_identity(identity: str) -> None:
    space = {"identity": {"weights": "sha256:" + "abcd" * 16}}
    assert not Selection(identity=identity)(space, {"label": "toy"})


# ---- verify -----------------------------------------------------------------------------------------------------
def test_verify_clean(cli: Cli, place: Place) -> None:
    place.fill(40)
    human, report = cli("pool", "verify", place.url), cli("pool", "verify", place.url, "--json")
    assert human.code == report.code == 0
    assert human.out.splitlines()[-1] == "clean"
    assert "3 chunks, 12 tiles" in human.out
    assert (report.json["clean"], report.json["chunks"], report.json["bytes"]) == (True, 3, SMALL.extent_bytes(40))


def test_verify_exits_1_when_a_byte_was_flipped(cli: Cli, place: Place) -> None:
    place.fill(16)
    place.flip_a_byte(100)
    report = cli("pool", "verify", place.url, "--json")
    assert report.code == 1
    assert (report.json["clean"], report.json["damaged"], report.json["chunks"]) == (False, 1, 0)
    assert cli("pool", "verify", place.url).code == 0, "what was damaged should be gone"
    assert cli("pool", "stats", place.url, "--json").json["damaged"] == 1

    place.fill(16)
    place.flip_a_byte(100)
    human = cli("pool", "verify", place.url)
    assert human.code == 1
    assert "damaged: 1 chunk, removed\nnot clean\n" in human.out


# ---- clear ------------------------------------------------------------------------------------------------------
def remaining(cli: Cli, place: Place) -> list[str]:
    return sorted(root["label"] for root in cli("pool", "ls", place.url, "--json").json["roots"])


def test_clear_everything(cli: Cli, place: Place) -> None:
    place.fill(40)
    result = cli("pool", "clear", place.url, "--yes", "--json")
    assert result.code == 0
    assert result.json["removed_chunks"] == 3
    assert result.json["freed_bytes"] >= SMALL.extent_bytes(40)
    assert remaining(cli, place) == []
    place.fill(40)
    assert "removed 3 chunks" in cli("pool", "clear", place.url, "-y").out
    assert "nothing to remove" in cli("pool", "clear", place.url, "-y").out


@pytest.mark.parametrize(
    "options",
    [("--identity", "llama"), ("--identity", "abab"), ("--tenant", "acme"), ("--tenant", tenant_tag(b"acme"))],
    ids=" ".join,
)
def test_clear_a_selection(cli: Cli, place: Place, options: tuple[str, str]) -> None:
    place.fill(40, model="llama", weights="ab", tenant=b"acme")
    place.fill(16, model="qwen", weights="cd")
    assert cli("pool", "clear", place.url, "--yes", "--json", *options).json["removed_chunks"] == 3
    assert remaining(cli, place) == ["qwen"]


def test_clear_refuses_digits_that_begin_two_digests(cli: Cli, place: Place) -> None:
    place.fill(16, model="one", weights="abcdabcd")
    place.fill(16, model="two", weights="abcdef00")
    result = cli("pool", "clear", place.url, "--yes", "--identity", "abcd")
    assert result.code == 1
    assert "matches 2 digests" in result.err
    assert cli("pool", "clear", place.url, "--yes", "--identity", "abcde").code == 0
    assert remaining(cli, place) == ["one"]
    assert cli("pool", "clear", place.url, "--yes", "--identity", "").code == 1
    assert remaining(cli, place) == ["one"]


def test_nobody_can_push_into_memory_of_one_process(cli: Cli) -> None:
    result = cli("pool", "receive", "memory://", "--listen", "127.0.0.1:0")
    assert result.code == 1
    assert "private to one process" in result.err


class Terminal(io.StringIO):
    """Somebody who types an answer."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("remove", [[], ["--remove"]], ids=["chunks", "pool"])
def test_clear_asks(cli: Cli, place: Place, monkeypatch: pytest.MonkeyPatch, remove: list[str]) -> None:
    place.fill(16)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    result = cli("pool", "clear", place.url, *remove)
    assert result.code == 1
    assert "nothing was removed" in result.err
    assert "--yes" in result.err
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    result = cli("pool", "clear", place.url, *remove)
    assert result.code == 1
    assert "not confirmed" in result.err
    assert remaining(cli, place) == ["toy"]
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    result = cli("pool", "clear", place.url, *remove, "--json")
    assert result.code == 0
    assert result.json["removed_pool"] is bool(remove)
    assert len(result.out.splitlines()) == 1, "the question belongs on stderr"


def test_clear_remove_deletes_the_files(cli: Cli, place: Place, tmp_path: Path) -> None:
    place.fill(16)
    assert f"{place.url}: deleted" in cli("pool", "clear", place.url, "--remove", "--yes").out
    assert not place.directory.exists()
    url = f"file://{tmp_path}/pool"
    open_pool(f"{url}?capacity=32MiB").close()
    assert cli("pool", "clear", url, "--remove", "--yes", "--json").json["removed_pool"] is True
    assert not (tmp_path / "pool").exists()


def test_clear_remove_knows_names_and_takes_one_tier_at_a_time(
    cli: Cli, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place.fill(16)
    monkeypatch.setenv("HEADWATER_POOL_FLEET", f"{place.url},file://{tmp_path}/below")
    refused = cli("pool", "clear", "fleet", "--remove", "--yes")
    assert refused.code == 1
    assert f"expected one tier, got 2; name one of: {place.url}" in refused.err
    assert "nothing to delete on this host" in cli("pool", "clear", "redis://127.0.0.1:1/0", "--remove", "--yes").err
    monkeypatch.setenv("HEADWATER_POOL_ALONE", place.url)
    assert cli("pool", "clear", "alone", "--remove", "--yes").code == 0
    assert not place.directory.exists()


@pytest.mark.parametrize("command", INSPECTING, ids=" ".join)
def test_an_empty_name_is_no_pool(cli: Cli, command: list[str]) -> None:
    """As of a variable that is not set: it must not mean everybody's."""
    result = cli("pool", command[0], "", *command[1:])
    assert result.code == 1
    assert "unknown store scheme ''" in result.err


def test_a_server_that_does_not_answer_is_no_empty_pool(cli: Cli, place: Place) -> None:
    gone = "redis://127.0.0.1:1/0"
    assert cli("pool", "stats", gone).code == 1
    place.fill(16)
    shown = cli("pool", "stats", f"{place.url},{gone}")
    assert shown.code == 0
    assert "no connection to 127.0.0.1:1" in " ".join(shown.out.split())
    assert list(cli("pool", "stats", f"{place.url},{gone}", "--json").json["unreachable"]) == [gone]


def test_what_concerns_all_tiers_names_all_tiers(cli: Cli, place: Place, tmp_path: Path) -> None:
    below = f"file://{tmp_path}/below"
    open_pool(f"{below}?capacity=32MiB").close()
    place.fill(40)
    both = f"{place.url},{below}"
    assert f"{both}: 3 chunks" in cli("pool", "verify", both).out
    assert cli("pool", "verify", both, "--json").json["url"] == both
    assert cli("pool", "ls", both, "--json").json["url"] == both
    removed = cli("pool", "clear", both, "--yes").out
    assert f"{both}: removed 3 chunks" in removed
    assert removed.strip().endswith(f"freed in {place.url}")


def test_a_tier_that_cannot_be_checked_is_named(cli: Cli, place: Place) -> None:
    gone = "redis://127.0.0.1:1/0"
    place.fill(16)
    checked = cli("pool", "verify", f"{place.url},{gone}")
    assert f"not checked: {gone}: no connection" in checked.out
    (reason,) = cli("pool", "verify", f"{place.url},{gone}", "--json").json["unchecked"]
    assert reason.startswith(gone)


def test_events_are_followed(cli: Cli, place: Place) -> None:
    place.fill(16)
    assert cli("pool", "events", place.url, "--seconds", "0").out == ""  # from here on they are kept
    place.fill(40, weights="ab")
    lines = cli("pool", "events", place.url, "--since", "0", "--seconds", "0", "--json").out.splitlines()
    events = [json.loads(line) for line in lines]
    assert [(e["sequence"], e["kind"], e["tier"], e["number"], e["num_tokens"]) for e in events] == [
        (1, "stored", "shm", 0, 16),
        (2, "stored", "shm", 1, 16),
        (3, "stored", "shm", 2, 8),
    ]
    cli("pool", "clear", place.url, "--yes")
    shown = cli("pool", "events", place.url, "--since", "3", "--seconds", "0").out
    assert "removed   shm" in shown
    assert "a whole root" in shown
    assert cli("pool", "events", f"{place.url}-none", "--seconds", "0").code == 1


def test_events_say_whose_they_are(cli: Cli, place: Place) -> None:
    place.fill(16)
    said = cli("pool", "events", f"{place.url},redis://127.0.0.1:1/0,mooncake://127.0.0.1:1", "--seconds", "0").err
    assert "redis://127.0.0.1:1/0: events of all hosts that share it" in said
    assert "mooncake://127.0.0.1:1: events of the processes of this host" in said


def test_clear_remove_takes_no_selection(cli: Cli, place: Place) -> None:
    place.fill(16)
    assert cli("pool", "clear", place.url, "--remove", "--yes", "--tenant", "acme").code == 2
    assert remaining(cli, place) == ["toy"]


# ---- the demo ---------------------------------------------------------------------------------------------------
def demo_pools() -> set[str]:
    return set(glob.glob("/dev/shm/headwater-demo-*"))


def test_a_paged_cache_gathers_what_another_scatters() -> None:
    for topology in (Topology(tp=4, pp=2, block_size=16), Topology(tp=1, pp=3, block_size=7)):
        shard = topology.shard(SPEC, tp_rank=topology.tp - 1, pp_rank=1)
        one = PagedCache(shard, topology.block_size, 100, seed=1)
        two = PagedCache(shard, 12, 100, seed=2)
        one.compute()
        assert one.count_wrong_bytes() == 0
        assert two.count_wrong_bytes() > 0
        for first, length in ((0, 64), (64, 36)):
            two.scatter(first, length, one.gather(first, length))
        assert two.count_wrong_bytes() == 0
        tiles = two.gather(30, 5)
        tiles[-1, -1, -1] ^= 1
        two.scatter(30, 5, tiles)
        assert two.count_wrong_bytes() == 1


def test_the_demo_counts_what_is_damaged_as_wrong(place: Place) -> None:
    """A reader that compared too little would show 0 wrong bytes for ever."""
    with place.open():
        rank = Rank(place.url, 1, Topology(block_size=16), pp_rank=0, tp_rank=0, num_tokens=100)
        assert save(rank, lambda: None).num_bytes == SPEC.extent_bytes(100)
        assert load(rank, lambda: None).wrong_bytes == 0
        place.flip_a_byte(1000)
        report = load(rank, lambda: None)
    assert report.num_bytes == 0
    assert report.wrong_bytes > 0.9 * SPEC.extent_bytes(100)


@pytest.mark.slow
def test_demo() -> None:
    before = demo_pools()
    result = finish(start("pool", "demo", "--json", "--tokens", "300"))
    assert (result.code, result.err) == (0, "")
    demo = result.json
    assert demo["correct"] is True
    shapes = [(s["role"], s["tp"], s["pp"], s["block_size"], s["ranks"]) for s in demo["servers"]]
    assert shapes == [("writer", 4, 2, 16, 8), ("reader", 8, 1, 64, 8), ("reader", 1, 3, 48, 3)]
    for server in demo["servers"]:
        assert (server["tokens"], server["bytes"], server["wrong_bytes"]) == (300, SPEC.extent_bytes(300), 0)
    assert demo["store"]["chunks"] == 2
    assert demo_pools() <= before


@pytest.mark.slow
def test_demo_in_a_given_pool_leaves_its_kv_there(cli: Cli, place: Place) -> None:
    url = f"{place.url}?capacity=64MiB"
    first = finish(start("pool", "demo", "--url", url, "--tokens", "300"))
    assert (first.code, first.err) == (0, "")
    assert f"headwater pool stats '{url}'" in first.out
    assert "clear --identity headwater-demo" in first.out, "somebody else's KV may be there"
    assert "--remove" not in first.out
    assert remaining(cli, place) == ["headwater-demo"]
    again = finish(start("pool", "demo", "--url", place.url, "--tokens", "300", "--json")).json
    assert again["correct"] is True
    assert again["servers"][0]["bytes"] == 0, "what is there already is not written again"


@pytest.mark.slow
def test_demo_falls_back_to_files(tmp_path: Path) -> None:
    code = (
        "import sys, tempfile, headwater.stores.embedded as embedded; from headwater.cli import main\n"
        "embedded.SHM_ROOT = '/dev/null'; tempfile.tempdir = sys.argv.pop(); main()"
    )
    result = finish(start("pool", "demo", "--json", "--tokens", "20", str(tmp_path), code=code))
    assert (result.code, result.err) == (0, "")
    assert result.json["url"].startswith(f"file://{tmp_path}")
    assert "shared memory cannot be used here" in result.json["note"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_interrupted_leaves_nothing(number: int, code: int) -> None:
    before = demo_pools()
    process = start("pool", "demo", "--tokens", "32768")
    wait_for(lambda: demo_pools() - before, "the demo's pool")
    process.send_signal(number)
    result = finish(process)
    assert (result.code, result.out, result.err) == (code, "", "")
    assert demo_pools() <= before


@pytest.mark.parametrize("calls", [1, 2])
def test_an_interrupt_while_a_pool_is_opened_leaves_nothing(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is open and that nobody knows of cannot be deleted."""

    class Stopped(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    def open_and_stop(url: str) -> Pool:
        opened.append(open_pool(url))
        if len(opened) == calls:
            signal.raise_signal(signal.SIGTERM)
        return opened[-1]

    opened, before = list[Pool](), demo_pools()
    monkeypatch.setattr(demo_run, "open_pool", open_and_stop)
    handler = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Stopped), demo_run.own_pool(1 << 20, keep=False) as (url, _), demo_run.held_pool(url):
            pytest.fail("the signal was lost")
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert len(opened) == calls
    assert demo_pools() <= before


def test_an_interrupt_that_becomes_another_error_ends_quietly() -> None:
    """As CPython does it to what a signal raises in the middle of an optional import."""
    script = """
import os, signal, time
import headwater.cli as cli
import headwater.cli.app

def app(args, **settings):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    except SystemExit:
        raise TypeError("expected a message argument") from None

headwater.cli.app.command = lambda: app
cli.main()
"""
    result = finish(start(code=script))
    assert (result.code, result.out, result.err) == (130, "", "")


def test_an_interrupt_inside_a_destructor_is_not_lost() -> None:
    """The interpreter swallows what is raised there; the command must stop all the same, and say nothing of it."""
    script = """
import os, signal, sys, time
import headwater.cli as cli

class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

def run(args):
    try:
        Slow()
        time.sleep(30)
    except SystemExit as stop:
        return stop.code

cli.run = run
cli.main()
"""
    result = finish(start(code=script))
    assert (result.code, result.err) == (130, "")


def test_demo_needs_a_pool_that_processes_can_share(cli: Cli) -> None:
    result = cli("pool", "demo", "--url", "memory://")
    assert result.code == 1
    assert "private to one process" in result.err


@pytest.mark.slow
def test_demo_says_what_went_wrong_in_a_rank(place: Place) -> None:
    with open_pool(f"{place.url}?capacity=8MiB"):
        result = finish(start("pool", "demo", "--url", place.url, "--json"))
    assert result.code == 1
    assert result.json["kind"] == "StoreError"
    assert "one chunk of 256 tokens takes 8.0 MiB" in result.json["error"]
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["stats", "ls", "verify"])
def test_a_pool_is_looked_at_as_it_is_whatever_sizes_the_url_asks_for(cli: Cli, verb: str, tmp_path: Path) -> None:
    """The URL of a configuration may have changed since the pool was made."""
    url = f"file://{tmp_path}/pool"
    with open_pool(f"{url}?capacity=4MiB"):
        pass
    for options in ("capacity=8MiB", "capacity=4MiB&index=1MiB", "segment=1MiB", "policy=fifo"):
        assert cli("pool", verb, f"{url}?{options}").code == 0
        with pytest.raises(SettingsMismatchError, match="the store exists with"):
            open_pool(f"{url}?{options}")


@pytest.mark.parametrize(
    "command", [(), ("serve",), ("proxy",), ("router",), ("generate",), ("pool",), ("pool", "ls"), ("bench", "vllm")]
)
def test_help_names_every_option_whole_at_80_columns(
    cli: Cli, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    shown = cli(*command, "--help").out
    group: Any = typer.main.get_command(app)
    for name in command:
        group = group.commands[name]
    seen = [parameter for parameter in group.params if not getattr(parameter, "hidden", False)]
    names = [option for parameter in seen for option in (*parameter.opts, *parameter.secondary_opts)]
    assert "--help" in shown
    assert not [name for name in names if name.startswith("--") and name not in shown]
    assert max(map(len, shown.splitlines())) <= 80
