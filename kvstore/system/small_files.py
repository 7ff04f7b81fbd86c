"""Reads files that another user may have put there: in /dev/shm, in a shared run directory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_small(path: Path, bytes_max: int) -> bytes:
    """Return the bytes of the plain file at `path`. The read follows no link, and nothing that is
    there (a pipe, a file without end) makes it wait or take more memory than `bytes_max`.

    Raises `OSError`, also for what is no plain file and for a larger one.
    """
    raw = read_start(path, bytes_max + 1)
    if len(raw) > bytes_max:
        raise OSError(errno.EFBIG, f"more than {bytes_max} bytes", str(path))
    return raw


def read_start(path: Path, size_bytes: int) -> bytes:
    """Return the first `size_bytes` of the file, or all if it has fewer. As `read_small`
    otherwise."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no plain file", str(path))
        return os.read(fd, size_bytes)
    finally:
        os.close(fd)
