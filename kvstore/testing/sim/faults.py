"""Lists the faults of the simulation, and how many of each one seed gets.

Every seed draws its own weather: some faults are absent, some frequent. Bugs
that need one fault often and another not at all are then found, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Holds rates per simulated second, of which a run has ten or so; chances are per message or
    per call."""

    client_kill: float = 0.3
    """A client's process dies where it stands; another one starts."""
    client_pause: float = 1.0
    """A client stops (SIGSTOP, a long GC) and goes on later as if nothing had been."""
    connection_loss: float = 1.0
    node_kill: float = 0.12
    """A node dies and starts again with an empty segment."""
    node_kill_warm: float = 0.25
    """A node dies and finds its segment again."""
    node_stop: float = 0.04
    """A node is told to end, and started again."""
    node_pause: float = 0.15
    clock_jump: float = 0.05
    """The machine sleeps: every deadline is over at once."""
    wall_set: float = 0.1
    """The wall clock is set, back or ahead."""
    index_emptied: float = 0.15
    index_failover: float = 0.15
    """A replica takes over that lacks the last writes."""
    index_down: float = 0.1
    index_slow: float = 0.08
    """It answers too late; what was asked of it may be carried out all the same."""
    index_lies: float = 0.3
    """Answers are somebody else's, old, damaged or missing records, for a while."""
    index_lag: float = 0.3
    """Reads are answered by a replica that is behind, for a while."""
    index_shard_away: float = 0.06
    """One of its shards is away, the other answers."""
    dropped: float = 0.008
    doubled: float = 0.03
    reordered: float = 0.02
    delayed: float = 0.03
    # What came later stands at the end: the seeds of before draw the same for the others.
    index_forged: float = 0.15
    """Somebody stands between the index and who asks it, for a while: records are whole, and name
    another length, slot, generation, node or another key's block; announcements are changed."""
    node_silent: float = 0.08
    """A node takes connections and requests for a while, and no answer of it arrives; of some
    such nodes the requests do not either."""
    cancelled: float = 0.03
    """Whoever puts wants no more of it before it is done, as in `AsyncClient`."""
    client_signal: float = 1.0
    """In the main thread of a client a handler of signals raises, where one of its calls waits."""
    forked: float = 0.05
    """Whoever saves has the copying done by a child, forked without Python (client/nodes/lease.py):
    it has all that its parent has, and goes on when that is killed."""

    def calm(self) -> Self:
        return replace(self, **{f.name: 0.0 for f in fields(self)})

    def without(self, name: str) -> Self:
        return replace(self, **{name: 0.0})

    def drawn_by(self, seed: int) -> Self:
        """Draws rates by the seed: of each fault none, as given, or five times as much."""
        rng = random.Random(-1 - seed)
        factors = {f.name: rng.choice((0.0, 0.0, 1.0, 1.0, 5.0)) for f in fields(self)}
        return replace(self, **{n: getattr(self, n) * factor for n, factor in factors.items()})


PER_MESSAGE = frozenset({"dropped", "doubled", "reordered", "delayed"})
PER_CALL = frozenset({"cancelled", "forked"})
