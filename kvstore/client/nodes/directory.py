"""Knows which nodes there are: on this host by the run directory, elsewhere by the index.

An entry is one start of one node (known.py); what a former start failed at, or was sent, says
nothing of the next. Each is

    unheard    until one of the two has named it
    reachable  while it is named, and its memory is mapped here or it offers a transport that this
               client may use
    silent     after it did not answer, until its breaker lets a probe through
    gone       when its lock is free, the index does not know it any more or names another start

What the run directory says is believed for `HERE_BELIEVED_S`, what the index says for
`NODE_BELIEVED_S` or, where the index cannot be asked, for `NODE_TTL_S` since it was heard last.

Nothing of another user's node is opened: its owner could end this process by making a file shorter
(docs/decisions/0103-another-user-is-another-host.md). Its stream is the only way to its blocks.

One class, because what is known of a start is one thing, whoever said it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.client.explanation import MissReason, Unreadable, of_other_user
from kvstore.client.nodes.known import Attached, KnownNode
from kvstore.errors import IndexUnavailableError
from kvstore.index.announced import announced_node, announced_nodes, nodes_among, strangers_among
from kvstore.index.base import Index
from kvstore.limits import NODE_BELIEVED_S, NODE_TTL_S
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement, NodeDir, Stranger, announced, strangers
from kvstore.record import RecordSigner
from kvstore.segment.attached import AttachedShm
from kvstore.system.fork import in_each_child
from kvstore.transport.base import Transport
from kvstore.transport.registry import CUDA_IPC

if TYPE_CHECKING:
    from kvstore.segment.disk.attached import AttachedDisks

log = logging.getLogger("kvstore.client")

HERE_BELIEVED_S = 0.5
"""How long a look into the run directory is believed, by who reads and by who saves: a dead node's
segment may be read so much longer (its bytes stay right; to let go only frees them), and a new node
is seen so much later."""
LISTED_EVERY_S = 5.0
"""How often the index is asked which nodes there are, by those who save."""
NODES_KNOWN_MAX = 4096
REMEDY = (
    "it needs --listen, both the same KVSTORE_SECRET and one Redis (KVSTORE_URL), and this client "
    "the transport stream (KVSTORE_TRANSPORTS)"
)
"""What a node of another user lacks, where more is not known of it."""


class NodeDirectory:
    """Finds nodes, and maps the segments of those of this host to be read. Thread-safe. Never
    raises for a peer's fault, but where it says so: a node that cannot be reached is None."""

    def __init__(
        self,
        run_dir: Path,
        index: Index,
        key_prefix: str,
        *,
        use: bool = True,
        disks: bool = True,
        offered: Callable[[Announcement], Sequence[Transport]] | None = None,
        signer: RecordSigner | None = None,
        mapping: Callable[[], None] = lambda: None,
        machine: Machine = REAL,
    ) -> None:
        """Without `use` no memory is mapped, and this host's nodes are as far away as others;
        without `disks` nothing is found on theirs.
        `offered` returns the transports by which this client can reach a node, which counts as
        gone where there is none; without it, every node is there. With `signer` only nodes count
        whose announcement in the index it signed. `mapping` is called before a segment is mapped:
        from then on somebody must `check`."""
        self.mapping = mapping
        self.machine = machine
        self.run_dir = run_dir
        self.key_prefix = key_prefix
        self._use = use
        self._disks = disks
        self._index = index
        self._offered = offered
        self._signer = signer
        self._starts: dict[tuple[int, int], KnownNode] = {}
        self._latest: dict[int, KnownNode] = {}
        """By node id, the start that the index named last."""
        self.mapped: tuple[Attached, ...] = ()
        """Every segment that is mapped now, the newest first."""
        self.had: set[str] = set()
        """Names of the nodes whose memory was opened."""
        self.gone = 0
        """How many segments were dropped because their node died."""
        self._checked_at = 0.0
        self._look_around_at = {False: float("-inf"), True: float("-inf")}
        """For all nodes of this host, and for those of this client's index only."""
        self.looked_at = float("-inf")
        """When the index was last asked which nodes there are."""
        self._looks = 0
        self.strangers_elsewhere: list[Stranger] = []
        """Nodes of another version, when the index was last asked which there are."""
        self.after_fork_in_child()
        in_each_child(self)

    def after_fork_in_child(self) -> None:
        """Make the locks anew: a thread of the parent may have had them."""
        # A handler of signals may close the client at any moment.
        self._lock = self.machine.lock()
        """Of what is mapped."""
        self._hearing = self.machine.lock()
        """Of what the index says; nobody waits for anything who has it."""
        self._looking = self.machine.lock()
        """Of the one that asks the index which nodes there are."""

    def entry(self, node_id: int, epoch: int) -> KnownNode:
        """Return what is known of that start of that node; asks nobody."""
        found = self._starts.get((node_id, epoch))
        if found is not None:
            return found
        if len(self._starts) >= NODES_KNOWN_MAX:
            unmapped = [start for start, one in [*self._starts.items()] if one.attached is None]
            for start in unmapped[:1]:
                self._starts.pop(start, None)
        return self._starts.setdefault((node_id, epoch), KnownNode(epoch))

    # --- of this host: whose memory is mapped -----------------------------------

    def segment(self, node_id: int, epoch: int, now: float) -> Attached | None:
        """Return the mapped segment of that start of that node, None when it is not on this
        host."""
        known = self._starts.get((node_id, epoch))
        if known is not None:
            attached = known.attached
            if attached is not None:
                attached.ours = True  # whoever asks for it has a record that names it
                return attached
            if known.absent_until > now:
                return None
        if not self._use:
            return None
        with self._lock:
            return self._attach(node_id, epoch, now)

    def unmapped(self, node_id: int, epoch: int) -> Unreadable | None:
        """Return why the memory of that start of that node could not be opened when that was last
        tried; None where it could, or was not tried."""
        return self.entry(node_id, epoch).unmapped

    def _attach(self, node_id: int, epoch: int, now: float) -> Attached | None:
        known = self.entry(node_id, epoch)
        if known.attached is not None:
            return known.attached
        if not self._use or known.absent_until > now:
            return None  # another thread has found out meanwhile
        for announcement, directory in self.here((node_id, epoch), any_prefix=True):
            if not directory.alive():
                self.machine.sweep(self.run_dir)
                break
            attached = self._add(announcement, directory, ours=True)
            if attached is not None:
                return attached
        known.absent_until = now + HERE_BELIEVED_S
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
        one was added. Waits for nobody; looks around every `HERE_BELIEVED_S`."""
        return now >= self._look_around_at[True] and self._map_around(now, ours_only=True)

    def every(self, now: float) -> tuple[Attached, ...]:
        """Return the segments of every living node here that serves our keys, of whichever index:
        for when the index cannot say who has a block."""
        self.check(now)
        self.map_all(now)
        return self.mapped

    def map_all(self, now: float) -> bool:
        """Map every living node here that serves our keys; whether one was added.

        For when the index cannot say who has a block. Looks around every `HERE_BELIEVED_S`.
        """
        return now >= self._look_around_at[False] and self._map_around(now, ours_only=False)

    def _map_around(self, now: float, *, ours_only: bool) -> bool:
        if not self._use or self._lock._is_owned():  # type: ignore[attr-defined]  # as in `check`
            return False
        try:
            if not self._lock.acquire(blocking=not ours_only):
                return False  # another thread looks, and the index can be asked
            self._look_around_at[ours_only] = now + HERE_BELIEVED_S
            before = self.mapped
            for announcement, directory in self.here():
                known = self.entry(announcement.node_id, announcement.epoch)
                there = known.attached
                if there is not None and (there.ours or not ours_only):
                    continue
                ours = ours_only and (known.ours or self._is_named_ours(announcement))
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
        attached = self._map(announcement, directory, ours=ours)
        if attached is not None and self._use:
            known = self.entry(announcement.node_id, announcement.epoch)
            known.attached, known.unmapped = attached, None
            self.had.add(announcement.name)
            self.mapped = (attached, *self.mapped)
        return attached

    def _map(
        self, announcement: Announcement, directory: NodeDir, *, ours: bool
    ) -> Attached | None:
        data, head = Path(announcement.data_path), Path(announcement.head_path)
        try:
            owner = directory.owner()
            if owner != os.geteuid():
                known = self.entry(announcement.node_id, announcement.epoch)
                known.unmapped = of_other_user(owner, REMEDY)
                return None
            shm = AttachedShm(data, head, owner=owner, machine=self.machine)
        except (OSError, ValueError) as e:
            self._cannot_map(announcement, str(e))
            return None
        block = shm.superblock
        if (block.node_id, block.epoch) != (announcement.node_id, announcement.epoch):
            shm.close()
            self._cannot_map(announcement, "its files are another node's, or another start's")
            return None
        shm.populate_ahead()
        disks = self._disks_of(announcement, owner) if announcement.disks else None
        return Attached(announcement, shm, directory, ours=ours, disks=disks)

    def _disks_of(self, word: Announcement, owner: int) -> AttachedDisks | None:
        if not self._disks:
            return None
        from kvstore.segment.disk.attached import AttachedDisks

        try:
            return AttachedDisks(word, owner, machine=self.machine)
        except (OSError, ValueError) as e:
            log.warning("what node %s has on disk cannot be read: %s", word.name, e)
            return None

    def _cannot_map(self, word: Announcement, why: str) -> None:
        if CUDA_IPC in word.transports:
            return  # there is none to map
        detail = f"its memory cannot be opened by this process: {why}"
        unreadable = Unreadable(MissReason.UNREADABLE_UNMAPPED, detail)
        self.entry(word.node_id, word.epoch).unmapped = unreadable

    def check(self, now: float) -> None:
        """Drop the segments of nodes that died; costs nothing between checks, and waits for no
        other thread, which may be starved."""
        if now < self._checked_at + HERE_BELIEVED_S:
            return
        if self._lock._is_owned():  # type: ignore[attr-defined]  # a handler of signals, amid this
            return
        try:
            # In here: what a handler raises behind it would leave the lock taken.
            if not self._lock.acquire(blocking=False):
                return
            self._checked_at = now
            dead = [
                attached
                for attached in self.mapped
                if not attached.directory.lives_as(attached.announcement)
            ]
            self._let_go(dead)
            self.gone += len(dead)
        finally:
            self._release()
        if dead:
            self.machine.sweep(self.run_dir)

    def _let_go(self, segments: Collection[Attached]) -> None:
        for one in segments:
            one.gone = True
            self.entry(one.announcement.node_id, one.announcement.epoch).attached = None
        self.mapped = tuple(one for one in self.mapped if not one.gone)

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
        for announcement, directory in self.here() if self._use else ():
            if CUDA_IPC in announcement.transports:
                continue  # its own process alone writes to it
            if not directory.is_ours():
                continue
            if not directory.alive():
                self.machine.sweep(self.run_dir)
                continue
            try:
                if self._is_ours(announcement):
                    found.append((announcement, directory))
            except IndexUnavailableError as e:
                unanswered = e
        if unanswered is not None and not found:
            raise unanswered
        return found

    def named_ours(self) -> list[tuple[Announcement, NodeDir]]:
        """Return this user's living nodes on this host that call their index as this client does;
        asks nobody."""
        return [
            (word, there)
            for word, there in self.here()
            if self._is_named_ours(word) and there.alive() and there.is_ours()
        ]

    def here(
        self, start: tuple[int, int] | None = None, *, any_prefix: bool = False
    ) -> Iterator[tuple[Announcement, NodeDir]]:
        """Return the nodes of this host that serve our keys (or `any_prefix`), living or dead; of
        one `start`, which is a node's (id, epoch)."""
        prefix = None if any_prefix else self.key_prefix
        return announced(self.machine.node_dirs(self.run_dir), prefix, start)

    def living(self) -> list[Announcement]:
        """Return the nodes of this user and host that serve our keys and live, in VRAM too."""
        return [word for word, there in self.here() if there.alive() and there.is_ours()]

    def others(self) -> list[tuple[Announcement, Unreadable]]:
        """Return the living nodes of this host that serve our keys and are other users', and what
        keeps this client from their memory."""
        found: list[tuple[Announcement, Unreadable]] = []
        for word, directory in self.here():
            if directory.alive() and not directory.is_ours():
                with suppress(OSError):
                    found.append((word, of_other_user(directory.owner(), REMEDY)))
        return found

    def only_others(self) -> Unreadable | None:
        """Return why this host's memory has nothing for this client: its nodes are other users',
        and no index has named them. None where that is not so."""
        if self.mapped:
            return None
        others = (
            known.unmapped
            for known in [*self._starts.values()]
            if known.unmapped is not None
            and known.unmapped.reason is MissReason.OTHER_USER
            and not known.indexed
        )
        return next(others, None)

    def strangers(self) -> list[Stranger]:
        """Living nodes of this host that are of another version: to be named, not used."""
        return strangers(self.run_dir, self.key_prefix) if self._use else []

    def _is_ours(self, announcement: Announcement) -> bool:
        """Return whether the node publishes to this client's index. When both call it the same
        nobody is asked: a node that is starved, or cut off from Redis, is no stranger. Else the
        index is asked, once for each start of the node: it does not change its index while it
        lives."""
        if self._is_named_ours(announcement):
            return True
        known = self.entry(announcement.node_id, announcement.epoch)
        if not known.ours:
            known.ours = self._index.node(announcement.node_id) is not None
        return known.ours

    def _is_named_ours(self, announcement: Announcement) -> bool:
        return announcement.index != "" and announcement.index == self._index.identity()

    def close(self) -> None:
        """Let go of all: from here on there are none, and what another thread asks for meanwhile is
        not mapped."""
        with self._lock:
            self._use = False
            self._let_go(self.mapped)
        self.machine.sweep(self.run_dir)

    # --- of the index -----------------------------------------------------------

    def announcements(self) -> dict[int, Announcement]:
        """Return what all nodes announce in the index, by node id. Raises
        `IndexUnavailableError`."""
        return announced_nodes(self._index, self._signer)

    def get(self, node_id: int) -> KnownNode | None:
        """Return what is known of its latest start; asks nobody."""
        return self._latest.get(node_id)

    def all(self) -> list[tuple[KnownNode, Announcement]]:
        """Return the nodes that are there; asks nobody."""
        nodes = [*self._latest.values()]
        return [(known, known.announcement) for known in nodes if known.announcement]

    def announced(self) -> list[Announcement]:
        """Return the nodes that the index says are there, also those of no use; asks nobody."""
        return [known.announced for known in [*self._latest.values()] if known.announced]

    def node(self, node_id: int, now: float) -> KnownNode:
        """Return what is believed of it; the index is asked for what is not."""
        known = self._latest.get(node_id)
        if known is not None and now < known.believed_until:
            return known
        with self._hearing:
            known = self._latest.get(node_id) or self._new(node_id)
            if now < known.believed_until:
                return known
            if known.confirmed_at != float("-inf"):  # others go on with what was heard, if anything
                known.believed_until = now + NODE_BELIEVED_S
        try:
            announcement = announced_node(self._index, node_id, self._signer)
        except IndexUnavailableError:
            if now >= known.confirmed_at + NODE_TTL_S - NODE_BELIEVED_S:
                known.announcement = None
            return known
        with self._hearing:
            return self._heard(node_id, announcement, now)

    def look_around(self, now: float, deadline: float) -> None:
        """Ask the index which nodes there are, if that is long ago. Whoever comes meanwhile goes on
        with those that are known, or waits for what the first one finds, until its deadline."""
        if now < self.looked_at + LISTED_EVERY_S:
            return
        looks = self._looks
        wait_s = 0.0 if self.all() else max(deadline - self.machine.monotonic(), 0.0)
        try:
            if self._looking.acquire(timeout=wait_s) and self._looks == looks:
                self._ask_all()
        finally:
            try:  # noqa: SIM105  # as in client/nodes/control.py: a signal could end it before
                self._looking.release()
            except RuntimeError:  # it was never got
                pass

    def _ask_all(self) -> None:
        now = self.machine.monotonic()
        try:
            raws = self._index.nodes()
        except IndexUnavailableError:
            pass  # those known before may still be there
        else:
            words = nodes_among(raws, self._signer)
            self.strangers_elsewhere = strangers_among(raws)
            with self._hearing:
                for node_id in [*self._latest, *words]:
                    self._heard(node_id, words.get(node_id), now)
        self.looked_at = self.machine.monotonic()
        self._looks += 1

    def _heard(self, node_id: int, announcement: Announcement | None, now: float) -> KnownNode:
        """The index said this; None: nothing. The caller holds the lock."""
        known = self._latest.get(node_id) or self._new(node_id)
        if announcement is not None and announcement.epoch != known.epoch:
            known.announcement = known.announced = None
            known = self._new(node_id, announcement.epoch)
        if announcement is not None and announcement != known.announcement:
            known.offered = () if self._offered is None else self._offered(announcement)
            known.heard_at, known.sent_bytes = now, 0
        known.announcement = announcement if known.offered or self._offered is None else None
        known.announced = announcement
        known.confirmed_at, known.believed_until = now, now + NODE_BELIEVED_S
        return known

    def _new(self, node_id: int, epoch: int | None = None) -> KnownNode:
        if node_id not in self._latest and len(self._latest) >= NODES_KNOWN_MAX:
            self._latest.pop(next(iter(self._latest)))
        known = KnownNode() if epoch is None else self.entry(node_id, epoch)
        self._latest[node_id] = known
        return known
