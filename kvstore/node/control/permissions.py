"""Decides which users of this host may use a node: its own, and one group that may read.

The group gets what a reader needs: to find the node, to read its segment and to
say what it used (`READER_OPS` of protocol/control.py). It cannot write a byte of a block,
reserve, pin or drop: whoever may write payload may put wrong bytes under a right key.
"""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

from kvstore.errors import UsageError
from kvstore.nodedir import Announcement, NodeDir


def group_id(name: str) -> int:
    """The number of the group called `name`, or numbered so.

    Raises `UsageError` when there is no such group or this user is not in it.
    """
    try:
        gid = int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except (KeyError, ValueError) as e:
        raise UsageError("group", name, "no such group") from e
    if os.geteuid() != 0 and gid not in (os.getegid(), *os.getgroups()):
        raise UsageError("group", name, "the node's user must be in it")
    return gid


def share_directory(run_dir: Path, directory: NodeDir, gid: int | None) -> None:
    """Let the group find the node; without one, nobody but the user. The caller holds the node's
    lock. Raises `UsageError` when the run directory is another group's."""
    if gid is None:
        directory.path.chmod(0o700)
        directory.lock.chmod(0o600)
        return
    status = run_dir.stat()
    if status.st_mode & stat.S_IXGRP and status.st_gid != gid:
        other = f"{run_dir} is shared with group {status.st_gid}: use another run directory"
        raise UsageError("group", gid, other)
    for path, mode in (
        (run_dir, 0o710),
        (directory.path.parent, 0o750),
        (directory.path, 0o750),
        (directory.lock, 0o640),
    ):
        give(path, gid, mode)


def share_files(announcement: Announcement, gid: int | None) -> None:
    """Let the group read the segment; without one, nobody but the user. The files may be
    those that the node's former start left, with another group."""
    for path in (Path(announcement.data_path), Path(announcement.head_path)):
        if gid is None:
            path.chmod(0o600)
        else:
            give(path, gid, 0o640)


def give(path: Path, gid: int, mode: int) -> None:
    """Give the file to the group, then set its mode: these rights are never another group's."""
    os.chown(path, -1, gid)
    path.chmod(mode)


def owns_node(uid: int) -> bool:
    """Whether that user may do everything: it is the node's own, or root, who can anyway."""
    return uid in (os.geteuid(), 0)
