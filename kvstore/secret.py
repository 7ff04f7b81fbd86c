"""Reads secrets: from a variable, or from a file that others cannot read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvstore.config_file import read_config
from kvstore.errors import UsageError
from kvstore.limits import SECRET_BYTES_MAX, SECRET_BYTES_MIN

SIGNING_KEY = "KVSTORE_SIGNING_KEY"
"""Signs index records (record.py); the same at nodes and clients."""
SALT = "KVSTORE_SALT"
"""Goes into every key (keys.py); the same at all clients of a tenant."""


def secret(name: str, given: str | bytes | None = None) -> bytes | None:
    """The secret: `given`, else the variable `name`, else what is in the file that `name`_FILE
    names, else in the one that `[security]` of the operator's file names.

    None when there is none of them; white space around it does not count. Raises `UsageError`,
    which does not show the secret, when it has too few or too many bytes, or its file cannot be
    read, or can be read by everybody.
    """
    where = name.removeprefix("KVSTORE_").lower()
    if given is None and (given := os.environ.get(name) or None) is not None:
        where = name
    file = os.environ.get(f"{name}_FILE")
    if given is None and file:
        where, given = f"{name}_FILE", _read(f"{name}_FILE", Path(file))
    if given is None and not file:
        own = f"{name.removeprefix('KVSTORE_').lower()}_file"
        listed: Path | None = getattr(read_config().security(), own)
        if listed is not None:
            where, given = f"security.{own}", _read(f"security.{own}", listed)
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


def tenant_salt(given: str | bytes | None = None) -> bytes:
    """The salt of this process's tenant, for `Namespace`; empty when it has none."""
    return secret(SALT, given) or b""


def _read(field: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o007:
                raise UsageError(field, str(path), "others may read or write it: chmod o= it")
            return file.read(SECRET_BYTES_MAX + 1)
    except OSError as e:
        raise UsageError(field, str(path), f"cannot be read: {e.strerror}") from e
