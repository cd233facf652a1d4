"""Pools by name: one TOML file, or environment variables, for everything that URLs can say.

    [pools]
    laptop = "shm:///headwater?capacity=2GiB"

    [pools.fleet]
    tenant_secret_file = "/run/secrets/headwater-tenants"

    [[pools.fleet.tiers]]
    url = "shm:///headwater"
    capacity = "8GiB"

    [[pools.fleet.tiers]]
    url = "redis://cache:6379/0"
    password_file = "/run/secrets/redis"
    write = "back"

HEADWATER_CONFIG names the file. HEADWATER_POOL_FLEET holds the URLs of a pool called `fleet`, and goes before the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from headwater.errors import ConfigError, UrlError
from headwater.redaction import show_value
from headwater.stores.url import OPTIONS, StoreUrl, check_order, parse_url, parse_urls, split_urls

CONFIG_VARIABLE = "HEADWATER_CONFIG"
POOL_VARIABLE = "HEADWATER_POOL_"
SECRET_VARIABLE = "HEADWATER_TENANT_SECRET"

_MOST_BYTES = 1 << 20
_LEAST_SECRET = 16
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_POOL_ENTRIES = ("url", "tiers", "tenant_secret_file", "tenant_secret_env")
_TIER_ENTRIES = ("url", "user", "password_env")


@dataclass(frozen=True)
class PoolConfig:
    """One pool: its tiers, and the secret that tenants' salts are made with, if any."""

    name: str
    urls: tuple[StoreUrl, ...]
    tenant_secret: bytes | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return ", ".join(map(str, self.urls))


def find_pool(text: str, environment: Mapping[str, str] | None = None) -> PoolConfig:
    """The pool that URLs, or a name in the configuration, stand for. Raises UrlError and ConfigError."""
    env = os.environ if environment is None else environment
    if isinstance(text, str) and ("://" in text or not _NAME.fullmatch(text)):
        return PoolConfig("", parse_urls(text), _secret({}, "", env))
    variable = POOL_VARIABLE + text.upper().replace("-", "_")
    if variable in env:
        try:
            return PoolConfig(text, parse_urls(env[variable]), _secret({}, "", env))
        except UrlError as error:
            raise ConfigError(f"{variable}: {error}") from error
    path = env.get(CONFIG_VARIABLE)
    if not path:
        raise ConfigError(
            f"{text!r} is neither a URL nor a pool that is known here; set {variable} to its URLs, or "
            f"{CONFIG_VARIABLE} to a file that has it"
        )
    pools, problems = check_config(path, env)
    if text in pools:
        return pools[text]
    own = [problem for problem in problems if problem.startswith(f"{path}: pools.{text}")]
    if own or not pools:
        raise ConfigError("; ".join(own or problems) or f"{path} has no pools")
    raise ConfigError(f"{path} has no pool {text!r}; it has {', '.join(sorted(pools))}")


def check_config(path: str, environment: Mapping[str, str] | None = None) -> tuple[dict[str, PoolConfig], list[str]]:
    """The pools of a file that can be used, and what is wrong with the others."""
    env = os.environ if environment is None else environment
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            return {}, [f"{path}: a configuration has at most {_MOST_BYTES} bytes"]
        data = tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        return {}, [f"{path}: cannot be read: {error.strerror}"]
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        return {}, [f"{path}: is not TOML: {error}"]
    problems = [f"{path}: unknown section {name!r}; known is pools" for name in data if name != "pools"]
    sections = data.get("pools", {})
    if not isinstance(sections, dict):
        return {}, [*problems, f"{path}: pools must be a table, as in [pools.fleet]"]
    pools: dict[str, PoolConfig] = {}
    for name, section in sections.items():
        found = _Problems(f"{path}: pools.{name}")
        pool = _read_pool(name, section, found, env)
        if pool is not None and not found:
            pools[name] = pool
        problems += found
    return pools, problems


class _Problems(list[str]):
    """What is wrong with one pool, each with the place where it is."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def add(self, text: str) -> None:
        """Note one."""
        self.append(text if text.startswith(self.where) else f"{self.where}: {text}")

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is raised, and go on after the `with`."""
        try:
            yield
        except (UrlError, ConfigError) as error:
            self.add(str(error))


