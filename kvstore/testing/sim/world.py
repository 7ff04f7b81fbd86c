"""Holds one simulated cluster: hosts, nodes, clients, an index, and the luck they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.node.epoch import epoch_after
from kvstore.testing.sim.checks import RuleChecks
from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.models.hosts import SimLease, SimNodeDir
from kvstore.testing.sim.models.index import SimServer
from kvstore.testing.sim.models.machine import SimMachine
from kvstore.testing.sim.models.memory import Files
from kvstore.testing.sim.models.network import Wire
from kvstore.testing.sim.scheduler import Process, Scheduler

if TYPE_CHECKING:
    from kvstore.testing.sim.node import SimNode

NODE_BYTES = (128 << 10, 192 << 10, 384 << 10)
WALL_START_S = 1_000_000.0


def run_dir_of(host: int) -> Path:
    return Path(f"/sim/host{host}")


class World(Scheduler):
    """Holds everything that the actors share."""

    def __init__(self, seed: int, faults: Faults) -> None:
        super().__init__(seed)
        self.faults = faults
        self.machine = SimMachine(self)
        self.wall_offset_s = WALL_START_S
        self.node_bytes = self.rng.choice(NODE_BYTES)
        """Of each node: little enough that pools are full, or enough for most."""
        self.calm = False
        """The last fault is over."""
        self.counts: dict[str, int] = {}
        self.index = SimServer(self)
        self.files = Files(self)
        self.checks = RuleChecks(self)
        self.on_check = self.checks.all_nodes
        self.dirs: dict[tuple[Path, str], SimNodeDir] = {}
        self.listening: dict[str, SimNode] = {}
        """Control socket -> the node that accepts there."""
        self.leases: dict[str, SimLease] = {}
        self.wires: list[tuple[Process, Wire]] = []
        """Open connections and whose they are, oldest first."""
        self._epochs: dict[tuple[Path, str], int] = {}
        self._replicated_at = 0.0

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by

    # --- time ------------------------------------------------------------------

    def wall(self) -> float:
        return self.now + self.wall_offset_s

    def sleep(self, for_s: float) -> None:
        self.wait(self.now + for_s)

    def replicate(self, delay_s: float, apply: Callable[[], None]) -> None:
        """Let the replica hear of changes: late, but in order."""
        self._replicated_at = max(self._replicated_at, self.now + delay_s)
        self.at(self._replicated_at, apply)

    # --- hosts -------------------------------------------------------------------

    def dir_of(self, run_dir: Path, name: str) -> SimNodeDir:
        found = self.dirs.get((run_dir, name))
        if found is None:
            found = self.dirs[run_dir, name] = SimNodeDir(self, run_dir, name)
        return found

    def dirs_of(self, run_dir: Path) -> Iterator[SimNodeDir]:
        """See `kvstore.nodedir.node_dirs`."""
        return iter([d for (where, _), d in sorted(self.dirs.items()) if where == run_dir])

    def sweep(self, run_dir: Path) -> None:
        """See `kvstore.nodedir.sweep`."""
        for node_dir in self.dirs_of(run_dir):
            if not node_dir.alive() and not node_dir.kept_for_s():
                node_dir.remove()

    def next_epoch(self, run_dir: Path, name: str, now_s: float) -> int:
        """See `kvstore.node.epoch.next_epoch`; the file is in a dict."""
        epoch = epoch_after(self._epochs.get((run_dir, name), 0), now_s)
        self._epochs[run_dir, name] = epoch
        return epoch

    # --- death --------------------------------------------------------------------

    def end_process(self, process: Process) -> None:
        """End a process, killed or by itself: connections break, locks are free, unless a child
        of it has them too."""
        self.kill(process)
        for path, node in list(self.listening.items()):
            if node.process is process:
                del self.listening[path]
                node.loop.clear()
                for wire in node.wires:
                    wire.hang_up()
        ended = [wire for holder, wire in self.wires if holder.gone]
        self.wires = [(h, w) for h, w in self.wires if not (h.gone or w.broken)]
        for wire in ended:
            wire.hang_up()
        self.checks.process_ended(process)
