"""Maps the segments of this host's nodes: each is found once and let go when its node dies.

Nothing of another user's node is opened: its owner could end this process by making a file shorter
(docs/decisions/0103-another-user-is-another-host.md). Its stream is the only way to its blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kvstore.client.base import BlockRef
from kvstore.client.missing.explanation import MissReason, Unreadable, of_other_user
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import Index
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement, NodeDir, Stranger, announced, strangers
from kvstore.record import node_start
from kvstore.segment.attached import AttachedShm
from kvstore.system.fork import in_each_child
from kvstore.transport.registry import CUDA_IPC

ALIVE_CHECK_S = 0.5
"""How long a dead node's segment may still be read. Its bytes stay right; this only frees them."""
ABSENT_S = 0.5
"""How long "no such node here" is believed."""
ABSENT_MAX = 1024
REMEDY = (
    "it needs --listen, both the same KVSTORE_SECRET and one Redis (KVSTORE_URL), and this client "
    "the transport stream (KVSTORE_TRANSPORTS)"
)
"""What a node of another user lacks, where more is not known of it."""


class Attached:
    """One node's segment in this process."""

    __slots__ = ("announcement", "directory", "gone", "ours", "records", "shm", "start")

    def __init__(
        self,
        announcement: Announcement,
        shm: AttachedShm,
        directory: NodeDir,
        *,
        ours: bool,
    ) -> None:
        self.announcement = announcement
        self.shm = shm
        self.directory = directory
        self.ours = ours
        """Of the client's own index, for certain: what it holds was not reset there."""
        self.start = node_start(announcement.node_id, announcement.epoch)
        """As records name it."""
        self.records: dict[int, tuple[bytes, BlockRef]] = {}
        """By slot its header and what was made of that: the same bytes in the same slot say the
        same (client/block_lookup.py)."""
        self.gone = False
        """The node is dead or restarted: every location in here is a miss."""


