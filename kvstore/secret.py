"""Reads secrets: from a variable, or from a file that others cannot read."""

from __future__ import annotations

import os
import stat
from hashlib import blake2b
from pathlib import Path

from kvstore.config_file import read_config
from kvstore.errors import UsageError
from kvstore.limits import DISK_KEYS_MAX, SECRET_BYTES_MAX, SECRET_BYTES_MIN

SIGNING_KEY = "KVSTORE_SIGNING_KEY"
"""The variable of the key that signs index records (record.py); it is the same at nodes and
clients."""
SALT = "KVSTORE_SALT"
"""The variable of the salt of every key (keys.py); it is the same at all clients of a tenant."""
DISK_KEYS = "KVSTORE_DISK_KEYS"
"""The variable of the keys that disks are encrypted with (segment/disk/seal.py), as a file alone;
they are the same at a tenant's nodes and clients."""


def secret(name: str, given: str | bytes | None = None) -> bytes | None:
    """Return the secret: `given`, else the variable `name`, else what is in the file that
    `name`_FILE names, else in the one that `[security]` of the operator's file names.

    None when there is none of them; white space around it does not count. Raises `UsageError`,
    which does not show the secret, when it has too few or too many bytes, or its file cannot be
    read, or can be read by everybody.
    """
    where = name.removeprefix("KVSTORE_").lower()
    if given is None and (given := os.environ.get(name) or None) is not None:
        where = name
    if given is None and (file := secret_file(name)) is not None:
        where = f"{name}_FILE" if os.environ.get(f"{name}_FILE") else f"security.{where}_file"
        given = read_secret(where, file)
    if given is None:
        return None
    if not isinstance(given, str | bytes):
        raise UsageError(where, type(given).__name__, "must be text or bytes")
    try:
        raw = (given.encode(errors="surrogateescape") if isinstance(given, str) else given).strip()
    except UnicodeEncodeError:
        raise UsageError(where, "(text)", "must be text without lone surrogates") from None
    if not SECRET_BYTES_MIN <= len(raw) <= SECRET_BYTES_MAX:
        must = f"must have {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes"
        raise UsageError(where, f"{len(raw)} bytes", must)
    return raw


def secret_file(name: str) -> Path | None:
    """Return the file that `secret` takes it from; None where it takes it from none."""
    if os.environ.get(name):
        return None
    own = f"{name.removeprefix('KVSTORE_').lower()}_file"
    file = os.environ.get(f"{name}_FILE") or getattr(read_config().security(), own)
    return Path(file) if file else None


def secrets_in(field: str, raw: bytes) -> tuple[bytes, ...]:
    """Return the secret, or the two secrets, each a line of text, of which the first is used and
    the second accepted too. What is no text is one, whatever its bytes. Raises `UsageError`."""
    lines = [line.strip() for line in raw.strip().split(b"\n")]
    if len(lines) == 1 or not b"".join(lines).decode(errors="surrogateescape").isprintable():
        lines = [raw]
    for line in lines:
        if not (SECRET_BYTES_MIN <= len(line) <= SECRET_BYTES_MAX and len(lines) <= 2):
            must = f"must have {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes"
            found = f"a line of {len(line)} bytes" if len(lines) > 1 else f"{len(line)} bytes"
            raise UsageError(field, found, f"{must}, in one line or in each of two")
    return tuple(lines)


def disk_keys() -> dict[bytes, bytes]:
    """Return the keys that disks are encrypted with, by their ids; the first encrypts, the others
    are those before it. Empty where no file of them is named. Raises `UsageError` as `secret` does,
    and where nothing can be encrypted for want of the extra `crypto`."""
    if os.environ.get(DISK_KEYS):
        raise UsageError(DISK_KEYS, "(set)", f"must name a file with keys, as {DISK_KEYS}_FILE")
    where, path = "disk_keys_file", secret_file(DISK_KEYS)
    if path is None:
        return {}
    try:  # all of it, so that threads import nothing later (kvstore/system/fork.py)
        import cryptography.hazmat.primitives.ciphers
        import cryptography.hazmat.primitives.kdf.hkdf  # noqa: F401
    except ImportError as e:
        must = f"needs the extra crypto: pip install 'kvstore-llm[crypto]' ({e})"
        raise UsageError(where, str(path), must) from None
    lines = read_secret(where, path).split()
    for number, line in enumerate(lines, 1):
        if len(line) != 64 or line.strip(b"0123456789abcdefABCDEF"):
            must = "must be 64 hexadecimal digits, as of `openssl rand -hex 32`"
            raise UsageError(where, f"{path}, key {number}", must)
    keys = [bytes.fromhex(line.decode()) for line in lines]
    if not 1 <= len(set(keys)) == len(keys) <= DISK_KEYS_MAX:
        must = f"must have 1 to {DISK_KEYS_MAX} different keys, one a line: it has {len(keys)}"
        raise UsageError(where, str(path), must)
    return {blake2b(key, digest_size=8, person=b"kvstore disk id").digest(): key for key in keys}


def tenant_salt(given: str | bytes | None = None) -> bytes:
    """Return the salt of this process's tenant, for `Namespace`; empty when it has none."""
    return secret(SALT, given) or b""


def read_secret(field: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o007:
                raise UsageError(field, str(path), "others may read or write it: chmod o= it")
            return file.read(SECRET_BYTES_MAX + 1)
    except OSError as e:
        raise UsageError(field, str(path), f"cannot be read: {e.strerror}") from e
