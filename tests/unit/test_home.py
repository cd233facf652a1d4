"""`Pool.home`: the same for those who fill chunks together, and different for everybody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.pool import open_pool
from headwater.stores.embedded import store as embedded_store

from support import temporary_url

SRC = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("scheme", ["shm", "file"])
def test_all_processes_of_a_store_have_one_home(scheme: str, tmp_path: Path) -> None:
    code = "import sys; from headwater.pool import open_pool; print(open_pool(sys.argv[1]).home)"
    with temporary_url(scheme, tmp_path) as url, open_pool(url) as pool:
        environment = {**os.environ, "PYTHONPATH": str(SRC)}
        other = subprocess.run([sys.executable, "-c", code, url], env=environment, capture_output=True, check=True)
        assert other.stdout.decode().strip() == pool.home


def test_every_store_has_a_home_of_its_own(tmp_path: Path) -> None:
    homes = set()
    with temporary_url("shm", tmp_path) as url:
        for _ in range(2):  # the second one is made anew, under the same name
            with open_pool(url) as pool:
                homes.add(pool.home)
            subprocess.run(["rm", "-r", f"/dev/shm/{url.removeprefix('shm:///').partition('?')[0]}"], check=True)
    homes |= {open_pool("memory://?capacity=8MiB").home for _ in range(2)}
    assert len(homes) == 4


def test_the_first_tier_is_the_home(tmp_path: Path) -> None:
    below = f"file://{tmp_path}/below?capacity=8MiB"
    with (
        temporary_url("shm", tmp_path) as url,
        open_pool(url) as alone,
        open_pool(f"{url},{below}") as tiers,
        open_pool(below) as lower,
    ):
        assert tiers.home == alone.home != lower.home


def test_one_directory_on_two_hosts_is_not_one_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network filesystem shows both the same files, but locks are each host's own."""
    with open_pool(f"file://{tmp_path}/pool?capacity=8MiB") as pool:
        here = pool.home
        monkeypatch.setattr(embedded_store, "boot_id", lambda: 1)
        assert pool.home != here