class LocalNodes:
    """Finds this host's nodes and maps their segments to be read. Thread-safe. Never raises for a
    peer's fault: a node that cannot be reached is None."""

    def __init__(
        self,
        run_dir: Path,
        index: Index,
        key_prefix: str,
        *,
        use: bool = True,
        mapping: Callable[[], None] = lambda: None,
        machine: Machine = REAL,
    ) -> None:
        """With `use` false there are none: what a client does that is to use other transports.
        `mapping` is called before a segment is mapped: from then on somebody must `check`."""
        self.mapping = mapping
        self.machine = machine
        self._use = use
        self._run_dir = run_dir
        self._index = index
        self._key_prefix = key_prefix
        # A handler of signals may close the client at any moment.
        self._lock = self.machine.lock()
        in_each_child(self)
        self._attached: dict[tuple[int, int], Attached] = {}
        self.mapped: tuple[Attached, ...] = ()
        """Every segment that is mapped now, the newest first."""
        self._absent: dict[tuple[int, int], float] = {}
        self.unmapped_because: dict[tuple[int, int], Unreadable] = {}
        """Starts of nodes whose memory could not be opened when it was last tried, and why."""
        self.had: set[str] = set()
        """Names of the nodes whose memory was opened."""
        self._ours: set[tuple[int, int]] = set()
        """Starts of nodes that the index knew."""
        self._checked_at = 0.0
        self._look_around_at = {False: float("-inf"), True: float("-inf")}
        """For all nodes, and for those of this client's index only."""
        self.gone = 0
        """How many segments were dropped because their node died."""

    def segment(self, node_id: int, epoch: int, now: float) -> Attached | None:
        """Return the mapped segment of that start of that node, None when it is not on this
        host."""
        found = self._attached.get((node_id, epoch))
        if found is not None:
            found.ours = True  # whoever asks for it has a record that names it
            return found
        if self._absent.get((node_id, epoch), 0.0) > now:
            return None
        with self._lock:
            return self._attached.get((node_id, epoch)) or self._attach(node_id, epoch, now)

    def mapped_start(self, node_id: int, epoch: int) -> bool:
        """Return whether the segment of that start of that node is mapped; maps none."""
        return (node_id, epoch) in self._attached

    def _attach(self, node_id: int, epoch: int, now: float) -> Attached | None:
        if not self._use or self._absent.get((node_id, epoch), 0.0) > now:
            return None  # another thread has found out meanwhile
        directories = self.machine.node_dirs(self._run_dir)
        for announcement, directory in announced(directories, start=(node_id, epoch)):
            if not directory.alive():
                self.machine.sweep(self._run_dir)
                break
            attached = self._add(announcement, directory, ours=True)
            if attached is not None:
                return attached
        if len(self._absent) >= ABSENT_MAX:
            self._absent.clear()
        self._absent[node_id, epoch] = now + ABSENT_S
        return None

    def ours(self, now: float, *, find: bool) -> list[Attached]:
        """Return the mapped segments of the client's own index. With `find`, of every living node
        here that is of it without a question; waits for nobody."""
        self.check(now)
        if find:
            self.map_ours(now)
        return [one for one in self.mapped if one.ours]

    def map_ours(self, now: float) -> bool:
        """Map every living node here that is of the client's own index without a question; whether
        one was added. Waits for nobody; looks around every `ABSENT_S`."""
        return now >= self._look_around_at[True] and self._map_around(now, ours_only=True)

    def every(self, now: float) -> tuple[Attached, ...]:
        """Return the segments of every living node here that serves our keys, of whichever index:
        for when the index cannot say who has a block."""
        self.check(now)
        self.map_all(now)
        return self.mapped

    def map_all(self, now: float) -> bool:
        """Map every living node here that serves our keys; whether one was added.

        For when the index cannot say who has a block. Looks around every `ABSENT_S`.
        """
        return now >= self._look_around_at[False] and self._map_around(now, ours_only=False)

    def _map_around(self, now: float, *, ours_only: bool) -> bool:
        if not self._use or self._lock._is_owned():  # type: ignore[attr-defined]  # as in `check`
            return False
        try:
            if not self._lock.acquire(blocking=not ours_only):
                return False  # another thread looks, and the index can be asked
            self._look_around_at[ours_only] = now + ABSENT_S
            before = self.mapped
            for announcement, directory in self._announced():
                start = (announcement.node_id, announcement.epoch)
                there = self._attached.get(start)
                if there is not None and (there.ours or not ours_only):
                    continue
                ours = ours_only and (start in self._ours or self._is_named_ours(announcement))
                if there is not None:
                    there.ours = ours
                elif (ours or not ours_only) and directory.alive():
                    self._add(announcement, directory, ours=ours)
            return self.mapped != before
        finally:
            self._release()

    def _add(
        self, announcement: Announcement, directory: NodeDir, *, ours: bool
    ) -> Attached | None:
        self.mapping()
        start = announcement.node_id, announcement.epoch
        attached = self._map(announcement, directory, ours=ours)
        if attached is not None and self._use:
            self.unmapped_because.pop(start, None)
            self.had.add(announcement.name)
            self._attached[start] = attached
            self.mapped = (attached, *self.mapped)
        return attached

    def _map(
        self, announcement: Announcement, directory: NodeDir, *, ours: bool
    ) -> Attached | None:
        data, head = Path(announcement.data_path), Path(announcement.head_path)
        try:
            owner = directory.owner()
            if owner != os.geteuid():
                self._leave_out(announcement, of_other_user(owner, REMEDY))
                return None
            shm = AttachedShm(data, head, owner=owner, machine=self.machine)
        except (OSError, ValueError) as e:
            self._unmapped(announcement, str(e))
            return None
        block = shm.superblock
        if (block.node_id, block.epoch) != (announcement.node_id, announcement.epoch):
            shm.close()
            self._unmapped(announcement, "its files are another node's, or another start's")
            return None
        shm.populate_ahead()
        return Attached(announcement, shm, directory, ours=ours)

    def _unmapped(self, word: Announcement, why: str) -> None:
        if CUDA_IPC in word.transports:
            return  # there is none to map
        detail = f"its memory cannot be opened by this process: {why}"
        self._leave_out(word, Unreadable(MissReason.UNREADABLE_UNMAPPED, detail))

    def _leave_out(self, word: Announcement, why: Unreadable) -> None:
        if len(self.unmapped_because) >= ABSENT_MAX:
            self.unmapped_because.clear()
        self.unmapped_because[word.node_id, word.epoch] = why

    def check(self, now: float) -> None:
        """Drop the segments of nodes that died; costs nothing between checks, and waits for no
        other thread, which may be starved."""
        if now < self._checked_at + ALIVE_CHECK_S:
            return
        if self._lock._is_owned():  # type: ignore[attr-defined]  # a handler of signals, amid this
            return
        try:
            # In here: what a handler raises behind it would leave the lock taken.
            if not self._lock.acquire(blocking=False):
                return
            self._checked_at = now
            dead = [
                place
                for place, attached in self._attached.items()
                if not attached.directory.lives_as(attached.announcement)
            ]
            for place in dead:
                self._attached.pop(place).gone = True
            self.mapped = tuple(a for a in self.mapped if not a.gone)
            self.gone += len(dead)
        finally:
            self._release()
        if dead:
            self.machine.sweep(self._run_dir)

    def _release(self) -> None:
        try:  # noqa: SIM105  # nothing is called before: a signal could end it there
            self._lock.release()
        except RuntimeError:  # it was never got
            pass

    def writable(self, name: str | None) -> tuple[Announcement, NodeDir] | None:
        """Return the first of `writables`, or the one called `name`; raises as they do."""
        for found in self.writables():
            if name is None or found[1].name == name:
                return found
        return None

    def writables(self) -> list[tuple[Announcement, NodeDir]]:
        """Return this user's nodes on this host to write to, by name: alive, and of the same index.

        Raises `IndexUnavailableError` when there may be one that names its index otherwise,
        and the index cannot say whether any is one of its own.
        """
        found: list[tuple[Announcement, NodeDir]] = []
        unanswered: IndexUnavailableError | None = None
        for announcement, directory in self._announced() if self._use else ():
            if CUDA_IPC in announcement.transports:
                continue  # its own process alone writes to it
            if not directory.is_ours():
                continue
            if not directory.alive():
                self.machine.sweep(self._run_dir)
                continue
            try:
                if self._is_ours(announcement):
                    found.append((announcement, directory))
            except IndexUnavailableError as e:
                unanswered = e
        if unanswered is not None and not found:
            raise unanswered
        return found

    def _announced(self) -> Iterator[tuple[Announcement, NodeDir]]:
        """Return the nodes of this host that serve our keys, living or dead."""
        return announced(self.machine.node_dirs(self._run_dir), self._key_prefix)

    def living(self) -> list[Announcement]:
        """Return the nodes of this user and host that serve our keys and live, in VRAM too."""
        return [word for word, there in self._announced() if there.alive() and there.is_ours()]

    def others(self) -> list[tuple[Announcement, Unreadable]]:
        """Return the living nodes of this host that serve our keys and are other users', and what
        keeps this client from their memory."""
        found: list[tuple[Announcement, Unreadable]] = []
        for word, directory in self._announced():
            if directory.alive() and not directory.is_ours():
                with suppress(OSError):
                    found.append((word, of_other_user(directory.owner(), REMEDY)))
        return found

    def strangers(self) -> list[Stranger]:
        """Living nodes of this host that are of another version: to be named, not used."""
        return strangers(self._run_dir, self._key_prefix) if self._use else []

    def _is_ours(self, announcement: Announcement) -> bool:
        """Return whether the node publishes to this client's index. When both call it the same
        nobody is asked: a node that is starved, or cut off from Redis, is no stranger. Else the
        index is asked, once for each start of the node: it does not change its index while it
        lives."""
        if self._is_named_ours(announcement):
            return True
        start = (announcement.node_id, announcement.epoch)
        if start not in self._ours:
            if self._index.node(announcement.node_id) is None:
                return False
            if len(self._ours) >= ABSENT_MAX:
                self._ours.clear()
            self._ours.add(start)
        return True

    def _is_named_ours(self, announcement: Announcement) -> bool:
        return announcement.index != "" and announcement.index == self._index.identity()

    def after_fork_in_child(self) -> None:
        self._lock = self.machine.lock()  # a thread of the parent may have had it

    def close(self) -> None:
        """Let go of all: from here on there are none, and what another thread asks for meanwhile is
        not mapped."""
        with self._lock:
            self._use = False
            for attached in self._attached.values():
                attached.gone = True
            self._attached.clear()
            self.mapped = ()
        self.machine.sweep(self._run_dir)
