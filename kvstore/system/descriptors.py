"""Raises the limit of open files in processes of ours, and divides it among those who connect."""

from __future__ import annotations

import contextlib
import resource

OPEN_FILES_MAX = 1 << 16
"""The limit of open files to which a process of ours raises its own, at most; no limit counts as
this one."""


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one, to at most `OPEN_FILES_MAX`.

    Only for processes that are ours from their start: the limit is the whole process's, and a
    user's code may rely on a small one (`select` knows 1024 descriptors).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _counted(hard)
    if _counted(soft) < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def share(most: int, one_in: int) -> int:
    """Return `most`, or the share `1 / one_in` of the files that this process may open, whichever
    is less, so that no port takes all of them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(min(most, _counted(soft) // one_in), 1)


def _counted(limit: int) -> int:
    return OPEN_FILES_MAX if limit == resource.RLIM_INFINITY else min(limit, OPEN_FILES_MAX)
