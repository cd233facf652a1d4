"""The certificate of a server that speaks HTTPS, and those that a client of such servers trusts."""

from __future__ import annotations

import ssl

from headwater.errors import EngineConfigError


def load_certificate(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with this certificate chain and key (None: the key is in the same file); None without one.

    Raises EngineConfigError for files that cannot be used.
    """
    if certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # OpenSSL would ask a terminal for the passphrase of an encrypted key.
        context.load_cert_chain(certfile, keyfile, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise EngineConfigError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile or certfile} cannot be used: {_reason(error)}; "
            "expected a PEM certificate chain and its private key, without a passphrase"
        ) from error
    return context


def load_trusted(cafile: str | None) -> ssl.SSLContext:
    """For connections to servers whose certificates these have signed; without a file, those that the system trusts.

    Raises EngineConfigError for a file that cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=cafile)
    except (OSError, ValueError) as error:
        raise EngineConfigError(
            f"--upstream-ca {cafile} cannot be used: {_reason(error)}; expected PEM certificates"
        ) from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
