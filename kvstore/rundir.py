"""Finds the run directory, where processes of one user and machine find each other.

It is `$KVSTORE_RUN_DIR`, or `$XDG_RUNTIME_DIR/kvstore`, or `<tmp>/kvstore-<uid>`. Whoever
can write there can pose as a node or as Redis, so this user alone may, or it is not
used; where another user has made `<tmp>/kvstore-<uid>` first, it is `<tmp>/kvstore-<uid>-<random>`.
A group may enter it where a node lets one ask it (node/control/permissions.py), and who is in
that group may name such a directory of another user, for commands.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import UsageError
from kvstore.types import StrPath

log = logging.getLogger("kvstore")

LOCK_WAIT_S = 1.0
"""Time to wait for other processes of this user that look for the same directory."""
LOCK_POLL_S = 0.01
RUN_DIR_ENV = "KVSTORE_RUN_DIR"
UNIX_PATH_BYTES_MAX = 107
"""Bytes that fit into a Unix socket's address, less the final zero."""
ENGINES_MAX = 64
"""Engines of one run directory that are asked."""


def run_dir(path: StrPath | None = None) -> Path:
    """Return the run directory (`path` if given), made with mode 0700 when it is not there.

    Raises `UsageError` when it is not a directory, not this user's (nor one that was named and that
    its user's group may enter), open to others, or cannot be made.
    """
    if path is not None:
        return _checked(Path(path), "run_dir", group_may_enter=True, named=True)
    configured = os.environ.get(RUN_DIR_ENV)
    if configured:
        return _checked(Path(configured), RUN_DIR_ENV, group_may_enter=True, named=True)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return _checked(Path(runtime) / "kvstore", "XDG_RUNTIME_DIR", group_may_enter=True)
    own = Path(tempfile.gettempdir()) / f"kvstore-{os.geteuid()}"
    if _is_anothers(own):
        log.warning(
            "%s belongs to user %d, not to this one: another directory beside it is used",
            own,
            own.lstat().st_uid,
        )
        return _instead_of(own)
    if not own.exists() and any(not _is_anothers(path) for path in _beside(own)):
        return _instead_of(own)  # who was first is gone: this user's processes stay together
    return _checked(own, RUN_DIR_ENV, group_may_enter=True)


def _is_anothers(path: Path) -> bool:
    try:
        return path.lstat().st_uid != os.geteuid()
    except OSError:
        return False


def _beside(taken: Path) -> list[Path]:
    return sorted(taken.parent.glob(f"{taken.name}-*"))


def _instead_of(taken: Path) -> Path:
    """Return a directory that all processes of this user find, where another user was first to make
    the one called after this user. Its name cannot be guessed, so nobody can be first again."""
    with _alone_in(taken.parent):
        for path in _beside(taken):
            if not _is_anothers(path):
                with contextlib.suppress(UsageError):
                    return _checked(path, RUN_DIR_ENV, group_may_enter=True)
        return Path(tempfile.mkdtemp(prefix=f"{taken.name}-", dir=taken.parent))


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Let one of this user's processes in at a time; after `LOCK_WAIT_S` let more in, because
    another user may hold the lock."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        give_up_at = time.monotonic() + LOCK_WAIT_S
        while time.monotonic() < give_up_at:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def private_dir(path: Path, *, field: str = "path") -> Path:
    """Return `path` as an absolute path to a directory that only this user can enter; it is made if
    absent."""
    return _checked(path, field)


def _checked(path: Path, field: str, *, group_may_enter: bool = False, named: bool = False) -> Path:
    path = Path(os.path.abspath(path))  # noqa: PTH100  # resolve() would follow a planted link
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as e:
        raise UsageError(field, str(path), f"cannot be made: {e.strerror}") from e
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(field, str(path), "must be a directory, not a link")
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        ours = status.st_gid in (os.getegid(), *os.getgroups())
        if not (named and ours and mode & 0o070 == 0o010):
            raise UsageError(field, str(path), f"must belong to user {os.geteuid()}")
    if mode & (0o067 if group_may_enter else 0o077):
        raise UsageError(field, str(path), "must have mode 0700: others may not enter it")
    return path


def socket_path(path: Path, *, field: str = "run_dir") -> Path:
    """Return `path` if a Unix socket can be there; raise `UsageError` when it is too long."""
    size = len(os.fsencode(path))
    if size > UNIX_PATH_BYTES_MAX:
        raise UsageError(
            field, str(path), f"has {size} bytes, a Unix socket at most {UNIX_PATH_BYTES_MAX}"
        )
    return path


def listens(path: Path) -> bool:
    """Return whether somebody listens at this Unix socket. Its file alone does not say so: it is
    there a moment before, and stays after a listener that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # so many connect that this one would have to wait
            return True
        except OSError:
            return False
    return True


def engine_sockets(home: Path) -> list[Path]:
    """Return the sockets of engines in a run directory (client/engine_socket.py), also of some that
    were killed: engine-PID-....sock."""
    return sorted(home.glob("engine-*.sock"))[:ENGINES_MAX]
