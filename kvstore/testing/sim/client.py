"""A client process: puts, gets, matches, pins and drops, at any pace, until its luck runs out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

from kvstore.client.nodes import LocalNodes
from kvstore.client.reader import Place, Reader
from kvstore.core.events import Abort, Clear, Commit, Drop, Event, Pin, Reserve, Stat, Touch, Unpin
from kvstore.errors import IndexUnavailableError
from kvstore.testing.sim.memory import SimSegment
from kvstore.testing.sim.node import Message, SimNode
from kvstore.testing.sim.world import Grant, World
from kvstore.types import Key

DEADLINE_STEPS = 400
COPY_STEPS = 4
SIZES = (1000, 9000, 20_000, 40_000)
NAMESPACES = (11, 22)

Steps = Generator[None, None, Any]


class SimAttached:
    """What `Attached` is to the reader, over simulated memory."""

    def __init__(self, node: SimNode) -> None:
        self.shm: SimSegment = node.segment
        self.node = node
        self.gone = False


class SimNodes:
    """`LocalNodes` of one client: a dead node is noticed some time later, as in life."""

    def __init__(self, world: World, current: Callable[[], SimNode], *, hints: bool) -> None:
        """Without `hints` its client always asks the index, as one on another host would."""
        self._world = world
        self._hints = hints
        self._current = current
        self._attached: dict[int, SimAttached] = {}
        self.mapped: tuple[SimAttached, ...] = ()

    def segment(self, node_id: int, epoch: int, now: float) -> SimAttached | None:
        found = self._attached.get(epoch)
        if found is not None:
            return found
        node = self._current()
        if not node.alive or node.core.node_id != node_id or node.core.epoch != epoch:
            return None
        self._attached[epoch] = SimAttached(node)
        self.mapped = tuple(self._attached.values()) if self._hints else ()
        return self._attached[epoch]

    def check(self, now: float) -> None:
        for epoch, attached in list(self._attached.items()):
            if not attached.node.alive and self._world.rng.random() < 0.3:
                attached.gone = True
                del self._attached[epoch]
        self.mapped = tuple(self._attached.values()) if self._hints else ()


class SimClient:
    """`run()` is its program. One session, one request at a time."""

    def __init__(
        self, world: World, number: int, keys: list[Key], current: Callable[[], SimNode]
    ) -> None:
        self.world = world
        self.number = number
        self.keys = keys
        self.current = current
        self.node = current()
        nodes = cast("LocalNodes", SimNodes(world, current, hints=number % 3 == 0))
        self.reader = Reader(world.index, nodes)
        self.connection = 0
        self.connected = False
        self.requests = 0
        self.grants: dict[tuple[int, int], Grant] = {}
        self.pins: dict[tuple[int, int], bytes] = {}

    def run(self, operations: int) -> Iterator[None]:
        for _ in range(operations):
            operation = self.world.rng.choices(
                (self._put, self._put_inline, self._get, self._match, self._pin, self._drop),
                (6, 2, 12, 2, 1, 0.5),
            )[0]
            yield from operation()
            if self.world.rng.random() < 0.01:
                yield from self._clear()
        for handle in list(self.pins):
            yield from self._unpin(handle)

    def lose_connection(self) -> None:
        self.connected = False

    def die(self) -> None:
        """What the world knows ends with the process; the node learns of it later."""
        for place in self.grants:
            self.world.writing.pop(place, None)
        for epoch_slot in self.pins:
            self.world.pinned[epoch_slot] -= 1

    # --- messages ------------------------------------------------------------

    def _ask(self, make: Callable[[int, int], Event]) -> Steps:
        """The answer's body; None when none came: the connection is then given up."""
        if self.node is not self.current():
            self.node = self.current()
            self.connected = False
            # The old node is gone and so is all it granted.
            for place in list(self.grants):
                self._end_grant(place)
            for place in list(self.pins):
                self.world.pinned[place] -= 1
                del self.pins[place]
        if not self.connected:
            self.connection += 1
            held = (
                [(slot, g.generation) for (_, slot), g in self.grants.items()],
                [(slot, 0) for _, slot in self.pins],
            )
            self.requests += 1
            self.node.inbox.append(Message(self.number, self.connection, None, self.requests, held))
            self.connected = True
        self.requests += 1
        request, node = self.requests, self.node
        node.inbox.append(Message(self.number, self.connection, make, request))
        give_up_at = self.world.step + DEADLINE_STEPS
        while self.world.step < give_up_at and self.connected and node.alive:
            yield
            answer = node.answers.pop((self.number, request), None)
            if answer is not None and answer[0] == self.connection:
                return answer[1]
        self.connected = False
        self.world.count("requests_lost")
        return None

    # --- saving ----------------------------------------------------------------

    def _put(self) -> Steps:
        world = self.world
        keys = world.rng.sample(self.keys, world.rng.randint(1, 3))
        size = world.rng.choice(SIZES)
        count = len(keys)
        answers = yield from self._ask(
            lambda s, r: Reserve(
                s, r, keys, [size] * count, NAMESPACES[0], [0] * count, [0] * count,
                [None] * count, [0] * count,
            )
        )  # fmt: skip
        if answers is None:
            return
        epoch, segment = self.node.core.epoch, self.node.segment
        granted: list[tuple[Key, tuple[int, int], int]] = []
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, tuple):
                slot, generation, offset = answer
                place = (epoch, slot)
                self.grants[place] = world.writing[place] = Grant(self.number, slot, generation)
                granted.append((key, place, offset))
            else:
                world.count(f"reserve_{answer}" if isinstance(answer, int) else "reserve_refused")
        for key, place, offset in granted:
            _, data = world.begin_put(key, size)
            yield from self._write(segment, place, offset, data)
        items = [
            (g.slot, g.generation, 0)
            for _, p, _ in granted
            if (g := self.grants.get(p)) is not None
        ]
        for _, place, _ in granted:
            self._end_grant(place)
        if not items:
            return
        if world.rng.random() < 0.1:
            yield from self._ask(lambda s, r: Abort(s, r, [item[:2] for item in items]))
            return
        committed = yield from self._ask(lambda s, r: Commit(s, r, items))
        for answer in committed or ():
            world.count("committed" if answer == 0 else "commit_refused")

    def _write(
        self, segment: SimSegment, place: tuple[int, int], offset: int, data: bytes
    ) -> Iterator[None]:
        """Copy chunk by chunk into our slot, whatever else goes on meanwhile."""
        chunk = -(-len(data) // COPY_STEPS)
        for start in range(0, len(data), chunk):
            part = data[start : start + chunk]
            segment.bytes[offset + start : offset + start + len(part)] = part
            yield
            if not self.connected:
                # Another thread of this client has something to ask meanwhile: the
                # node then hears of the new connection while we are still writing.
                yield from self._ask(lambda s, r: Stat(s, r))

    def _end_grant(self, place: tuple[int, int]) -> None:
        self.grants.pop(place, None)
        self.world.writing.pop(place, None)

    def _put_inline(self) -> Steps:
        key = self.world.rng.choice(self.keys)
        _, data = self.world.begin_put(key, self.world.rng.choice(SIZES[:2]))
        answers = yield from self._ask(
            lambda s, r: Reserve(s, r, [key], [len(data)], NAMESPACES[1], [0], [0], [data], [0])
        )
        if answers == [0]:
            self.world.count("committed")

    # --- reading ---------------------------------------------------------------

    def _get(self) -> Steps:
        key = self.world.rng.choice(self.keys)
        place = self.reader.remembered(key)
        if place is None:
            yield
            (place,) = self.reader.find([key])
        if place is None:
            self.world.count("misses")
            return
        yield from self._read(key, place)
        self.node.inbox.append(
            Message(self.number, self.connection, lambda s, r: Touch(s, [key]), 0)
        )

    def _read(self, key: Key, place: Place) -> Steps:
        """Copy chunk by chunk, then check (rule 4)."""
        size = place.payload.nbytes
        chunk = -(-size // COPY_STEPS)
        data = bytearray()
        for start in range(0, size, chunk):
            data += place.payload[start : start + chunk]
            yield
        if place.valid():
            self.world.count("hits")
            self.world.check_hit(key, bytes(data))
        else:
            self.world.count("stale")
            self.reader.forget(key)

    def _match(self) -> Steps:
        yield
        try:
            records = self.reader.readable_run(self.keys)
        except IndexUnavailableError:
            return
        truth = self.world.index.truth()
        run = next((i for i, key in enumerate(self.keys) if key not in truth), len(self.keys))
        if not self.world.index.lying and len(records) > run:
            self.world.fail(f"a match of {len(records)} blocks where only {run} lead")

    # --- pins and drops ----------------------------------------------------------

    def _pin(self) -> Steps:
        key = self.world.rng.choice(self.keys)
        answers = yield from self._ask(lambda s, r: Pin(s, r, [key]))
        if not answers or not isinstance(answers[0], bytes):
            return
        place = self.reader.place(key, answers[0])
        slot = int.from_bytes(answers[0][24:28], "little")
        handle = (self.node.core.epoch, slot)
        if place is None or handle in self.pins:
            self.connected = False  # the next HELLO says that we hold no such pin
            return
        self.world.pinned[handle] = self.world.pinned.get(handle, 0) + 1
        self.pins[handle] = answers[0]
        seen = bytes(place.payload)
        self.world.check_hit(key, seen)
        for _ in range(self.world.rng.randrange(60)):
            yield
            if handle in self.pins and bytes(place.payload) != seen:
                self.world.fail(f"a pinned block ({slot}) changed")
        yield from self._unpin(handle)

    def _unpin(self, handle: tuple[int, int]) -> Steps:
        record = self.pins.pop(handle, None)
        if record is None:
            return
        self.world.pinned[handle] -= 1
        generation = int.from_bytes(record[16:24], "little")
        yield from self._ask(lambda s, r: Unpin(s, r, [(handle[1], generation)]))

    def _drop(self) -> Steps:
        key = self.world.rng.choice(self.keys)
        yield from self._ask(lambda s, r: Drop(s, r, [key]))

    def _clear(self) -> Steps:
        namespace = self.world.rng.choice(NAMESPACES)
        yield from self._ask(lambda s, r: Clear(s, r, namespace))
