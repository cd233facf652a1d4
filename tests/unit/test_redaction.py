"""A secret at any place where people put secrets never comes out again: not in errors, their causes, logs or output.

URLs are made with a secret in them and then mangled: wrong schemes, missing slashes, wrong separators, characters that
should have been quoted, and quoted ones that should not.
"""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from headwater import cli
from headwater.connector.metrics import host_values, own_values
from headwater.engine.config import EngineConfig
from headwater.errors import HeadwaterError
from headwater.integrations.vllm.options import read_options
from headwater.redaction import redact, redact_words
from headwater.stores.config import PoolConfig, check_config, find_pool
from headwater.stores.remote import connect
from headwater.stores.stats import StoreStats, TierStats
from headwater.stores.url import StoreUrl, parse_url

SECRET = "S3kr1tZ"
AWAY = "127.0.0.1:1"
"""Nobody listens there."""


def leaks(text: object) -> bool:
    return SECRET.lower() in str(text).lower()


def told_by(error: BaseException | None) -> str:
    """All that an exception can say: its own text, its causes and contexts, as Python prints them and as `repr`."""
    said = []
    while error is not None:
        said += [str(error), repr(error), *traceback.format_exception_only(error)]
        assert error.__cause__ is None or error.__context__ in (None, error.__cause__)
        error = error.__cause__ or error.__context__
    return "\n".join(said)


@st.composite
def urls_with_a_secret(draw: st.DrawFn) -> str:
    """One tier with an account or a password somewhere, mangled."""
    scheme = draw(st.sampled_from(["redis", "rediss", "mooncake", "REDIS", "Redis", "valkey", "http", "shm", "file"]))
    slashes = draw(st.sampled_from(["://", "://", "://", ":/", ":", "//", "/", "", ":///", "%3A%2F%2F", "%3a//"]))
    at = draw(st.sampled_from(["@", "@", "@", "%40", "@@", "%2540", ":", "/", "?", "#"]))
    user = draw(st.sampled_from(["", "u", "me:you", "u%3Av", "u@x"]))
    before, after = (
        draw(st.sampled_from(["", "/", "?", "#", "@", "%", "%2F", "[", " ", "a,b://", "&x=", "ü"])),
        draw(st.sampled_from(["", "/", "?", "#", "@", "%zz", "]", " ", "=", ",c://d", "&x=1"])),
    )
    secret = f"{before}{SECRET}{after}"
    place = draw(st.sampled_from([AWAY, AWAY + "/0", "[::1]:1", "host:port", "", "127.0.0.1:99999"]))
    options = draw(st.sampled_from(["", "?ttl=5", "?nonsense=1", "?ttl=x", "?capacity=1GiB", "#x"]))
    name = draw(st.sampled_from(["password", "PASSWORD", "passwd", "pwd", "token", "secret", "auth", "api_key", "p w"]))
    mark = draw(st.sampled_from(["?", "&", ";", "#", "%3F", "?ttl=5&", "?ttl=5;", "?ttl=5?", "/?"]))
    equals = draw(st.sampled_from(["=", "=", "==", "%3D", ":"]))
    return draw(
        st.sampled_from(
            [
                f"{scheme}{slashes}{user}:{secret}{at}{place}{options}",
                f"{scheme}{slashes}:{secret}{at}{place}{options}",
                f"{scheme}{slashes}{secret}@{place}{options}",
                f"{scheme}{slashes}{user}:{secret}@{place}{options}",
                f"{user}:{secret}@{scheme}{slashes}{place}",
                f"redis{slashes}:{secret}",
                f"{scheme}{slashes}{place}{mark}{name}{equals}{secret}",
                f"{scheme}{slashes}{place}{mark}{name}{equals}{secret}{options}",
                f"{scheme}{slashes}{user}:pw@{place}{mark}{name}{equals}{secret}",
                f"mooncake://{place}?metadata=http{slashes}{user}:{secret}@meta",
                f"mooncake://{place}?metadata=http://meta/{mark}{name}{equals}{secret}",
                f"redis://{place}?password_file=/run/secret;redis{slashes}{user}:{secret}@{place}",
                f"shm:///x?policy=lru;redis{slashes}{user}:{secret}@{place}",
            ]
        )
    )


