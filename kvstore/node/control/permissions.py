"""Decides which users of this host may use a node: its own, and root and one group that may ask.

They get what commands need: to find the node, and to ask what it counts, lists and explains
(`READER_OPS` of protocol/control.py). Blocks come to them by the node's stream, as to other hosts:
its files are open to its own user alone.
"""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

from kvstore.errors import UsageError
from kvstore.nodedir import Announcement, NodeDir


def group_id(name: str) -> int:
    """Return the number of the group called `name`, or numbered so.

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


def share_files(announcement: Announcement) -> None:
    """Share the segment with nobody but the user. The files may be those that a former start of
    another release left, which a group could read."""
    for path in (Path(announcement.data_path), Path(announcement.head_path)):
        path.chmod(0o600)


def give(path: Path, gid: int, mode: int) -> None:
    """Give the file to the group, then set its mode: these rights are never another group's."""
    os.chown(path, -1, gid)
    path.chmod(mode)


def owns_node(uid: int) -> bool:
    """Return whether that user may do everything: it is the node's own."""
    return uid == os.geteuid()
