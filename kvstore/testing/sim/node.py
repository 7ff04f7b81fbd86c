"""Runs a memory node in the simulation: the real daemon and core, on a loop of simulated time."""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvstore.core.node import NodeCore
from kvstore.limits import Limits
from kvstore.node import takeover
from kvstore.node.config import NodeConfig
from kvstore.node.control.control_server import Connection
from kvstore.node.control.liveness import Sessions
from kvstore.node.control.turns import MESSAGE_ITEMS
from kvstore.node.daemon import LEASE_POLL_S, Node
from kvstore.node.publishing.heartbeat import HEARTBEAT_S, JITTER
from kvstore.node.publishing.scrubber import SCRUB_EVERY_S
from kvstore.node.takeover import Started
from kvstore.nodedir import Announcement
from kvstore.testing.sim.models.hosts import SimFormerClients, SimNodeDir, SimSessions
from kvstore.testing.sim.models.memory import SimOwned
from kvstore.testing.sim.models.network import SimSocket, SimTransport, Wire
from kvstore.testing.sim.scheduler import FOREVER, Actor, Process
from kvstore.testing.sim.session import guarded

if TYPE_CHECKING:
    from kvstore.testing.sim.world import World

LIMITS = Limits(pins_per_client=6)
INLINE_BYTES = 6000
"""Some values of simulated clients have more, some less."""
TURN_ITEMS = 2
AT_ONCE_ITEMS = MESSAGE_ITEMS + TURN_ITEMS
"""Requests of simulated clients are for a dozen blocks at most: these are in parts."""
POLICY_NAMES = ("lru", "head-start")
"""By turns over the seeds: nothing is drawn for it."""


class SimLoop:
    """Does what the daemon needs of asyncio's event loop, in one thread."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ready: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._timers: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self.actor: Actor | None = None
        self.lost: set[int] = set()
        """Directions in which no message of a connection to it arrives (network.py)."""

    def call_soon(self, call: Callable[..., None], *args: object) -> None:
        self._ready.append((call, args))
        if self.actor is not None:
            self.actor.notify()

    call_soon_threadsafe = call_soon

    def call_later(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        self._count += 1
        heapq.heappush(self._timers, (self._world.now + delay_s, self._count, call, args))

    def clear(self) -> None:
        self._ready.clear()

    def run(self, stopping: SimFlag) -> None:
        world = self._world
        self.actor = world.current
        while not stopping.is_set():
            timers = self._timers
            while timers and timers[0][0] <= world.now:
                _, _, call, args = heapq.heappop(timers)
                self._ready.append((call, args))
            if self._ready:
                call, args = self._ready.popleft()
                call(*args)
                world.pause()
            else:
                world.wait(timers[0][0] if timers else FOREVER)


class SimFlag:
    """Does what the daemon needs of an `asyncio.Event`."""

    def __init__(self, loop: SimLoop) -> None:
        self._set = False
        self._loop = loop

    def set(self) -> None:
        self._set = True
        if self._loop.actor is not None:
            self._loop.actor.notify()

    def is_set(self) -> bool:
        return self._set


class SimConnection(Connection):
    """Connects a node to a simulated client, which is of the same user."""

    def peer_uid(self) -> int:
        return os.geteuid()


class SimConfig(NodeConfig):
    """Announces a size that some values are beyond."""

    def announcement(self, node_id: int, epoch: int, socket_path: Path, index: str) -> Announcement:
        made = NodeConfig.announcement(self, node_id, epoch, socket_path, index)
        return replace(made, inline_bytes=INLINE_BYTES)


class SimNode(Node):
    """Runs one start of a node."""

    def __init__(self, world: World, run_dir: Path, name: str) -> None:
        config = SimConfig(
            run_dir=run_dir,
            name=name,
            size_bytes=world.node_bytes,
            limits=LIMITS,
            shm_dir=run_dir / "shm",
            keep=world.rng.random() < 0.5,
            policy=POLICY_NAMES[world.seed % len(POLICY_NAMES)],
        )
        super().__init__(config, guarded(world, LIMITS.publish_timeout_s), machine=world.machine)
        self.world = world
        self.process = Process(f"node {run_dir.name}/{name}")
        self.dir: SimNodeDir = world.dir_of(run_dir, name)
        self.loop: Any = SimLoop(world)
        self.wires: list[Wire] = []
        self.ready = False
        self.succeeded = False
        """Its next start is under way."""
        self._loop = self.loop  # type: ignore[assignment]
        self._stopping = SimFlag(self.loop)  # type: ignore[assignment]

    def start_here(self) -> None:
        """Start its thread, in the simulated world."""
        assert not self.dir.alive()
        self.dir.holder = self.process
        self.world.spawn(self.process, self.process.name, self.live)

    def live(self) -> None:
        world = self.world
        world.sweep(self.config.run_dir)
        self._create()
        turns = self.clients.turns
        turns.turn_items, turns.at_once_items = TURN_ITEMS, AT_ONCE_ITEMS
        world.note("starts, epoch", self.core.epoch)
        world.checks.node_started(self)
        heartbeat = self._heartbeat()
        heartbeat.beat()
        world.listening[str(self.dir.socket)] = self
        self.ready = True
        self._end_former()
        self.publisher.schedule()
        self._every(HEARTBEAT_S, heartbeat.beat)
        self._every(SCRUB_EVERY_S, self._scrubber(heartbeat).step)
        self._every(LEASE_POLL_S, self._watch_once)
        self.loop.run(self._stopping)
        world.note("ends")
        world.listening.pop(str(self.dir.socket), None)
        self.ready = False
        self._keeps = self.config.keep
        self._close()
        world.end_process(self.process)

    def _begin(self, announcement: Announcement, make_core: Callable[[], NodeCore]) -> Started:
        return takeover.start(
            self.dir,
            announcement,
            make_core,
            self.config.run_dir,
            self._resets.catch_up,
            machine=self.machine,
            segment_class=SimOwned,
            clients_class=type("Former", (SimFormerClients,), {"world": self.world}),
        )

    def _next_epoch(self) -> int:
        return self.world.next_epoch(self.config.run_dir, self.config.name, self.world.wall())

    def _share_files(self, announcement: Announcement) -> None:
        """Do nothing: one user has all hosts."""

    def _make_sessions(self, leases: Path, clients_max: int) -> Sessions:
        return SimSessions(self.world, leases, clients_max)

    def _beaten(self, error: Exception | None) -> None:
        """Do nothing: readiness is for people, and its file is not of this world."""

    def _watch_once(self) -> None:
        self._end_former()
        self.clients.end_dead()

    def _every(self, period_s: float, call: Callable[[], None]) -> None:
        def again() -> None:
            call()
            self._every(period_s, call)

        self.loop.call_later(period_s * self.world.rng.uniform(1 - JITTER, 1 + JITTER), again)

    def accept(self, client: SimSocket) -> Wire:
        """Take a client that connects: the kernel does at once, the daemon when it gets to it."""
        connection = self.clients.connection(SimConnection)
        transport = SimTransport()
        transport.wire = Wire(self.world, client, connection, self.loop)
        self.wires.append(transport.wire)
        self.loop.call_soon(connection.connection_made, transport)
        return transport.wire

    def _fail(self, error: BaseException) -> NoReturn:
        self.world.fail(f"node {self.config.name} does not trust itself any more: {error!r}")