@st.composite
def pools_with_a_secret(draw: st.DrawFn) -> str:
    """That tier alone, or in a list."""
    first = draw(
        st.sampled_from(["", "", "shm:///a", "file:///a/b", "file:///a?capacity=4MiB", "SHM:///a", "memory://"])
    )
    between = draw(st.sampled_from([",", ", ", ";", " ", "|", ",,", "\n", " , "])) if first else ""
    last = draw(st.sampled_from(["", "", ",redis://127.0.0.1:2", ",x", ",", ",redis://u:q@127.0.0.1:2"]))
    tier = draw(urls_with_a_secret())
    before, _, after = tier.partition(SECRET)
    is_host = re.search(r"(@|%(25)*40)[^@:=]*$", before) and not re.search(r"@|%(25)*40", after)
    assume(not is_host)
    return f"{first}{between}{tier}{last}"


SOME = settings(max_examples=200, deadline=None)


@SOME
@given(pools_with_a_secret())
@example(f"redis://u:{SECRET}@{AWAY}")
@example(f"shm:///a;redis://u:{SECRET}@{AWAY}")
@example(f"file:///a redis:/u:{SECRET}@{AWAY}")
@example(f"REDIS://u:{SECRET}@host:port")
@example(f"redis:u:{SECRET}@h")
@example(f"redis://h?password={SECRET}")
@example(f"redis://h?token%3D{SECRET}")
@example(f"redis://{SECRET}@{AWAY}")
@example(f"redis://u:{SECRET}%40h")
@example(f"shm://u:{SECRET}@h")
@example(f"shm:///x?policy=lru;redis://u:{SECRET}@h")
@example(f"mooncake://h?metadata=http://u:{SECRET}@meta")
def test_nothing_that_reads_a_pools_urls_tells_a_secret(text: str) -> None:
    assert not leaks(redact(text)), redact(text)
    assert not leaks(redact_words(f"no such thing: '{text}' ({text})", [text]))
    assert " " in text or not leaks(redact_words(f"no such thing: '{text}' ({text})"))
    for name, env in ((text, {}), ("fleet", {"HEADWATER_POOL_FLEET": text})):
        told = attempt(lambda name=name, env=env: find_pool(name, env))
        assert not leaks(told), told
    told = attempt(lambda: EngineConfig(model="m", pool=text))
    assert not leaks(told), told
    told = attempt(lambda: read_options({"pool": text}, "kv_both"))
    assert not leaks(told), told


def attempt(read: Callable[[], object]) -> str:
    """What a call returns, or what it raises, as text."""
    try:
        found = read()
    except HeadwaterError as error:
        return told_by(error)
    labels = [metric_labels(url) for url in found.urls] if isinstance(found, PoolConfig) else []
    return f"{found} {found!r} {labels}"


def metric_labels(url: StoreUrl) -> set[str]:
    """Of all metrics of a tier."""
    stats = StoreStats(str(url), *(0,) * 14, tiers=(TierStats(str(url), "back"),))
    return {label for values in (own_values, host_values) for series in values(stats).values() for label in series}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=pools_with_a_secret())
