"""Tenants of cache salts: one each, also for salts that are too long for a key."""

import hashlib

import pytest

from headwater.pool import tenants
from headwater.pool.tenants import MAX_TENANT_BYTES, tenant_of


def test_ordinary_salts_are_their_own_tenants() -> None:
    assert tenant_of(None) == tenant_of("") == b""
    for salt in ("a", "é", "sha256", "sha512:abc", "x" * MAX_TENANT_BYTES):
        assert tenant_of(salt) == salt.encode()


def test_a_long_salt_fits_into_a_key() -> None:
    longer = "x" * (MAX_TENANT_BYTES + 1)
    assert tenant_of(longer) == b"sha256:" + hashlib.sha256(longer.encode()).digest()
    assert tenant_of(longer) != tenant_of(longer + "x")


def test_a_short_salt_cannot_spell_the_tenant_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few digests are text, so the search for one is made easy: this one is text whatever it digests."""

    class Readable:
        def __init__(self, data: bytes) -> None:
            self._digest = hashlib.md5(data).hexdigest().encode()

        def digest(self) -> bytes:
            return self._digest

    monkeypatch.setattr(tenants.hashlib, "sha256", Readable)
    long_tenant = tenant_of("x" * 5000)
    spelled = long_tenant.decode()
    assert len(spelled) < MAX_TENANT_BYTES
    assert tenant_of(spelled) != long_tenant
