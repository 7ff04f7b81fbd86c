"""Decides by the seed when which fault strikes whom."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.testing.sim.client import SimClient
from kvstore.testing.sim.faults import PER_CALL, PER_MESSAGE
from kvstore.testing.sim.models.network import ANSWERS, ASKS
from kvstore.testing.sim.node import SimNode
from kvstore.testing.sim.world import run_dir_of

if TYPE_CHECKING:
    from kvstore.testing.sim.world import World

CLIENT_PAUSE_MAX_S = 4.0
NODE_PAUSE_MAX_S = 2.5
NODE_DOWN_MAX_S = 0.6
SILENT_MAX_S = 4.0
TROUBLE_MAX_S = 1.5
JUMP_MAX_S = 8.0
START_S = (0.2, 0.6)
WALL_SET_MAX_S = 5000.0
CLIENTS_MAX = 5


class Luck:
    """Keeps clients and nodes coming, and takes them away."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.nodes: list[SimNode] = []
        self.clients: list[SimClient] = []
        self._client_count = 0
        self.places: list[tuple[Path, str]] = self._topology()
        for run_dir, name in self.places:
            self.start_node(run_dir, name)
        for _ in range(self.rng.randint(2, CLIENTS_MAX)):
            world.after(self.rng.uniform(*START_S), self.start_client)
        for field in fields(world.faults):
            if field.name not in PER_MESSAGE | PER_CALL:
                self._next(field.name)

    def _topology(self) -> list[tuple[Path, str]]:
        hosts = self.rng.choice(((0,), (0,), (0, 0), (0, 1), (0, 0, 1)))
        return [(run_dir_of(host), f"node{i}") for i, host in enumerate(hosts)]

    def start_node(self, run_dir: Path, name: str) -> None:
        node = SimNode(self.world, run_dir, name)
        self.nodes.append(node)
        node.start_here()

    def start_client(self) -> None:
        self._client_count += 1
        run_dir, name = self.rng.choice(self.places)
        node = name if self.rng.random() < 0.5 else None
        client = SimClient(self.world, run_dir, self._client_count, node)
        self.clients.append(client)
        client.start_here()

    def living_clients(self) -> list[SimClient]:
        self.clients = [c for c in self.clients if not c.process.dead]
        return self.clients

    def strike(self, name: str) -> None:
        """Let the fault of that name strike now."""
        self.world.note("luck:", name)
        self.world.count(name)
        getattr(self, "_" + name)()

    def _next(self, name: str) -> None:
        rate = getattr(self.world.faults, name)
        if not rate:
            return

        def again() -> None:
            if self.world.calm:
                return
            self.strike(name)
            self._next(name)

        self.world.after(self.rng.expovariate(rate), again)

    # --- clients -------------------------------------------------------------------

    def _some_client(self) -> SimClient | None:
        clients = self.living_clients()
        return self.rng.choice(clients) if clients else None

    def _client_kill(self) -> None:
        client = self._some_client()
        if client is not None:
            self.world.end_process(client.process)
            self.start_client()

    def _client_pause(self) -> None:
        client = self._some_client()
        if client is not None:
            self.world.stop(client.process, self.rng.random() ** 2 * CLIENT_PAUSE_MAX_S)

    def _client_signal(self) -> None:
        in_calls = [client for client in self.living_clients() if client.in_call]
        if in_calls:
            self.rng.choice(in_calls).interrupt()

    def _connection_loss(self) -> None:
        open_wires = [wire for _, wire in self.world.wires if not wire.broken]
        if open_wires:
            self.rng.choice(open_wires).hang_up()

    # --- nodes ----------------------------------------------------------------------

    def _some_node(self) -> SimNode | None:
        self.nodes = [node for node in self.nodes if not node.process.dead]
        ready = [node for node in self.nodes if node.ready]
        return self.rng.choice(ready) if ready else None

    def _again(self, node: SimNode) -> None:
        """Start a node anew, when the old start is over."""
        if node.succeeded:
            return
        node.succeeded = True
        run_dir, name = node.config.run_dir, node.config.name

        def start() -> None:
            if node.process.dead:
                self.start_node(run_dir, name)
            else:
                self.world.after(NODE_DOWN_MAX_S, start)

        self.world.after(self.rng.random() * NODE_DOWN_MAX_S, start)

    def _node_kill(self) -> None:
        """Kill a node with what it had in memory: as after a reboot, or when somebody frees it."""
        node = self._some_node()
        if node is not None:
            self.world.end_process(node.process)
            node.dir.remove()
            self._again(node)

    def _node_kill_warm(self) -> None:
        node = self._some_node()
        if node is not None:
            self.world.end_process(node.process)
            self._again(node)

    def _node_stop(self) -> None:
        node = self._some_node()
        if node is not None:
            node.stop()
            self._again(node)

    def _node_pause(self) -> None:
        node = self._some_node()
        if node is not None:
            self.world.stop(node.process, self.rng.random() * NODE_PAUSE_MAX_S)

    def _node_silent(self) -> None:
        node = self._some_node()
        if node is not None:
            lost = self.rng.choice(((ANSWERS,), (ASKS, ANSWERS)))
            node.loop.lost |= set(lost)
            self.world.after(self.rng.random() * SILENT_MAX_S, node.loop.lost.clear)

    # --- clocks ----------------------------------------------------------------------

    def _clock_jump(self) -> None:
        jump_s = self.rng.random() * JUMP_MAX_S
        self.world.now += jump_s
        self.world.jumped_s += jump_s

    def _wall_set(self) -> None:
        self.world.wall_offset_s += self.rng.uniform(-WALL_SET_MAX_S, WALL_SET_MAX_S)

    # --- the index --------------------------------------------------------------------

    def _for_a_while(self, switch: str) -> None:
        index = self.world.index
        setattr(index, switch, True)

        def over() -> None:
            setattr(index, switch, False)
            if switch in ("lying", "forged") and not index.doubtful:
                index.lied_at = self.world.now

        self.world.after(self.rng.random() * TROUBLE_MAX_S, over)

    def _index_emptied(self) -> None:
        self.world.index.lose_everything()

    def _index_failover(self) -> None:
        self.world.index.fail_over()

    def _index_down(self) -> None:
        self._for_a_while("down")

    def _index_slow(self) -> None:
        self._for_a_while("slow")

    def _index_lies(self) -> None:
        self.world.index.lied_at = float("inf")
        self._for_a_while("lying")

    def _index_forged(self) -> None:
        self.world.index.lied_at = float("inf")
        self._for_a_while("forged")

    def _index_shard_away(self) -> None:
        self._for_a_while("shard_away")

    def _index_lag(self) -> None:
        self._for_a_while("lagging")
