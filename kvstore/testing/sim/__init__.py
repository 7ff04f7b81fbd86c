"""Simulates a whole cluster by a seed: real code, invented luck.

Client, control channel, daemon, core, segments and breakers run as they are, in
threads that pass a baton; clocks, sockets, shared memory and the index are
simulated (edges.py). `run(seed)` raises `ViolationError` when a rule of the design
breaks, and a seed replays exactly.
"""

from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.run import Report, run
from kvstore.testing.sim.scheduler import ViolationError

__all__ = ["Faults", "Report", "ViolationError", "run"]
