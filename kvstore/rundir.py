"""The per-user directory where processes of one machine find each other.

`$KVSTORE_RUN_DIR`, or `$XDG_RUNTIME_DIR/kvstore`, or `<tmp>/kvstore-<uid>`. Whoever
can write there can pose as a node or as Redis, so it belongs to this user alone
or it is not used.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from kvstore.errors import UsageError

RUN_DIR_ENV = "KVSTORE_RUN_DIR"
UNIX_PATH_BYTES_MAX = 107
"""What fits into a Unix socket's address, less the final zero."""


def run_dir(path: str | Path | None = None) -> Path:
    """The run directory (`path` if given), made with mode 0700 when it is not there.

    Raises `UsageError` when it is not a directory, not this user's, open to
    others, or cannot be made.
    """
    if path is not None:
        return private_dir(Path(path), field="run_dir")
    configured = os.environ.get(RUN_DIR_ENV)
    if configured:
        return private_dir(Path(configured), field=RUN_DIR_ENV)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return private_dir(Path(runtime) / "kvstore", field="XDG_RUNTIME_DIR")
    return private_dir(Path(tempfile.gettempdir()) / f"kvstore-{os.geteuid()}", field=RUN_DIR_ENV)


def private_dir(path: Path, *, field: str = "path") -> Path:
    """`path` as an absolute path to a directory that only this user can enter; made if absent."""
    path = Path(os.path.abspath(path))  # noqa: PTH100  # resolve() would follow a planted link
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as e:
        raise UsageError(field, str(path), f"cannot be made: {e.strerror}") from e
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(field, str(path), "must be a directory, not a link")
    if status.st_uid != os.geteuid():
        raise UsageError(field, str(path), f"must belong to user {os.geteuid()}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(field, str(path), "must have mode 0700: others may not enter it")
    return path


def socket_path(path: Path, *, field: str = "run_dir") -> Path:
    """`path` if a Unix socket can be there; `UsageError` when it is too long."""
    size = len(os.fsencode(path))
    if size > UNIX_PATH_BYTES_MAX:
        raise UsageError(
            field, str(path), f"has {size} bytes, a Unix socket at most {UNIX_PATH_BYTES_MAX}"
        )
    return path