def _read_pool(name: str, section: object, problems: _Problems, env: Mapping[str, str]) -> PoolConfig | None:
    """The pool, as far as it can be read; all that is wrong with it is noted."""
    if not _NAME.fullmatch(name):
        problems.add("a name is a letter and up to 63 letters, digits, '_' and '-'")
    if isinstance(section, str):
        section = {"url": section}
    if not isinstance(section, dict):
        problems.add("expected URLs, or a table with `url` or `tiers`")
        return None
    for entry in section:
        if entry not in _POOL_ENTRIES:
            problems.add(f"unknown entry {entry!r}; known are {', '.join(_POOL_ENTRIES)}")
    secret = None
    with problems.noted():
        secret = _secret(section, problems.where, env)
    if ("url" in section) == ("tiers" in section):
        problems.add("give either `url` or `tiers`")
        return None
    texts, urls = list[str](), list[StoreUrl]()
    if "url" in section:
        with problems.noted():
            texts = split_urls(_text(section, "url", problems.where))
    else:
        tiers = section["tiers"]
        if not isinstance(tiers, list) or not tiers or not all(isinstance(tier, dict) for tier in tiers):
            problems.add(f"tiers must be tables, as in [[pools.{name}.tiers]]")
            return None
        for i, tier in enumerate(tiers):
            with problems.noted():
                texts.append(_tier_url(tier, f"{problems.where}.tiers[{i}]", env, problems))
    for text in texts:
        with problems.noted():
            urls.append(parse_url(text))
            _check_files(urls[-1])
    if not problems:
        with problems.noted():
            return PoolConfig(name, check_order(tuple(urls)), secret)
    return None


def _check_files(url: StoreUrl) -> None:
    """Raise ConfigError for a file that a tier names and that cannot be used here."""
    for option in ("password_file", "secret_file", "ca", "cert", "key"):
        if (path := url.options.get(option)) is None:
            continue
        try:
            with open(path, "rb"):
                pass
            if option == "ca":
                ssl.create_default_context(cafile=path)
        except OSError as error:  # and what is wrong with certificates
            reason = error.strerror if error.errno and not isinstance(error, ssl.SSLError) else "no certificates"
            raise ConfigError(f"{url}: {option}={show_value(path)!r} cannot be used: {reason}") from error


def _tier_url(tier: dict[str, Any], where: str, env: Mapping[str, str], problems: _Problems) -> str:
    """A tier's table as a URL: what is not `url`, `user` or `password_env` is one of its options. What is wrong with
    them is noted, and left out."""
    url = _text(tier, "url", where)
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in OPTIONS:
        raise ConfigError(f"{where}: url must begin with one of {', '.join(f'{s}://' for s in OPTIONS)}")
    account = ""
    if "user" in tier or "password_env" in tier:
        variable = tier.get("password_env")
        if variable is not None and variable not in env:
            problems.add(f"{where}: password_env names {_variable(variable)}, which is not set")
        if "@" in rest:
            problems.add(f"{where}: the account is in the url already")
        password = f":{quote(env[variable], safe='')}" if variable is not None and variable in env else ""
        account = f"{quote(str(tier.get('user', '')), safe='')}{password}@"
    options = []
    for name, value in tier.items():
        if name in _TIER_ENTRIES:
            continue
        if name not in OPTIONS[scheme]:
            known = ", ".join((*_TIER_ENTRIES, *OPTIONS[scheme]))
            problems.add(f"{where}: unknown entry {name!r}; known are {known}")
        elif isinstance(value, bool) or not isinstance(value, (str, int, float)):
            problems.add(f"{where}: {name} must be a text or a number")
        else:
            options.append(f"{name}={quote(str(value), safe='/:.')}")
    joined = "&".join(options)
    mark = "" if not joined else "&" if "?" in rest else "?"
    return f"{scheme}://{account}{rest}{mark}{joined}"


def _variable(name: object) -> str:
    """The name of a variable, unless it may be the secret itself that somebody wrote there."""
    return repr(name) if re.fullmatch(r"[A-Z][A-Z0-9_]{0,63}", str(name)) else "a variable"


def _text(table: dict[str, Any], name: str, where: str) -> str:
    value = table.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} must be a string, not a {type(value).__name__}")
    return value


def _secret(section: dict[str, Any], where: str, env: Mapping[str, str]) -> bytes | None:
    """The tenants' secret: from a file, from a variable that is named, or from HEADWATER_TENANT_SECRET."""
    path, variable = section.get("tenant_secret_file"), section.get("tenant_secret_env")
    if path is not None:
        try:
            with open(str(path), "rb") as file:
                secret = file.read(4096).strip()
        except OSError as error:
            raise ConfigError(f"{where}: tenant_secret_file {path!r} cannot be read: {error.strerror}") from error
    elif variable is not None:
        if variable not in env:
            raise ConfigError(f"{where}: tenant_secret_env names {_variable(variable)}, which is not set")
        secret = env[variable].encode()
    elif SECRET_VARIABLE in env:
        secret = env[SECRET_VARIABLE].encode()
    else:
        return None
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(f"{where or SECRET_VARIABLE}: a tenant secret needs at least {_LEAST_SECRET} bytes")
    return secret
