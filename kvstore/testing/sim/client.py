"""Runs a client in the simulation: the real `Client`, at any pace, until its luck runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.client.base import Reservation
from kvstore.client.client import Client
from kvstore.client.values.put_pipeline import StoppedError, unless
from kvstore.errors import PeerError, UsageError
from kvstore.index.base import KeyRecord
from kvstore.keys import Namespace
from kvstore.limits import Limits
from kvstore.record import unpack_record
from kvstore.testing.sim.models import memory
from kvstore.testing.sim.scheduler import Actor, HandlerError, Process
from kvstore.testing.sim.session import client_class
from kvstore.types import Key, Location, PutResult, PutStatus, Value

if TYPE_CHECKING:
    from kvstore.testing.sim.world import World

URL = "redis://simulated"
LIMITS = Limits()
THREADS = (1, 1, 2, 3)
BLOCK_TOKENS = 4
BLOCKS_MAX = 5
TEXTS = tuple(
    [*([7] * BLOCK_TOKENS * shared), *([7 + text] * BLOCK_TOKENS * (BLOCKS_MAX - shared))]
    for text, shared in ((1, 2), (2, 2), (3, 0))
)
"""Token sequences; two of them begin alike."""
VALUES = tuple(f"value {i}" for i in range(5))
SIZES = (1000, 5000, 9000, 20_000, 30_000)
TENANTS = ("", "one", "two")
NAMESPACES = tuple(map(Namespace.named, ("one", "two")))
CALL_MAX_S = 60.0
"""No call takes longer: some requests of `LIMITS.request_timeout_s` each, one after another."""
OPERATIONS_IN_PEACE = 4
"""What a client does after the last fault: the store must work again."""
ANSWER_TRIES_MAX = 20
PAUSE_BETWEEN_S = 0.005
CANCELLED_AFTER_S = 0.02
CHILD_WAITS_S = 0.3
"""Before each block, on average: many parents are killed meanwhile."""
PAUSE_AFTER_FAILURE_S = 0.4


def size_of(key: Key) -> int:
    """Values differ in size; those of one key do not, as in life."""
    return SIZES[key[9] % len(SIZES)]


class SimClient:
    """Runs a program, `live`: some threads that share one `Client`."""

    def __init__(self, world: World, run_dir: Path, number: int, node: str | None) -> None:
        self.world = world
        self.process = Process(f"client {number}")
        self.rng = world.rng
        self._run_dir = run_dir
        self._node = node
        self._verify = world.rng.random() < 0.2
        self.client: Client | None = None
        self._failed = 0
        self._threads = 0
        self._main: Actor | None = None
        self.in_call = False
        """Its main thread is: handlers of signals run in no other."""
        self._operations: tuple[tuple[Callable[[], None], ...], tuple[float, ...]] = (
            (
                self._put_blocks,
                self._put_values,
                self._reserve,
                self._get,
                self._get_many,
                self._get_blocks,
                self._match,
                self._pin,
                self._retain,
                self._delete,
                self._clear,
                self._look_around,
            ),
            (4, 3.5, 4, 3, 2, 4, 2.5, 2.5, 1, 0.8, 0.3, 0.5),
        )

    def start_here(self) -> None:
        self.world.spawn(self.process, self.process.name, self.live)

    def live(self) -> None:
        world = self.world
        client = self.client = client_class(world)(
            URL,
            namespace=self.rng.choice(NAMESPACES),
            run_dir=self._run_dir,
            node=self._node,
            block_tokens=BLOCK_TOKENS,
            verify="always" if self._verify else "never",
            limits=LIMITS,
            transports=("shm",),
        )
        world.checks.clients[self.process] = self
        self._main = world.current
        for i in range(1, self.rng.choice(THREADS)):
            self._threads += 1
            world.spawn(self.process, f"{self.process.name}.{i}", self._work)
        self._threads += 1
        self._work()
        while self._threads:
            world.sleep(PAUSE_AFTER_FAILURE_S)
        world.checks.nothing_leaked(self)
        del world.checks.clients[self.process]
        if self.rng.random() < 0.7:  # others just end
            client.close()
        world.end_process(self.process)

    def _work(self) -> None:
        """Do one thing after the other, as each thread does."""
        while not self.world.calm:
            worked = self._operate()
            pause_s = PAUSE_BETWEEN_S if worked else PAUSE_AFTER_FAILURE_S
            self.world.sleep(self.rng.expovariate(1 / pause_s))
        for _ in range(OPERATIONS_IN_PEACE):
            self._operate()
        self._answered()
        self._threads -= 1

    def interrupt(self) -> None:
        """Have a handler raise in the main thread, which is in a call."""
        assert self._main is not None
        self._main.interrupted = True
        self._main.notify()

    def _operate(self) -> bool:
        """Call the client once; False when it came to nothing."""
        operation = self.rng.choices(*self._operations)[0]
        world, process = self.world, self.process
        failed_before = self._failed
        before = world.now - process.stopped_s - world.jumped_s
        world.note(operation.__name__)
        main = world.current if world.current is self._main else None
        try:
            self.in_call |= main is not None
            operation()
        except PeerError as e:
            world.note("failed:", e)
            world.count("failed")
            self._failed += 1
        except HandlerError:
            world.note("interrupted")
            world.count("interrupted")
        finally:
            if main is not None:
                self.in_call = main.interrupted = False
        took_s = world.now - process.stopped_s - world.jumped_s - before
        if took_s > CALL_MAX_S:
            world.fail(f"rule 8: {operation.__name__} took {took_s:.1f} s")
        return self._failed == failed_before

    def _answered(self) -> None:
        """Reach every node again, in peace."""
        for _ in range(ANSWER_TRIES_MAX):
            try:
                for writer in self.real.session.writer.writers():
                    writer.stats()
            except PeerError:
                self.world.sleep(1.0)
            else:
                return
        self.world.fail(f"{self.process.name} cannot reach a node after the faults")

    @property
    def real(self) -> Client:
        assert self.client is not None
        return self.client

    def holds(self, data_path: str, slot: int) -> bool:
        """Tell whether this client believes that the slot of that memory is reserved for it."""
        return any(
            link.announcement.data_path == data_path
            and any(held == slot for held, _ in link.held.reserved)
            for link in self.real.session.writer.links()
        )

    # --- saving ------------------------------------------------------------------

    def _keys(self, text: list[int]) -> list[Key]:
        return self.real.namespace.block_keys(text, BLOCK_TOKENS)

    def _new(self, key: Key) -> bytearray:
        return bytearray(self.world.checks.begin_put(key, size_of(key)))

    def _save(self, put: Callable[[], Sequence[PutResult]], values: Sequence[bytearray]) -> None:
        """Save from memory of the caller's that is used for something else once the call ends, and
        as a call that somebody may want no more of."""
        world = self.world
        if world.faults.cancelled and self.rng.random() < world.faults.cancelled:
            at = world.now + self.rng.expovariate(1 / CANCELLED_AFTER_S)
            whole, put = put, lambda: unless(lambda: world.now >= at, whole)
        try:
            self._count(put())
        except StoppedError:
            world.note("cancelled")
            world.count("cancelled")
        finally:
            for value in values:
                value[:] = bytes(len(value))

    def _count(self, results: Sequence[PutResult]) -> None:
        for result in results:
            self.world.count(str(result.status))
            self.world.note(result.status, result.reason)
            self._failed += result.status is PutStatus.REJECTED

    def _put_blocks(self) -> None:
        text = self.rng.choice(TEXTS)
        keys = self._keys(text)[: self.rng.randint(1, BLOCKS_MAX)]
        blocks = [self._new(key) for key in keys]
        self._save(lambda: self.real.put_blocks(text, blocks), blocks)

    def _put_values(self) -> None:
        names = self.rng.sample(VALUES, self.rng.randint(1, 3))
        value_key = self.real.namespace.value_key
        values = [self._new(value_key(name)) for name in names]
        self._save(lambda: self.real.put_many(zip(names, values, strict=True)), values)

    def _reserve(self) -> None:
        """Save as a connector does: it decides by itself when to copy, and what to give up."""
        keys = self._keys(self.rng.choice(TEXTS))
        keys = [key for key in keys if size_of(key) == size_of(keys[0])]
        session = self.real.session
        answers = session.reserve(keys, size_of(keys[0]), self.real.namespace.id)
        granted = [answer for answer in answers if isinstance(answer, Reservation)]
        self._count([answer for answer in answers if not isinstance(answer, Reservation)])
        try:
            if self.rng.random() < 0.2:
                self.world.sleep(self.rng.expovariate(2.0))
            work = [(r.buffer, memoryview(self._new(r.key))) for r in granted]
            if self.rng.random() < self.world.faults.forked:
                self._copy_in_a_child(work)
            else:
                for destination, source in work:
                    memory.copy(self.world, destination, source)
        except HandlerError:
            session.abort(granted)
            raise
        given_up = [r for r in granted if self.rng.random() < 0.1]
        if given_up:
            session.abort(given_up)
        kept = [r for r in granted if r not in given_up]
        if kept:
            self._count(session.commit(kept))

    def _copy_in_a_child(self, work: Sequence[tuple[memoryview, memoryview]]) -> None:
        """Let a forked child copy, slowly, and wait for it: it has the lease, the connection and
        the memory, too."""
        world, parent = self.world, self.process
        child = Process(f"child of {parent.name}")

        def copy_slowly() -> None:
            for destination, source in work:
                world.checks.copies_to(destination)  # at any moment, from now on
                world.sleep(self.rng.expovariate(1 / CHILD_WAITS_S))
                memory.copy(world, destination, source)
            if parent.dead:
                world.count("outlived")
            world.end_process(child)

        parent.children.append(child)
        world.spawn(child, child.name, copy_slowly)
        world.count("forked")
        try:
            while not child.dead:
                world.sleep(PAUSE_BETWEEN_S)
        except HandlerError:
            world.end_process(child)
            raise

    # --- reading -------------------------------------------------------------------

    def _read(self, key: Key, value: Value) -> None:
        if value is None:
            self.world.count("misses")
        else:
            self.world.note("hit", key)
            self.world.checks.hit(key, value)

    def _get(self) -> None:
        name = self.rng.choice(VALUES)
        key = self.real.namespace.value_key(name)
        out = bytearray(size_of(key)) if self.rng.random() < 0.8 else None
        self._read(key, self.real.get(name, out=out))

    def _get_many(self) -> None:
        names = self.rng.sample(VALUES, 3)
        keys = list(map(self.real.namespace.value_key, names))
        for key, value in zip(keys, self.real.get_many(names), strict=True):
            self._read(key, value)

    def _get_blocks(self) -> None:
        text = self.rng.choice(TEXTS)
        keys = self._keys(text)
        out = [bytearray(size_of(key)) for key in keys]
        got = self.real.get_blocks(text, out)
        for key, block in zip(keys[:got], out, strict=False):
            self._read(key, block)
        self.world.count("misses", len(keys) - got)

    def _match(self) -> None:
        world, text = self.world, self.rng.choice(TEXTS)
        since = world.now
        found = self.real.match_prefix(text).found
        world.checks.match(self._keys(text), [KeyRecord(*f) for f in found], since)
        for one in found:
            view = self.real.session.view(one)
            if view is None:
                world.count("stale")
                return
            data = bytearray(len(view.buffer))
            memory.copy(world, memoryview(data), view.buffer)
            if not view.valid():
                world.count("stale")
                return
            self._read(one.key, data)

    # --- the rest --------------------------------------------------------------------

    def _pin(self) -> None:
        name = self.rng.choice(VALUES[:2])
        try:
            pinned = self.real.pin(name)
        except UsageError:
            self.world.count("pins_refused")
            return
        if not pinned:
            self.world.count("misses")
            return
        key = self.real.namespace.value_key(name)
        location = unpack_record(key, pinned._memory.pin.record)  # type: ignore[union-attr]
        assert location is not None
        view = pinned.buffer
        seen = bytes(view)
        self._read(key, seen)
        with self._pinned(location):
            self._watch(view, seen, name)
            if self.rng.random() < 0.5:
                pinned.close()  # `view` keeps the pin
                self._watch(view, seen, name)
        del view
        pinned.close()

    def _watch(self, view: memoryview, seen: bytes, name: str) -> None:
        for _ in range(self.rng.randrange(8)):
            self.world.sleep(self.rng.expovariate(10.0))
            if bytes(view) != seen:
                self.world.fail(f"pinned bytes of {name} changed")

    @contextmanager
    def _pinned(self, at: Location) -> Iterator[None]:
        segment = self.world.checks.nodes[at.node_id, at.epoch].segment
        pinned, key = self.world.checks.pinned, (self.process, (str(segment.data_path), at.slot))
        pinned[key] = pinned.get(key, 0) + 1
        try:
            yield
        finally:
            if key in pinned:
                pinned[key] -= 1

    def _retain(self) -> None:
        text, ttl_s = self.rng.choice(TEXTS), self.rng.choice((0, 1, 5, 60))
        for answer in self.real.retain_blocks(text, ttl_s, self.rng.choice(TENANTS)):
            self.world.count(f"retained: {answer.name}")

    def _delete(self) -> None:
        self.real.delete(self.rng.choice(VALUES[:2]))

    def _clear(self) -> None:
        if self.rng.random() < 0.5:
            self.real.session.clear(self.real.namespace.id)
        else:
            self.world.count("resets_complete", int(bool(self.real.clear(self.rng.random() * 4))))

    def _look_around(self) -> None:
        self.real.exists(self.rng.choice(VALUES))
        self.real.stats()
