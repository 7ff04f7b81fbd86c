"""Finds and frees segments of this user whose node is dead, in whichever run directory it was.

A segment is worth nothing once nobody will start its node again, and worth all its blocks
when somebody does within `RESTART_WITHIN_S`. Whoever frees one has to know both:

1. The owner holds a lock (flock) on the header file from its making until its process ends,
   however that ends. The lock is free: the owner is dead.
2. A node that may come back writes down in the header file every few seconds that it lives, by
   clocks that nobody sets (host_clock.py). Lock free and the host has run for longer than
   `RESTART_WITHIN_S` since: nobody is expected back, and every process of this user may free
   it, from any run directory. The other nodes, `kvstore up` and the reaper of clients do,
   every `SWEEP_EVERY_S`.
3. Whoever frees takes the lock, looks at the time again and that the name still leads to the
   file it has locked, and keeps the lock until payload and headers are gone. A node that
   comes back takes the same lock before it maps anything (`segment/shm.py`), and finds a file
   that is its own or none: then it starts empty. So a segment is freed or taken over,
   never both.
4. No name is used twice: a part of each is random. What is removed by name is never what
   somebody made meanwhile, and nobody else can be there first.

The header file's first page names the node's directory, so that what has no home any more, since
that directory is gone or speaks of another segment, can be told and be freed before its time.
Files of other users that are called like ours are passed over.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import UsageError
from kvstore.limits import RESTART_WITHIN_S, SEGMENTS_SEEN_MAX
from kvstore.nodedir import TABLE, NodeDir, sweep
from kvstore.segment.header import SHM_DIR, SUPERBLOCK_BYTES, home_of, life_of
from kvstore.system import host_clock
from kvstore.system.filelock import FileLock, is_locked, try_lock
from kvstore.system.small_files import read_start

HEAD, DATA = ".head", ".data"
SWEEP_EVERY_S = 60.0
"""Seconds between two searches, by nodes, `kvstore up` and clients, for memory that dead nodes of
this user left in /dev/shm."""
_NAME = re.compile("kvstore-([0-9]{1,10})-")


def segment_base(shm_dir: Path, node_id: int, epoch: int) -> Path:
    """Return the path of a new segment's files, less their suffixes: nobody has used it or can
    guess it."""
    token = os.urandom(8).hex()
    return shm_dir / f"kvstore-{os.getuid()}-{node_id:016x}-{epoch}-{token}"


def user_of(path: str) -> int | None:
    """Return the user whose segment has that name; None where `path` is not named like a
    segment."""
    named = _NAME.match(Path(path).name)
    return int(named[1]) if named else None


class Segment(NamedTuple):
    """The files under one segment's name."""

    base: Path
    size_bytes: int
    age_s: float
    """Seconds since its node's last sign of life if the node may return, else since it was made."""
    home: Path | None
    """The directory of its node; None when the header file does not say."""
    owned: bool
    """Its node lives."""

    @property
    def homeless(self) -> bool:
        """Return whether its node's directory says nothing of it, so that no start can take it
        over."""
        if self.home is None:
            return False
        try:
            announcement = NodeDir(self.home.parent.parent, self.home.name).announcement()
        except UsageError:
            return True
        return announcement is None or announcement.head_path != f"{self.base}{HEAD}"

    @property
    def home_named(self) -> str:
        """Return the node and its run directory, as messages name them."""
        if self.home is None:
            return "a node that it does not name"
        return f"node {self.home.name} in run directory {self.home.parent.parent}"

    @property
    def waits_s(self) -> float:
        """Return for how many seconds it waits for its node's next start. At 0 any process of the
        user may free it, unless it is `owned`."""
        return 0.0 if self.owned else max(RESTART_WITHIN_S - self.age_s, 0.0)


