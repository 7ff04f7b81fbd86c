"""A memory node as the simulator runs it: the real core, its daemon's duties step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvstore.core.events import Event, SessionDead, SessionResumed
from kvstore.core.node import NodeCore
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import KeyRecord
from kvstore.limits import Limits
from kvstore.segment.header import Superblock
from kvstore.testing.sim.memory import SimSegment
from kvstore.testing.sim.world import World

NODE_ID = 7
ARENAS = 2
ARENA_BYTES = 64 << 10
INDEX_BATCH = 4
HEARTBEAT_STEPS = 40


class Message(NamedTuple):
    session: int
    connection: int
    make: Callable[[int, int], Event] | None
    """None: HELLO of a client that is back."""
    request: int
    held: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])


class SimNode:
    """One start of the node. `run()` is its event loop."""

    def __init__(self, world: World, epoch: int, make_core: Callable[..., NodeCore]) -> None:
        self.world = world
        self.core = make_core(
            node_id=NODE_ID,
            epoch=epoch,
            arenas=ARENAS,
            arena_bytes=ARENA_BYTES,
            limits=Limits(reservations_per_client=16, pins_per_client=8),
        )
        self.segment = SimSegment(Superblock(NODE_ID, epoch, 0, ARENAS, ARENA_BYTES))
        self.alive = True
        self.inbox: deque[Message | SessionDead] = deque()
        self.answers: dict[tuple[int, int], tuple[int, Any]] = {}
        """(session, request) -> (connection, body); a client takes its own."""
        self._connections: dict[int, int] = {}
        self._incarnation = world.index.incarnation() if not world.index.unavailable else ""

    def run(self) -> Iterator[None]:
        beat = 0
        while True:
            yield
            beat += 1
            if self.inbox:
                yield from self._serve(self.inbox.popleft())
            if beat % HEARTBEAT_STEPS == 0:
                self._heartbeat()
            yield from self._tell_index()

    def idle(self) -> bool:
        core = self.core
        return not (self.inbox or core.outbox.publications_pending or core.outbox.removals_pending)

    def _serve(self, message: Message | SessionDead) -> Iterator[None]:
        if isinstance(message, SessionDead):
            yield from self._act(message, 0)
            return
        session, connection = message.session, message.connection
        if message.make is None:
            self._connections[session] = connection
            yield from self._act(SessionResumed(session, *message.held), connection)
            self.answers[session, message.request] = (connection, None)
        elif self._connections.get(session) == connection:
            yield from self._act(message.make(session, message.request), connection)

    def _act(self, event: Event, connection: int) -> Iterator[None]:
        effects = self.core.handle(event, float(self.world.step))
        for write in effects.writes:
            self.world.check_write(self.core.epoch, write, self.segment)
            for _ in self.segment.steps(write):
                yield
        if effects.replies and effects.replies[0].after_publish:
            yield from self._tell_index()
        for reply in effects.replies:
            self.answers[reply.session, reply.request] = (connection, reply.body)

    def _tell_index(self) -> Iterator[None]:
        core, index = self.core, self.world.index
        try:
            work = core.outbox.take_publications(INDEX_BATCH)
            for key, _ in work:
                self.world.check_publication(core, self.segment, key, core.by_key[key].slot_id)
            if work:
                index.publish([KeyRecord(*item) for item in work])
                core.outbox.published(work)
                yield
            removals = core.outbox.take_removals(INDEX_BATCH)
            if removals:
                index.remove([KeyRecord(*item) for item in removals])
                core.outbox.removed(removals)
                yield
        except IndexUnavailableError:
            yield

    def _heartbeat(self) -> None:
        try:
            incarnation = self.world.index.incarnation()
        except IndexUnavailableError:
            return
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self.core.republish()