@example(text=f"redis://u:{SECRET}@{AWAY}")
@example(text=f"shm:///a,redis://u:{SECRET}@{AWAY}")
@example(text=f"redis{SECRET}=@{AWAY}")
@example(text=f"shm:///a\nredis://: {SECRET}")  # Typer escapes control characters
def test_no_command_prints_a_secret(
    text: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for args in (  # none of them connects: a name server may take its time
        ["pool", "clear", "--remove", text, "--json"],
        ["pool", "stats", "a", text],
        [text],
        ["pool", "ls", f"--{text}"],
        ["serve", "--no-pool", "--pool", text],
    ):
        assert cli.run(args) != 0
    out, err = capfd.readouterr()
    assert not leaks(out), out
    assert not leaks(err), err
    assert not leaks(caplog.text), caplog.text


@pytest.mark.parametrize(
    "args",
    [
        ["--api-key=", SECRET],
        ["--api-key", "=", SECRET],
        ["--api-key", "", SECRET],
        ["--api-key", "x", "--port", "1", f"sk {SECRET}", "more"],
        [f"--api-key{SECRET}"],
        [f"--api_key{SECRET}"],
        [f"--apikey:{SECRET}"],
        [f"--apikey={SECRET}"],
        [f"-api-key={SECRET}"],
        [SECRET],
    ],
    ids=str,
)
def test_a_mistyped_api_key_is_not_shown(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", *args]) == 2
    said = capsys.readouterr()
    assert not leaks(said.out + said.err)
    assert "Error: " in said.err


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_a_server_that_does_not_answer_is_told_without_the_secret(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = parse_url(f"{scheme}://u:{SECRET}@{AWAY}/0?lookup=0.2")
    with pytest.raises(HeadwaterError) as caught:
        connect(url).ping(time.monotonic() + 1)
    assert not leaks(told_by(caught.value))
    assert not leaks(caplog.text)


def test_a_configuration_file_is_told_without_its_secrets(tmp_path: Path) -> None:
    path = tmp_path / "headwater.toml"
    for entry in (
        f'url = "redis:/u:{SECRET}@h"',
        f'url = ["redis://u:{SECRET}@h"]',
        f'url = {{ password = "{SECRET}" }}',
        f'[[pools.fleet.tiers]]\nurl = "redis://u:{SECRET}@h"\nuser = "me"',
        f'[[pools.fleet.tiers]]\nurl = "redis://h"\npassword = "{SECRET}"',
        f'[[pools.fleet.tiers]]\nurl = "redis://h"\npassword_env = "{SECRET}"',
        f'[[pools.fleet.tiers]]\nurl = "redis//:{SECRET}@h"',
        f'url = "shm:///a"\ntenant_secret_env = "{SECRET}"',
        f'url = "redis://u:{SECRET}@h',
    ):
        path.write_text(f"[pools.fleet]\n{entry}\n")
        pools, problems = check_config(str(path), {})
        assert problems
        assert not leaks((pools, problems)), problems
        with pytest.raises(HeadwaterError) as caught:
            find_pool("fleet", {"HEADWATER_CONFIG": str(path)})
        assert not leaks(told_by(caught.value))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://cache:6379/0?ttl=60", "redis://cache:6379/0?ttl=60"),
        ("redis://me:pw@cache:6379/0?ttl=60", "redis://***@cache:6379/0?ttl=60"),
        ("shm:///headwater?capacity=8GiB&packing=off", "shm:///headwater?capacity=8GiB&packing=off"),
        ("mooncake://h?metadata=http://meta:8080/metadata", "mooncake://h?metadata=http://meta:8080/metadata"),
        ("redis://h?password=x&ttl=60", "redis://h?password=***"),
        ("redis:u:pw", "redis:***"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("http://host/x", "http://host/x"),
        ("file:///var/lib/x?size=9", "file:///var/lib/x?size=***"),
        ("/dev/shm/x", "/dev/shm/x"),
    ],
)
def test_what_is_no_secret_is_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_sentences_keep_their_words() -> None:
    text = "No such option: --pol (Possible options: --pool, --port). See /usr/bin/x or http://localhost:8000/v1"
    assert redact_words(text) == text


def test_a_metric_names_a_tier_by_its_place_alone() -> None:
    url = parse_url(f"redis://me:{SECRET}@cache:6379/0?ttl=60&prefix=x")
    assert metric_labels(url) == {"", "redis://cache:6379/0"}
    assert metric_labels(parse_url("file:///var/lib/x?capacity=8MiB")) == {"", "file:///var/lib/x"}
