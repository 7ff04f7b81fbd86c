"""A seeded simulation of the protocol: real core, real headers, real reader, invented luck.

Every actor is a generator that yields wherever another process could get in
between: after each store to shared memory, after each chunk of a copy, after
each message. One random number generator picks who goes next, so a seed
replays exactly. `run(seed)` raises `ViolationError` when a rule of the design breaks.
"""

from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.run import Report, run
from kvstore.testing.sim.world import ViolationError

__all__ = ["Faults", "Report", "ViolationError", "run"]
