"""What an operator says about peers, the same for whoever sends and whoever receives: files, names and nothing open.

One set of TLS files serves both ends of a server. `tls_cert` and `tls_key` are what it shows; `tls_ca` is who has
signed what others show. A receiver with a `tls_ca` wants a certificate of its callers, too.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from headwater.errors import InvalidArgumentError
from headwater.peers.caller import LinkSettings, check_carrier
from headwater.peers.hello import read_secret
from headwater.peers.receiver import ReceiverSettings


@dataclass(frozen=True)
class PeerOptions:
    """Files are read when settings are made of it."""

    secret_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    carrier: str = "tcp"

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted. A key alone counts, and is refused: it was meant for something."""
        return self.tls_cert is not None or self.tls_ca is not None or self.tls_key is not None

    def check(self, *, receives: bool) -> None:
        """Raise ConfigError or InvalidArgumentError where the files or the carrier cannot be used, now rather than with
        the first push."""
        self.link_settings()
        if receives:
            self.receiver_settings()

    def link_settings(self) -> LinkSettings:
        """For pushes to others."""
        tls = client_tls(self.tls_cert, self.tls_key, self.tls_ca) if self.has_tls else None
        check_carrier(self.carrier, tls)
        return LinkSettings(secret=self._secret(), tls=tls, carrier=self.carrier)

    def receiver_settings(self) -> ReceiverSettings:
        """For pushes of others. Without a certificate there is no TLS, whatever callers must be signed by: refused."""
        if self.has_tls and self.tls_cert is None:
            raise InvalidArgumentError("a receiver with TLS needs a certificate of its own, beside the CA's")
        tls = server_tls(self.tls_cert, self.tls_key, self.tls_ca)
        check_carrier(self.carrier, tls)
        return ReceiverSettings(secret=self._secret(), tls=tls, carrier=self.carrier)

    def _secret(self) -> bytes | None:
        return None if self.secret_file is None else read_secret(self.secret_file)


def client_tls(cert: str | None, key: str | None, ca: str | None) -> ssl.SSLContext:
    """TLS for a caller: the listener must show a certificate for the address that was called, signed by `ca` (None: by
    one that this machine trusts). Raises InvalidArgumentError for files that cannot be used."""
    if key is not None and cert is None:
        raise InvalidArgumentError("a TLS key needs its certificate")
    try:
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise InvalidArgumentError(f"the TLS files cannot be used: {error}") from error
    return context


def server_tls(cert: str | None, key: str | None, ca: str | None) -> ssl.SSLContext | None:
    """TLS for a listener: with `ca`, callers must show a certificate that it signed. None without a certificate. Raises
    InvalidArgumentError for files that cannot be used."""
    if cert is None:
        if key is not None or ca is not None:
            raise InvalidArgumentError("a TLS key or CA needs a certificate (--tls-cert) beside it")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key)
        if ca is not None:
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise InvalidArgumentError(f"the TLS files cannot be used: {error}") from error
    return context