def segments(shm_dir: Path = SHM_DIR) -> list[Segment]:
    """Return the segments of this user, in the order of their names, at most
    `SEGMENTS_SEEN_MAX`."""
    bases = {path.with_suffix("") for path in _files(shm_dir) if _ours(path)}
    found = [_look(base) for base in sorted(bases)[:SEGMENTS_SEEN_MAX]]
    return [segment for segment in found if segment is not None]


def foreign_files(shm_dir: Path = SHM_DIR) -> list[Path]:
    """Return files of other users whose names look like segments of this one."""
    return sorted(path for path in _files(shm_dir) if not _ours(path))


def free_abandoned(shm_dir: Path = SHM_DIR, *, homeless: bool = False) -> list[Segment]:
    """Free what no node is expected back for; with `homeless`, also what none can take over.

    Returns what was freed. Anyone may call this at any time; it raises nothing.
    """
    for path in _files(shm_dir):
        if _ours(path):
            host_clock.set_right(path)
    return [s for s in segments(shm_dir) if _may_go(s, homeless) and _free(s, homeless)]


def _may_go(segment: Segment, homeless: bool) -> bool:
    return not segment.owned and (not segment.waits_s or (homeless and segment.homeless))


def _files(shm_dir: Path) -> list[Path]:
    try:
        found = list(shm_dir.glob(f"kvstore-{os.getuid()}-*"))
    except OSError:
        return []
    return [path for path in found if path.suffix in (HEAD, DATA)]


def _ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return True  # gone meanwhile: nobody's
    return status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)


def _look(base: Path) -> Segment | None:
    head, data = Path(f"{base}{HEAD}"), Path(f"{base}{DATA}")
    sizes: list[int] = []
    times: list[float] = []
    for path in (head, data, base.with_suffix(TABLE)):
        try:
            status = path.lstat()
        except OSError:
            continue
        sizes.append(status.st_size)
        times.append(status.st_mtime)
    if not sizes:
        return None
    owned = _owned(head)
    page = _first_page(head) if _ours(head) else b""
    age_s = host_clock.age_s(life_of(page), max(times))
    return Segment(base, sum(sizes), age_s, home_of(page), owned)


def _owned(head: Path) -> bool:
    """Return whether the segment's owner lives; True, too, where that cannot be tested."""
    try:
        return _ours(head) and is_locked(head)
    except OSError:
        return True


def _first_page(head: Path) -> bytes:
    try:
        return read_start(head, SUPERBLOCK_BYTES)
    except OSError:
        return b""


def _free(segment: Segment, homeless: bool) -> bool:
    head, data = Path(f"{segment.base}{HEAD}"), Path(f"{segment.base}{DATA}")
    try:
        # Payload alone is left when a node is killed between removing the two files.
        alone = not head.exists() or not _ours(head)
        lock = FileLock(data, os.O_RDONLY) if alone else try_lock(head, create=False)
        if lock is None:
            return False
        try:
            again = _look(segment.base)
            locked = os.fstat(lock.fd).st_nlink > 0
            if again is None or not locked or not _may_go(again._replace(owned=False), homeless):
                return False
            head.with_suffix(TABLE).unlink(missing_ok=True)
            data.unlink(missing_ok=True)
            head.unlink(missing_ok=True)
        finally:
            lock.release()
    except OSError:
        return False
    return True


class Sweeper:
    """Frees what dead nodes of this user left on this host, each time that it is `due`."""

    every_s = SWEEP_EVERY_S

    def __init__(self, run_dir: Path, *, shm_dir: Path = SHM_DIR) -> None:
        self._run_dir = run_dir
        self._shm_dir = shm_dir
        self._due_at = float("-inf")

    def due(self, now: float) -> bool:
        """Return whether `every_s` have gone by since the last time that this was so."""
        if now < self._due_at:
            return False
        self._due_at = now + self.every_s
        return True

    def sweep(self) -> None:
        """Free what is there now. It may take as long as the kernel needs to clear that memory."""
        sweep(self._run_dir)
        free_abandoned(self._shm_dir)
