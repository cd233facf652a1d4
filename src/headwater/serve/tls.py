"""The certificate of a server that speaks HTTPS."""

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
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise EngineConfigError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile or certfile} cannot be used: {reason}; expected a "
            "PEM certificate chain and its private key, without a passphrase"
        ) from error
    return context
