"""Tenants: what keeps one's keys apart from another's, and from those of anybody who can guess a prompt."""

from __future__ import annotations

import hashlib
import hmac

MAX_TENANT_BYTES = 1024
"""What a chunk key has room for (docs/format.md)."""
_HASHED = b"sha256:"


def tenant_of(cache_salt: str | None) -> bytes:
    """The tenant that a request's `cache_salt` names, the same in every engine; without one, the nameless tenant.

    A salt that is too long is named by its digest. So is a short one that begins as such a name does: otherwise it
    could spell the name of another.
    """
    tenant = (cache_salt or "").encode("utf-8", "surrogatepass")
    if len(tenant) <= MAX_TENANT_BYTES and not tenant.startswith(_HASHED):
        return tenant
    return _HASHED + hashlib.sha256(tenant).digest()


def tenant_salt(secret: bytes | None, tenant: bytes) -> bytes:
    """What goes into every key of a tenant.

    Without a secret it is the tenant's name: whoever knows name, model and prompt can compute the keys, and ask a
    shared server whether that prompt was ever seen. With one, nobody can who does not have it. All servers that share a
    pool need the same.
    """
    if secret is None:
        return tenant
    return hmac.new(secret, b"headwater tenant salt\0" + tenant, hashlib.sha256).digest()


def tenant_tag(tenant: bytes) -> str:
    """How a tenant is named in listings: enough to tell tenants apart, useless for finding their chunks."""
    return hashlib.sha256(b"headwater tenant\0" + tenant).hexdigest()[:16] if tenant else ""
