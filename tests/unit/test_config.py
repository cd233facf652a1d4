"""Pools by name: what a file or a variable may say, and how errors are explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli.app import app
from headwater.errors import ConfigError, UrlError
from headwater.kv.topology import whole_shard
from headwater.pool import open_pool
from headwater.pool.tenants import tenant_salt
from headwater.stores.config import check_config, find_pool

from support import gqa, identity, local_tiles

GOOD = """
[pools]
laptop = "shm:///headwater?capacity=2GiB"

[pools.fleet]
tenant_secret_env = "SALT"

[[pools.fleet.tiers]]
url = "shm:///headwater"
capacity = "8GiB"

[[pools.fleet.tiers]]
url = "file:///var/lib/headwater"
capacity = "200GiB"
write = "demote"

[[pools.fleet.tiers]]
url = "rediss://cache:6380/2"
user = "head water"
password_env = "REDIS_PASSWORD"
ttl = 3600
"""
ENV = {"SALT": "0123456789abcdef", "REDIS_PASSWORD": "p@ss,redis://w/rd"}


def test_tiers_as_tables_are_the_same_as_urls(tmp_path: Path) -> None:
    path = tmp_path / "headwater.toml"
    path.write_text(GOOD)
    pools, problems = check_config(str(path), ENV)
    assert not problems
    assert [str(url) for url in pools["laptop"].urls] == ["shm:///headwater?capacity=2GiB"]
    shm, file, redis = pools["fleet"].urls
    assert (shm.scheme, shm.size("capacity")) == ("shm", 8 << 30)
    assert file.options["write"] == "demote"
    assert (redis.scheme, redis.host, redis.port, redis.path) == ("rediss", "cache", 6380, "/2")
    assert (redis.user, redis.password) == ("head water", ENV["REDIS_PASSWORD"])
    assert pools["fleet"].tenant_secret == b"0123456789abcdef"
    assert find_pool("fleet", ENV | {"HEADWATER_CONFIG": str(path)}) == pools["fleet"]


def test_nothing_that_is_shown_has_a_password(tmp_path: Path) -> None:
    path = tmp_path / "headwater.toml"
    path.write_text(GOOD)
    pool = check_config(str(path), ENV)[0]["fleet"]
    assert ENV["REDIS_PASSWORD"] not in repr(pool) + str(pool)
    assert "0123456789abcdef" not in repr(pool)
    assert "//***@cache:6380" in str(pool)


@pytest.mark.parametrize("text", ["redis://u:s3cret@h:1/x", "redis://u:s3cret@h:99999", "redis://u:s3c/ret@h/?a=1"])
def test_errors_about_urls_do_not_quote_the_password(text: str) -> None:
    with pytest.raises(UrlError) as caught:
        find_pool(text, {})
    assert "s3c" not in str(caught.value)


def test_a_variable_goes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "headwater.toml"
    path.write_text(GOOD)
    env = ENV | {"HEADWATER_CONFIG": str(path), "HEADWATER_POOL_FLEET": "memory://,redis://other"}
    assert [url.scheme for url in find_pool("fleet", env).urls] == ["memory", "redis"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[pools.x]\nurl = 'nope://'", "unknown store scheme 'nope'"),
        ("[pools.x]", "give either `url` or `tiers`"),
        ("[pools.x]\nurl = 'memory://'\nspeed = 3", "unknown entry 'speed'"),
        ("[[pools.x.tiers]]\nurl = 'shm:///a'\nttl = 3", "pools.x.tiers[0]: unknown entry 'ttl'"),
        ("[[pools.x.tiers]]\nurl = 'redis://h'\npassword_env = 'NOT_THERE'", "'NOT_THERE', which is not set"),
        ("[[pools.x.tiers]]\nurl = 'redis://h'\n[[pools.x.tiers]]\nurl = 'shm:///a'", "fastest first"),
        ("[pools.x]\nurl = 'shm:///a'\ntenant_secret_file = '/nonexistent/file'", "cannot be read"),
        ("[pools.'9x']\nurl = 'shm:///a'", "a name is a letter"),
        ("[server]\nport = 1", "unknown section 'server'"),
        ("pools = 3", "must be a table"),
        ("this is no toml", "is not TOML"),
        ("[pools.x]\nurl = 'redis://h?replicas=2'", "unknown option 'replicas'"),
    ],
)
def test_errors_say_where_and_what_is_possible(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "headwater.toml"
    path.write_text(text)
    _, problems = check_config(str(path), {})
    assert len(problems) == 1
    assert expected in problems[0]
    assert str(path) in problems[0]
    outcome = CliRunner().invoke(app, ["config", "check", str(path), "--json"])
    assert outcome.exit_code == 1
    assert json.loads(outcome.stdout.splitlines()[-1])["problems"] == problems


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "headwater.toml"
    path.write_text("[pools.a]\nurl = 'x://'\n[pools.b]\nurl = 'y://'\n[pools.c]\nurl = 'memory://'")
    pools, problems = check_config(str(path), {})
    assert list(pools) == ["c"]
    assert len(problems) == 2


def test_every_problem_of_one_pool_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "headwater.toml"
    path.write_text(
        """
        [pools.x]
        speed = 3
        tenant_secret_env = "NO_SALT"
        [[pools.x.tiers]]
        url = "shm:///a"
        ttl = 3
        colour = "red"
        [[pools.x.tiers]]
        url = "redis://h?lookup=never&write=maybe"
        [[pools.x.tiers]]
        url = "redis://i"
        password_env = "NO_PASSWORD"
        deadline = "later"
        [pools.y]
        url = "shm:///b?capacity=big,redis://j?replicas=2&ttl=soon"
        """
    )
    pools, problems = check_config(str(path), {})
    assert not pools
    text = "\n".join(problems)
    for part in (
        "pools.x: unknown entry 'speed'",
        "'NO_SALT', which is not set",
        "tiers[0]: unknown entry 'ttl'",
        "unknown entry 'colour'",
        "lookup='never'",
        "option write",
        "tiers[2]: password_env names 'NO_PASSWORD'",
        "deadline='later'",
        "'big' is not a size",
        "unknown option 'replicas'",
        "ttl='soon'",
    ):
        assert part in text
    with pytest.raises(ConfigError) as caught:
        find_pool("y", {"HEADWATER_CONFIG": str(path)})
    assert "'big'" in str(caught.value)
    assert "NO_SALT" not in str(caught.value)


def test_the_command_shows_pools_without_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "headwater.toml"
    path.write_text(GOOD)
    outcome = CliRunner().invoke(app, ["config", "check", str(path), "--json"])
    assert outcome.exit_code == 0, outcome.output
    shown = json.loads(outcome.stdout.splitlines()[-1])
    assert shown["ok"]
    assert shown["pools"]["fleet"]["tenant_secret"] is True
    assert len(shown["pools"]["fleet"]["tiers"]) == 3
    assert ENV["REDIS_PASSWORD"] not in outcome.output
    assert ENV["SALT"] not in outcome.output


@pytest.mark.parametrize("option", ["ca", "password_file"])
def test_the_command_looks_for_files_that_a_tier_names(option: str, tmp_path: Path) -> None:
    path, named = tmp_path / "headwater.toml", tmp_path / "named"
    path.write_text(
        f'[pools]\nlaptop = "shm:///a"\nfleet = "shm:///a,rediss://cache?{option}={named}"\nother = "nothing://"\n'
    )

    def check() -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(CliRunner().invoke(app, ["config", "check", str(path), "--json"]).stdout)
        return shown

    found = check()
    assert list(found["pools"]) == ["laptop"]
    assert f"{option}=" in found["problems"][0]
    assert "No such file or directory" in found["problems"][0]
    assert len(found["problems"]) == 2, "everything that is wrong, at once"
    named.write_text("something")
    found = check()
    assert ("no certificates" in found["problems"][0]) == (option == "ca")
    assert ("fleet" in found["pools"]) == (option != "ca")


def test_an_unknown_name_says_how_to_define_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="HEADWATER_POOL_FLEET_2"):
        open_pool("fleet-2")


def test_a_named_pool_opens_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_POOL_HERE", "memory://?capacity=4MiB")
    with open_pool("here") as pool:
        assert pool.stats().store.url.startswith("memory://")


def test_salts_from_a_secret_keep_keys_from_outsiders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows model, tenant and prompt but not the secret computes other keys, for the nameless tenant too."""
    spec = gqa()
    shard = whole_shard(spec)
    monkeypatch.setenv("HEADWATER_TENANT_SECRET", "a secret of enough bytes")
    with open_pool("memory://?capacity=4MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=8)
        mine = space.keys(range(16), tenant=b"acme")
        chunks = mine.chunks()
        space.write(chunks, shard, [local_tiles(spec, c, shard) for c in chunks])
        assert space.match(space.keys(range(16), tenant=b"acme")).num_tokens == 16
        monkeypatch.delenv("HEADWATER_TENANT_SECRET")
        with open_pool("memory://?capacity=4MiB") as other:
            outside = other.space(identity(), spec, chunk_tokens=8)
            assert not set(outside.keys(range(16), tenant=b"acme").full) & set(mine.full)
            assert outside.keys(range(16)).full != space.keys(range(16)).full
        assert pool.clear(tenant=b"acme") == 2
    assert tenant_salt(None, b"acme") == b"acme"
    assert tenant_salt(b"k" * 16, b"acme") != tenant_salt(b"l" * 16, b"acme")


def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_TENANT_SECRET", "short")
    with pytest.raises(ConfigError, match="at least 16 bytes") as caught:
        open_pool("memory://")
    assert "short" not in str(caught.value).replace("a tenant secret", "")
