"""Decides which files a client takes for a node's segment: what its directory says is not enough.

In a run directory of this user everything is this user's own word. One that another user shares
(node/control/permissions.py) may name any path, also a file of the reader's: so only what lies
where segments lie and is called like one of that user's counts, and opening it must show a plain
file of that user's (`attach` in memory_files.py). Nor is it mapped: its owner could end this
process by making it shorter (segment/unmapped.py). Root's files are: root can end every process
anyway.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from kvstore.nodedir import Announcement, NodeDir

SHM_DIR = Path("/dev/shm")
"""Where segments of the host's memory lie."""


class SegmentFiles(NamedTuple):
    """The files of one segment, and who may do what with them."""

    data: Path
    head: Path
    owner: int
    """The user to whom both files must belong."""
    may_write: bool
    """They are this user's (or this is root); else nothing may be opened for writing."""
    mapped: bool
    """Their owner is trusted with this process: they may be mapped."""


def files_of(directory: NodeDir, announcement: Announcement) -> SegmentFiles:
    """The files that `announcement`, found in `directory`, names.

    Raises `ValueError` when another user names what cannot be a segment of theirs, and `OSError`
    when the directory is gone.
    """
    owner, user = directory.owner(), os.geteuid()
    data, head = Path(announcement.data_path), Path(announcement.head_path)
    if owner != user:
        base = data.with_suffix("")
        named = data.name.startswith(f"kvstore-{owner}-") and data.suffix == ".data"
        if data.parent != SHM_DIR or not named or head != base.with_suffix(".head"):
            raise ValueError(f"{data} and {head} are no segment of user {owner}")
    return SegmentFiles(data, head, owner, user in (owner, 0), owner in (user, 0))
