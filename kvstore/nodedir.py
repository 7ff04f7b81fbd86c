"""Reads and writes a node's directory, where its host finds it: `RUN_DIR/nodes/NAME/`.

    lock          flock held for as long as the node's process lives
    node.json     its announcement (also in the index)
    control.sock  its control socket
    vram.sock     hands its memory over, where that is a device's
    ready         why it is not ready; empty once it is
    room          bytes it can take without evicting, a hint
    resets        resets of namespaces that it knows of, and what it last saw of the index
    keep          its last sign of life (host_clock.py), when its segment is to wait for its next
                  start
    unwatched     says that the lease of a living client was removed: only this start knows of it
    leases/ID     one file per client, flock held for as long as the client's process lives

A lock outlives a lost connection and a stopped process and ends with the
process, however that ends: it is how both sides know who is dead (rule 5).

In one file, because who writes such a directory and who reads it, perhaps of another version,
must agree on every name and word in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.errors import UsageError
from kvstore.limits import RESTART_WITHIN_S
from kvstore.system import host_clock
from kvstore.system.filelock import is_locked, try_lock
from kvstore.system.small_files import read_small, read_start
from kvstore.system.small_json import parse_object

log = logging.getLogger("kvstore.node")

LOCK, ANNOUNCEMENT, SOCKET, LEASES = "lock", "node.json", "control.sock", "leases"
KEEP, READY, ROOM, RESETS, VRAM = "keep", "ready", "room", "resets", "vram.sock"
UNWATCHED = "unwatched"
TABLE = ".table"
"""Suffix of the file beside its segment's that says what it has on disk (segment/disk/table.py)."""
ROOM_BYTES = 8
VERSION = 3
"""Version of everything by which a node is reached: it grows with every change of the announcement,
of the control protocol (protocol/control.py) and of the segment's layout (segment/header.py)."""
NODES_SCANNED_MAX = 256
NAME_CHARS_MAX = 32
FILE_BYTES_MAX = 1 << 20
"""Bytes that are read of a file here: the directory may be another user's."""
ANNOUNCEMENT_BYTES_MAX = 64 << 10
"""Bytes of an announcement; the resets that the node knows of are the most of it, 8 KB."""
VERSION_MAX = (1 << 32) - 1
"""The largest version; a larger number is none, and is not shown."""
WORD_CHARS_MAX = 255
"""Characters of the name of a node of another version that are shown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What others need to reach a node."""

    version: int = dataclasses.field(default_factory=lambda: VERSION)
    node_id: int
    epoch: int
    name: str
    host: str
    pid: int
    key_prefix: str
    data_path: str
    head_path: str
    control_path: str
    size_bytes: int
    """Size of its segment."""
    inline_bytes: int
    """Values up to this size may travel in a reserve request."""
    index: str = ""
    """The index that it publishes to (`Index.identity`), for clients of its own host; empty in the
    index itself."""
    free_bytes: int = 0
    """Room without evicting anything, as of the last heartbeat; 0 in the node's own directory."""
    up_s: int = 0
    """Seconds since its start, as of the last heartbeat."""
    resets: str = ""
    """Resets that the node knows of (core/resets.py), as of the last heartbeat; in its own
    directory they are in a file beside."""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """What it holds and has done (core/report.py), as of the last heartbeat; empty in the node's
    own directory."""
    transports: dict[str, str] = dataclasses.field(default_factory=dict)
    """Other ways to reach it than this host's memory: an address by the transport's name."""
    disks: dict[str, str] = dataclasses.field(default_factory=dict)
    """Disks on which it keeps blocks, for clients of its own host (segment/disk/attached.py): UUID
    and path by number; empty in the index."""

    def with_files(self, data_path: str, head_path: str) -> Announcement:
        """Return this announcement with its segment in these files."""
        return dataclasses.replace(self, data_path=data_path, head_path=head_path)

    def pack(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Announcement | None:
        """Return the announcement in `raw`; None when it is none of this version: nobody to
        reach."""
        try:
            fields = _fields(raw)
            if fields.get("version") != VERSION:
                return None
            fields.setdefault("disks", {})  # an older node does not say
            known = {f.name: f.type for f in dataclasses.fields(cls)}
            found = cls(**{name: fields[name] for name in known})
        except (KeyError, TypeError):
            return None
        right = all(
            type(getattr(found, n)).__name__ == t.partition("[")[0] for n, t in known.items()
        ) and all(isinstance(a, str) for a in (*found.transports.values(), *found.disks.values()))
        right = right and all(type(count) is int for count in found.counts.values())
        return found if right else None


class Stranger(NamedTuple):
    """A live node that speaks another protocol version: it can be counted, but not read."""

    name: str
    host: str
    key_prefix: str
    version: int

    def __str__(self) -> str:
        return f"node {self.name} speaks version {self.version}, this side version {VERSION}"


def stranger(raw: bytes) -> Stranger | None:
    """Return who announced `raw`, when that is a node of another version; else None."""
    fields = _fields(raw)
    version = fields.get("version")
    if type(version) is not int or version == VERSION or not 0 <= version <= VERSION_MAX:
        return None
    said = (fields.get(name) for name in ("name", "host", "key_prefix"))
    name, host, key_prefix = (str(value)[:WORD_CHARS_MAX] for value in said)
    return Stranger(name if name.isprintable() else "?", host, key_prefix, version)


def _fields(raw: bytes) -> dict[str, Any]:
    """Return the fields of an announcement of any version; empty when `raw` is no announcement."""
    return parse_object(raw, ANNOUNCEMENT_BYTES_MAX)


class NodeDir:
    """One node's directory."""

    def __init__(self, run_dir: Path, name: str) -> None:
        if len(name) > NAME_CHARS_MAX or not name.replace("-", "").isalnum():
            raise UsageError(
                "name", name, f"must be 1 to {NAME_CHARS_MAX} letters, digits or hyphens"
            )
        self.name = name
        self.path = run_dir / "nodes" / name
        self.lock = self.path / LOCK
        self.announcement_path = self.path / ANNOUNCEMENT
        self.socket = self.path / SOCKET
        self.leases = self.path / LEASES
        self.keep = self.path / KEEP
        self.ready_path = self.path / READY
        self.room_path = self.path / ROOM
        self.resets_path = self.path / RESETS
        self.vram_socket = self.path / VRAM
        self.unwatched = self.path / UNWATCHED
        self._last_announced: tuple[Announcement, os.stat_result] | None = None
        """What this process announced last, and the file that contains it."""

    def announce(self, announcement: Announcement) -> None:
        """Write the announcement: readers see the old one or the new one, whenever the node is
        killed. Raises `OSError`."""
        fresh = self.announcement_path.with_suffix(".new")
        fresh.write_bytes(announcement.pack())
        fresh.chmod(0o644)  # who may enter the directory may read it, whatever the umask
        status = fresh.stat()
        fresh.rename(self.announcement_path)
        self._last_announced = announcement, status

    def announce_again(self) -> bool:
        """Write what was announced last once more if its file was taken away or replaced. Return
        whether it was. Raises `OSError`."""
        if self._last_announced is None:
            return False
        announcement, status = self._last_announced
        try:
            there = self.announcement_path.lstat()
            if os.path.samestat(status, there) and status.st_size == there.st_size:
                return False
        except FileNotFoundError:
            pass
        self.announce(announcement)
        return True

    def say_ready(self, why_not: str) -> None:
        """Say why the node is not ready, or with an empty text that it is. Health checks, which are
        processes of their own, read it."""
        with contextlib.suppress(OSError):
            fresh = self.ready_path.with_suffix(".new")
            fresh.write_text(why_not)
            fresh.chmod(0o644)  # as in `announce`
            fresh.rename(self.ready_path)

    def why_not_ready(self) -> str:
        """Return why the node is not ready (node/readiness.py); empty when it is."""
        try:
            return read_small(self.ready_path, FILE_BYTES_MAX).decode(errors="replace")
        except OSError:
            return "it has not tried its index and its memory yet"

    def say_room(self, free_bytes: int) -> None:
        """Say how much is free: clients of this host weigh their nodes by it. Where it cannot be
        written, they do not."""
        with contextlib.suppress(OSError):
            fd = os.open(self.room_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(fd, free_bytes.to_bytes(ROOM_BYTES, "little"), 0)
            finally:
                os.close(fd)

    def room(self) -> int:
        """Return the free bytes that the node wrote last; 0 when it wrote none."""
        try:
            return int.from_bytes(read_small(self.room_path, ROOM_BYTES), "little")
        except OSError:
            return 0

    def keep_resets(self, kept: Mapping[str, object]) -> None:
        """Write `kept`, a JSON object: readers see the old one or the new one, whenever the node is
        killed. Raises `OSError`."""
        fresh = self.resets_path.with_suffix(".new")
        fresh.write_bytes(json.dumps(kept).encode())
        fresh.rename(self.resets_path)

    def kept_resets(self) -> dict[str, object]:
        """Return what `keep_resets` wrote last; empty where it cannot be read."""
        try:
            return parse_object(read_small(self.resets_path, FILE_BYTES_MAX), FILE_BYTES_MAX)
        except OSError:
            return {}

    def open_keep(self) -> int:
        """Return a descriptor of the file for signs of life, which is made when it is not there. A
        node keeps the descriptor, so it can say that it lives when no other can be opened. Raises
        `OSError`.

        For `RESTART_WITHIN_S` from the last sign, the segment of a dead node waits for its next
        start.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(self.keep, flags, 0o600)

    def kept_for_s(self) -> float:
        """Return how many seconds the segment of this node, if it is dead, still waits for its next
        start; 0 when it does not."""
        try:
            changed_at = self.keep.stat().st_mtime
            paths = self._segment_paths()
            if not paths or not all(path.exists() for path in paths):
                return 0.0
            written = host_clock.Moment.unpack(read_start(self.keep, host_clock.MOMENT_BYTES))
        except OSError:
            return 0.0
        return max(RESTART_WITHIN_S - host_clock.age_s(written, changed_at), 0.0)

    def _announced(self) -> bytes:
        return read_small(self.announcement_path, ANNOUNCEMENT_BYTES_MAX)

    def announcement(self) -> Announcement | None:
        try:
            return Announcement.unpack(self._announced())
        except OSError:
            return None

    def stranger(self) -> Stranger | None:
        """Return the node, when it is of another version."""
        try:
            return stranger(self._announced())
        except OSError:
            return None

    def _segment_paths(self) -> list[Path]:
        """Return the files of its segment, whatever its version."""
        try:
            fields = _fields(self._announced())
        except OSError:
            return []
        said = [fields.get(name) for name in ("head_path", "data_path")]
        return [Path(path) for path in said if isinstance(path, str) and path]

    def owner(self) -> int:
        """Return the user whose word the directory is: another one than this, if any could have put
        it where it is found, also by a link. Raises `OSError` when it is not there."""
        uids = [path.lstat().st_uid for path in (self.path, *self.path.parents[:2])]
        return next((uid for uid in uids if uid != os.geteuid()), uids[0])

    def is_ours(self) -> bool:
        """Return whether it is this user's own word. False, too, when it is not there any more."""
        try:
            return self.owner() == os.geteuid()
        except OSError:
            return False

    def alive(self) -> bool:
        """Return whether the node's process lives: its lock is held. True, too, where nobody can
        look: no file descriptor is left, say."""
        try:
            return is_locked(self.lock)
        except OSError:
            return True

    def lives_as(self, announcement: Announcement) -> bool:
        """Return whether the start of the node that announced so lives; believed as `alive` is."""
        try:
            return self.alive() and Announcement.unpack(self._announced()) == announcement
        except OSError as e:
            return not isinstance(e, FileNotFoundError)

    def remove(self) -> None:
        """Delete the directory and the segment it names. The caller holds the lock."""
        self.remove_segment()
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_segment(self) -> None:
        """Delete the files of the segment that it names. What cannot be deleted is told in the
        log: one file of another user must not keep nodes from starting."""
        paths = self._segment_paths()
        for path in (*(path.with_suffix(TABLE) for path in paths[:1]), *paths):
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                log.warning("node %s: %s stays: %s", self.name, path, e.strerror)


def strangers(run_dir: Path, key_prefix: str | None) -> list[Stranger]:
    """Return the living nodes of this host that are of another version; all when `key_prefix` is
    None."""
    found = [(d, d.stranger()) for d in node_dirs(run_dir)]
    return [
        other
        for directory, other in found
        if other is not None
        and (key_prefix is None or other.key_prefix == key_prefix)
        and directory.alive()
    ]


def node_dirs(run_dir: Path) -> Iterator[NodeDir]:
    """Return the directories of all nodes of this host, living or dead, in name order."""
    try:
        names = sorted(path.name for path in (run_dir / "nodes").iterdir())
    except OSError:
        return
    for name in names[:NODES_SCANNED_MAX]:
        with contextlib.suppress(UsageError):
            yield NodeDir(run_dir, name)


def announced(
    directories: Iterable[NodeDir],
    key_prefix: str | None = None,
    start: tuple[int, int] | None = None,
) -> Iterator[tuple[Announcement, NodeDir]]:
    """Return what the nodes in `directories`, living or dead, announce: of all, of those that serve
    the keys of `key_prefix`, or of one `start`, which is a node's (id, epoch)."""
    for directory in directories:
        announcement = directory.announcement()
        if announcement is None or key_prefix not in (None, announcement.key_prefix):
            continue
        if start in (None, (announcement.node_id, announcement.epoch)):
            yield announcement, directory


def sweep(run_dir: Path, *, kept: bool = False, names: Collection[str] | None = None) -> list[str]:
    """Remove what dead nodes left behind (segments too); the names of those removed.

    Segments that wait for the next start of their node go only with `kept`; with
    `names`, only those nodes are looked at.
    Anyone may call this at any time: holding the lock proves that the node is dead. Whether
    it waits is asked again under the lock: it may have come back, and died, since.
    """
    removed: list[str] = []
    for node_dir in node_dirs(run_dir):
        if names is not None and node_dir.name not in names:
            continue
        host_clock.set_right(node_dir.keep)
        if not kept and node_dir.kept_for_s() > 0:
            continue
        try:
            lock = try_lock(node_dir.lock, create=False)
        except OSError:
            continue
        if lock is None:
            continue
        try:
            # Who waited for the lock of a directory that another has removed has a lock
            # that says nothing about the one which is there now.
            if lock.is_at(node_dir.lock) and (kept or not node_dir.kept_for_s()):
                node_dir.remove()
                removed.append(node_dir.name)
        except OSError as e:
            log.warning("what node %s left behind stays: %s", node_dir.name, e)
        finally:
            lock.release()
    return removed
