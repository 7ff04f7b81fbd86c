"""A certificate for 127.0.0.1, made on the spot by the `openssl` command."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


def certificate(directory: Path) -> tuple[Path, Path]:
    """(certificate, key): it is its own CA."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=n"
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key))
    subprocess.run([*command.split(), *names], check=True, capture_output=True, timeout=60)
    return cert, key


def tls_contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(a client's, a server's)."""
    cert, key = certificate(directory)
    ours = ssl.create_default_context(cafile=cert)
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(cert, key)
    return ours, theirs
