"""Takes over a node's former segment at its start, and watches the clients that may still use it.

A start is warm when the former one left a segment of the same node, key prefix and size, in the
same place; any doubt on the way makes it an empty one, which costs a recompute. The way:

    reopen     the lock on the header file makes this process the segment's owner
    recover    headers become blocks (core/recovery.py); what a client of a former start may still
               write to, or has pinned, is held for all of them as session FORMER
    catch up   what was reset while the node was down is dropped (publishing/resets.py)
    watch      `FormerClients` opens the leases that former starts granted
    adopt      the superblock gets the new epoch, then the directory announces it

No client can connect before the last of these. The headers are changed in place: a reader that
has the segment mapped goes on reading right bytes, since each reuse of a slot has a generation of
its own (rule 4). Who maps it anew with a former start's epoch finds another one, and has a miss.

Must never happen:

- a slot that a former client may still write to, given out before the last of these clients has
  gone (rule 5): the daemon ends FORMER then, and not before;
- a block that was reset while the node was down, served by the new start;
- a start that fails because nothing can be made of what the former one left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvstore.core.events import Effects
from kvstore.core.node import NodeCore
from kvstore.core.recovery import recover
from kvstore.errors import InternalError, NoSpaceError
from kvstore.machine import REAL, Machine
from kvstore.node.seldom import Seldom
from kvstore.nodedir import Announcement, NodeDir
from kvstore.segment.abandoned import Sweeper, free_abandoned
from kvstore.segment.cuda import OwnedCuda
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm, check_room, never_fits
from kvstore.system.filelock import fd_is_locked
from kvstore.system.on_failure import on_failure
from kvstore.system.threads import DaemonThreads

log = logging.getLogger("kvstore.node")

ROOM_WAIT_S = 3.0
"""Time that a node waits for memory that is about to become free: a client releases a dead node's
memory within a second (client/nodes/reaper.py)."""
ROOM_POLL_S = 0.05
_SAME = ("node_id", "key_prefix", "size_bytes")


class Started(NamedTuple):
    """What a node starts with."""

    core: NodeCore
    segment: OwnedShm | OwnedCuda
    announcement: Announcement
    clients: FormerClients


class FormerClients:
    """The clients of former starts that live: their leases outlive the node that granted them.

    Until all of them are gone, nobody can say who of them may still write where (rule 5).
    """

    def __init__(self, leases: Path, *, matter: bool) -> None:
        """Open the leases in `leases`, and remove the free ones; all, unless they `matter`."""
        self._open: dict[Path, int] = {}
        self._unknown: list[Path] = []
        """Leases that could not be checked yet: their clients may live."""
        self._say = Seldom(log)
        for path in leases.iterdir():
            try:
                status = path.lstat()
            except OSError:
                continue  # its client has let go of it
            if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                # No client of this node made it: clients that save are of its user.
                self._say.warning("%s holds what is no lease, %s: it is left alone", leases, path)
            elif matter:
                self._look_at(path)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _look_at(self, path: Path) -> None:
        """Take note of the lease if its client lives; remove it if not."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._open[path] = os.open(path, flags)
        except FileNotFoundError:
            return
        except OSError as e:
            text = "lease %s cannot be opened: %s; its client counts as alive"
            self._say.warning(text, path, e.strerror)
            self._unknown.append(path)
        else:
            if not fd_is_locked(self._open[path]):
                self._remove(path)

    def __len__(self) -> int:
        return len(self._open) + len(self._unknown)

    def gone(self) -> bool:
        """Return whether no such client is left; each lease that was freed meanwhile is removed."""
        for path in [path for path, fd in self._open.items() if not fd_is_locked(fd)]:
            self._remove(path)
        unknown, self._unknown = self._unknown, []
        for path in unknown:
            self._look_at(path)
        return not self._open and not self._unknown

    def _remove(self, path: Path) -> None:
        os.close(self._open.pop(path))
        with contextlib.suppress(OSError):
            path.unlink()

    def close(self) -> None:
        """Stop watching; the files stay."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def start(
    directory: NodeDir,
    announcement: Announcement,
    make_core: Callable[[], NodeCore],
    run_dir: Path,
    catch_up: Callable[[NodeCore, Callable[[Effects], None]], None],
    *,
    machine: Machine = REAL,
    segment_class: type[OwnedShm] = OwnedShm,
    clients_class: type[FormerClients] = FormerClients,
) -> Started:
    """Start with the blocks of the former start where they can be had, else with an empty segment.

    `announcement` says where an empty segment is to be. The caller holds the node's lock.
    `catch_up` drops what may not be read any more, and raises `ValueError` when it cannot tell.
    The classes are for tests that look on. Raises `NoSpaceError` when an empty one does not fit.
    """
    directory.leases.mkdir(exist_ok=True, mode=0o700)
    former = directory.announcement()
    warm = None
    if directory.unwatched.exists():
        log.warning(
            "node %s starts empty: leases of clients were removed while it lived, and who of them "
            "still writes into its memory cannot be told",
            announcement.name,
        )
        directory.unwatched.unlink()
    elif former is not None:
        warm = _take_over(former, announcement, make_core, catch_up, machine, segment_class)
    if warm is None:
        other = directory.stranger()
        if other is not None:
            log.warning("%s: the segment that it left is not taken over", other)
        directory.remove_segment()
    clients = clients_class(directory.leases, matter=warm is not None)
    with on_failure(clients.close):
        if warm is not None:
            core, segment = warm
            announcement = _at(announcement, segment)
            segment.adopt()
            directory.announce(announcement)
            return Started(core, segment, announcement, clients)
        _make_room(Path(announcement.data_path).parent, announcement, run_dir, machine)
        # Written before the segment: whoever finds this directory without a
        # living owner knows which files to remove.
        directory.announce(announcement)
        base = Path(announcement.data_path).with_suffix("")
        home = str(directory.path)
        segment = segment_class(base, superblock_of(announcement), home=home, machine=machine)
        return Started(make_core(), segment, announcement, clients)


def _take_over(
    former: Announcement,
    announcement: Announcement,
    make_core: Callable[[], NodeCore],
    catch_up: Callable[[NodeCore, Callable[[Effects], None]], None],
    machine: Machine,
    segment_class: type[OwnedShm],
) -> tuple[NodeCore, OwnedShm] | None:
    segment: OwnedShm | None = None
    try:
        for name in _SAME:
            was, wanted = getattr(former, name), getattr(announcement, name)
            if was != wanted:
                raise ValueError(f"its {name} is {was}, not {wanted}")
        path = Path(former.data_path)
        if path.parent != Path(announcement.data_path).parent:
            raise ValueError(f"it is in {path.parent}")
        segment = segment_class(
            path.with_suffix(""), superblock_of(announcement), reopen=True, machine=machine
        )
        with _no_collection():
            epoch, seen = segment.seen()
            core = make_core()
            writes = recover(core, seen, epoch, machine.monotonic())
        segment.apply_all(writes)
        catch_up(core, partial(_apply, segment))
    except (OSError, ValueError, InternalError, AssertionError, LookupError) as e:
        # A segment that nothing can be made of must not keep the node from starting.
        log.warning("node %s starts empty, not with what it left behind: %s", announcement.name, e)
        if segment is not None:
            segment.close()
        return None
    log.info(
        "node %s goes on with %d blocks of epoch %d; %d headers were unsealed or damaged",
        announcement.name,
        core.blocks.counts["recovered"],
        epoch,
        core.blocks.counts["recovery_dropped"],
    )
    return core, segment


def _apply(segment: OwnedShm, effects: Effects) -> None:
    segment.apply_all(effects.writes)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turn the garbage collector off meanwhile. Hundreds of thousands of objects are made and none
    dies; searching them again and again for garbage takes a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def superblock_of(announcement: Announcement) -> Superblock:
    return Superblock(announcement.node_id, announcement.epoch, 0, announcement.size_bytes)


def _at(announcement: Announcement, segment: OwnedShm) -> Announcement:
    """Return the announcement of the same node with the files of `segment`."""
    return announcement.with_files(str(segment.data_path), str(segment.head_path))


def _make_room(where: Path, announcement: Announcement, run_dir: Path, machine: Machine) -> None:
    """Raise `NoSpaceError` unless the segment fits, be it after freeing those that dead nodes of
    this run directory could be restarted with. What clients still map of nodes that were just
    killed is free a moment later, so there are tries for `ROOM_WAIT_S`."""
    try:
        check_room(where, announcement.size_bytes, machine)
        return
    except NoSpaceError:
        if never_fits(where, announcement.size_bytes, machine):
            raise
    # Imported where it is needed: 45 ms, which most starts can do without.
    from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

    for attempt in Retrying(
        retry=retry_if_exception_type(NoSpaceError),
        stop=stop_after_delay(ROOM_WAIT_S),
        wait=wait_fixed(ROOM_POLL_S),
        reraise=True,
    ):
        with attempt:
            if removed := machine.sweep(run_dir, kept=True):
                names = ", ".join(removed)
                log.info("removed what nodes %s left behind: its memory is needed", names)
            free_abandoned(where)
            check_room(where, announcement.size_bytes, machine)


async def free_memory_of_the_dead(sweeper: Sweeper) -> None:
    """Sweep every `sweeper.every_s`, for ever; in a thread, because clearing a large segment
    takes the kernel seconds."""
    while True:
        await asyncio.wrap_future(DaemonThreads(1, "kvstore-sweep").submit(sweeper.sweep))
        await asyncio.sleep(sweeper.every_s)
