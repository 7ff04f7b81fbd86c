"""Configures what protects a stream: a shared secret, TLS where both ends have certificates."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from kvstore.config_file import read_config
from kvstore.errors import UsageError
from kvstore.secret import read_secret, secret, secret_file, secrets_in
from kvstore.system.renewed import Renewed
from kvstore.types import StrPath

T = TypeVar("T")
ENDS_SOON_S = 7 * 24 * 3600.0
SECRET, SECRET_FILE = "KVSTORE_SECRET", "KVSTORE_SECRET_FILE"
TLS_CA, TLS_CERT, TLS_KEY = "KVSTORE_TLS_CA", "KVSTORE_TLS_CERT", "KVSTORE_TLS_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSecurity:
    """What protects one end of a stream. Without a secret a client talks only to nodes that have
    none. Raises `UsageError` for a secret of a wrong length, and for a certificate without its key.
    """

    secret: bytes | None = field(default=None, repr=False)
    """One secret, or two, a line each: the first is used, the second also accepted."""
    secret_file: StrPath | None = None
    """File of the secret; it is read again when it changes, as the files below are."""
    tls_ca: StrPath | None = None
    """File of the authorities that may have signed the other side's certificate; a client needs it
    for TLS. On a node it makes certificates of clients mandatory."""
    tls_cert: StrPath | None = None
    tls_key: StrPath | None = None
    _renewed: dict[str, Renewed[object]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes | None):
            raise UsageError("secret", type(self.secret).__name__, "must be bytes")
        if self.secret is None and self.secret_file is not None:
            read = read_secret("secret_file", Path(self.secret_file))
            object.__setattr__(self, "secret", read.strip())
        self.secrets()  # from here on what they were is kept where they cannot be read
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("tls_cert, tls_key", "one of them", "must be given both or neither")

    @classmethod
    def from_environment(cls) -> StreamSecurity:
        """Make it of KVSTORE_SECRET or KVSTORE_SECRET_FILE, KVSTORE_TLS_CA, KVSTORE_TLS_CERT and
        KVSTORE_TLS_KEY; all are optional.

        What they leave open is in `[security]` of the operator's file (config_file.py).
        """
        files = read_config().security()
        return cls(
            secret=secret(SECRET),
            secret_file=secret_file(SECRET),
            tls_ca=_path(TLS_CA) or files.tls_ca,
            tls_cert=_path(TLS_CERT) or files.tls_cert,
            tls_key=_path(TLS_KEY) or files.tls_key,
        )

    def secrets(self) -> tuple[bytes, ...]:
        """Return the secrets as they are now: what this end uses, then what it accepts too."""
        if self.secret_file is None:
            return secrets_in("secret", self.secret) if self.secret else ()
        file = Path(self.secret_file)

        def read() -> tuple[bytes, ...]:
            return secrets_in("secret_file", read_secret("secret_file", file).strip())

        return self._now("secret", (file,), read)

    def client_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of a client, as its files are now; None without a CA: then it uses
        no TLS. Raises `UsageError` for files that cannot be used when they are first read."""
        return None if self.tls_ca is None else self._context(ssl.Purpose.SERVER_AUTH)

    def server_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of a node, as its files are now; None without a certificate: then
        it serves without TLS. Raises `UsageError` as `client_context` does."""
        return None if self.tls_cert is None else self._context(ssl.Purpose.CLIENT_AUTH)

    def _context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        files = [Path(path) for path in (self.tls_ca, self.tls_cert, self.tls_key) if path]

        def make() -> ssl.SSLContext:
            try:
                context = ssl.create_default_context(purpose, cafile=self.tls_ca)
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                if self.tls_cert is not None:
                    context.load_cert_chain(self.tls_cert, self.tls_key)
            except (OSError, ValueError) as e:  # SSLError is an OSError
                named = ", ".join(map(str, files))
                raise UsageError("tls", named, f"cannot be used: {e}") from e
            if purpose is ssl.Purpose.CLIENT_AUTH and self.tls_ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
            return context

        return self._now(purpose.name, files, make)

    def _now(self, name: str, files: Sequence[Path], make: Callable[[], T]) -> T:
        if name not in self._renewed:
            self._renewed[name] = Renewed(files, make)
        return cast("T", self._renewed[name].get())

    def __getstate__(self) -> list[object]:
        """Leave out what was read of the files: a copy reads them itself."""
        return [self.secret, self.secret_file, self.tls_ca, self.tls_cert, self.tls_key, {}]


def ending(certificate: StrPath) -> str:
    """Return when a certificate ends, if it has or does so within `ENDS_SOON_S`; empty otherwise,
    also where it cannot be read."""
    try:
        # Nothing public decodes one that no peer has shown.
        decoded = ssl._ssl._test_decode_cert(str(certificate))  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return ""
    left_s = ssl.cert_time_to_seconds(decoded["notAfter"]) - time.time()
    when = f"the certificate in {certificate} ends at {decoded['notAfter']}"
    return when if left_s < ENDS_SOON_S else ""


def _path(variable: str) -> Path | None:
    path = os.environ.get(variable)
    return Path(path) if path else None
