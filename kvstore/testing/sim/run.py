"""One seed, from start to settled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvstore.core.events import SessionDead
from kvstore.core.node import NodeCore
from kvstore.hashing import Namespace
from kvstore.testing.sim.client import SimClient
from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.node import SimNode
from kvstore.testing.sim.world import World

CLIENTS = 4
KEYS = 12
OPERATIONS = 40
PAUSE_STEPS_MAX = 600
LEASE_STEPS_MAX = 120
"""How long after a client's death its lease is found free."""
TROUBLE_STEPS_MAX = 300
STEPS_MAX = 60_000
SETTLE_STEPS_MAX = 20_000
CHECK_EVERY_STEPS = 16


class Report(NamedTuple):
    seed: int
    steps: int
    counts: dict[str, int]


class _Actor:
    def __init__(self, steps: Iterator[None], client: SimClient | None) -> None:
        self.steps = steps
        self.client = client
        self.resume_at = 0


class _Simulation:
    def __init__(self, seed: int, faults: Faults, make_core: Callable[..., NodeCore]) -> None:
        self.world = World(seed, faults)
        self.rng: random.Random = self.world.rng
        self.make_core = make_core
        self.epoch = 1
        self.node = SimNode(self.world, self.epoch, make_core)
        self.node_actor = _Actor(self.node.run(), None)
        self.keys = Namespace.named("sim").block_keys(range(KEYS * 4), 4)
        self.next_client = 1
        self.actors: list[_Actor] = []
        self.deaths: list[tuple[int, int, SimNode]] = []
        self.calm_at = 0
        for _ in range(CLIENTS):
            self.add_client()

    def add_client(self) -> None:
        client = SimClient(self.world, self.next_client, self.keys, lambda: self.node)
        self.next_client += 1
        self.actors.append(_Actor(client.run(OPERATIONS), client))

    def trouble(self) -> None:
        """Let luck strike."""
        world, faults = self.world, self.world.faults
        for actor in list(self.actors):
            assert actor.client is not None
            if faults.hits(self.rng, "client_crash"):
                self.kill(actor)
                self.add_client()
            elif faults.hits(self.rng, "client_pause"):
                actor.resume_at = world.step + self.rng.randrange(PAUSE_STEPS_MAX)
            elif faults.hits(self.rng, "connection_loss"):
                actor.client.lose_connection()
        if faults.hits(self.rng, "node_crash"):
            self.restart_node()
        if faults.hits(self.rng, "index_emptied"):
            world.index.lose_everything()
        if world.step >= self.calm_at:
            world.index.unavailable = faults.hits(self.rng, "index_unavailable")
            world.index.lying = faults.hits(self.rng, "index_lies")
            if world.index.unavailable or world.index.lying:
                self.calm_at = world.step + self.rng.randrange(TROUBLE_STEPS_MAX)

    def kill(self, actor: _Actor) -> None:
        client = actor.client
        assert client is not None
        self.world.count("clients_killed")
        self.actors.remove(actor)
        client.die()
        found_at = self.world.step + self.rng.randrange(LEASE_STEPS_MAX)
        self.deaths.append((found_at, client.number, self.node))

    def restart_node(self) -> None:
        self.world.count("node_restarts")
        self.node.alive = False
        self.epoch += 1
        self.node = SimNode(self.world, self.epoch, self.make_core)
        self.node_actor = _Actor(self.node.run(), None)

    def report_deaths(self) -> None:
        for death in list(self.deaths):
            found_at, number, node = death
            if found_at <= self.world.step:
                self.deaths.remove(death)
                node.inbox.append(SessionDead(number))

    def turn(self) -> None:
        """One step of somebody; the node is somebody, and gets its share."""
        world = self.world
        world.step += 1
        self.report_deaths()
        ready = [a for a in self.actors if a.resume_at <= world.step]
        if not ready or self.rng.random() < 0.4:
            next(self.node_actor.steps)
        else:
            actor = self.rng.choice(ready)
            try:
                next(actor.steps)
            except StopIteration:
                self.actors.remove(actor)
                assert actor.client is not None
                self.deaths.append((world.step, actor.client.number, self.node))
        if world.step % CHECK_EVERY_STEPS == 0:
            world.check_node(self.node.core)

    def run(self) -> Report:
        world = self.world
        while self.actors:
            if world.step > STEPS_MAX:
                world.fail(f"still busy after {STEPS_MAX} steps: something hangs")
            self.trouble()
            self.turn()
        world.faults = world.faults.calm()
        world.index.unavailable = world.index.lying = False
        give_up_at = world.step + SETTLE_STEPS_MAX
        quiet = 0
        while quiet < 2 * LEASE_STEPS_MAX:
            if world.step > give_up_at:
                world.fail(f"not settled {SETTLE_STEPS_MAX} steps after the last fault")
            self.turn()
            quiet = quiet + 1 if self.node.idle() and not self.deaths else 0
        world.check_node(self.node.core)
        world.check_settled(self.node.core)
        return Report(world.seed, world.step, world.counts)


def run(
    seed: int, faults: Faults | None = None, make_core: Callable[..., NodeCore] = NodeCore
) -> Report:
    """Simulate one seed; raises `ViolationError` when a rule breaks. The same seed, the same run.

    `make_core` makes the node's core: a test plants bugs through it.
    """
    return _Simulation(seed, faults or Faults(), make_core).run()
