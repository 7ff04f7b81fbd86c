"""Configures what protects a stream: a shared secret, TLS where both ends have certificates."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.config_file import read_config
from kvstore.errors import UsageError
from kvstore.limits import SECRET_BYTES_MAX, SECRET_BYTES_MIN
from kvstore.secret import secret

SECRET, SECRET_FILE = "KVSTORE_SECRET", "KVSTORE_SECRET_FILE"
TLS_CA, TLS_CERT, TLS_KEY = "KVSTORE_TLS_CA", "KVSTORE_TLS_CERT", "KVSTORE_TLS_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSecurity:
    """What protects one end of a stream. Without a secret a client talks only to nodes that have
    none. Raises `UsageError` for a secret of a wrong length, and for a certificate without its key.
    """

    secret: bytes | None = field(default=None, repr=False)
    tls_ca: Path | None = None
    """Who may have signed the other side's certificate; a client needs it for TLS. On a node it
    makes certificates of clients a must."""
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if self.secret is not None and not (
            SECRET_BYTES_MIN <= len(self.secret) <= SECRET_BYTES_MAX
        ):
            raise UsageError(
                "secret",
                f"{len(self.secret)} bytes",
                f"must have {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes",
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("tls_cert, tls_key", "one of them", "must be given both or neither")

    @classmethod
    def from_environment(cls) -> StreamSecurity:
        """Made of KVSTORE_SECRET or KVSTORE_SECRET_FILE, KVSTORE_TLS_CA, KVSTORE_TLS_CERT and
        KVSTORE_TLS_KEY; all are optional.

        What they leave open is in `[security]` of the operator's file (config_file.py).
        """
        files = read_config().security()
        return cls(
            secret=secret(SECRET),
            tls_ca=_path(TLS_CA) or files.tls_ca,
            tls_cert=_path(TLS_CERT) or files.tls_cert,
            tls_key=_path(TLS_KEY) or files.tls_key,
        )

    def client_context(self) -> ssl.SSLContext | None:
        """The TLS context of a client; None without a CA: then it uses no TLS. Raises `UsageError`
        for files that cannot be used."""
        if self.tls_ca is None:
            return None
        return self._context(ssl.Purpose.SERVER_AUTH)

    def server_context(self) -> ssl.SSLContext | None:
        """The TLS context of a node; None without a certificate: then it serves without TLS.
        Raises `UsageError` for files that cannot be used."""
        if self.tls_cert is None:
            return None
        context = self._context(ssl.Purpose.CLIENT_AUTH)
        if self.tls_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(purpose, cafile=self.tls_ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if self.tls_cert is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ValueError) as e:  # SSLError is an OSError
            files = ", ".join(str(p) for p in (self.tls_ca, self.tls_cert, self.tls_key) if p)
            raise UsageError("tls", files, f"cannot be used: {e}") from e
        return context


def _path(variable: str) -> Path | None:
    path = os.environ.get(variable)
    return Path(path) if path else None
