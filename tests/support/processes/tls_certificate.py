"""Certificates made on the spot by the `openssl` command."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def openssl(*arguments: object) -> None:
    """Skip the test where there is no such command."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def certificate(directory: Path, *names: str) -> tuple[Path, Path]:
    """Make (certificate, key) for hosts and addresses, without any for 127.0.0.1. The certificate
    is its own CA."""
    names = names or ("127.0.0.1",)
    directory.mkdir(exist_ok=True)
    cert, key = directory / "cert.pem", directory / "key.pem"
    others = ",".join(f"IP:{name}" if name[0].isdigit() else f"DNS:{name}" for name in names)
    named = ("-subj", f"/CN={names[0]}", "-addext", f"subjectAltName={others}")
    openssl("req", "-x509", *EC_KEY, *named, "-out", cert, "-keyout", key)
    return cert, key


def tls_contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return (a client's, a server's)."""
    cert, key = certificate(directory)
    ours = ssl.create_default_context(cafile=cert)
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(cert, key)
    return ours, theirs
