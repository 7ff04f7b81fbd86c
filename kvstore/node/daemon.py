"""Runs a memory node: carries the core's decisions out on shared memory, sockets and the index.

A node goes through these, once each, and starts anew under the next epoch:

    takes its name   `take_name`: it waits for the lock of its directory, which it keeps to the end
    begins           `_create`: it takes its former segment over or makes an empty one (takeover.py)
    serves           `_run`: clients can connect; whether the index and a slot were tried as well,
                     readiness.py says
    ends             `stop`, or `_fail` after a bug of ours: clients find it no more (`_vanish`),
                     then its records leave the index; with `keep`, they and the segment stay

The thread of the event loop alone changes the core, the slot headers and the sessions (rule 2).
Other threads hand it events (local_session.py); those of streams write payload, and only into
slots that the core gave to their session.

`carry_out` carries one event out, and the order is what rule 3 rests on, hence one file: first what
the core wants written, then a reset to disk, then a look at what was reported as damaged, then
the removals that somebody waits for, then the answers. An answer that promises that a block can
be found is held until its record is in the index, or the index is away (publishing/publisher.py).

Must never happen:

- a record in the index, or an answer to a client, before the header that it speaks of is written;
- two processes that are one node: who lacks the lock writes nothing;
- a node that goes on after its core has raised: its state cannot be trusted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvstore.core.events import (
    NOBODY,
    CheckSlot,
    Clear,
    Corrupt,
    Drop,
    Event,
    Expire,
    Reply,
    Reset,
    SessionDead,
    SessionResumed,
)
from kvstore.core.holdings import FORMER
from kvstore.core.memory.eviction import POLICIES
from kvstore.core.node import NodeCore
from kvstore.core.parts import joined, parts_of
from kvstore.core.report import counts, stats
from kvstore.core.resets import Resets
from kvstore.errors import (
    DeadlineError,
    IndexUnavailableError,
    NodeUnavailableError,
    NoSpaceError,
    UsageError,
)
from kvstore.index.base import Index
from kvstore.machine import REAL, Machine
from kvstore.node import takeover
from kvstore.node.background_tasks import BackgroundTasks
from kvstore.node.checks import Checks
from kvstore.node.config import NodeConfig, node_id_of
from kvstore.node.control.clients import Clients
from kvstore.node.control.control_listener import ControlListener
from kvstore.node.control.liveness import Sessions
from kvstore.node.control.local_session import LocalSessions
from kvstore.node.control.permissions import share_directory, share_files
from kvstore.node.control.turns import Turns
from kvstore.node.epoch import next_epoch
from kvstore.node.idle_shutdown import wait_for_last_client
from kvstore.node.name_lock import take_name
from kvstore.node.nixl_sidecar import NixlSidecar
from kvstore.node.publishing.block_events import BlockEvents
from kvstore.node.publishing.dead_records import DeadRecords
from kvstore.node.publishing.heartbeat import Heartbeat
from kvstore.node.publishing.publisher import STOP_TIMEOUT_S, Publisher
from kvstore.node.publishing.resets import ResetNews
from kvstore.node.publishing.scrubber import Scrubber
from kvstore.node.readiness import Readiness, slot_works
from kvstore.node.seldom import Seldom
from kvstore.node.stream.disk_reads import DiskReads
from kvstore.node.stream.server import StreamServer
from kvstore.node.stream.service import ServedSegment
from kvstore.node.upkeep import Parts, PutBack, Upkeep
from kvstore.nodedir import Announcement, NodeDir
from kvstore.protocol.block_events import Source
from kvstore.record import RecordSigner
from kvstore.secret import SIGNING_KEY, secret
from kvstore.segment.abandoned import Sweeper
from kvstore.segment.attached import AttachedShm
from kvstore.segment.cgroup import check_limit, memory_limit
from kvstore.system.filelock import FileLock
from kvstore.system.on_failure import on_failure
from kvstore.system.threads import DaemonThreads
from kvstore.types import Key

if TYPE_CHECKING:
    from kvstore.node.disk.disks import NodeDisks
    from kvstore.node.metrics import NodeMetrics
    from kvstore.node.page.page import Page

log = logging.getLogger("kvstore.node")

LEASE_POLL_S = 0.1
START_TIMEOUT_S = 30.0
ROOM_STEPS = 256
"""Steps into which the size of the node is divided for reporting its free room to clients."""


class Node:
    """A memory node in this process. `with Node(config, index): ...` runs it in a thread;
    `serve()` runs it in the caller's event loop (`kvstore node` does that)."""

    core_class: type[NodeCore] = NodeCore
    medium = "CPU"
    """The kind of memory of its segment, in vLLM's word."""
    restartable = True
    """Whether its segment may wait for its next start; otherwise it ends with the process."""
    takes_saves = True
    """Whether clients may write to it; otherwise only its own process does."""

    def __init__(self, config: NodeConfig, index: Index, *, machine: Machine = REAL) -> None:
        self.config = config
        self.machine = machine
        self._now = machine.monotonic
        self.index = index
        self.dir = NodeDir(config.run_dir, config.name)
        self.announcement: Announcement | None = None
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._stream: StreamServer | None = None
        self._events: BlockEvents | None = None
        self._metrics: NodeMetrics | None = None
        self._page: Page | None = None
        self._said_room = -1
        self._resetting: set[int] = set()
        """Resets that others told of and that are being carried out."""
        self._name: FileLock | None = None
        self._say = Seldom(log)
        self._disks: NodeDisks | None = None
        self._keeps = False
        """Whether the segment stays for the next start: `keep` was set and this was an orderly end,
        or a start was refused before anybody could connect."""

    # --- life -----------------------------------------------------------

    def start(self) -> Self:
        """Run in a thread of this process; returns when clients can connect.

        Raises what kept it from starting: `UsageError` (name taken, bad sizes) or
        `NoSpaceError` (/dev/shm too small).
        """
        ready = threading.Event()

        def run() -> None:
            try:
                asyncio.run(self.serve(ready.set))
            except BaseException as e:
                self._failure = e
            ready.set()

        self._thread = threading.Thread(target=run, name=f"kvstore-{self.config.name}", daemon=True)
        self._thread.start()
        with on_failure(self.stop):  # Ctrl-C too: nobody will have it who could stop it
            if not ready.wait(START_TIMEOUT_S):
                raise DeadlineError(f"node {self.config.name} did not start in {START_TIMEOUT_S} s")
        if self._failure is not None:
            raise self._failure
        return self

    def stop(self) -> None:
        """End the node and remove its segment and records, unless the configuration says `keep`.

        Safe to call twice, from any thread.
        """
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(stopping.set)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S * 2)

    def __enter__(self) -> Node:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def serve(
        self,
        on_serving: Callable[[], None] | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """Serve until `stop()`; raises like `start()`. Clients can connect from `on_serving` on;
        `on_ready` says that the index and the memory were tried too (readiness.py)."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            lock = await take_name(self.dir, self.config.run_dir, self._stopping.is_set)
        except OSError as e:
            raise _unusable(self.config.run_dir, e) from e
        self._name = lock
        try:
            self._keeps = self._former_waits()
            try:
                share_directory(self.config.run_dir, self.dir, self.config.group)
                self._create()
            except BaseException as e:
                self._keeps = self._keeps and self._former_waits()
                if isinstance(e, OSError):
                    raise _unusable(self.config.run_dir, e) from e
                raise
            try:
                await self._run(on_serving, on_ready)
            finally:
                self._close()
        finally:
            if not self._keeps and self._has_name():
                self.dir.remove()
            lock.release()
        if self._failure is not None:
            raise self._failure

    def _create(self) -> None:
        config = self.config
        self.dir.socket.unlink(missing_ok=True)  # of one that was killed: nobody serves yet
        node_id = self._node_id()
        key = secret(SIGNING_KEY, config.signing_key)
        self._signer = RecordSigner(key, config.key_prefix) if key else None
        epoch = self._next_epoch()
        make_core = partial(
            self.core_class,
            node_id=node_id,
            epoch=epoch,
            size_bytes=config.segment_bytes,
            limits=config.limits,
            policy=POLICIES[config.policy],
            signer=self._signer,
        )
        if config.end_with_last_client or not self.restartable:
            self.dir.keep.unlink(missing_ok=True)
        self._resets = ResetNews(
            self.dir,
            config.run_dir,
            config.key_prefix,
            self.index,
            self._signer,
            machine=self.machine,
        )
        announcement = config.announcement(node_id, epoch, self.dir.socket, self.index.identity())
        started = self._begin(announcement, make_core)
        self.core, self.segment, self.announcement, self._former = started
        self._keeps = self._keeps and bool(self.core.blocks.counts["recovered"])
        with on_failure(self._former.close), on_failure(self.segment.close, keep=self._keeps):
            self._share_files(self.announcement)
            self._equip()
            if config.disks:
                self._open_disks()

    def _node_id(self) -> int:
        """Return the node id of the former start where its segment waits, because a container that
        is started again may have another host name."""
        former = self.dir.announcement() if self._keeps else None
        return former.node_id if former else node_id_of(self.config.run_dir, self.config.name)

    def _former_waits(self) -> bool:
        """Return whether a segment waits for this start."""
        waits = self.restartable and not self.config.end_with_last_client
        return waits and self.dir.kept_for_s() > 0

    def _equip(self) -> None:
        """Make what serves the segment."""
        config = self.config
        assert self._loop is not None
        self.publisher = Publisher(
            self.core, self.index, self._loop, machine=self.machine, signer=self._signer
        )
        self.dir.ready_path.unlink(missing_ok=True)
        start = (self.core.node_id, self.core.epoch)
        self.readiness = Readiness(self.index, self.dir, start, self._try_slot)
        self.sessions = self._make_sessions(self.dir.leases, config.limits.clients)
        turns = Turns(self._loop)
        self._checks = Checks(self.segment, turns, self._damaged)
        self.clients = Clients(
            self.sessions,
            start,
            self,
            self.core.holds,
            turns,
            takes_saves=self.takes_saves,
            has_group=config.group is not None,
        )

    def _open_disks(self) -> None:
        """Open the disks; from here on the core decides what goes there."""
        # Imported where it is needed: most nodes have none.
        from kvstore.node.disk.disks import NodeDisks

        assert self._loop is not None
        assert self.announcement is not None
        core, resets = self.core, Resets.unpack(str(self.dir.kept_resets().get("resets", "")))
        disks = NodeDisks(self.config, core.node_id, resets, core.epoch)
        with on_failure(disks.close):
            # Before the core knows of disks: these have caught up with each of them.
            for number, namespace_ids in (*core.resets.news(resets), *disks.resets()):
                self.carry_out(Reset(NOBODY, 0, number, namespace_ids))
            data_path = Path(self.announcement.data_path)
            start = (core.node_id, core.epoch)
            turns = self.clients.turns
            core.use_disks(disks.start(self.config, data_path, start, self._loop, turns))
        self._disks = disks
        self.announcement = dataclasses.replace(self.announcement, disks=disks.announced)
        self.dir.announce(self.announcement)

    def _next_epoch(self) -> int:
        return next_epoch(self.config.run_dir, self.config.name, self.machine.wall())

    def _share_files(self, announcement: Announcement) -> None:
        share_files(announcement)

    def _make_sessions(self, leases: Path, clients_max: int) -> Sessions:
        return Sessions(leases, clients_max)

    def _begin(
        self, announcement: Announcement, make_core: Callable[[], NodeCore]
    ) -> takeover.Started:
        """Return core and segment to start with; `announcement` says where an empty segment is to
        be."""
        check_limit(self.config.segment_bytes, memory_limit())
        catch_up = self._resets.catch_up
        return takeover.start(
            self.dir, announcement, make_core, self.config.run_dir, catch_up, machine=self.machine
        )

    async def _run(
        self, on_serving: Callable[[], None] | None, on_ready: Callable[[], None] | None
    ) -> None:
        assert self._loop is not None
        assert self._stopping is not None
        self._serve_streams()
        self._serve_disks()
        self._publish_events()
        self._serve_metrics()
        heartbeat = self._heartbeat()
        # Before anyone can connect: a client that names the index otherwise asks it for us.
        heartbeat.beat()
        connection, group = self.clients.connection, self.config.group
        self._listener = ControlListener(self.dir.socket, connection, self.config.name, group)
        self._listener.open()
        self._keeps = False
        self._loop.set_exception_handler(self._on_loop_failure)
        tasks = BackgroundTasks(self.config.name, self.core.blocks.counts)
        tasks.start(
            heartbeat.run,
            self._watch_leases,
            self._scrubber(heartbeat).run,
            DeadRecords(self.index, self.core.node_id, machine=self.machine).run,
            partial(
                takeover.free_memory_of_the_dead,
                Sweeper(self.config.run_dir, shm_dir=self.config.shm_dir),
            ),
        )
        if self._events is not None:
            tasks.start(self._events.keep_beating)
        if self.config.end_with_last_client:
            tasks.start(partial(wait_for_last_client, self.sessions, self._stopping.set))
        upkeep = self._upkeep()
        upkeep.refresh()
        tasks.start(upkeep.look_after, upkeep.stay_fresh)
        self._end_former()
        self._say_room()
        self.publisher.schedule()
        log.info(
            "node %s (id %016x, epoch %d) serves %d MiB at %s",
            self.config.name,
            self.core.node_id,
            self.core.epoch,
            self.core.blocks.allocator.capacity_bytes >> 20,
            self.dir.socket,
        )
        if on_serving is not None:
            on_serving()
        self.readiness.serving(on_ready)
        try:
            await self._stopping.wait()
        finally:
            self._keeps = self.config.keep and self._failure is None
            self._listener.close()
            if self._disks is not None:  # their thread may be waiting for this one
                ends = DaemonThreads(1, "kvstore-disks-end").submit(self._disks.stop)
                await asyncio.wrap_future(ends)
            self._vanish()
            await tasks.end()
            upkeep.close()

    def _heartbeat(self) -> Heartbeat:
        assert self.announcement is not None
        self._beat = Heartbeat(
            self.index,
            self.announcement,
            self.publisher.refill,
            self._free_bytes,
            self._signer,
            self._hear,
            lambda incarnation: self._resets.announced(incarnation, self.core.resets),
            lambda: counts(self.core),
            self._beaten,
            machine=self.machine,
        )
        return self._beat

    def _hear(self, announcements: Iterable[Announcement]) -> str:
        """Drop what other nodes say was reset; returns the resets that this node knows of then."""
        if self._page is not None:
            self._page.hear(announcements)
        for number, namespace_ids in self._resets.unknown_to(self.core.resets, announcements):
            if number not in self._resetting:
                self._resetting.add(number)
                self.act(Reset(NOBODY, 0, number, namespace_ids))
        return self.core.resets.pack()

    def _beaten(self, error: IndexUnavailableError | None) -> None:
        # A Redis that is full may take a beat and no record.
        self.readiness.beaten(error or self.publisher.error)

    def _try_slot(self, key: Key) -> bool:
        return not self.takes_saves or slot_works(self.core, self.segment, key, self._now())

    def _scrubber(self, heartbeat: Heartbeat) -> Scrubber:
        return Scrubber(self.core, self.index, self.publisher, heartbeat.beat)

    def _free_bytes(self) -> int:
        return self.core.blocks.allocator.free_bytes

    def _upkeep(self) -> Upkeep:
        assert self.announcement is not None
        waits = self.restartable and not self.config.end_with_last_client
        parts = Parts(
            self.dir,
            self.config.run_dir,
            self.announcement,
            self._listener,
            self.sessions,
            self.readiness,
            self._free_bytes,
            self.segment if waits else None,
            self._more_files(),
        )
        return Upkeep(parts, self._has_name)

    def _more_files(self) -> list[PutBack]:
        """Return what else it has in its directory that must not be missing."""
        return []

    def _serve_streams(self) -> None:
        """Open the node to other hosts, and let the announcement say so."""
        if self.config.listen is None:
            return
        assert self._loop is not None
        assert self.announcement is not None
        inside = LocalSessions(self._loop, self.sessions, self.act)
        sidecar = self._sidecar(self.announcement) if self.config.nixl else None
        segment = self._served(self.announcement)
        disks = DiskReads(self.announcement, self.config.disk_keys) if self._disks else None
        self._stream = StreamServer(self.config, self.announcement, inside, segment, sidecar, disks)
        self._stream.start()
        self._announce_ways(self.announcement, self._stream.transports)

    def _serve_disks(self) -> None:
        """Let what is on disks be found, and write there."""
        if self._disks is not None:
            assert self._loop is not None
            assert self.announcement is not None
            inside = LocalSessions(self._loop, self.sessions, self.act)
            files = Path(self.announcement.data_path), Path(self.announcement.head_path)
            self._disks.serve(lambda: (inside.open(), AttachedShm(*files, writable=True)))

    def _publish_events(self) -> None:
        """Tell routers what is stored and removed from here on, and before on request."""
        if not self.config.events:
            return
        assert self._loop is not None
        assert self.announcement is not None
        source = Source(self.announcement.host, self.config.name, self.core.epoch)
        events = BlockEvents(
            self.config.events,
            source,
            self.core,
            self._loop,
            medium=self.medium,
            machine=self.machine,
        )
        events.start()
        self._events = events

    def _serve_metrics(self) -> None:
        """Answer Prometheus and probes from here on."""
        if self.config.metrics is None:
            return
        # Imported where it is needed: an HTTP server, which most nodes do without.
        from kvstore.node.metrics import NodeMetrics

        assert self._loop is not None
        if self.config.page:
            from kvstore.node.page.page import Page

            self._page = Page(self.config, self.core, self._now)
        self._metrics = NodeMetrics(
            self.config, self.medium, self._loop, self._numbers, self.dir, self._page
        )
        self._metrics.start()

    def _numbers(self) -> dict[str, int | float]:
        """Return the numbers for Prometheus."""
        return {
            **stats(self.core, self._now()),
            "clients": len(self.sessions),
            "ready": int(not self.dir.why_not_ready()),
            "index_away": int(self.publisher.away),
        }

    def _served(self, announcement: Announcement) -> ServedSegment:
        """Return the segment for threads of streams. Raises `OSError` and `PeerError`."""
        data, head = Path(announcement.data_path), Path(announcement.head_path)
        return AttachedShm(data, head, writable=True)

    def _sidecar(self, announcement: Announcement) -> NixlSidecar:
        return NixlSidecar(announcement, self.config.nixl)

    def _announce_ways(self, announcement: Announcement, transports: dict[str, str]) -> None:
        """Say by which `transports` other hosts reach it."""
        self.announcement = dataclasses.replace(announcement, transports=transports)
        self.dir.announce(self.announcement)

    def _vanish(self) -> None:
        """Stop serving, so that clients of this host find no node from here on and start or choose
        another.

        The announcement is removed after the segment, because a sweep knows the segment by it.
        """
        if self._has_name():
            self.dir.socket.unlink(missing_ok=True)
        if self._stream is not None:
            self._stream.stop()
        if self._events is not None:
            self._events.stop(keep=self._keeps)
        if self._metrics is not None:
            self._metrics.stop()
        self.clients.hang_up()
        self._checks.stop()
        self.segment.close(keep=self._keeps)
        if not self._keeps and self._has_name():
            self.dir.announcement_path.unlink(missing_ok=True)

    def _has_name(self) -> bool:
        """Return whether the lock in the node's directory is this process's. Where it was removed
        or replaced, the directory is another process's, or nobody's: nothing is changed there. Nor
        where nobody can look."""
        try:
            return self._name is None or self._name.is_at(self.dir.lock)
        except OSError:
            return False

    def _lost_name(self) -> bool:
        """Return whether that is so for certain."""
        try:
            return self._name is not None and not self._name.is_at(self.dir.lock)
        except OSError as e:
            text = "node %s: %s cannot be looked at: %s; new clients may need the right to do so"
            self._say.warning(text, self.config.name, self.dir.lock, e.strerror)
            return False

    def _close(self) -> None:
        self._vanish()
        with suppress(IndexUnavailableError):
            assert self.announcement is not None
            self._resets.withdrawn()
            self.index.withdraw(self.announcement.node_id)
            if not self._keeps:
                self.publisher.withdraw_all()
        if self._disks is not None and self.core.disk is not None:
            self.core.disk.ends()
            self._disks.close()
        self.sessions.close(keep=self._keeps)
        self._former.close()

    def _fail(self, error: BaseException) -> None:
        """Stop after a bug, rather than serve from a state that cannot be trusted."""
        log.critical("node %s stops: %s", self.config.name, error, exc_info=error)
        self._failure = error
        assert self._stopping is not None
        self._stopping.set()

    def _on_loop_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """End the node after a bug in a callback: a publication might never be sent again, nor its
        client answered. A bug in the protocol of one connection ends that connection only."""
        error = context.get("exception")
        peers = isinstance(error, OSError | UsageError)
        if isinstance(error, Exception) and not peers and "handle" in context:
            self._fail(error)
        else:
            text = f"node %s: {context.get('message')}: %s"
            self._say.warning(text, self.config.name, error)

    # --- events ---------------------------------------------------------

    def act(self, event: Event) -> None:
        """Carry `event` out, and answer: at once, or, what frees more blocks than a turn may, in
        turns with what clients ask."""
        parts: Sequence[Event] = (event,)
        if isinstance(event, Clear | Reset | SessionDead):
            parts = self.parts(event, self.clients.turns.turn_items)
        if len(parts) > 1:
            self._act_in_turns(event, parts)
            return
        for reply in self.carry_out(event):
            self.answer(reply)

    def parts(self, event: Event, at_most: int) -> Sequence[Event]:
        """Cut `event` into parts of at most so many blocks (core/parts.py)."""
        return parts_of(event, at_most, self.core.blocks.by_key, self._slots_of(event))

    def _slots_of(self, event: Event) -> Sequence[int]:
        """Return what the session holds that the event is about, where that tells how large it
        is."""
        if isinstance(event, SessionResumed | SessionDead):
            return self.core.held_slots(event.session)
        return ()

    def _damaged(self, check: CheckSlot) -> None:
        log.warning("node %s: slot %d is damaged", self.config.name, check.slot_id)
        self.act(Corrupt(check.slot_id, check.generation))

    def _act_in_turns(self, event: Event, parts: Sequence[Event]) -> None:
        left, replies = deque(parts), list[Reply]()

        def turn() -> bool:
            if self._stopping is None or self._stopping.is_set():
                return False
            replies.extend(self.carry_out(left.popleft()))
            if left:
                return True
            reply = joined(event, replies)
            if reply is not None:
                self.answer(reply)
            return False

        self.clients.turns.enter(turn)

    def check(self, event: Event) -> None:
        """Raises `UsageError` for what this kind of node does not do."""

    def carry_out(self, event: Event) -> Sequence[Reply]:
        """Do all that `event` brings about but the answers, which are returned."""
        try:
            effects = self.core.handle(event, self._now())
            self.segment.apply_all(effects.writes)
        except UsageError:
            raise
        except Exception as e:
            self._fail(e)
            return ()
        if isinstance(event, Reset):
            self._resetting.discard(event.number)
            self._resets.save(self.core.resets)
            if event.session != NOBODY:
                self._beat.beat()  # the others hear of it with their next one
        self._checks.add(effects.checks)
        if isinstance(event, Drop | Clear | Reset):
            # Asked for by somebody: the answer waits until the index was told.
            self.publisher.remove()
        self.publisher.schedule()
        if self._events is not None:
            self._events.schedule()
        if self._disks is not None:
            self._disks.carried_out(self.core.blocks.counts["evicted"])
        self._say_room()
        return effects.replies

    def answer(self, reply: Reply) -> None:
        """Send a client its answer, once the index knows of what it tells, and the disks of what
        must not come back."""
        if reply.after_log and self._disks is not None:
            self._disks.hold(reply._replace(after_log=False), self.answer)
            return
        session = self.sessions.get(reply.session)
        connection = session.transport if session is not None else None
        if connection is None:
            return
        if reply.after_publish:
            self.publisher.answer(connection, reply)
        else:
            connection.send(reply)

    def _say_room(self) -> None:
        """Tell clients how much is free, in steps: they weigh nodes by it, no more."""
        free_bytes = self._free_bytes()
        steps = free_bytes * ROOM_STEPS // self.core.blocks.allocator.capacity_bytes
        if steps != self._said_room:
            self._said_room = steps
            self.dir.say_room(free_bytes)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_POLL_S)
            if self._lost_name():
                gone = "was removed or replaced: clients find this node no more"
                self._fail(NodeUnavailableError(f"{self.dir.lock} {gone}"))
                return
            self._end_former()
            self.clients.end_dead()
            while self.core.blocks.bounded.next_end <= self._now():
                self.act(Expire())
                await asyncio.sleep(0)  # others' requests go between

    def _end_former(self) -> None:
        """Free what clients of former starts held, once the last of them is gone."""
        if self.core.holds(FORMER) and self._former.gone():
            self.act(SessionDead(FORMER))

    def stats(self) -> dict[str, int | float]:
        """Return counters of the core; for the thread that runs the node, and for tests after it
        ended.

        Raises `NodeUnavailableError` when the node has failed.
        """
        if self._thread is not None and not self._thread.is_alive() and self._failure:
            raise NodeUnavailableError(f"node {self.config.name} failed: {self._failure}")
        return stats(self.core, self._now())


def _unusable(run_dir: Path, error: OSError) -> Exception:
    """Return `error` itself, or what to do when a file system is full or may not be written."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        where = Path(error.filename or run_dir)
        field, used = "run_dir", run_dir
        if not where.is_relative_to(run_dir):
            field, used = "shm_dir", where.parent
        return UsageError(field, str(used), f"cannot be used: {where}: {error.strerror}")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    remedy = "free bytes and inodes there, or name another with --run-dir"
    return NoSpaceError(f"run_dir={str(run_dir)!r}: {error.strerror}: {remedy}")
